from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rm_optimizer.core.pairs.layouts import Layout
from rm_optimizer.core.pairs.pair import PreferencePair, as_messages
from rm_optimizer.core.pairs.source_pairs import SourcePairs, load_source, mixed
from rm_optimizer.core.pairs.sources import DataSource, parse_sources
from rm_optimizer.core.rows.bad_rows import SkippedRow
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.schema.data import DataConfig, OnBadRow

ROW = {"prompt": "Hi", "chosen": "Hello!", "rejected": "No."}


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path: str, on_bad_row: OnBadRow = OnBadRow.error, **options: Any) -> SourcePairs:
    (source,) = parse_sources({"path": path, **options}, DataConfig())
    return load_source(source, DataConfig(on_bad_row=on_bad_row, max_bad_share=1.0))


def test_optional_columns_become_fields_and_the_rest_metadata(tmp_path: Path):
    extra = {"margin": 0.5, "label": 0.75, "weight": 2, "subset": "s", "tags": ["a", {"b": None}], "none": None}
    (pair,) = load(write(tmp_path / "a.jsonl", ROW | extra)).pairs
    assert (pair.margin, pair.label, pair.weight) == (0.5, 0.75, 2.0)
    assert pair.metadata == {"subset": "s", "tags": ["a", {"b": None}], "source": "a"}


def test_empty_cells_are_missing_numbers(tmp_path: Path):
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected,margin,label,source\nHi,a,b,,,\nHi,a,b,1.5,0.5,mine\n")
    first, second = load(str(tmp_path / "a.csv")).pairs
    assert (first.margin, first.label, first.weight, first.metadata["source"]) == (None, 1.0, 1.0, "a")
    assert (second.margin, second.label, second.weight, second.metadata["source"]) == (1.5, 0.5, 1.0, "mine")


def test_what_json_cannot_say_stays_out_of_the_metadata(tmp_path: Path):
    row = ROW | {"day": dt.date(2024, 7, 26), "raw": b"x", "nan": float("nan"), "margin": None, "ok": 1}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    (pair,) = load(str(tmp_path / "a.parquet")).pairs
    assert pair.margin is None
    assert pair.metadata == {"ok": 1, "source": "a"}


def test_pairs_written_as_dicts_are_read_back_equal(tmp_path: Path):
    pairs = (
        PreferencePair("Hi", "a", "b", margin=1.0, metadata={"source": "s"}, label=0.5, weight=3.0),
        PreferencePair("Hi", "a", "c", metadata={"source": "t", "votes": [1, 2]}),
    )
    assert load(write(tmp_path / "a.jsonl", *(pair.to_dict() for pair in pairs))).pairs == pairs


