"""Questions for people and their answers, in every form of file, and `rm-opt select` before and after them."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from rm_optimizer import Message, PreferenceDataset, PreferencePair
from rm_optimizer.data_efficiency.feature_rules import RULES
from rm_optimizer.data_efficiency.questions import (
    questions_of,
    read_answers,
    read_questions,
    write_questions,
)
from rm_optimizer.errors import DataError
from rm_optimizer.interfaces.cli import app
from rm_optimizer.interfaces.commands.labels import DEFAULT_RULE
from rm_optimizer.rl_coupling.ensemble import EnsembleReference
from rm_optimizer.rl_coupling.ensemble_folder import save_ensemble
from tests.builders import tiny_reward_model
from tests.serving.test_agent_rows import ROWS, TOOLS

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


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json"])
def test_responses_of_several_messages_come_back_as_they_were(tmp_path, suffix):
    pairs = PreferenceDataset([{**row, "tools": TOOLS} for row in ROWS[:1]])
    spelled = PreferencePair("2 + 2?", str(pairs[0].chosen), "5.")  # a text that only looks like messages
    path = tmp_path / f"ask{suffix}"
    write_questions(questions_of([*pairs, spelled], np.arange(2), seed=0), path)
    answered(path, ["A", "A"])
    found = read_answers(path).pairs
    for pair, before in zip(found, (pairs[0], spelled), strict=True):
        assert pair.prompt == before.prompt
        assert {pair.chosen, pair.rejected} == {before.chosen, before.rejected}


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
        ({"response_a": "another"}, "pair_id does not belong to its texts"),
        ({"prompt": ""}, "prompt is missing"),
    ],
)
def test_what_is_no_answer_is_refused_with_its_line(tmp_path, change, message):
    path = tmp_path / "ask.jsonl"
    path.write_text(json.dumps({**questions()[0].row(), **change}) + "\n")
    with pytest.raises(DataError, match=f"ask.jsonl, line 1: .*{message}"):
        read_answers(path)


def test_an_argilla_draft_is_no_answer_and_a_discarded_one_a_skip(tmp_path):
    path = tmp_path / "ask.jsonl"
    rows = [question.row() for question in questions()]
    states = [["draft", "submitted"], ["discarded", "draft"], ["draft", None]]
    for row, state in zip(rows, states, strict=True):
        row |= {"label": None, "label.responses": ["A", "B"], "label.responses.status": state}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_answers(path)
    assert [pair.chosen for pair in found.pairs] == [rows[0]["response_b"], rows[2]["response_b"]]
    assert (found.num_answers, found.num_skipped, found.num_open) == (2, 1, 0)
    rows[0]["label.responses.status"] = ["submitted"]
    path.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(DataError, match=r"line 1: label\.responses has 2 answers and 1 states"):
        read_answers(path)


def test_messages_without_an_identity_are_read_as_messages_with_a_warning(tmp_path, caplog):
    rows = [{**question.row(), "label": "A"} for question in questions()]
    path = tmp_path / "ask.jsonl"
    for changed, told in ((lambda row: row, 0), (lambda row: {**row, "pair_id": ""}, 1)):
        path.write_text("".join(json.dumps(changed(row)) + "\n" for row in rows))
        assert {pair.prompt for pair in read_answers(path).pairs} == {pair.prompt for pair in PAIRS}
        assert caplog.text.count("1 of 9 texts spell messages and are read as messages, since no pair_id tells") == told


def test_the_export_of_label_studio_without_tasks_is_refused(tmp_path):
    path = tmp_path / "ask.json"
    path.write_text(json.dumps([{**questions()[0].row(), "preference": "A", "annotator": 1}]))
    with pytest.raises(DataError, match="row 1: this is Label Studio's JSON-MIN; export the project as JSON"):
        read_answers(path)


def test_a_spreadsheet_may_round_an_identity_that_looks_like_a_number(tmp_path):
    found = (questions_of([PreferencePair(f"ask {n}", "a", "b")], np.arange(1), seed=0)[0] for n in range(100_000))
    question = next(one for one in found if one.pair_id.isdigit())
    path = tmp_path / "ask.jsonl"
    for cell in (f"{float(question.pair_id):.5E}", int(question.pair_id)):
        path.write_text(json.dumps({**question.row(), "pair_id": cell, "label": "A"}) + "\n")
        assert read_answers(path).pairs[0].metadata["id"] == question.pair_id
    for cell in (f"{float(question.pair_id) * 1.01:.5E}", "nan", "x"):
        path.write_text(json.dumps({**question.row(), "pair_id": cell, "label": "A"}) + "\n")
        with pytest.raises(DataError, match="pair_id does not belong to its texts"):
            read_answers(path)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json"])
def test_carriage_returns_and_letters_of_all_kinds_pass_through_every_form(tmp_path, suffix):
    texts = ("one\rtwo", "one\r\ntwo", "\rx", 'a, "b"', " ÜŇ 🙂 ")
    pairs = [PreferencePair((Message("user", text),), text, "other " + text) for text in texts]
    path = tmp_path / f"ask{suffix}"
    write_questions(questions_of(pairs, np.arange(len(pairs)), seed=0), path)
    assert "🙂" in path.read_text(encoding="utf-8")
    assert "\\u" not in path.read_text(encoding="utf-8")
    read = [question for question, _ in read_questions(path)]
    assert [{one.response_a, one.response_b} for one in read] == [{text, "other " + text} for text in texts]
    assert [one.prompt[0].content for one in read] == [*texts]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("my notes\nand more\n", "line 1: is damaged"),
        ('{"a": 1}\n{"b": 2}\n', "line 1: expected the header"),
        ('{"identity": "x"}\n{"b": 2}\n', "expected the answers that rm-opt label keeps"),
        ('{"identity": "x"}\n[1\n{"b": 2}\n', "line 2: is damaged"),
        ('{"identity": "x"}\n{"pair_id": "1", "label": "A"}\n', "prompt is missing"),
    ],
)
def test_what_the_labeling_page_did_not_write_is_one_sentence(tmp_path, content, message):
    log = tmp_path / "ask.labels.jsonl"
    if content is not None:
        log.write_text(content)
    result = run("label-import", log, "--out", tmp_path / "out.jsonl")
    assert result.exit_code == 2, result.output
    assert "ask.labels.jsonl" in result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_answers_to_other_questions_beside_a_file_are_refused(tmp_path):
    path = tmp_path / "ask.csv"
    row = questions()[2].row() | {"label": "A"}
    path.with_suffix(".labels.jsonl").write_text(f'{{"identity": "x"}}\n{json.dumps(row)}\n')
    write_questions(questions()[:2], path)
    with pytest.raises(DataError, match=r"ask.labels.jsonl: holds answers to questions that ask.csv does not ask"):
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


@pytest.mark.parametrize("rule", [DEFAULT_RULE, "random"])
def test_selected_questions_are_answered_imported_and_left_out_of_the_next_choice(pool, tmp_path, rule):
    by_model = () if rule == "random" else ("--model", pool / "model", "--cache", tmp_path / "cache")
    options = (*by_model, "--k", 10, "--rule", rule)
    ask = tmp_path / "ask.csv"
    result = run("select", pool / "pool.jsonl", *options, "--out", ask)
    assert result.exit_code == 0, result.output
    assert "10 of 30 unlabeled pairs" in result.stdout
    empty = run("label-import", ask, "--out", tmp_path / "none.jsonl")
    assert empty.exit_code == 2
    assert "10 questions and no answer" in empty.stderr
    answered(ask, ["A", "B"] * 5)
    assert run("label-import", ask, "--out", tmp_path / "labels.jsonl").exit_code == 0
    labeled = PreferenceDataset(tmp_path / "labels.jsonl")
    assert len(labeled) == 10
    again = tmp_path / "more.jsonl"
    options = (*by_model[:2], "--k", 10, "--rule", rule)
    result = run("select", pool / "pool.jsonl", *options, "--out", again, "--labeled", tmp_path / "labels.jsonl")
    assert "10 of 20 unlabeled pairs" in result.stdout, result.output
    asked = {json.loads(line)["prompt"] for line in again.read_text().splitlines()}
    assert not asked & {pair.prompt for pair in labeled}


def test_a_pool_whose_pairs_are_all_labeled_is_said_to_be(pool, tmp_path):
    labeled = tmp_path / "labels.jsonl"
    rows = map(json.loads, (pool / "pool.jsonl").read_text().splitlines())
    sides = [{"prompt": row["prompt"], "chosen": row["response_a"], "rejected": row["response_b"]} for row in rows]
    labeled.write_text("".join(json.dumps(row) + "\n" for row in sides))
    options = ("--model", pool / "model", "--k", 3, "--out", tmp_path / "x.csv", "--labeled", labeled)
    result = run("select", pool / "pool.jsonl", *options)
    assert result.exit_code == 2
    assert "--labeled names all 30 pairs of" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--k", 3, "--out", "x.csv", "--rule", "random"), "--model has no effect with --rule random"),
        (("--k", 3, "--out", "x.txt"), "--out must end in .csv, .jsonl, .json"),
        (("--k", 3, "--out", "x.csv", "--rule", "bald"), "rule 'bald' needs an ensemble"),
        (("--k", 3, "--out", "x.csv", "--rule", "badges"), "did you mean 'badge'"),
        (("--k", 3, "--out", "no/x.csv"), "its folder does not exist"),
        (("--k", 3, "--out", "x.labels.jsonl"), "--out must not end in .labels.jsonl"),
        (
            ("--k", 3, "--out", "x.csv", "--model", "ensemble", "--cache", "c"),
            "--cache has no effect with an ensemble",
        ),
        (("--k", 3, "--out", "x.csv", "--model", "ensemble", "--ray-workers", 0), "--ray-workers has no effect with"),
    ],
)
def test_what_cannot_be_chosen_is_one_sentence_and_leaves_nothing(pool, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    options = [pool / value if value == "ensemble" else value for value in options]
    result = run("select", pool / "pool.jsonl", "--model", pool / "model", *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_texts_that_begin_as_formulas_are_protected_in_a_spreadsheet_and_read_back(tmp_path):
    texts = ("=1+1", "+1 (of 2)", "-x", "@home", "\tx", "'-quoted", "'tis", "-1.5e3", "plain")
    pairs = [PreferencePair(text, text, f"other {text}") for text in texts]
    path = tmp_path / "ask.csv"
    write_questions(questions_of(pairs, np.arange(len(pairs)), seed=0), path)
    with path.open(newline="", encoding="utf-8") as file:
        cells = [row["prompt"] for row in csv.DictReader(file)]
    assert cells == ["'=1+1", "'+1 (of 2)", "'-x", "'@home", "'\tx", "''-quoted", "'tis", "-1.5e3", "plain"]
    assert [question.prompt for question, _ in read_questions(path)] == list(texts)


def test_labels_of_zeros_and_ones_alone_are_said_to_be_probabilities_of_a(tmp_path, caplog):
    path = tmp_path / "ask.csv"
    for labels, is_said in ((["1", "0", "1"], True), (["1", "B", ""], False)):
        write_questions(questions(), path)
        answered(path, labels)
        caplog.clear()
        read_answers(path)
        assert ("1 is A, 0 is B" in caplog.text) == is_said


def test_a_pair_that_the_pool_holds_twice_is_one_question(pool, tmp_path):
    rows = [json.loads(line) for line in (pool / "pool.jsonl").read_text().splitlines()][:6]
    turned = [{**row, "response_a": row["response_b"], "response_b": row["response_a"]} for row in rows[:2]]
    twice = tmp_path / "twice.jsonl"
    twice.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[3], *turned]))
    ask = tmp_path / "ask.jsonl"
    result = run("select", twice, "--model", pool / "model", "--k", 6, "--out", ask)
    assert result.exit_code == 0, result.output
    assert "3 pairs of the pool repeat another one" in result.stdout
    assert len({json.loads(line)["pair_id"] for line in ask.read_text().splitlines()}) == 6
    result = run("select", twice, "--rule", "length_stratified", "--k", 7, "--out", tmp_path / "more.csv")
    assert "6 of 6 unlabeled pairs by rule length_stratified" in result.stdout
    result = run("select", twice, "--k", 6, "--out", tmp_path / "none.csv")
    assert "--rule boundary_optimal reads a model: add --model, or take --rule random" in result.stderr


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:200])])
def test_a_cache_without_its_features_is_one_sentence(pool, tmp_path, damage):
    def select(name: str):
        options = ("--model", pool / "model", "--k", 3, "--cache", tmp_path / "cache", "--out", tmp_path / name)
        return run("select", pool / "pool.jsonl", *options)

    assert select("a.csv").exit_code == 0
    damage(tmp_path / "cache/differences.npy")
    result = select("b.csv")
    assert result.exit_code == 2, result.output
    assert "differences.npy: is gone or damaged" in result.stderr
    assert not (tmp_path / "b.csv").exists()


def test_the_default_is_the_first_rule():
    assert next(iter(RULES)) == DEFAULT_RULE
