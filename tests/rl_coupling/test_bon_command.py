"""`rm-opt bon` through a server ranks as it does in process, and refuses a server of other weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.interfaces.cli import app
from rm_optimizer.rl_coupling import policy_simulation
from tests.builders import tiny_reward_model
from tests.serving.engines import InProcessEngine, options_of
from tests.serving.running import engine_running

OPTIONS = ("--policy", "world", "--gold", "world", "--num-prompts", "5", "--n", "8", "--bootstrap", "20")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        tiny_reward_model("llama", seed=seed, max_length=256).save_pretrained(root / str(seed))
    return [root / "0", root / "1"]


def test_a_server_ranks_like_its_model_and_another_is_refused(models: list[Path], tmp_path: Path):
    def run(model: Path, out: str, *more: str):
        return CliRunner().invoke(app, ["bon", str(model), str(tmp_path / out), *OPTIONS, *more])

    with engine_running(lambda: InProcessEngine(options_of(models[0], tmp_path / "scratch"))) as server:
        assert run(models[0], "served.jsonl", "--server", server.url).exit_code == 0
        refused = run(models[1], "other.jsonl", "--server", server.url)
    assert refused.exit_code == 2
    assert "has other weights than" in refused.stderr
    assert not list(tmp_path.glob("other*"))
    local = run(models[0], "local.jsonl")
    assert local.exit_code == 0
    assert "gold reward" in local.stdout
    assert "warning" not in local.stdout
    short = run(models[0], "short.jsonl", "--max-length", "24")
    assert "warning: cut at 24 tokens: the prompts of 40 of 40 responses lost their beginning" in short.stdout
    served, own = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("served", "local")
    )
    for one, other in zip(served, own, strict=True):
        assert one["rewards"] == pytest.approx(other["rewards"], abs=1e-4)
        assert sorted(one["responses"]) == sorted(other["responses"])
    names = {path.name for path in tmp_path.glob("local*")}
    curves = {f"local.{kind}.{end}" for kind in ("curve", "overoptimization") for end in ("json", "png")}
    assert names == {"local.jsonl", *curves}


def test_a_constant_gold_reward_is_named_beside_what_was_ranked(models, tmp_path, monkeypatch):
    class Constant(Scorer):
        def score(self, prompts, responses):
            return torch.ones(len(responses))

    monkeypatch.setattr("rm_optimizer.interfaces.commands.bon.load_judge", lambda name, prompts: Constant())
    ranked = CliRunner().invoke(app, ["bon", str(models[0]), str(tmp_path / "out.jsonl"), *OPTIONS])
    assert ranked.exit_code == 0, ranked.stderr
    assert "warning: the gold reward is the same for all responses to every prompt" in ranked.stdout
    few = [word if word != "8" else "4" for word in OPTIONS]
    small = CliRunner().invoke(app, ["bon", str(models[0]), str(tmp_path / "few.jsonl"), *few])
    assert "no over-optimization curve: it needs 4 prompts with 8 responses" in small.stdout


def test_completions_of_unequal_numbers_are_refused_before_anything_is_written(models, tmp_path):
    rows = [{"prompt": f"p{n}", "responses": ["a"] * n} for n in (2, 3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--completions", str(tmp_path / "in.jsonl")]
    for command in (["bon", str(models[0]), str(tmp_path / "out.jsonl")], ["readiness", str(models[0])]):
        refused = CliRunner().invoke(app, [*command, *given])
        assert refused.exit_code == 2
        assert "in.jsonl: expected equally many responses to each prompt, got 2 to 3" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_resumed_ranking_encodes_each_response_once_and_counts_all_cuts(models, tmp_path, monkeypatch):
    monkeypatch.setattr(policy_simulation, "SAMPLES_AT_ONCE", 8)
    encoded: list[str] = []
    stop_at = 16
    whole = BradleyTerryRM.encode

    def encode(self, prompts, responses):
        if len(encoded) == stop_at:
            raise KeyboardInterrupt
        encoded.extend(responses)
        return whole(self, prompts, responses)

    monkeypatch.setattr(BradleyTerryRM, "encode", encode)
    command = ["bon", str(models[0]), str(tmp_path / "out.jsonl"), *OPTIONS, "--max-length", "24"]
    stopped = CliRunner().invoke(app, command)
    assert "goes on from the prompts ranked so far" in stopped.stderr
    assert (tmp_path / "out.jsonl.partial").exists()
    stop_at = -1
    resumed = CliRunner().invoke(app, command)
    assert resumed.exit_code == 0
    assert "the prompts of 40 of 40 responses lost their beginning" in resumed.stdout
    assert len(encoded) == 40