def test_columns_are_mapped_even_when_names_swap(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", {"question": "Hi", "chosen": "No.", "rejected": "Hello!", "label": "kind"})
    columns = {"prompt": "question", "chosen": "rejected", "rejected": "chosen", "topic": "label"}
    (pair,) = load(path, columns=columns).pairs
    assert (pair.prompt, pair.chosen, pair.rejected) == ("Hi", "Hello!", "No.")
    assert pair.metadata == {"topic": "kind", "source": "a"}


def test_a_mapped_column_that_is_not_there_gets_a_hint(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", {"question": "Hi", "chosen": "a", "rejected": "b"})
    with pytest.raises(
        DataError, match=r"data\.columns={prompt: qestion}': unknown column 'qestion'; did you mean 'question'\?"
    ):
        load(path, columns={"prompt": "qestion"})
    with pytest.raises(ConfigError, match=r"unknown column of ours 'promt'; did you mean 'prompt'\?"):
        load(path, columns={"promt": "question"})


@pytest.mark.parametrize("form", ["auto", "explicit"])
def test_columns_that_fit_no_format_say_how_to_map_them(form: str, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", {"Question": "Hi", "better": "a", "Rejected": "b"})
    with pytest.raises(DataError) as caught:
        load(path, format=form)
    message = str(caught.value)
    proposal = "did you mean 'data.columns={prompt: Question, chosen: better, rejected: Rejected}'?"
    assert message == f"{path}: {proposal}; got columns Question, better, Rejected"


def test_a_format_asked_for_wants_its_columns(tmp_path: Path):
    asked = r"the rows fit the format explicit; .*; got columns prompt.*; expected prompt, responses and scores lists"
    with pytest.raises(DataError, match=asked):
        load(write(tmp_path / "a.jsonl", ROW), format="kwise")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rejected": None}, "rejected is empty in each of the first 5 rows"),
        ({"chosen": 4}, "chosen is int in each of the first 5 rows"),
        ({"prompt": 7, "chosen": None}, "prompt is int and chosen is empty in each of the first 5 rows"),
    ],
)
def test_right_columns_with_values_that_cannot_be_read_are_called_that(
    change: dict[str, Any], says: str, tmp_path: Path
):
    with pytest.raises(DataError, match=says) as refused:
        load(write(tmp_path / "a.jsonl", *[ROW | change] * 5))
    assert "name yours" not in str(refused.value)


BAD_ROWS = [
    ({"chosen": ""}, "chosen must not be empty"),
    ({"chosen": "No."}, "chosen and rejected must differ"),
    ({"chosen": None}, "chosen must be text, got nothing"),
    ({"prompt": " "}, "prompt must not be empty"),
    ({"margin": "wide"}, "margin must be a number, got 'wide'"),
    ({"margin": "inf"}, "margin must be finite, got inf"),
    ({"label": 1.5}, r"label must lie in \[0, 1\], got 1.5"),
    ({"weight": 0}, "weight must be positive and finite, got 0.0"),
]


@pytest.mark.parametrize(("change", "reason"), BAD_ROWS)
def test_a_bad_row_names_file_line_and_reason(change: dict[str, Any], reason: str, tmp_path: Path):
    path = write(tmp_path / "a.jsonl", ROW, ROW | change)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: {reason}; correct it, or set data\.on_bad_row=drop"):
        load(path)


def test_dropped_rows_are_listed_in_order(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", ROW, *(ROW | change for change, _ in BAD_ROWS), ROW)
    loaded = load(path, OnBadRow.drop)
    assert len(loaded.pairs) == 2
    assert [row.row for row in loaded.skipped] == list(range(2, 2 + len(BAD_ROWS)))
    assert loaded.skipped[0] == SkippedRow(path, 2, "chosen must not be empty")
    assert str(loaded.skipped[0]) == f"{path}, line 2: chosen must not be empty"


def test_a_broken_csv_line_stops_or_is_dropped(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,chosen,rejected\nHi,a,b\nHi,a\nHi,b,c\n")
    with pytest.raises(DataError, match=r"a\.csv, line 3: has 2 fields where the header has 3"):
        load(str(path))
    loaded = load(str(path), OnBadRow.drop)
    assert (len(loaded.pairs), [row.row for row in loaded.skipped]) == (2, [3])


def test_a_file_without_a_pair_says_why(tmp_path: Path):
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\n")
    with pytest.raises(DataError, match=r"a\.csv: the file holds no rows"):
        load(str(tmp_path / "a.csv"))
    path = write(tmp_path / "a.jsonl", ROW | {"chosen": ""}, ROW | {"rejected": ""})
    with pytest.raises(DataError, match=r"none of 2 rows gives a pair; the first: .*line 1: chosen must not be empty"):
        load(path, OnBadRow.drop)


def test_kwise_rows_without_a_preference_are_listed_but_are_no_error(tmp_path: Path):
    tied = {"prompt": "Hi", "responses": ["a", "b"], "scores": [1, 1]}
    loaded = load(write(tmp_path / "k.jsonl", tied, tied | {"scores": [0, 1]}))
    assert [row.row for row in loaded.skipped] == [1]
    (pair,) = loaded.pairs
    assert (pair.chosen, pair.margin) == ("b", 1.0)
    places = {"chosen_index": 1, "rejected_index": 0, "chosen_score": 1.0, "rejected_score": 0.0}
    assert pair.metadata == {"source": "k", "group": "k:2", **places}


def test_a_table_of_single_responses_is_kwise(tmp_path: Path):
    rows = [
        {"question": "Hi", "response": text, "score": score, "model": text.upper()}
        for text, score in [("a", 0.0), ("b", 2.0), ("c", 1.0)]
    ]
    loaded = load(write(tmp_path / "k.jsonl", *rows), columns={"prompt": "question"})
    assert {(pair.chosen, pair.rejected, pair.margin) for pair in loaded.pairs} == {
        ("b", "c", 1.0),
        ("b", "a", 2.0),
        ("c", "a", 1.0),
    }
    assert loaded.pairs[0].metadata["chosen_model"] == loaded.pairs[0].chosen.upper()


def test_a_source_of_ties_can_be_labeled_as_such(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", ROW, ROW | {"label": 0.9})
    assert [pair.label for pair in load(path, label=0.5).pairs] == [0.5, 0.9]


def test_an_option_names_one_source_or_many():
    sources = parse_sources(
        [
            Path("a.csv"),
            {"path": "b.csv", "weight": "0.5", "format": "hh"},
            {"path": "c.csv", "columns": {"prompt": "q"}},
        ],
        DataConfig(format="explicit", columns={"prompt": "p"}),
    )
    assert sources == (
        DataSource("a.csv", Layout(format="explicit", columns={"prompt": "p"})),
        DataSource("b.csv", Layout(format="hh", columns={"prompt": "p"}), 0.5),
        DataSource("c.csv", Layout(format="explicit", columns={"prompt": "q"})),
    )
    assert parse_sources("a.csv", DataConfig()) == (DataSource("a.csv"),)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ([], "empty list"),
        (3, "must be a path, a data-set name or {path: …}, got 3"),
        ({"weight": 2}, "must be a path, a data-set name or {path: …}"),
        ({"path": "a", "wieght": 2}, "did you mean 'weight'?"),
        ({"path": "a", "weight": 0}, "weight of source a must be positive, got 0"),
        ({"path": "a", "weight": "much"}, "data source a: weight must be a number, got 'much'"),
        ({"path": "a", "label": 2}, "label of source a must lie in [0, 1], got 2"),
        ({"path": "a", "format": "hhh"}, "did you mean 'hh'?"),
    ],
)
def test_a_wrong_source_is_one_sentence(option: object, reason: str):
    with pytest.raises(ConfigError) as caught:
        parse_sources(option, DataConfig())
    assert reason in str(caught.value)


def source_of(name: str, num_pairs: int, weight: float) -> tuple[DataSource, SourcePairs]:
    pairs = tuple(PreferencePair(f"{name}{i}", "a", "b", metadata={"source": name}) for i in range(num_pairs))
    return DataSource(name, weight=weight), SourcePairs(pairs, ())


@pytest.mark.parametrize("weight", [0.25, 0.5, 1.0, 1.5, 2.0, 3.75])
def test_a_weight_is_the_mean_number_of_times_a_pair_counts(weight: float):
    source, loaded = source_of("x", 40, weight)
    mixture = mixed([(source, loaded)], seed=0).pairs
    counts = [sum(pair.prompt == original.prompt for pair in mixture) for original in loaded.pairs]
    assert len(mixture) == 40 * weight
    assert set(counts) <= {int(weight), int(weight) + 1}
    assert len({(pair.prompt, pair.metadata.get("copy")) for pair in mixture}) == len(mixture)


def test_a_mixture_depends_on_its_seed_alone():
    sources = [source_of("x", 40, 0.5), source_of("y", 40, 0.5)]
    first = mixed(sources, seed=1).pairs
    assert first == mixed(sources, seed=1).pairs
    assert first != mixed(sources, seed=2).pairs
    assert first[:20] == mixed(sources[:1], seed=1).pairs


def test_responses_to_other_inputs_and_under_other_system_turns_are_not_compared(tmp_path: Path):
    rows = [
        {"instruction": "Summarize.", "input": text, "system": system, "response": response, "score": score}
        for text in ("one", "two")
        for system in ("Be kind.", "")
        for response, score in (("good", 2), ("bad", 1))
    ]
    found = load(write(tmp_path / "r.jsonl", *rows), columns={"prompt": "instruction"})
    assert len(found.pairs) == 4
    assert {(pair.chosen, pair.rejected) for pair in found.pairs} == {("good", "bad")}
    prompts = {tuple(message.content for message in as_messages(pair.prompt)) for pair in found.pairs}
    assert prompts == {(*turn, f"Summarize.\n{text}") for text in ("one", "two") for turn in ((), ("Be kind.",))}
    with pytest.raises(DataError, match="context is not read and would be lost"):
        load(
            write(
                tmp_path / "c.jsonl", *({"prompt": "p", "context": "c", "response": f"{i}", "score": i} for i in (1, 2))
            )
        )


@pytest.mark.parametrize("value", [[1], {"a": [1]}, {"a": 5}, "x"])
def test_a_users_column_of_any_name_is_metadata(value: object, tmp_path: Path):
    row = {"prompt": "p", "responses": ["a", "b"], "scores": [1, 2], "per_response": value}
    (pair,) = load(write(tmp_path / "k.jsonl", row)).pairs
    assert pair.metadata["per_response"] == value


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"columns": {"responses": "all", "scores": "rm"}},
            "columns.*responses.*has no effect.*format explicit",
        ),
        ({"columns": {"response": "all"}}, "has no effect.*format explicit"),
        ({"winner": ["a", "b"]}, "winner.*has no effect"),
    ],
)
def test_a_mapping_that_the_rows_format_does_not_read_is_refused(options: dict[str, Any], says: str, tmp_path: Path):
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "all": ["x", "y"], "rm": [1, 2]}
    with pytest.raises(DataError, match=says):
        load(write(tmp_path / "p.jsonl", row), **options)


