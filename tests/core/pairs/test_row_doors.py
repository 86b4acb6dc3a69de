"""Rows that come in another form: parts of objects, structures as text, missing numbers, answers in prompts."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pandas as pd
import pytest

from rm_optimizer.core.pairs.pair import Message, PreferencePair
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import DataError
from tests.core.pairs.row_layouts import LAYOUTS, outcome

TOOLS = [{"type": "function", "function": {"name": "search"}}]
OPENAI = {"prompt": "input.messages.0.content", "chosen": "good.0.content", "rejected": "bad.0.content"}


def openai_row(i=0, **inside):
    return {
        "input": {"messages": [{"role": "user", "content": f"Why {i}?"}], **inside},
        "good": [{"role": "assistant", "content": f"Because {i}."}],
        "bad": [{"role": "assistant", "content": f"No {i}."}],
    }


def loaded(tmp_path, rows, **options):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PreferenceDataset(path, **options)


def test_parts_beside_a_mapped_path_are_metadata(tmp_path):
    row = {"meta": {"task": "chat", "turn": 1, "deep": {"note": "x"}}, "chosen": "Yes.", "rejected": "No."}
    (pair,) = loaded(tmp_path, [row | {"meta": row["meta"] | {"q": "Why?"}}], columns={"prompt": "meta.q"}).pairs
    assert pair.prompt == "Why?"
    assert dict(pair.metadata) == {
        "source": "pairs", "meta.task": "chat", "meta.turn": 1, "meta.deep": {"note": "x"},
    }  # fmt: skip


@pytest.mark.parametrize("mapped", ["input.messages", "input.messages.0.content"])
@pytest.mark.parametrize(
    ("name", "value"), [("tools", TOOLS), ("system", "Be rude."), ("documents", ["d"]), ("input", "1")]
)
def test_context_beside_a_mapped_path_is_refused_by_its_path(tmp_path, mapped, name, value):
    columns = OPENAI | {"prompt": mapped}
    rows = [openai_row(i) for i in range(60)]
    assert len(loaded(tmp_path, [*rows, openai_row(60, **{name: []})], columns=columns)) == 61
    with pytest.raises(DataError, match=rf"input\.{name} is not read and would be lost"):
        loaded(tmp_path, [*rows, openai_row(60, **{name: value})], columns=columns)
    with pytest.raises(DataError, match=rf"the column input\.{name} is not read and would be lost"):
        loaded(tmp_path, [openai_row(0, **{name: value}), *rows], columns=columns)
    left_out = columns | {f"input.{name}": None}
    assert len(loaded(tmp_path, [*rows, openai_row(60, **{name: value})], columns=left_out)) == 61


def test_context_beside_a_mapped_path_is_read_where_it_is_mapped(tmp_path):
    columns = OPENAI | {"system": "input.rules"}
    (pair,) = loaded(tmp_path, [openai_row(0, rules="Be brief.")], columns=columns).pairs
    assert pair.prompt == (Message("system", "Be brief."), Message("user", "Why 0?"))


def test_fields_of_a_message_that_is_read_by_its_path_are_not_lost(tmp_path):
    row = openai_row()
    row["good"][0]["tool_calls"] = TOOLS
    with pytest.raises(DataError, match=r"good\.0\.tool_calls is not read and would be lost"):
        loaded(tmp_path, [row], columns=OPENAI)


def test_other_turns_of_a_conversation_are_not_lost(tmp_path):
    row = openai_row()
    row["input"]["messages"].append({"role": "user", "content": "And how?"})
    with pytest.raises(DataError, match=r"input\.messages\.1 is not read and would be lost"):
        loaded(tmp_path, [row], columns=OPENAI)


def test_a_turn_that_stands_on_both_sides_is_not_lost(tmp_path):
    sides = {
        f"conv_{side}": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": side}] for side in "ab"
    }
    columns = {"prompt": "conv_a.0.content", "response_a": "conv_a.1.content", "response_b": "conv_b.-1.content"}
    (pair,) = loaded(tmp_path, [sides | {"winner": "a"}], columns=columns, winner="a,b").pairs
    assert (pair.prompt, pair.chosen, pair.rejected) == ("Q?", "a", "b")


def test_context_of_each_response_in_a_list_is_refused(tmp_path):
    row = {"prompt": "Q?", "answers": [{"text": "x", "score": 1}, {"text": "y", "score": 2, "tool_calls": TOOLS}]}
    columns = {"responses": "answers.text", "scores": "answers.score"}
    with pytest.raises(DataError, match=r"answers\.tool_calls is not read"):
        loaded(tmp_path, [row], columns=columns)


def test_places_in_a_list_are_counted_with_its_empty_items(tmp_path):
    row = {"answers": [None, {"text": "x"}, {"text": "y"}, {"text": "z"}], "prompt": "Q?"}
    columns = {"chosen": "answers.text.1", "rejected": "answers.text.-1"}
    (pair,) = loaded(tmp_path, [row], columns=columns).pairs
    assert (pair.chosen, pair.rejected) == ("x", "z")
    assert dict(pair.metadata) == {"source": "pairs", "answers.text.2": "y"}


def test_a_score_inside_a_side_that_prefers_the_other_is_said(tmp_path):
    rows = [{"p": f"Q{i}?", "a": [{"t": f"x{i}", "score": 1}, {"t": f"y{i}", "score": 2}]} for i in range(8)]
    columns = {"prompt": "p", "chosen": "a.0.t", "rejected": "a.1.t"}
    (note,) = loaded(tmp_path, rows, columns=columns).notes
    assert "a.0.score beside a.1.score prefers the other response in 8 of 8 pairs" in note


def test_grouping_of_single_responses_sees_the_context_in_an_object(tmp_path):
    rows = [{"d": {"q": "Add.", "n": n}, "response": f"{n}{k}", "score": k} for n in "12" for k in range(2)]
    pairs = loaded(tmp_path, rows, columns={"prompt": "d.q", "input": "d.n"}).pairs
    assert [pair.prompt for pair in pairs] == ["Add.\n1", "Add.\n2"]
    for row in rows:
        row["d"]["input"] = row["d"].pop("n")
    with pytest.raises(DataError, match=r"d\.input"):
        loaded(tmp_path, rows, columns={"prompt": "d.q"})


def conversation(i, answer):
    return [{"role": "user", "content": f'Say "{i}" isn\'t\n\\d.'}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("write", [json.dumps, str])
def test_conversations_as_text_are_read_as_either_thing_once_it_is_told_which(tmp_path, write):
    path = tmp_path / "pairs.csv"
    rows = [{side: write(conversation(i, f"{side} {i}")) for side in ("chosen", "rejected")} for i in range(60)]
    pd.DataFrame(rows).assign(prompt=[f"Write a chat {i}" for i in range(60)]).to_csv(path, index=False)
    with pytest.raises(
        DataError, match=r"in chosen, rejected spells .*\{'parse': \['chosen', 'rejected'\]\}, .*\{'parse': \[\]\}"
    ):
        PreferenceDataset(path)
    data = PreferenceDataset(path, layout={"parse": ["chosen", "rejected"]}, columns={"prompt": None})
    assert data.pairs[7].prompt == (Message("user", 'Say "7" isn\'t\n\\d.'),)
    assert (data.pairs[7].chosen, data.notes) == ("chosen 7", ())
    text = PreferenceDataset(path, layout={"parse": []})
    assert (text.pairs[7].prompt, text.pairs[7].chosen, text.notes) == ("Write a chat 7", rows[7]["chosen"], ())


@pytest.mark.parametrize("write", [json.dumps, str])
def test_a_prompt_of_messages_as_text_is_parsed_when_asked(tmp_path, write):
    path = tmp_path / "pairs.csv"
    rows = [{"question": write(conversation(i, "Hi")[:1]), "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(3)]
    pd.DataFrame(rows).to_csv(path, index=False)
    with pytest.raises(DataError, match=r"in question spells .*\{'parse': \['question'\]\}"):
        PreferenceDataset(path, columns={"prompt": "question"})
    data = PreferenceDataset(path, layout={"parse": ["question"]}, columns={"prompt": "question"})
    assert data.pairs[1].prompt == (Message("user", 'Say "1" isn\'t\n\\d.'),)


def test_lists_of_responses_as_text_are_parsed_when_asked(tmp_path):
    rows = [{"prompt": f"Q{i}?", "responses": json.dumps(["a", "b"]), "scores": "[1, 2]"} for i in range(3)]
    with pytest.raises(DataError, match=r"in responses, scores spells .*\{'parse': \['responses', 'scores'\]\}; got"):
        loaded(tmp_path, rows)
    assert loaded(tmp_path, rows, layout={"parse": ["responses", "scores"]})[0].chosen == "b"


@pytest.mark.parametrize("write", [json.dumps, str])
def test_text_on_both_sides_and_text_that_a_published_layout_would_parse_are_refused_by_their_columns(tmp_path, write):
    turns = [conversation(i, f"a{i}") for i in range(4)]
    mixed = [
        {"prompt": turn[:1], "chosen": turn[1:], "rejected": write([turn[1] | {"content": "b"}])} for turn in turns
    ]
    lists = [{"prompt": f"Q{i}?", "chosen": write([f"a{i}", f"c{i}"]), "rejected": write([f"b{i}"])} for i in range(4)]
    sides = {side: f"\n\nHuman: Hi\n\nAssistant: {side}" for side in ("chosen", "rejected")}
    named = [{"conversations": write([{"role": "user", "content": "Hi"}]), **sides} for _ in turns]
    for rows, told, parse, num in (
        (mixed, "the text in rejected spells", ["rejected"], 4),
        (lists, "the text in chosen, rejected spells", ["chosen", "rejected"], 8),
        (named, "layout llama-factory-sharegpt: the text in conversations spells", ["conversations"], 4),
    ):
        with pytest.raises(DataError, match=f"{told} .*{re.escape(str(parse))}"):
            loaded(tmp_path, rows)
        assert len(loaded(tmp_path, rows, layout={"parse": parse})) == num


@pytest.mark.parametrize("write", [json.dumps, str])
def test_a_path_parses_the_text_that_it_leads_into_and_no_other(tmp_path, write):
    rows = [{"meta": {"body": write({"q": f"[{i}]"})}, "chosen": "[1, 2]", "rejected": "b"} for i in range(4)]
    (pair, *_) = loaded(tmp_path, rows, columns={"prompt": "meta.body.q"}).pairs
    assert (pair.prompt, pair.chosen) == ("[0]", "[1, 2]")


@pytest.mark.parametrize("write", [json.dumps, str])
def test_text_at_the_end_of_a_path_is_parsed_when_asked(tmp_path, write):
    turns = [write(conversation(i, "Hi")[:1]) for i in range(4)]
    rows = [{"x": {"prompt": turn, "id": 1}, "chosen": "a", "rejected": "b"} for turn in turns]
    options, asked = {"columns": {"prompt": "x.prompt"}}, {"parse": ["x.prompt"]}
    with pytest.raises(DataError, match=r"in x\.prompt spells .*\{'parse': \['x\.prompt'\]\}, .*\{'parse': \[\]\}"):
        loaded(tmp_path, rows, **options)
    pair = loaded(tmp_path, rows, **options, layout=asked).pairs[1]
    assert (pair.prompt, pair.metadata["x.id"]) == ((Message("user", 'Say "1" isn\'t\n\\d.'),), 1)
    assert loaded(tmp_path, rows, **options, layout={"parse": []}).pairs[1].prompt == turns[1]
    for other in ("x.id", "x.none"):  # which nothing reads
        with pytest.raises(DataError, match=rf"needs the columns x\.{other[2:]}"):
            loaded(tmp_path, rows, **options, layout={"parse": [*asked["parse"], other]})
    rows[2]["x"]["prompt"] = turns[2][:-1]
    with pytest.raises(DataError, match=r"line 3: x\.prompt must be a list or an object in JSON"):
        loaded(tmp_path, rows, **options, layout=asked)
    rows = [{"x": {"a": write(["a", "b"]), "s": "[1, 2]"}, "prompt": f"Q{i}?"} for i in range(3)]
    options = {"columns": {"responses": "x.a", "scores": "x.s"}, "layout": {"parse": ["x.a", "x.s"]}}
    assert loaded(tmp_path, rows, **options).pairs[0].chosen == "b"


def test_columns_whose_names_are_numbers_are_parsed(tmp_path):
    rows = [{"prompt": write_turn(i), "1": f"a{i}", "2": "b"} for i in range(3)]
    options = {"columns": {"chosen": "1", "rejected": "2"}, "layout": {"parse": ["prompt"], "has": [1]}}
    assert loaded(tmp_path, rows, **options).pairs[2].prompt[0].content.startswith('Say "2"')


def write_turn(i):
    return json.dumps(conversation(i, "Hi")[:1])


def test_a_text_in_a_parsed_column_that_is_cut_is_a_bad_row(tmp_path):
    rows = [{"prompt": f"[1, {i}]", "chosen": json.dumps(conversation(i, "a")[1:]), "rejected": "b"} for i in range(5)]
    rows[3]["chosen"] = rows[3]["chosen"][:-1]
    rows[4]["chosen"] = "plain"
    with pytest.raises(DataError, match="line 4: chosen must be a list or an object in JSON"):
        loaded(tmp_path, rows, layout={"parse": ["chosen"]})
    pairs = loaded(tmp_path, rows, layout={"parse": ["chosen"]}, on_bad_row="drop").pairs
    assert [pair.chosen for pair in pairs] == ["a", "a", "a", "plain"]
    assert {*pairs[0].prompt} == {Message("user", "[1, 0]")}  # other columns stay text
    with pytest.raises(DataError, match="needs the columns answer"):
        loaded(tmp_path, rows, layout={"parse": ["answer"]})


@pytest.mark.parametrize("column", ["prompt", "chosen"])
def test_messages_in_a_notation_that_cannot_be_read_are_refused(tmp_path, column):
    path = tmp_path / "pairs.csv"
    rows = [{"prompt": f"q{i}", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(3)]
    for i, row in enumerate(rows):
        row[column] = str(np.array(conversation(i, "Hi"), dtype=object))
    pd.DataFrame(rows).to_csv(path, index=False)
    with pytest.raises(DataError, match=f"{column} holds lists of messages as text that cannot be read"):
        PreferenceDataset(path)


def test_json_answers_stay_text(tmp_path):
    other = {"role": "user", "content": "hi"}
    sides = [(json.dumps(other), "hi"), (json.dumps(other), json.dumps(other | {"content": "ho"})), ('{"a": 1}', "[1]")]
    rows = [{"prompt": f"Write JSON {i}", "chosen": a, "rejected": b} for i, (a, b) in enumerate(sides)]
    for part in (rows, *([row] for row in rows)):
        assert [(pair.chosen, pair.rejected) for pair in loaded(tmp_path, part).pairs] == [
            (row["chosen"], row["rejected"]) for row in part
        ]


def test_one_json_conversation_among_plain_answers_stays_text_and_is_counted(tmp_path):
    rows = [{"prompt": f"Q{i}?", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(20)]
    rows[3]["chosen"] = json.dumps(conversation(3, "x"))
    data = loaded(tmp_path, rows)
    assert data.pairs[3].chosen == rows[3]["chosen"]
    assert any(
        "1 of 40 cells of chosen, rejected look like messages and are read as text" in note for note in data.notes
    )


@pytest.mark.parametrize("write", [json.dumps, str])
def test_turns_as_lists_of_texts_are_refused_with_a_path_that_reads_one(tmp_path, write):
    rows = [{"prompt": f"Q{i}?", "response_a": f"a{i}", "response_b": f"b{i}"} for i in range(5)]
    path = tmp_path / "arena.csv"
    pd.DataFrame([{k: write([v]) for k, v in row.items()} | {"winner": "a"} for row in rows]).to_csv(path, index=False)
    with pytest.raises(DataError, match=r"prompt holds lists of texts, .*prompt\.0"):
        PreferenceDataset(path, winner="a,b")
    pd.read_csv(path).assign(response_a="a", response_b="b").to_csv(tmp_path / "plain.csv", index=False)
    with pytest.raises(DataError, match=r"first turn with columns=\{'prompt': 'prompt\.0'\}, or"):
        PreferenceDataset(tmp_path / "plain.csv", winner="a,b")
    columns = {name: f"{name}.0" for name in ("prompt", "response_a", "response_b")}
    assert PreferenceDataset(path, winner="a,b", columns=columns).pairs[2].prompt == "Q2?"
    turns = {name: {"user": "prompt", "assistant": name} for name in ("response_a", "response_b")}
    asked = {"parse": ["prompt", "response_a", "response_b"]}
    with pytest.raises(DataError, match=re.escape(f"layout={asked}")):
        PreferenceDataset(path, winner="a,b", columns=turns)
    assert PreferenceDataset(path, winner="a,b", columns=turns, layout=asked).pairs[2].prompt[0].content == "Q2?"
    asked["parse"] = []
    assert PreferenceDataset(path, winner="a,b", columns=turns, layout=asked).pairs[2].chosen == write(["a2"])


def test_lists_of_answers_as_text_are_said_and_parsed_when_asked(tmp_path):
    rows = [{"prompt": f"Q{i}?", "chosen": json.dumps([f"a{i}", f"c{i}"]), "rejected": f"b{i}"} for i in range(5)]
    data, asked = loaded(tmp_path, rows), r"layout={'parse': ['chosen']}"
    assert data.pairs[0].chosen == '["a0", "c0"]'
    assert any("chosen holds lists of texts written as text" in note and asked in note for note in data.notes)
    with pytest.raises(DataError, match=re.escape(asked)):
        loaded(tmp_path, rows, format="lists")
    parsed = loaded(tmp_path, rows[:1], layout={"parse": ["chosen"]})
    assert [pair.chosen for pair in parsed.pairs] == ["a0", "c0"]


@pytest.mark.parametrize("name", ["margin", "label", "weight"])
@pytest.mark.parametrize("missing", [None, "", math.nan, " ", "NaN"])
def test_every_missing_number_is_the_same(tmp_path, name, missing):
    rows = [{"prompt": "Q?", "chosen": "a", "rejected": f"b{i}", name: value} for i, value in enumerate([missing, 0.5])]
    pairs = loaded(tmp_path, rows).pairs
    assert getattr(pairs[0], name) == getattr(PreferencePair("Q?", "a", "b0"), name)
    assert getattr(pairs[1], name) == 0.5
    with pytest.raises(DataError, match=f"{name} must be finite"):
        loaded(tmp_path, [rows[1] | {name: "inf"}])


def test_missing_numbers_of_parquet_are_missing(tmp_path):
    path = tmp_path / "pairs.parquet"
    rows = {"prompt": ["Q?"] * 2, "chosen": ["a"] * 2, "rejected": ["b", "c"], "margin": [np.nan, 2.0]}
    pd.DataFrame(rows).to_parquet(path)
    assert [pair.margin for pair in PreferenceDataset(path).pairs] == [None, 2.0]


def test_a_prompt_that_ends_with_one_of_the_answers_is_refused(tmp_path):
    row = {"messages": conversation(0, "Yes."), "rejected": "No."}
    columns = {"prompt": "messages", "chosen": "messages.-1.content"}
    with pytest.raises(DataError, match="the prompt ends with the chosen response"):
        loaded(tmp_path, [row], columns=columns)
    turns = (Message("user", "Q?"), Message("assistant", " No. "))
    with pytest.raises(ValueError, match="the prompt ends with the rejected response"):
        PreferencePair(turns, "Yes.", "No.")
    assert PreferencePair((*turns, Message("user", "Sure?")), "Yes.", "No.")


def test_a_prompt_that_stands_among_the_turns_is_not_put_in_front(tmp_path):
    turns = [{"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Hi"}]
    sides = {side: [*turns, {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    (pair,) = loaded(tmp_path, [{"prompt": "Hi", **sides}]).pairs
    assert [message.content for message in pair.prompt] == ["Hello!", "Hi"]


def test_streaming_reads_structures_as_in_memory(tmp_path):
    from rm_optimizer.core.pairs.sources import parse_sources
    from rm_optimizer.core.streaming.blocks import BlockReader, blocks_of, stream_files
    from rm_optimizer.schema.data import DataConfig

    path = tmp_path / "pairs.jsonl"
    rows = [{side: str(conversation(i, f"{side} {i}")) for side in ("chosen", "rejected")} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"parse": ["chosen", "rejected"]}
    files = stream_files(parse_sources(str(path), DataConfig(layout=asked)))
    reader = BlockReader(files, DataConfig())
    pairs = [pair for block in blocks_of(files) for _, pair in reader.pairs(block, reader.tally(0))]
    assert tuple(pairs) == PreferenceDataset(path, layout=asked).pairs


@pytest.mark.parametrize("name", ["margin", "label", "weight"])
def test_rows_of_one_prompt_that_differ_in_a_number_of_the_pair_are_bad(tmp_path, name):
    rows = [{"prompt": p, "response": f"{p}{k}", "score": k, name: 0.5} for p in "ab" for k in range(2)]
    assert [getattr(pair, name) for pair in loaded(tmp_path, rows).pairs] == [0.5, 0.5]
    rows[1][name] = 0.25
    with pytest.raises(DataError, match=f"line 1: the rows of its prompt differ in {name}"):
        loaded(tmp_path, rows)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_means_the_same_comparisons_or_is_refused(tmp_path, layout):
    assert not outcome(layout, tmp_path).startswith("wrong")


def test_most_layouts_that_can_be_read_are(tmp_path):
    found = [outcome(layout, tmp_path) for layout in LAYOUTS if layout.is_readable]
    assert found.count("right") > 0.75 * len(found)


@pytest.mark.parametrize("name", ["available_tools", "functions", "Tool definitions"])
@pytest.mark.parametrize("write", [list, json.dumps])
def test_tools_under_another_name_are_refused_until_they_are_mapped(tmp_path, name, write):
    row = {"prompt": "Why?", "chosen": "Because.", "rejected": "No.", name: write(TOOLS)}
    with pytest.raises(DataError, match=rf"the column {name} is not read .* columns=\{{'tools': '{name}'\}}, or leave"):
        loaded(tmp_path, [row])
    (pair,) = loaded(tmp_path, [row], columns={"tools": name})
    assert pair.prompt[0].fields["tools"] == TOOLS
    assert len(loaded(tmp_path, [row | {name: 3}], columns={} if name != "functions" else {name: None})) == 1


def test_a_winner_may_be_the_name_of_a_column_with_the_name_of_a_model(tmp_path):
    sides = {f"messages_{side}": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": f"{side}."}]
             for side in "ab"}  # fmt: skip
    rows = [sides | {"model_a": "x", "model_b": "y", "winner": f"model_{side}"} for side in "ab"]
    with pytest.raises(DataError, match=r"'response_a': 'messages_a', .*'winner': 'winner'} winner=.model_a,model_b."):
        loaded(tmp_path, rows)


def test_a_bad_row_of_a_published_layout_names_it(tmp_path):
    rows = [{"input": "Why?", "output_1": "So.", "output_2": "No.", "label": label} for label in (1, 2, 1, 0)]
    with pytest.raises(DataError, match=r"line 4: winner must be one of 1, 2, got 0 \(layout llmbar\); correct it"):
        loaded(tmp_path, rows)
    unpaired = [{"prompt": f"{i}?", "completion": f"{i}.", "label": True} for i in range(3)]
    with pytest.raises(DataError, match="nearest is layout trl-unpaired: no pair: its prompt has one response alone"):
        loaded(tmp_path, unpaired)
