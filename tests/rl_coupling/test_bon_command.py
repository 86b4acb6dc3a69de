"""`rm-opt bon` through a server ranks as it does in process, and refuses a server of other weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

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
