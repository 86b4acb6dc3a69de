"""Questions for people and their answers, in every form of file, and `rm-opt select` before and after them."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from rm_optimizer import Message, PreferenceDataset, PreferencePair
from rm_optimizer.data_efficiency.labeling.questions import questions_of, read_answers, write_questions
from rm_optimizer.errors import DataError
from rm_optimizer.interfaces.cli import app
from rm_optimizer.rl_coupling.ensemble import EnsembleReference
from rm_optimizer.rl_coupling.ensemble_folder import save_ensemble
from tests.builders import tiny_reward_model

TALK = (Message("user", "Hi"), Message("assistant", "Hello"), Message("user", 'Why,\n"so"?'))
PAIRS = [
    PreferencePair("What is 2 + 2?", "4", "5", label=0.5),
    PreferencePair(TALK, "Because, well", "Ask\nme later", label=0.5),
    PreferencePair("Ünïcode → here", "=1+1", "@home", label=0.5),
]


def questions(seed: int = 0):
    return questions_of(PAIRS, np.arange(3), seed=seed)


def answered(path, answers: list[str]):
    """Give the answers to the questions of a file, each in its form."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows({**row, "label": answer} for row, answer in zip(rows, answers, strict=True))
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row, answer in zip(rows, answers, strict=True):
            row["label"] = None
            row["preference.responses"] = [answer]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        tasks = json.loads(path.read_text())
        for task, answer in zip(tasks, answers, strict=True):
            value = {"choices": [answer]}
            task["annotations"] = [{"was_cancelled": answer == "skip", "result": [{"type": "choices", "value": value}]}]
        path.write_text(json.dumps(tasks))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json"])
def test_answers_come_back_as_pairs_whatever_the_order_and_the_form(tmp_path, suffix):
    path = tmp_path / f"ask{suffix}"
    write_questions(questions(), path)
    answered(path, ["", "", ""])
    assert (read_answers(path).num_skipped, read_answers(path).num_open) == (0, 3)
    answered(path, ["A", "tie", "skip"])
    found = read_answers(path)
    first = questions()[0]
    assert found.pairs[0].chosen == first.response_a
    assert found.pairs[0].rejected == first.response_b
    assert [pair.label for pair in found.pairs] == [1.0, 0.5]
    assert found.pairs[1].prompt == TALK
    assert (found.num_answers, found.num_skipped, found.num_open) == (2, 1, 0)


def test_responses_stand_in_either_order_and_a_question_has_one_identity():
    orders = {seed: [question.response_a for question in questions(seed)] for seed in range(20)}
    assert {texts[0] for texts in orders.values()} == {"4", "5"}
    assert len({question.pair_id for seed in range(20) for question in questions(seed)}) == 3


def test_answers_to_one_question_are_averaged_repeats_and_contradictions_counted(tmp_path):
    first, second, third = (question.row() for question in questions())
    exchanged = {**first, "response_a": first["response_b"], "response_b": first["response_a"]}
    rows = [
        {**first, "label": "A"},
        {**exchanged, "label": "B"},  # the same answer
        {**second, "label": "A"},
        {**second, "label": "B"},
        {**second, "label": "b"},
        {**third, "label": "0.8"},
    ]
    path = tmp_path / "ask.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_answers(path)
    assert [pair.label for pair in found.pairs] == pytest.approx([1.0, 2 / 3, 0.8])
    assert found.pairs[0].chosen == first["response_a"]
    assert found.pairs[1].chosen == second["response_b"]
    assert (found.num_answers, found.num_repeated, found.num_contradicted, found.num_skipped) == (6, 1, 1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "C"}, "label must be A, B, tie, skip or a probability"),
        ({"label": "1.5"}, "label must be A, B, tie"),
        ({"response_a": "another"}, "pair_id is not that of its texts"),
        ({"prompt": ""}, "prompt is missing"),
    ],
)
def test_what_is_no_answer_is_refused_with_its_line(tmp_path, change, message):
    path = tmp_path / "ask.jsonl"
    path.write_text(json.dumps({**questions()[0].row(), **change}) + "\n")
    with pytest.raises(DataError, match=f"ask.jsonl, line 1: .*{message}"):
        read_answers(path)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    root = tmp_path_factory.mktemp("pool")
    tiny_reward_model("llama", max_length=128).save_pretrained(root / "model")
    save_ensemble(
        root / "ensemble", [str(root / "model")] * 2, EnsembleReference((0.0, 0.0), (1.0, 1.0), 1.0, 0.05, 20)
    )
    rows = [{"prompt": f"ask {n}", "response_a": f"yes {n}", "response_b": f"no {n * n}"} for n in range(30)]
    (root / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def run(*arguments: object):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.mark.parametrize("rule", ["v_optimal", "random"])
def test_selected_questions_are_answered_imported_and_left_out_of_the_next_choice(pool, tmp_path, rule):
    options = ("--model", pool / "model", "--k", 10, "--rule", rule)
    ask = tmp_path / "ask.csv"
    result = run("select", pool / "pool.jsonl", *options, "--out", ask, "--cache", tmp_path / "cache")
    assert result.exit_code == 0, result.output
    assert "10 of 30 unlabeled pairs" in result.stdout
    empty = run("label-import", ask, "--out", tmp_path / "none.jsonl")
    assert empty.exit_code == 2
    assert "10 questions and no answer" in empty.stderr
    answered(ask, ["A", "B"] * 5)
    assert run("label-import", ask, "--out", tmp_path / "labels.jsonl").exit_code == 0
    labeled = PreferenceDataset.load(tmp_path / "labels.jsonl")
    assert len(labeled) == 10
    again = tmp_path / "more.jsonl"
    result = run("select", pool / "pool.jsonl", *options, "--out", again, "--labeled", tmp_path / "labels.jsonl")
    assert "10 of 20 unlabeled pairs" in result.stdout, result.output
    asked = {json.loads(line)["prompt"] for line in again.read_text().splitlines()}
    assert not asked & {pair.prompt for pair in labeled}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--k", 31, "--out", "x.csv"), "--k must be at most 30"),
        (("--k", 3, "--out", "x.txt"), "--out must end in .csv, .jsonl, .json"),
        (("--k", 3, "--out", "x.csv", "--rule", "bald"), "rule 'bald' needs an ensemble"),
        (("--k", 3, "--out", "x.csv", "--rule", "badges"), "did you mean 'badge'"),
        (("--k", 3, "--out", "no/x.csv"), "its folder does not exist"),
        (
            ("--k", 3, "--out", "x.csv", "--model", "ensemble", "--cache", "c"),
            "--cache keeps the features of one model",
        ),
        (("--k", 3, "--out", "x.csv", "--model", "ensemble", "--ray-workers", 2), "--ray-workers compute the features"),
    ],
)
def test_what_cannot_be_chosen_is_one_sentence_and_leaves_nothing(pool, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    options = [pool / value if value == "ensemble" else value for value in options]
    result = run("select", pool / "pool.jsonl", "--model", pool / "model", *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not list(tmp_path.iterdir())
