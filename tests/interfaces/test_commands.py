"""`evaluate`, `score` and `data check` on a small saved model: what they print and the files they leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rm_optimizer.core.audit import DataAudit
from rm_optimizer.core.metrics import PairwiseMetrics
from rm_optimizer.core.reward_model import BradleyTerryRM
from rm_optimizer.core.tiny import train_tokenizer
from rm_optimizer.interfaces.cli import app

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
PAIRS = [{"prompt": f"What is {i} + {i}?", "chosen": f"It is {2 * i}.", "rejected": f"Maybe {i}?"} for i in range(12)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model") / "best"
    tokenizer = train_tokenizer((text for pair in PAIRS for text in pair.values()), 300)
    BradleyTerryRM.from_config(LLAMA, tokenizer, max_length=64, seed=0).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def pairs(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return "pairs.jsonl"


def rm_opt(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.stderr + repr(result.exception)
    return result.stdout


def test_evaluate_prints_a_table_and_leaves_json_and_plots(checkpoint, pairs):
    printed = rm_opt("evaluate", checkpoint, "--data", pairs, "--bootstrap", "100", "--output", "found")
    metrics = PairwiseMetrics.from_json(Path("found/metrics.json").read_text())
    assert metrics.num_pairs == len(PAIRS)
    assert "accuracy" in printed
    assert {path.name for path in Path("found").rglob("*") if path.is_file()} == {
        "metrics.json",
        "reward_distributions.json",
        "pair_rewards.jsonl",
        "reliability.png",
        "margins.png",
    }


def test_score_gives_the_same_reward_on_the_terminal_and_in_a_file(checkpoint, pairs):
    model = BradleyTerryRM.from_pretrained(checkpoint)
    expected = model.score(["What is 1 + 1?"] * 2, ["It is 2.", "Maybe 1?"]).tolist()
    printed = rm_opt(
        "score", checkpoint, "--prompt", "What is 1 + 1?", "--response", "It is 2.", "--response", "Maybe 1?"
    )
    assert [float(line) for line in printed.splitlines()] == pytest.approx(expected, abs=1e-6)
    row = {"prompt": "What is 1 + 1?", "responses": ["It is 2.", "Maybe 1?"]}
    Path("in.jsonl").write_text(json.dumps(row) + "\n")
    assert rm_opt("score", checkpoint, "in.jsonl", "out.jsonl") == "1 rows scored: out.jsonl\n"
    assert json.loads(Path("out.jsonl").read_text()) == row | {"reward": pytest.approx(expected, abs=1e-5)}


def test_data_check_prints_the_audit_and_writes_it(pairs):
    Path("other.csv").write_text("question,better,worse\nWhat is 1 + 1?,two,three\n")
    mapping = ["--columns", "prompt=question", "--columns", "chosen=better", "--columns", "rejected=worse"]
    assert "trained on this data" in rm_opt("data", "check", "other.csv", *mapping)
    printed = rm_opt("data", "check", pairs, "--json", "audit.json")
    audit = DataAudit.from_json(Path("audit.json").read_text())
    assert audit.splits["pairs.jsonl"].num_pairs == len(PAIRS)
    assert "longer wins" in printed


def test_data_check_lists_the_rows_it_dropped(pairs):
    with Path(pairs).open("a") as lines:
        lines.write('{"prompt": "p", "chosen": "same", "rejected": "same"}\n')
    printed = rm_opt("data", "check", pairs, "--on-bad-row", "drop")
    assert f"dropped {pairs}, row {len(PAIRS) + 1}: " in printed


def test_data_check_takes_the_tokenizer_that_is_named(checkpoint, pairs):
    printed = rm_opt("data", "check", pairs, "--tokenizer", checkpoint, "--max-length", "16")
    assert "trained on this data" not in printed
    result = CliRunner().invoke(app, ["data", "check", pairs, "--tokenizer", "./nowhere"])
    assert result.stderr.startswith("error: no tokenizer at './nowhere'")
