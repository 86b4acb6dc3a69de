"""`rm-opt readiness`: the loop with people, what it leaves, and what it refuses."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rm_optimizer.core.pairs.synthetic import Gold, PreferenceWorld
from rm_optimizer.interfaces.cli import app
from rm_optimizer.records.files import write_json_lines
from tests.builders import tiny_reward_model

SIZES = ("--n", "4", "--num-prompts", "6", "--labels", "12", "--bootstrap", "20", "--max-pairs", "24")


def run(*arguments):
    return CliRunner().invoke(app, ["readiness", *map(str, arguments)])


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("readiness")
    tiny_reward_model("llama", max_length=256).save_pretrained(folder / "model")
    pairs = PreferenceWorld(0, gold=Gold()).pairs(0, 24).val
    votes = {"votes_chosen": 4, "votes_rejected": 1}
    write_json_lines(folder / "pairs.jsonl", [pair.to_dict() | votes for pair in pairs])
    return folder


@pytest.mark.slow
def test_questions_go_to_people_and_their_answers_come_back(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")
    ask, out = tmp_path / "questions.csv", tmp_path / "out"
    asked = run(
        root / "model", "--data", root / "pairs.jsonl", "--policy", "world", "--ask", ask, "--output", out, *SIZES
    )
    assert asked.exit_code == 0, asked.stderr
    assert "verdict: not known" in asked.stdout
    assert f"rm-opt label {ask}" in asked.stdout
    (pool,) = out.glob("responses-*.jsonl")
    before = os.stat(pool).st_mtime_ns
    rows = list(csv.DictReader(ask.read_text(encoding="utf-8").splitlines()))
    assert 0 < len(rows) <= 12
    picks = {row["prompt"]: row["responses"] for row in map(json.loads, pool.read_text().splitlines())}
    for row in rows:  # a person who agrees with the model
        ranked = picks[row["prompt"]]
        row["label"] = "A" if ranked.index(row["response_a"]) < ranked.index(row["response_b"]) else "B"
    with ask.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    report = tmp_path / "report.json"
    found = run(
        *(root / "model", "--data", root / "pairs.jsonl", "--policy", "world", "--comparisons", ask),
        *("--output", out, "--json", report, *SIZES),
    )
    assert found.exit_code == 0, found.stderr
    assert os.stat(pool).st_mtime_ns == before
    values = json.loads(report.read_text())
    (probe,) = values["probes"]
    assert probe["win_rate"]["value"] == 1.0
    accuracy, relative = (values["features"][name]["value"] for name in ("accuracy", "accuracy_relative"))
    assert 0.7 < 0.5 + (accuracy - 0.5) / relative < 1.0  # the ceiling is that of the votes
    assert probe["num_labels"] == len(rows)
    assert {path.name for path in out.iterdir()} == {"readiness.json", "readiness.png", "readiness.html", pool.name}
    assert json.loads((out / "readiness.json").read_text()) == values
    assert "model's pick of 4 preferred" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--algorithm", "gpro"), "unknown --algorithm 'gpro'; did you mean 'grpo'?"),
        (("--gold", "world"), "--gold is about a policy's responses; add --policy MODEL"),
        (("--ask", "q.csv"), "--ask is about a policy's responses"),
        (("--policy", "world", "--gold", "world", "--comparisons", "f"), "give one oracle: --gold MODEL, or"),
        (("--policy", "world", "--completions", "f"), "give either --policy MODEL, or --completions FILE"),
        (("--policy", "world", "--ask", "q.txt"), "--ask must end in .csv, .jsonl, .json, got 'q.txt'"),
        (("--ceiling", "0.4"), "--ceiling must lie in (0.5, 1], got 0.4"),
        (("--precision", "0.7"), "error: --precision must lie in (0, 0.5), got 0.7"),
        (("--policy", "world", "--comparisons", "nope.csv"), "nope.csv: no such file"),
        (("--policy", "world", "--gold", "world", "--ensemble", "nope"), "nope holds no ensemble.json"),
        ((), "--data must name labeled pairs, for"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(root: Path, tmp_path: Path, arguments, message):
    refused = run(root / "model", *arguments, "--output", tmp_path / "out")
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_model_cannot_be_its_own_oracle(root: Path, tmp_path: Path):
    refused = run(
        *(root / "model", "--data", root / "pairs.jsonl", "--policy", "world", "--gold", root / "model"),
        *("--output", tmp_path / "out", *SIZES),
    )
    assert refused.exit_code == 2
    assert "always agrees with itself" in refused.stderr
    assert not list((tmp_path / "out").glob("readiness*"))
