"""Published layouts of preference data: each is read as it was meant, or answered with what to type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rm_optimizer.core.data_loader import PreferenceDataset, load_pairs
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.schema.data import DataConfig, Spelling

GOOD, BAD = "Paris is the capital of France.", "It may be Lyon, who knows."
CHAT = [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": GOOD}]
OTHER = [CHAT[0], {"role": "assistant", "content": BAD}]


def load(
    tmp_path: Path, rows: list[dict[str, Any]], *, spelling: Spelling = Spelling.python, **options: Any
) -> PreferenceDataset:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if spelling == Spelling.python:
        return PreferenceDataset(path, **options)
    with spelling.used():
        return load_pairs(str(path), DataConfig(**options))


def refusal(tmp_path: Path, rows: list[dict[str, Any]], *, spelling: Spelling = Spelling.flags, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(tmp_path, rows, spelling=spelling, **options)
    return str(caught.value)


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llmbar": (
        {"input": "Capital?", "output_1": BAD, "output_2": GOOD, "label": 2},
        {
            "columns": {"prompt": "input", "response_a": "output_1", "response_b": "output_2", "winner": "label"},
            "winner": [1, 2],
        },
    ),
    "arena": (
        {"conversation_a": CHAT, "conversation_b": OTHER, "winner": "model_a", "judge": "x"},
        {
            "columns": {"response_a": "conversation_a", "response_b": "conversation_b"},
            "winner": "model_a,model_b,tie|tie (bothbad)",
        },
    ),
    "judgebench": (
        {"question": "Capital?", "response_A": BAD, "response_B": GOOD, "label": "B>A"},
        {
            "columns": {
                "prompt": "question",
                "response_a": "response_A",
                "response_b": "response_B",
                "winner": "label",
            },
            "winner": "A>B,B>A",
        },
    ),
    "strengths": (
        {"prompt": "Capital?", "response_1": BAD, "response_2": GOOD, "strength": 3},
        {
            "columns": {"response_a": "response_1", "response_b": "response_2", "winner": "strength"},
            "winner": [[-3, -2, -1], [1, 2, 3], 0],
        },
    ),
    "rm-bench": ({"prompt": "Capital?", "chosen": [GOOD], "rejected": [BAD]}, {}),
    "nested": (
        {"prompt": "Capital?", "chosen": {"answer": GOOD, "model": "m"}, "rejected": {"answer": BAD, "model": "n"}},
        {"columns": {"chosen": "chosen.answer", "rejected": "rejected.answer"}},
    ),
    "ultrafeedback": (
        {
            "instruction": "Capital?",
            "completions": [{"response": BAD, "overall_score": 2}, {"response": GOOD, "overall_score": 9}],
        },
        {
            "columns": {
                "prompt": "instruction",
                "responses": "completions.response",
                "scores": "completions.overall_score",
            }
        },
    ),
    "nectar": (
        {"prompt": "Capital?", "answers": [{"answer": GOOD, "rank": 1}, {"answer": BAD, "rank": 2}]},
        {"columns": {"responses": "answers.answer", "ranks": "answers.rank"}},
    ),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": "Capital?"}],
            "chosen": {"from": "gpt", "value": GOOD},
            "rejected": {"from": "gpt", "value": BAD},
        },
        {"columns": {"prompt": "conversations"}},
    ),
    "json-in-csv": (
        {"chosen": json.dumps(CHAT), "rejected": json.dumps(OTHER)},
        {"layout": {"parse": ["chosen", "rejected"]}},
    ),
    "transcripts-beside-a-prompt": (
        {
            "prompt": "Capital?",
            "chosen": f"\n\nHuman: Capital?\n\nAssistant: {GOOD}",
            "rejected": f"\n\nHuman: Capital?\n\nAssistant: {BAD}",
        },
        {},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_is_read_as_it_was_meant(name: str, tmp_path: Path):
    row, options = LAYOUTS[name]
    (pair,) = load(tmp_path, [row], **options)
    prompt = pair.prompt if isinstance(pair.prompt, str) else pair.prompt[-1].content
    assert (prompt, pair.chosen, pair.rejected, pair.label) == ("Capital?", GOOD, BAD, 1.0)


def test_a_tie_counts_half_and_an_unknown_winner_is_a_bad_row(tmp_path: Path):
    row = {"prompt": "Capital?", "response_a": GOOD, "response_b": BAD}
    (pair,) = load(tmp_path, [row | {"winner": "Tie"}], winner="a,b,tie")
    assert pair.label == 0.5
    with pytest.raises(DataError, match=r"line 1: winner must be one of a, b, got 'c'"):
        load(tmp_path, [row | {"winner": "c"}], winner="a,b")


def test_the_values_of_a_winner_column_are_never_guessed(tmp_path: Path):
    rows = [{"prompt": f"{i}?", "response_a": "yes", "response_b": "no", "winner": i % 2 + 1} for i in range(6)]
    found = refusal(tmp_path, rows)
    assert "--winner FIRST,SECOND,TIE" in found
    assert found.endswith("winner holds 1, 2")
    assert "data.winner=[FIRST,SECOND,TIE]" in refusal(tmp_path, rows, spelling=Spelling.hydra)


@pytest.mark.parametrize("winner", ["a", "a,b,c,d", "a,a", ["a", ["b", "a"]], 3])
def test_a_wrong_winner_option_is_refused(winner: object, tmp_path: Path):
    with pytest.raises(ConfigError, match="winner must name"):
        load(tmp_path, [{"prompt": "a"}], winner=winner)


def test_lists_on_both_sides_are_every_pair_of_one_group(tmp_path: Path):
    data = load(tmp_path, [{"prompt": "Q?", "chosen": ["a", "b"], "rejected": ["c", "d", "a"]}])
    assert [(pair.chosen, pair.rejected) for pair in data] == [
        ("a", "c"),
        ("a", "d"),
        ("b", "c"),
        ("b", "d"),
        ("b", "a"),
    ]
    assert {pair.metadata["group"] for pair in data} == {"a:1"}


HINTLESS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    # rows, what the answer must name, what it must not propose
    "ranks-are-not-scores": (
        {"question": "Q?", "answers": ["best", "worst"], "ranks": [1, 2]},
        ("--columns prompt=question --columns responses=answers",),
        ("scores=",),
    ),
    "arena": (
        {"conversation_a": CHAT, "conversation_b": OTHER, "winner": "model_a", "turn": 1},
        ("--columns response_a=conversation_a --columns response_b=conversation_b --columns winner=winner", "--winner"),
        ("chosen=",),
    ),
    "values-of-a-winner": (
        {"prompt": "Q?", "human_ref_A": GOOD, "human_ref_B": BAD, "labels": 1, "score_A": 3, "score_B": 2},
        ("response_a=human_ref_A --columns response_b=human_ref_B --columns winner=labels", "labels holds 1"),
        ("scores=", "did you mean"),
    ),
    "sides-from-0": (
        {"prompt": "Q?", "response_0": GOOD, "response_1": BAD, "better_id": 0},
        ("response_a=response_0 --columns response_b=response_1 --columns winner=better_id",),
        ("did you mean",),
    ),
    "webgpt": (
        {"question": "Q?", "answer_j": GOOD, "answer_k": BAD, "preference": 1},
        ("prompt=question --columns response_a=answer_j --columns response_b=answer_k",),
        ("did you mean",),
    ),
    "similar-is-not-same": ({"promt": "Q?", "choosen": GOOD, "reject": BAD}, ("name yours as",), ("did you mean",)),
    "responses": ({"prompt": "Q?", "response": GOOD}, ("rm-opt score",), ("did you mean",)),
    "messages-without-a-prompt": (
        {
            "query": [{"from": "human", "value": "Q?"}],
            "chosen": {"from": "gpt", "value": GOOD},
            "rejected": {"from": "gpt", "value": BAD},
        },
        ("chosen has no prompt before its response; name the column", "--columns prompt=query;"),
        ("on-bad-row",),
    ),
    "kto": (
        {"conversations": [{"from": "human", "value": "Q?"}, {"from": "gpt", "value": GOOD}], "label": True},
        ("name yours as",),
        ("conversations.from",),
    ),
    "objects": (
        {"prompt": "Q?", "chosen": {"text": GOOD}, "rejected": {"text": BAD}},
        ("--columns chosen=chosen.text",),
        ("role and content",),
    ),
}


@pytest.mark.parametrize("name", HINTLESS)
def test_an_answer_names_what_to_type_and_never_changes_what_a_value_means(name: str, tmp_path: Path):
    row, wanted, unwanted = HINTLESS[name]
    found = refusal(tmp_path, [row, row])
    for text in wanted:
        assert text in found
    for text in unwanted:
        assert text not in found.partition("got columns")[0]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "p", "responses": [GOOD, BAD], "ranking": [1, 2]}, "did you mean --columns ranks=ranking?"),
        ({"prompt": "p", "responses": [{"text": GOOD, "score": 1}]}, "responses holds responses.text, responses.score"),
        ({"prompt": "p", "responses": [GOOD, BAD]}, "these are responses to score"),
        ({"prompt": "p", "response": GOOD}, "these are responses to score"),
        ({"prompt": "p", "response 1": GOOD, "response 2": BAD}, "--columns 'response_a=response 1'"),
    ],
)
def test_responses_that_can_be_mapped_are_not_called_responses_to_score(
    row: dict[str, Any], answer: str, tmp_path: Path
):
    assert answer in refusal(tmp_path, [row])


def test_ranks_cannot_be_mapped_as_scores(tmp_path: Path):
    with pytest.raises(ConfigError, match="ranks must be mapped as ranks"):
        load(tmp_path, [{"prompt": "Q?", "responses": ["a", "b"], "ranks": [1, 2]}], columns={"scores": "ranks"})


@pytest.mark.parametrize("labels", [(1, 2), (-1, 1), (-3, 3), ("A", "B"), ("model_a", "tie")])
def test_labels_that_are_no_probabilities_are_a_column_of_another_meaning(labels: Any, tmp_path: Path):
    rows = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no", "label": labels[i % 2]} for i in range(10)]
    for policy in ("error", "drop"):
        found = refusal(tmp_path, rows, on_bad_row=policy)
        assert "--columns response_a=chosen --columns response_b=rejected --columns winner=label --winner" in found
        assert "--columns label=null" in found
        assert "on_bad_row" not in found
        assert "on-bad-row" not in found


def test_dropping_many_rows_is_an_error_with_the_reasons_counted(tmp_path: Path):
    fine = {"prompt": "Q?", "chosen": "yes", "rejected": "no"}
    rows = [fine] * 5 + [fine | {"chosen": ""}] * 3 + [fine | {"rejected": "yes"}] * 2
    found = refusal(tmp_path, rows, on_bad_row="drop")
    assert "5 of 10 rows are bad, more than the 20%" in found
    assert "3: chosen must not be empty; 2: chosen and rejected must differ" in found
    assert found.endswith("permit it with --max-bad-share 0.5")
    assert len(load(tmp_path, rows, on_bad_row="drop", max_bad_share=0.5)) == 5


@pytest.mark.parametrize(
    ("spelling", "named"),
    [
        (Spelling.flags, "use --on-bad-row drop"),
        (Spelling.hydra, r"set data\.on_bad_row=drop"),
        (Spelling.python, 'on_bad_row="drop"'),
    ],
)
def test_a_bad_row_names_the_option_of_the_entrance(spelling: Spelling, named: str, tmp_path: Path):
    with pytest.raises(DataError, match=f"line 1: chosen must not be empty; correct it, or .*{named}"[:-1]):
        load(tmp_path, [{"prompt": "Q?", "chosen": "", "rejected": "no"}], spelling=spelling)


def test_a_column_can_be_left_out(tmp_path: Path):
    row = {"prompt": "Q?", "chosen": "yes", "rejected": "no", "label": 7, "context": "all of it"}
    (pair,) = load(tmp_path, [row], columns={"label": None, "context": None})
    assert (pair.label, dict(pair.metadata)) == (1.0, {"source": "a"})
    assert "--columns context=null" in refusal(tmp_path, [row], columns={"label": None})


def test_a_path_into_a_column_that_leads_nowhere_names_the_parts(tmp_path: Path):
    rows = [{"prompt": "Q?", "chosen": {"text": "a", "model": "m"}, "rejected": "b"}]
    found = refusal(tmp_path, rows, columns={"chosen": "chosen.answer"})
    assert "--columns chosen=chosen.answer: the column chosen holds no such part; it has text, model" in found


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Another?", "chosen": CHAT, "rejected": OTHER},
        {
            "prompt": "Another?",
            "chosen": f"Human: Capital?\n\nAssistant: {GOOD}",
            "rejected": f"Human: Capital?\n\nAssistant: {BAD}",
        },
    ],
)
def test_a_prompt_column_must_agree_with_the_conversations_beside_it(row: dict[str, Any], tmp_path: Path):
    assert "the prompt column differs" in refusal(tmp_path, [row])


def test_one_empty_response_of_many_is_told_and_the_others_count(tmp_path: Path):
    rows = [{"prompt": f"{i}?", "responses": ["a", "b", "c"], "scores": [1, 2, 3]} for i in range(9)]
    rows.append({"prompt": "Q?", "responses": ["a", "", "c"], "scores": [1, 2, 3]})
    data = load(tmp_path, rows, on_bad_row="drop")
    assert len(data) == 9 * 3 + 1
    assert [row.row for row in data.skipped] == [10]


def test_a_margin_that_is_not_a_number_is_a_bad_row(tmp_path: Path):
    assert "line 1: margin must be finite, got inf" in refusal(
        tmp_path, [{"prompt": "Q?", "chosen": "a", "rejected": "b", "margin": float("inf")}]
    )
