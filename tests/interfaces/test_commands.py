"""`evaluate`, `score` and `data check` on a small saved model: what they print and the files they leave."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.core.model.identity import scorer_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.audit import DataAudit
from rm_optimizer.interfaces.cli import app
from tests.bad_input.world import PAIRS
from tests.builders import narrow_reward_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model") / "best"
    narrow_reward_model(text for pair in PAIRS for text in pair.values()).save_pretrained(folder)
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


def test_evaluate_reads_patterns_and_folders_and_names_equal_files_by_their_path(checkpoint, pairs):
    for folder in ("a", "b", "shards"):
        Path(folder).mkdir()
        shutil.copy(pairs, Path(folder, "test.jsonl"))
    shutil.copy(pairs, "shards/more.jsonl")
    options = ["--bootstrap", "0", "--output", "found"]
    rm_opt("evaluate", checkpoint, "--data", "[ab]/*.jsonl", "--data", "shards", *options)
    found = PairwiseMetrics.from_json(Path("found/metrics.json").read_text())
    sizes = {name: group.num_pairs for name, group in found.groups["source"].items()}
    assert sizes == {"a/test.jsonl": 12, "b/test.jsonl": 12, "shards": 24}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--data", "pairs.jsonl", "--by", "sorce"], "unknown --by column 'sorce'; did you mean 'source'?"),
        (["--data", "*.parquet"], r"*.parquet: no file matches this pattern"),
        (["--data", "model"], "model: expected pairs, got the folder of a model or run; name a file of pairs"),
        (["--data", "empty"], "empty: the folder holds no Parquet, JSON Lines, JSON or CSV file"),
        (["--data", "pairs.jsonl", "--data", "pairs.jsonl"], "--data must name each file once, got 'pairs.jsonl'"),
        (["--data", "pairs.jsonl", "--kwise-rule", "best"], "unknown --kwise-rule 'best'"),
        (
            ["--data", "pairs.jsonl", "--output", "run"],
            "--output must not be the folder of a run or a model, got 'run'",
        ),
        (["--data", "pairs.jsonl", "--max-length", "5000", "--output", "o"], "--max-length must be at most 2048"),
    ],
)
def test_a_mistake_in_an_evaluation_is_one_sentence_and_leaves_nothing(checkpoint, pairs, arguments, sentence):
    Path("empty").mkdir()
    Path("run").mkdir()
    Path("model").mkdir()
    Path("model/config.json").touch()
    Path("run/options.json").touch()
    result = CliRunner().invoke(app, ["evaluate", checkpoint, *arguments])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert not Path("o").exists()


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
    report = json.loads(Path("out.jsonl.report.json").read_text())
    assert (report["max_length"], report["num_responses"], report["num_response_cut"]) == (64, 2, 0)
    assert json.loads(Path("out.jsonl").read_text()) == row | {"reward": pytest.approx(expected, abs=1e-5)}


def test_score_says_what_it_cut_on_the_terminal_and_beside_the_file(checkpoint, pairs):
    Path("in.jsonl").write_text(json.dumps({"prompt": "Why? " * 90, "response": "so " * 90}) + "\n")
    printed = rm_opt("score", checkpoint, "in.jsonl", "out.jsonl")
    assert (
        "cut at 64 tokens: the prompts of 1 of 1 responses lost their beginning, 1 responses lost their end" in printed
    )
    report = json.loads(Path("out.jsonl.report.json").read_text())
    assert (report["num_prompt_cut"], report["num_response_cut"]) == (1, 1)
    arguments = ["score", checkpoint, "--prompt", "p", "--response", "so " * 90]
    result = CliRunner().invoke(app, arguments)
    assert "1 responses lost their end" in result.stderr
    assert "lost" not in result.stdout
    assert "lost" not in CliRunner().invoke(app, [*arguments, "--max-length", "400"]).stderr


def test_a_length_that_the_model_cannot_read_is_refused_by_its_flag(checkpoint, pairs):
    for command in (["score", "--prompt", "p", "--response", "r"], ["doctor"]):
        result = CliRunner().invoke(app, [command[0], checkpoint, *command[1:], "--max-length", "99999"])
        assert result.exit_code == 2
        assert "--max-length must be at most 2048" in result.stderr


def test_rewards_of_weights_trained_again_are_not_continued(checkpoint, pairs, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    Path("in.jsonl").write_text("".join(json.dumps({"prompt": "p", "response": str(i)}) + "\n" for i in range(3)))
    model = BradleyTerryRM.from_pretrained(checkpoint)
    header = json.dumps({"identity": "of the weights before"})
    Path("out.jsonl.partial").write_text(header + "\n[0.5]\n")
    result = CliRunner().invoke(app, ["score", str(tmp_path / "model"), "in.jsonl", "out.jsonl"])
    assert result.exit_code == 2
    assert "holds scores of another input, layout, model, length limit" in result.stderr
    digests = [scorer_digest(model), scorer_digest(BradleyTerryRM.from_pretrained(tmp_path / "model"))]
    digests.append(scorer_digest(BradleyTerryRM.from_pretrained(checkpoint, max_length=32)))
    with torch.no_grad():
        model.reward_head.weight[0, 0] += 1e-3
    digests.append(scorer_digest(model))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_loading_a_model_writes_no_bar(checkpoint, capfd):
    BradleyTerryRM.from_pretrained(checkpoint)
    assert "Loading weights" not in capfd.readouterr().err


def test_data_check_prints_the_audit_and_writes_it(pairs):
    Path("other.csv").write_text("question,better,worse\nWhat is 1 + 1?,two,three\n")
    mapping = ["--columns", "prompt=question", "--columns", "chosen=better", "--columns", "rejected=worse"]
    assert "trained on this data" in rm_opt("data", "check", "other.csv", *mapping)
    printed = rm_opt("data", "check", pairs, "--json", "audit.json")
    audit = DataAudit.from_json(Path("audit.json").read_text())
    assert audit.splits["pairs.jsonl"].num_pairs == len(PAIRS)
    assert "longer wins" in printed


@pytest.mark.parametrize("command", ["data check {pairs}", "doctor {checkpoint} --data {pairs} --max-pairs 4"])
def test_json_on_standard_output_stands_alone(command, checkpoint, pairs, capfd):
    arguments = command.format(checkpoint=checkpoint, pairs=pairs).split()
    done = CliRunner().invoke(app, [*arguments, "--json", "/dev/stdout"])
    assert json.loads(capfd.readouterr().out)
    assert done.stdout == ""
    assert "pairs.jsonl" in done.stderr


def test_data_check_suggests_a_layout_to_paste(pairs):
    row = {"ask": "2 + 2?", "answer 1": "four", "answer 2": "five", "verdict": 0}
    rows = [row | {"ask": f"{i} + 2?", "verdict": i % 2} for i in range(8)]
    Path("asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = rm_opt("data", "check", "asked.jsonl", "--suggest")
    assert printed.startswith(
        "# asked.jsonl: save this as mine.yaml for --layout mine.yaml, with what the rows mean in place of"
    )
    assert "columns: {prompt: TODO, response_a: answer 1, response_b: answer 2, winner: verdict}" in printed
    Path("mine.yaml").write_text(printed.replace("prompt: TODO", "prompt: ask").replace("[TODO, TODO, TODO]", "[0, 1]"))
    assert "trained on this data" in rm_opt("data", "check", "asked.jsonl", "--layout", "mine.yaml")
    assert "chosen (better)" in rm_opt("data", "check", pairs, "--suggest")
    named = "{path: asked.jsonl, columns: {prompt: ask}, layout: {encoding: utf-8}}"
    printed = rm_opt("data", "check", named, "--suggest", "--winner", "0,1")
    assert "columns: {prompt: ask, response_a" in printed
    assert "encoding: utf-8" in printed
    assert "is read by these options, as layout mine" in rm_opt(
        "data", "check", "{path: asked.jsonl, layout: mine.yaml}", "--suggest"
    )


def test_data_check_tells_of_huge_responses_at_once_and_trains_no_tokenizer_on_them(pairs):
    huge = {"prompt": "Why?", "chosen": "because " * 40_000, "rejected": "No."}
    Path("huge.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in (*PAIRS, huge)))
    said = rm_opt("data", "check", "huge.jsonl")
    told = f"WARNING: huge.jsonl: 1 of {len(PAIRS) + 1} pairs have a response of more than 100,000 characters, pair "
    assert f"{told}{len(PAIRS) + 1} one of 320,000; are the rows whole?" in " ".join(said.split())
    assert "WARNING" not in rm_opt("data", "check", pairs)


def test_data_check_counts_control_tokens(pairs):
    with Path(pairs).open("a") as lines:
        lines.write('{"prompt": "<s>[INST] Hi [/INST]", "chosen": "a", "rejected": "b"}\n')
    Path("other.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n')
    assert "control tokens" in rm_opt("data", "check", pairs, "other.jsonl", "--json", "audit.json")
    splits = DataAudit.from_json(Path("audit.json").read_text()).splits
    assert (splits[pairs].num_control_tokens, splits["other.jsonl"].num_control_tokens) == (1, 0)
    assert sorted(splits[pairs].control_tokens) == ["<s>", "[/INST]", "[INST]"]


def test_data_check_reads_as_training_would(pairs):
    rows = [{"prompt": f"{i}?", "responses": ["a", "b", "c"], "scores": [1, 2, 3]} for i in range(6)]
    Path("lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rm_opt(
        "data", "check", pairs, "lists.jsonl", "--kwise-rule", "best_worst", "--label", "0.5", "--json", "audit.json"
    )
    splits = DataAudit.from_json(Path("audit.json").read_text()).splits
    assert (splits["lists.jsonl"].num_pairs, splits[pairs].num_soft_labels) == (6, len(PAIRS))


def test_data_check_lists_the_rows_it_dropped(pairs):
    with Path(pairs).open("a") as lines:
        lines.write('{"prompt": "p", "chosen": "same", "rejected": "same"}\n')
    printed = rm_opt("data", "check", pairs, "--on-bad-row", "drop")
    assert f"dropped {pairs}, line {len(PAIRS) + 1}: " in printed


def test_data_check_prints_one_line_for_all_groups_of_equal_scores(pairs):
    rows = [{"prompt": f"{i}", "responses": ["a", "b"], "scores": [i % 2, 0]} for i in range(20)]
    Path(pairs).write_text("".join(json.dumps(row) + "\n" for row in rows))
    dropped = [line for line in rm_opt("data", "check", pairs).splitlines() if line.startswith("dropped")]
    cause = "no pair: no two responses that differ in text and score"
    assert dropped == [f"dropped {pairs}, line 1: {cause}; rows of this cause: 10"]


def test_data_check_takes_the_tokenizer_that_is_named(checkpoint, pairs):
    printed = rm_opt("data", "check", pairs, "--tokenizer", checkpoint, "--max-length", "16")
    assert "trained on this data" not in printed
    result = CliRunner().invoke(app, ["data", "check", pairs, "--tokenizer", "./nowhere"])
    assert result.stderr.startswith("error: no tokenizer at './nowhere'")


def test_data_check_prints_a_pair_as_it_was_understood_and_counts_labels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [pair | {"label": i % 2, "system": "Be exact."} for i, pair in enumerate(PAIRS)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = rm_opt("data", "check", "pairs.jsonl")
    shown = [line.split() for line in printed.splitlines()]
    assert ["│", "system", "│", "Be", "exact.", "│"] in shown
    assert any(line[1:4] == ["rejected", "(better)", "│"] for line in shown)
    assert "pairs.jsonl: labels: 6 ones, 6 zeros, 0 between; chosen loses in 6 of 12 pairs" in printed
    assert any("label" in line and "0" in line and "(50.0%)" in line for line in shown)