SIDES = {"response_a": "x", "response_b": "y"}


@pytest.mark.parametrize(
    ("rows", "says", "never"),
    [
        (
            [SIDES | {"wins_a": i, "wins_b": 0, "tie_won": 1 - i} for i in (0, 1)],
            r"if wins_a, wins_b tell it together, .data.columns=.*winner: \[wins_a, wins_b\]}. data.winner=one_hot",
            "winner: wins_",
        ),
        (
            [SIDES | {"winner_model_a": f"{i}", "winner_model_b": f"{1 - i}"} for i in (0, 1)],
            "if winner_model_a, winner_model_b tell it together",
            "winner: winner_",
        ),
        ([SIDES | {"score_a": 1, "score_b": 2}], "if score_a, score_b tell it together", "WHICH_IS_BETTER"),
        ([SIDES | {"rating_a": 1.5, "rating_b": 2}], "if rating_a, rating_b tell it together", "WHICH_IS_BETTER"),
        ([SIDES | {"votes_1": 1, "votes_2": 4}], "if votes_1, votes_2 tell it together", "winner: votes"),
        ([SIDES | {"model_a_votes": 1, "model_b_votes": 4}], "if model_a_votes, model_b_votes", "winner: model"),
        ([SIDES | {"a_wins": True, "b_wins": False}], "if a_wins, b_wins tell it together", "winner: a_wins"),
        ([SIDES | {"annotator1": 1, "annotator2": 2}], "if annotator1, annotator2 tell it together", "winner: ann"),
        ([SIDES | {"preference": 1, "verdict": 2}], "if preference, verdict tell it together", "winner: pref"),
        (
            [{"response_0": "x", "response_1": "y", "score_0": 1, "score_1": 2}],
            "if score_0, score_1 tell it together",
            "WHICH_IS_BETTER",
        ),
        (
            [SIDES | {"score_a": 1, "score_b": 2, "upvote_ratio": 0.9, "labels": 1}],
            "winner: labels}.*labels holds 1",
            "upvote",
        ),
        (
            [{"left": "x", "right": "y", "preferred": side} for side in ("left", "right", "skip")],
            r"left and right are two .* preferred names the better one: .*response_a: left.*winner: preferred}. "
            r".data.winner=\[left,right,TIE\]., .*; preferred holds left, right, skip",
            "chosen: left",
        ),
        (
            [{"chosen_input_ids": [1, 2], "rejected_input_ids": [3], "chosen_attention_mask": [1, 1]}],
            r"chosen_input_ids and rejected_input_ids are token ids: .* by a layout such as {tokenizer: NAME}",
            "name yours",
        ),
        (
            [{"positive": "x", "negative": "y", "better": side} for side in ("positive", "negative")],
            r"better names the better one: .*winner: better}. .data.winner=\[negative,positive\].;",
            "chosen: positive",
        ),
        (
            [{"response": "x", "id": i, "helpfulness": 3 - i} for i in (0, 1)],
            "scores each response .*score: helpfulness",
            "rm-opt score",
        ),
        ([{"response": "x", "turn": i} for i in (0, 1)], "one of turn.*score: TODO", "score: turn"),
        (
            [{"responses": ["x", "y"], "choice": i} for i in (0, 1)],
            "response_a: responses.0, response_b: responses.1, winner: choice}.*choice holds 0, 1",
            "rm-opt score",
        ),
        (
            [{f"response_{i}": "x" for i in range(1, 12)} | {"scores": [True] * 11}],
            "response_10, response_11 are 11 responses of a row",
            "response_b: response_2",
        ),
        (
            [{"completions": [{"annotations": "x", "response": "y"}]}],
            "such as .data.columns={responses: TODO, scores: TODO}",
            "completions.annotations}",
        ),
        (
            [{"prompt": {"message_id": "17", "text": "a longer text"}, "labels": {"quality": 1}}],
            "such as .data.columns={prompt: prompt.text}",
            "message_id}",
        ),
        ([{"chosen": {"0": "a", "1": "b"}, "rejected": {"0": "c", "1": "d"}}], "orient='records'", "chosen.0"),
        (
            [{"query": "q", "chosen": "a", "rejected": "b", "generations": ["a", "b"]}],
            "did you mean .data.columns={prompt: query}",
            "responses: generations",
        ),
    ],
)
def test_no_hint_changes_a_meaning(rows: list[dict[str, Any]], says: str, never: str, tmp_path: Path):
    prompt = {} if "query" in rows[0] else {"prompt": "p"}
    with pytest.raises(DataError, match=says) as refused:
        load(write(tmp_path / "h.jsonl", *(prompt | row for row in rows)))
    assert never not in str(refused.value).partition("; got columns")[0]


def test_values_of_a_winner_column_may_be_shared_with_sources_of_another_format(tmp_path: Path):
    won = write(tmp_path / "w.jsonl", {"prompt": "p", "response_a": "x", "response_b": "y", "winner": "a"})
    plain = write(tmp_path / "p.jsonl", ROW)
    first, second = parse_sources([won, plain], DataConfig(winner=["a", "b"]))
    found = [load_source(each, DataConfig()) for each in (first, second)]
    assert found[0].notes == ()
    assert "has no effect here, since the rows are read by format explicit" in found[1].notes[0]
