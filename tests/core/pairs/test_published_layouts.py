"""Layouts of published data sets: recognized by their columns and values, and never taken for another when damaged."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.pairs import source_format
from rm_optimizer.core.pairs.layouts import Layout, published
from rm_optimizer.core.pairs.pair import PreferencePair, as_messages
from rm_optimizer.core.pairs.source_format import suggested_layout
from rm_optimizer.core.pairs.sources import DataSource, parse_sources
from rm_optimizer.core.pairs.winner import TODO, named_values
from rm_optimizer.core.streaming.blocks import BlockReader, blocks_of, stream_files
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.data import DataConfig

Row = dict[str, Any]


def q(i: int) -> str:
    return f"Why does river {i} bend?"


def good(i: int) -> str:
    return f"River {i} bends since its outer bank wears away."


def bad(i: int) -> str:
    return f"Nobody knows about {i}."


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def answer(text: str) -> Row:
    return {"role": "assistant", "content": text}


def chat(i: int, text: str) -> list[Row]:
    return [user(q(i)), answer(text)]


def parts(messages: list[Row]) -> list[Row]:
    return [{**each, "content": [{"type": "text", "text": each["content"], "image": None}]} for each in messages]


def two(i: int, first: str, second: str, **more: Any) -> Row:
    """Two responses, of which the second is the better one in odd rows."""
    texts = (good(i), bad(i)) if i % 2 == 0 else (bad(i), good(i))
    return {first: texts[0], second: texts[1], **more}


def chats(i: int, first: str, second: str, **more: Any) -> Row:
    row = two(i, first, second)
    return {name: chat(i, text) for name, text in row.items()} | more


def pick(i: int, first: Any, second: Any) -> Any:
    return (first, second)[i % 2]


def ordered(i: int, better: Any, worse: Any) -> list[Any]:
    return [better, worse] if i % 2 == 0 else [worse, better]


CASES: dict[str, Callable[[int], Row | list[Row]]] = {
    "acecode": lambda i: {
        "question": q(i), "tests": ["assert 1"],
        "inferences": [
            {"completion": text, "pass_rate": rate, "model_name": "m"}
            for text, rate in zip(ordered(i, good(i), bad(i)), ordered(i, 1.0, 0.5), strict=True)
        ],
    },
    "alpaca-eval": lambda i: two(
        i, "output_1", "output_2", instruction=q(i), preference=pick(i, 1, 2.0), generator_1="x"
    ),
    "arena-140k": lambda i: {
        **{name: parts(turns) for name, turns in chats(i, "conversation_a", "conversation_b").items()},
        "winner": pick(i, "model_a", "model_b"), "evaluation_session_id": "s", "is_code": False,
        "full_conversation": [{"user": user(q(i)), "model_side_a": answer(good(i))}],
    },
    "arena-33k": lambda i: chats(
        i, "conversation_a", "conversation_b", question_id=f"{i}", winner=pick(i, "model_a", "model_b"), judge="u",
        turn=1, anony=True, language="English", tstamp=1.5, openai_moderation={"flagged": False},
    ),
    "arena-55k": lambda i: {
        "prompt": json.dumps([q(i)]),
        **{name: json.dumps([text]) for name, text in two(i, "response_a", "response_b").items()},
        "winner_model_a": pick(i, 1, 0), "winner_model_b": pick(i, 0, 1), "winner_tie": 0,
    },
    "argilla-flat": lambda i: two(i, "response1", "response2", prompt=q(i), **{
        "preference.responses": [pick(i, "response1", "response2")], "preference.responses.users": ["u"],
        "preference.responses.status": ["submitted"],
    }),
    "argilla-flat-ranking": lambda i: two(i, "response1", "response2", prompt=q(i), **{
        "ranking.responses": [[
            {"value": "response1", "rank": pick(i, 1, 2)}, {"value": "response2", "rank": pick(i, 2, 1)},
        ]],
        "ranking.responses.users": ["u"], "ranking.responses.status": ["submitted"],
    }),
    "argilla-label": lambda i: {
        "status": "completed", "fields": two(i, "response1", "response2", prompt=q(i)), "metadata": {},
        "responses": {"preference": [{"value": pick(i, "response1", "response2"), "user_id": "u"}]},
    },
    "argilla-ranking": lambda i: {
        "fields": two(i, "response1", "response2", prompt=q(i)),
        "responses": {"ranking": [{"value": [
            {"value": "response1", "rank": pick(i, 1, 2)}, {"value": "response2", "rank": pick(i, 2, 1)},
        ]}]},
    },
    "auto-j": lambda i: two(i, "response 1", "response 2", prompt=q(i), scenario="s", label=pick(i, 0, 1)),
    "axolotl-bradley-terry": lambda i: {"input": q(i), "chosen": good(i), "rejected": bad(i)},
    "beavertails": lambda i: [
        {"prompt": q(i), "response": text, "category": {"theft": False}, "is_safe": text == good(i)}
        for text in ordered(i, good(i), bad(i))
    ],
    "code-preference-pairs": lambda i: {"input": q(i), "accepted": good(i), "rejected": bad(i), "ID": i},
    "codeultrafeedback": lambda i: {
        "instruction": q(i), "preference": "style",
        "responses": [{"response": text} for text in ordered(i, good(i), bad(i))],
        "annotations": [{"rating": rating, "rationale": "r"} for rating in ordered(i, "5", "2")],
    },
    "distilabel-capybara": lambda i: {
        "prompt": f"[INST] {q(i)}", "conversation": [{"input": q(i)}], "generation_prompt": ["x"],
        "chosen": chat(i, good(i)), "rejected": chat(i, bad(i)),
    },
    "distilabel-orca": lambda i: {
        "input": q(i), "chosen": good(i), "rejected": bad(i), "generations": [good(i), bad(i)], "status": "unchanged",
        "order": ["chosen", "rejected"], "labelling_prompt": [user("Compare these two answers, and name the best.")],
    },
    "helpsteer2-helpfulness": lambda i: [
        {"prompt": q(i), "response": text, "helpfulness": h, **dict.fromkeys(("correctness", "coherence"), 3),
         "complexity": 1, "verbosity": 1}
        for text, h in zip(ordered(i, good(i), bad(i)), ordered(i, 4, 1), strict=True)
    ],
    "helpsteer2-preference": lambda i: two(
        i, "response_1", "response_2", prompt=q(i), preference_strength=pick(i, -2, 1),
        preference_statement="@Response 2 is better than the other one, as all of us can see here",
    ),
    "helpsteer3-preference": lambda i: two(
        i, "response1", "response2", context=[user(q(i))], overall_preference=pick(i, -1, 3), domain="general",
        individual_preference=[{"score": 1, "feedback1": "f"}],
    ),
    "hhh-alignment": lambda i: {
        "input": q(i), "targets": {"choices": ordered(i, good(i), bad(i)), "labels": ordered(i, 1, 0)},
    },
    "inf-orm-magnitude": lambda i: {"chosen": chat(i, good(i)), "rejected": chat(i, bad(i)), "magnitude": 3.0},
    "intel-orca": lambda i: {"question": q(i), "chosen": good(i), "rejected": bad(i)},
    "judgebench": lambda i: two(i, "response_A", "response_B", question=q(i), label=pick(i, "A>B", "B>A"), pair_id="7"),
    "judgelm": lambda i: two(i, "answer1_body", "answer2_body", question_body=q(i), score=ordered(i, 9, 4), text="t"),
    "label-studio": lambda i: {
        "data": two(i, "answer1", "answer2", prompt=q(i)),
        "annotations": [{"was_cancelled": False, "result": [{"value": {"selected": pick(i, "left", "right")}}]}],
    },
    "label-studio-json-min": lambda i: two(
        i, "answer1", "answer2", prompt=q(i), comparison=pick(i, "left", "right"), annotation_id=i
    ),
    "llama-factory-alpaca": lambda i: {"instruction": q(i), "input": "", "chosen": good(i), "rejected": bad(i)},
    "llama-factory-output-list": lambda i: {"instruction": q(i), "input": "", "output": [good(i), bad(i)]},
    "llama-factory-sharegpt": lambda i: {
        "conversations": [{"from": "human", "value": q(i)}],
        "chosen": {"from": "gpt", "value": good(i)}, "rejected": {"from": "gpt", "value": bad(i)},
    },
    "llmbar": lambda i: two(i, "output_1", "output_2", input=q(i), label=pick(i, 1, 2)),
    "math-preference": lambda i: {"instruction": q(i), "chosen_response": good(i), "rejected_response": bad(i)},
    "ms-swift-rejected-messages": lambda i: {"messages": chat(i, good(i)), "rejected_messages": chat(i, bad(i))},
    "ms-swift-rejected-response": lambda i: {"messages": chat(i, good(i)), "rejected_response": bad(i)},
    "mt-bench-human": lambda i: {
        **{name: [*turns, user("And why?"), answer(f"See {turns[-1]['content']}")]
           for name, turns in chats(i, "conversation_a", "conversation_b").items()},
        "winner": pick(i, "model_a", "model_b"), "turn": 1, "judge": "author_0", "question_id": i,
    },
    "multipref": lambda i: two(
        i, "completion_a", "completion_b", text=q(i), source="s",
        normal_worker_annotations=[{"overall_pref": pick(i, "A-is-clearly-better", "B-is-slightly-better")}],
        expert_worker_annotations=[{"overall_pref": pick(i, "A-is-slightly-better", "B-is-clearly-better")}],
    ),
    "nectar": lambda i: {
        "prompt": f"\n\nHuman: {q(i)}\n\nAssistant: ",
        "answers": [
            {"answer": text, "rank": rank}
            for text, rank in zip(ordered(i, good(i), bad(i)), ordered(i, 1, 2), strict=True)
        ],
    },
    "nemo-rl": lambda i: {
        "context": [user(q(i))],
        "completions": [
            {"rank": rank, "completion": [answer(text)]}
            for text, rank in zip(ordered(i, good(i), bad(i)), ordered(i, 0, 1), strict=True)
        ],
    },
    "oasst-messages": lambda i: [
        {"message_id": f"q{i}", "parent_id": None, "text": q(i), "role": "prompter", "rank": None},
        *({"message_id": f"{text[0]}{i}", "parent_id": f"q{i}", "text": text, "role": "assistant", "rank": rank}
          for text, rank in zip(ordered(i, good(i), bad(i)), ordered(i, 0, 1), strict=True)),
    ],
    "oasst-trees": lambda i: {
        "message_tree_id": f"{i}",
        "prompt": {"text": q(i), "role": "prompter", "replies": [
            {"text": text, "role": "assistant", "rank": rank, "replies": []}
            for text, rank in zip(ordered(i, good(i), bad(i)), ordered(i, 0, 1), strict=True)
        ]},
    },
    "offsetbias": lambda i: two(i, "output_1", "output_2", instruction=q(i), label=pick(i, 1, 2), id=f"{i}"),
    "one-vote-a-row": lambda i: two(i, "response_a", "response_b", prompt=q(i), vote=pick(i, "A", "B"), annotator="w"),
    "openai-preference": lambda i: {
        "input": {"messages": [user(q(i))]}, "preferred_output": [answer(good(i))],
        "non_preferred_output": [answer(bad(i))],
    },
    "openhermes-preferences": lambda i: {
        "prompt": q(i), "chosen": chat(i, good(i)), "rejected": chat(i, bad(i)), "ranks": [2, 1], "rank_str": "b>a",
        "candidates_completions": [bad(i), good(i)],
    },
    "openpipe": lambda i: {"messages": chat(i, good(i)), "rejected_message": answer(bad(i)), "split": "TRAIN"},
    "pandalm": lambda i: two(
        i, "response1", "response2", instruction=q(i), input="", annotator1=pick(i, 1, 2), annotator2=pick(i, 1, 2),
        annotator3=pick(i, 2, 0),
    ),
    "pku-saferlhf": lambda i: two(
        i, "response_0", "response_1", prompt=q(i), better_response_id=i % 2, safer_response_id=1
    ),
    "ppe-best-of-k": lambda i: {
        "prompt": q(i), "parsed_outputs": ["A"] * 32, "scores": [place == i for place in range(32)],
        **{f"response_{place + 1}": good(i) if place == i else bad(i) for place in range(32)},
    },
    "ppe-human": lambda i: two(i, "response_1", "response_2", prompt=q(i), winner=pick(i, "model_a", "model_b")),
    "preference-graph": lambda i: {
        "prompt": q(i), "responses": ordered(i, good(i), bad(i)), "preferences": [[i % 2, 1 - i % 2]],
    },
    "princeton-armorm": lambda i: {
        "prompt": q(i), "all_generated_responses": [bad(i), good(i)], "all_rm_scores": [0.1, 0.2],
        "chosen": chat(i, good(i)), "rejected": chat(i, bad(i)),
    },
    "problem": lambda i: {"problem": q(i), "chosen": f"{good(i)}", "rejected": bad(i)},
    "prompt-messages": lambda i: {"messages": [user(q(i))], "chosen": [answer(good(i))], "rejected": [answer(bad(i))]},
    "prometheus-preference": lambda i: two(
        i, "orig_response_A", "orig_response_B", orig_instruction=q(i), orig_preference=pick(i, "A", "B"),
        instruction="###Task Description: compare the two responses.", output="Feedback: [RESULT] A",
    ),
    "prism": lambda i: [
        {"conversation_id": "c", "interaction_id": f"{i}", "turn": 0, "user_prompt": q(i), "model_response": text,
         "score": score}
        for text, score in zip(ordered(i, good(i), bad(i)), ordered(i, 80, 9), strict=True)
    ],
    "rmb-best-of-n": lambda i: {
        "conversation_input": [user(q(i))], "bon_best": {"answer": good(i), "llm_name": "x"},
        "loser_list": [{"answer": bad(i), "llm_name": "y"}],
    },
    "rmb-pairs": lambda i: {
        "conversation_input": [user(q(i))], "chosen": {"answer": good(i)}, "reject": {"answer": bad(i)},
    },
    "shp": lambda i: two(i, "human_ref_A", "human_ref_B", history=q(i), labels=pick(i, 1, 0), upvote_ratio=0.9),
    "stack-exchange-paired": lambda i: {"qid": i, "question": q(i), "response_j": good(i), "response_k": bad(i)},
    "stack-exchange-preferences": lambda i: {
        "question": q(i),
        "answers": [
            {"text": text, "pm_score": score}
            for text, score in zip(ordered(i, good(i), bad(i)), ordered(i, 5, 1), strict=True)
        ],
    },
    "summarize-from-feedback": lambda i: {
        "info": {"post": q(i), "title": "t"}, "summaries": [{"text": text} for text in ordered(i, good(i), bad(i))],
        "choice": i % 2,
    },
    "trl-unpaired": lambda i: [
        {"prompt": q(i), "completion": text, "label": text == good(i)} for text in ordered(i, good(i), bad(i))
    ],
    "ultrafeedback": lambda i: {
        "instruction": q(i), "models": ["a", "b"],
        "completions": [{"response": text, "overall_score": score, "custom_system_prompt": "Be good."}
                        for text, score in zip(ordered(i, good(i), bad(i)), ordered(i, 8.5, 3), strict=True)],
    },
    "ultrainteract": lambda i: {"trajectory": [{"from": "user", "value": q(i)}], "chosen": good(i), "rejected": bad(i)},
    "unified-feedback": lambda i: chats(
        i, "conv_A", "conv_B", conv_A_rating=pick(i, 1.0, 0), conv_B_rating=pick(i, 0.0, 1)
    ),
    "votes-a-b": lambda i: two(
        i, "response_a", "response_b", prompt=q(i), votes_a=pick(i, 3, 0), votes_b=pick(i, 0, 2)
    ),
    "webgpt": lambda i: two(
        i, "answer_0", "answer_1", question={"full_text": q(i), "dataset": "eli5"}, score_0=pick(i, 1.0, -1),
        score_1=pick(i, -1.0, 1), quotes_0={"title": ["t"]}, quotes_1={"title": ["t"]},
    ),
    "wildfeedback": lambda i: {"prompt": [user(q(i))], "preferred": answer(good(i)), "dispreferred": answer(bad(i))},
}  # fmt: skip
NUM = 4
SCALARS = str | int | float


def rows_of(name: str) -> list[Row]:
    made = [CASES[name](i) for i in range(NUM)]
    return [row for each in made for row in (each if isinstance(each, list) else [each])]


def meaning(pair: PreferencePair) -> tuple[Any, ...]:
    return tuple((m.role, m.content) for m in as_messages(pair.prompt)), pair.chosen, pair.rejected, pair.label


WANTED = [((("user", q(i)),), good(i), bad(i), 1.0) for i in range(NUM)]


def test_every_published_layout_has_an_example():
    assert CASES.keys() == published().keys()


@pytest.mark.parametrize("name", CASES)
def test_a_published_layout_is_recognized_named_and_read_right(name: str, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(name)))
    data = PreferenceDataset(path)
    assert sorted({*map(meaning, data)}) == sorted(WANTED)
    if name != "openhermes-preferences":  # the general format reads the same pairs
        assert f"read as layout {name}, " in data.notes[0]
    assert sorted({*map(meaning, PreferenceDataset(path, layout=name))}) == sorted(WANTED)


CONTENT: tuple[tuple[str, Any], ...] = (
    ("functions", [{"type": "function"}]),
    ("history", [["a", "b"]]),
    ("context", "A passage."),
    ("documents", ["d"]),
    ("images", ["i.png"]),
    ("passage", "Some passage of text."),
    ("prompt", "Another question?"),
    ("chosen", "Another answer."),
    ("messages", [{"role": "user", "content": "Another question?"}]),
    ("question", "Another question?"),
    ("status", "discarded"),
)


FREE = {
    "another input", "another score", "another votes_a", "another votes_b", "another conv_A_rating",
    "another conv_B_rating", "annotator1 is null", "annotator2 is null", "annotator3 is null",
}  # fmt: skip


def damaged(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        yield f"without {name}", [{each: value for each, value in row.items() if each != name} for row in rows]
        yield f"{name} is null", [{**row, name: None} for row in rows]
        if all(isinstance(row.get(name), SCALARS) and len(str(row[name]).split()) < 2 for row in rows):
            yield f"another {name}", [{**row, name: "zzz" if isinstance(row[name], str) else 77} for row in rows]
    for name, value in CONTENT:
        if name not in names:
            yield f"with {name}", [{**row, name: value} for row in rows]
    texts = [{n: str(v) if isinstance(v, list | dict) else v for n, v in row.items()} for row in rows]
    yield "structures as text", texts
    yield "in another order", rows[::-1]


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_refused_or_gives_a_part_of_its_pairs(name: str):
    for damage, rows in damaged(rows_of(name)):
        try:
            found = [meaning(pair) for pair in PreferenceDataset(rows, on_bad_row="drop", max_bad_share=1.0)]
        except DataError:
            continue
        # Ratings and counts may be any number, a vote may be missing, and a prompt beside chosen and rejected is read.
        if damage in FREE or (damage == "with prompt" and {"chosen", "rejected"} <= rows[0].keys()):
            continue
        assert {*found} <= {*WANTED}, damage


@pytest.mark.parametrize("name", CASES)
def test_structures_written_as_text_are_read_as_they_are_or_by_the_mapping_that_is_suggested(name: str):
    rows = [{n: str(v) if isinstance(v, list | dict) else v for n, v in row.items()} for row in rows_of(name)]
    layout, _ = suggested_layout(DataSource("rows"), [*enumerate(rows, 1)])
    if {*layout} == {"parse"}:
        with pytest.raises(DataError, match=re.escape(f"layout={layout}")):
            PreferenceDataset(rows)
    assert sorted({*map(meaning, PreferenceDataset(rows, layout=layout))}) == sorted(WANTED)


@pytest.mark.parametrize("name", CASES)
def test_a_suggested_layout_is_right_or_has_something_to_fill_in(name: str, monkeypatch: pytest.MonkeyPatch):
    rows = rows_of(name)
    recognized, _ = suggested_layout(DataSource("rows"), [*enumerate(rows, 1)])
    assert Layout.of(recognized).to_dict() == recognized
    monkeypatch.setattr(source_format, "published", dict)
    try:
        layout, said = suggested_layout(DataSource("rows"), [*enumerate(rows, 1)])
        if TODO in str(layout):
            assert "in place of TODO" in said
            return
        found = [meaning(pair) for pair in PreferenceDataset(rows, layout=layout)]
    except DataError:
        return
    assert {*found} <= {*WANTED}, layout


TWO = {"question": q(0), "response_j": good(0), "response_k": bad(0)}


def test_a_source_written_as_a_list_is_one_name():
    (row, *_) = rows_of("nectar")
    assert {pair.metadata["source"] for pair in PreferenceDataset([{**row, "source": ["ultrachat"]}])} == {"ultrachat"}


def test_an_encoding_does_not_hide_a_layout(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps({**TWO, "question": "Où?"}, ensure_ascii=False).encode("latin1"))
    data = PreferenceDataset(path, layout={"encoding": "latin1"})
    assert (data[0].prompt, data[0].chosen) == ("Où?", good(0))
    assert "read as layout stack-exchange-paired" in data.notes[0]


def test_two_layouts_that_fit_are_refused_with_both_named():
    row = {**TWO, "instruction": q(1), "chosen_response": good(1), "rejected_response": bad(1)}
    with pytest.raises(DataError, match="question is not read by layout math-preference"):
        PreferenceDataset([row])
    row = {"prompt": q(0), **two(0, "response_a", "response_b"), "vote": "A", "votes_a": 0, "votes_b": 2}
    with pytest.raises(
        DataError, match=r'fit layout one-vote-a-row and layout votes-a-b; name the one .*layout="NAME"'
    ):
        PreferenceDataset([row])
    assert PreferenceDataset([row], layout="votes-a-b")[0].chosen == bad(0)


def test_another_prompt_beside_the_columns_of_a_layout_is_noted():
    (row, *_) = rows_of("ultrainteract")
    data = PreferenceDataset([row | {"prompt": q(1)}])
    assert as_messages(data[0].prompt)[0].content == q(1)
    assert "read as format explicit, not as layout ultrainteract: prompt is not read by layout" in data.notes[0]


def test_a_mapping_of_the_user_wins():
    row = {**TWO, "prompt": q(1)}
    (pair,) = PreferenceDataset([TWO], columns={"prompt": "question", "chosen": "response_k", "rejected": "response_j"})
    assert (pair.chosen, pair.prompt) == (bad(0), q(0))
    (pair,) = PreferenceDataset(
        [TWO], layout="stack-exchange-paired", columns={"chosen": "response_k", "rejected": "response_j"}
    )
    assert pair.chosen == bad(0)
    with pytest.raises(DataError, match="prompt is not read by layout stack-exchange-paired and would be lost; rename"):
        PreferenceDataset([row], layout="stack-exchange-paired")


def test_a_score_beside_the_sides_of_a_layout_is_metadata():
    rows = [{"question": q(i), "chosen": good(i), "rejected": bad(i), "score": [None, 2.5][i]} for i in range(2)]
    assert [pair.metadata.get("score") for pair in PreferenceDataset(rows)] == [None, 2.5]
    single = [{"prompt": q(0), "completion": text, "label": text == "a", "score": 1.5} for text in "ab"]
    with pytest.raises(DataError, match="score is not read by layout trl-unpaired"):
        PreferenceDataset(single)


def test_columns_that_are_left_out_do_not_hide_a_layout():
    row = {**TWO, "persona": "a pirate of the seven seas"}
    told = r"persona is not read by layout stack-exchange-paired .*; leave it out with columns=\{'persona': None\}"
    with pytest.raises(DataError, match=told):
        PreferenceDataset([row])
    (pair,) = PreferenceDataset([row], columns={"persona": None})
    assert (pair.prompt, pair.chosen) == (q(0), good(0))


def test_a_layout_is_a_name_a_file_or_a_mapping(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("columns: {prompt: ask, responses: [x, y], scores: [sx, sy]}\nwhere: {kept: {not: spam}}\n")
    rows = [{"ask": q(0), "x": bad(0), "y": good(0), "sx": 1, "sy": 4, "kept": kept} for kept in ("yes", "spam")]
    mapping = {"columns": {"prompt": "ask", "responses": ["x", "y"], "scores": ["sx", "sy"]}, "where": {"kept": "yes"}}
    for layout in (str(file), mapping):
        data = PreferenceDataset(rows, layout=layout)
        assert [(pair.chosen, pair.margin) for pair in data] == [(good(0), 3.0)]
        assert [str(row.reason) for row in data.skipped] == ["left out, since kept is spam"]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("shpp", "unknown layout 'shpp'; did you mean 'shp'"),
        ("absent.yaml", "the layout absent.yaml cannot be read: .*No such file"),
        ({"column": {}}, "unknown option of a layout 'column'; did you mean 'columns'"),
        ({"columns": ["prompt"]}, "columns must be a mapping, got"),
        ({"has": "prompt"}, "has must be a list, got 'prompt'"),
        ({"tree": {"id": "x"}}, "tree must name root, or id and parent"),
        ({"columns": {"prompt": "TODO"}}, "put what the rows mean in place of TODO in columns"),
        ({"winner": "strength:1,1"}, "winner must name the numbers of the first and the second response"),
    ],
)
def test_a_wrong_layout_is_one_sentence(layout: object, said: str):
    with pytest.raises(ConfigError, match=said):
        PreferenceDataset([TWO], layout=layout)


def test_columns_that_a_named_layout_lacks_are_named():
    with pytest.raises(
        DataError, match="layout shp needs the columns history, human_ref_A, human_ref_B, labels, which"
    ):
        PreferenceDataset([TWO], layout="shp")


@pytest.mark.parametrize(
    ("winner", "cell", "found"),
    [
        ("votes", [1, 3], (bad(0), 0.75, None)),
        ("scores", [0.5, 0.5], (good(0), 0.5, 0.0)),
        ("one_hot", [0, 0, 1], (good(0), 0.5, None)),
        ("probability:0,1", 0.2, (good(0), 0.8, None)),
        ("strength:3,-3", -1, (bad(0), 1.0, 1.0)),
        ("majority:1,2,0", [1, 1, 2], (good(0), 1.0, None)),
        ("1,2,0", [1, [1, 2], None], (good(0), 2 / 3, None)),
    ],
)
def test_a_winner_is_told_in_many_ways(winner: str, cell: Any, found: tuple[Any, ...]):
    row = {"prompt": q(0), "response_a": good(0), "response_b": bad(0), "winner": cell}
    (pair,) = PreferenceDataset([row], winner=winner)
    assert (pair.chosen, pytest.approx(pair.label), pair.margin) == found


def test_votes_stay_with_the_pair():
    row = {"prompt": q(0), **two(0, "response_a", "response_b"), "votes_a": 1, "votes_b": 3}
    (pair,) = PreferenceDataset([row])
    assert (pair.metadata["votes_chosen"], pair.metadata["votes_rejected"]) == (3.0, 1.0)


def test_scores_that_tell_the_winner_stay_with_the_pair():
    row = {"prompt": q(0), **two(0, "response_a", "response_b"), "winner": [0.5, 2]}
    (pair,) = PreferenceDataset([row], winner="scores")
    assert (pair.chosen, pair.scores) == (row["response_b"], (2.0, 0.5))


def test_a_prompt_with_one_response_gives_no_pair_for_that_reason():
    with pytest.raises(DataError, match="row 1: no pair: its prompt has one response alone"):
        PreferenceDataset([{"prompt": q(i), "response": good(i), "score": i} for i in range(3)])


@pytest.mark.parametrize(
    ("values", "sides", "told"),
    [
        (("model_a", "model_b"), ("conversation_a", "conversation_b"), ["model_a", "model_b"]),
        (("A", "B", "tie", "both bad"), ("response_a", "response_b"), ["A", "B", ["both bad", "tie"]]),
        (("left", "right", "skip"), ("left", "right"), ["left", "right", TODO]),
        (("A", "B", "not_a"), ("answer A", "answer B"), ["A", "B", TODO]),
        (("A>B", "B>A"), ("response_A", "response_B"), [TODO] * 3),
        ((0, 1), ("response_0", "response_1"), [TODO] * 3),
        (("a", "b"), ("output 1", "output 2"), [TODO] * 3),
        (("a", "tie"), ("side_a", "side_b"), [TODO] * 3),
    ],
)
def test_only_values_that_name_a_side_are_suggested_for_the_winner(values: Any, sides: Any, told: list[Any]):
    assert named_values([{"w": value} for value in values], "w", sides) == told


@pytest.mark.parametrize(
    ("winner", "cell", "said"),
    [
        ("votes", [0, 0], "votes must be counts of which one is positive, got 0 and 0"),
        ("one_hot", [1, 1, 0], "exactly one of the winner's numbers must be 1"),
        ("scores", [1], "winner must be a list of 2 numbers"),
        ("strength:-3,3", 4, r"winner must lie in \[-3, 3\], got 4"),
        ("a,b", ["a", "x"], "winner must be one of a, b, got 'x'"),
    ],
)
def test_a_cell_that_tells_no_winner_is_a_bad_row(winner: str, cell: Any, said: str):
    row = {"prompt": q(0), "response_a": good(0), "response_b": bad(0), "winner": cell}
    with pytest.raises(DataError, match=said):
        PreferenceDataset([row], winner=winner)


def test_annotations_that_were_taken_back_are_left_out():
    rows = rows_of("label-studio")
    rows[0]["annotations"][0]["was_cancelled"] = True
    data = PreferenceDataset(rows)
    assert (len(data), data.skipped[0].reason) == (NUM - 1, "left out, since annotations.was_cancelled is True")


TAKEN_BACK: dict[str, tuple[Callable[[Row], list[Row]], str]] = {
    "label-studio": (lambda row: row["annotations"], "annotations.was_cancelled is True"),
    "argilla-label": (lambda row: row["responses"]["preference"], "responses.preference.status is discarded"),
    "argilla-ranking": (lambda row: row["responses"]["ranking"], "responses.ranking.status is draft"),
}


@pytest.mark.parametrize("name", [*TAKEN_BACK, "argilla-flat", "argilla-flat-ranking"])
def test_only_the_answer_that_was_taken_back_is_left_out(name: str, tmp_path: Path):
    expected, rows = [*map(meaning, PreferenceDataset(rows_of(name)))], rows_of(name)
    if name in TAKEN_BACK:
        answers, reason = TAKEN_BACK[name][0](rows[0]), TAKEN_BACK[name][1]
        other = json.loads(json.dumps(answers[0]).replace("left", "RIGHT").replace("response1", "response2"))
        field, _, value = reason.rpartition(".")[2].partition(" is ")
        answers.append(other | {field: value == "True" or value})
    else:
        (answers,) = (column for column in rows[0] if column.endswith(".responses"))
        reason = f"{answers}.status is discarded"
        rows[0][answers] *= 2
        rows[0][f"{answers}.users"] *= 2
        rows[0][f"{answers}.status"] = ["discarded", "submitted"]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    data = PreferenceDataset(str(path))
    assert [*map(meaning, data)] == expected
    assert [row.reason for row in data.skipped] == [f"one or more of its answers are left out, since {reason}"]


def test_truth_written_as_text_is_a_score(tmp_path: Path):
    rows = [f"{row['prompt']},{row['completion']},{row['label']}\n" for row in rows_of("trl-unpaired")]
    (tmp_path / "kto.csv").write_text("prompt,completion,label\n" + "".join(rows))
    assert sorted(map(meaning, PreferenceDataset(tmp_path / "kto.csv"))) == sorted(WANTED)


def test_a_stream_reads_a_recognized_layout_and_files_have_layouts_of_their_own(tmp_path: Path):
    for name in ("shp", "nectar", "oasst-messages"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(name)))
    sources = parse_sources([{"path": str(tmp_path / "shp.jsonl")}, str(tmp_path / "nectar.jsonl")], DataConfig())
    reader = BlockReader(stream_files(sources), DataConfig())
    reader = pickle.loads(pickle.dumps(reader))  # as it goes to a worker
    blocks = blocks_of(reader.files)
    found = [meaning(pair) for block in blocks for _, pair in reader.pairs(block, reader.tally(block.file))]
    assert sorted(found) == sorted(WANTED * 2)
    with pytest.raises(DataError, match="got one response a row, or one message"):
        stream_files(parse_sources(str(tmp_path / "oasst-messages.jsonl"), DataConfig()))
    mixed = [{"path": str(tmp_path / f"{name}.jsonl"), "layout": name} for name in ("shp", "oasst-messages")]
    assert sorted(map(meaning, PreferenceDataset(mixed))) == sorted(WANTED * 2)


def test_a_run_takes_a_layout_as_a_mapping():
    layout = "data.layout={columns: {prompt: ask}, where: {turn: 1}}"
    config = typed(compose(["output_dir=runs/a", "data.train=a.jsonl", layout]), TrainConfig)
    (source,) = parse_sources("a.jsonl", config.data)
    assert (source.layout.columns, dict(source.layout.where)) == ({"prompt": "ask"}, {"turn": 1})


def test_what_stands_beside_a_path_is_read_where_a_layout_maps_it():
    tools = [{"type": "function", "function": {"name": "search", "description": "d", "parameters": {}}}]
    openai, studio = rows_of("openai-preference")[0], rows_of("label-studio")[0]
    openai["input"]["tools"], studio["data"]["system"] = tools, "Be brief."
    assert PreferenceDataset([openai])[0].to_dict()["tools"] == tools
    assert as_messages(PreferenceDataset([studio])[0].prompt)[0].content == "Be brief."


def test_tool_calls_of_ranked_completions_stay():
    call = {"type": "function", "function": {"name": "search", "arguments": {"q": "rivers"}}}
    row = rows_of("nemo-rl")[0]
    row["completions"][0]["completion"][0]["tool_calls"] = [call]
    assert PreferenceDataset([row])[0].to_dict()["chosen"][0]["tool_calls"] == [call]


def test_each_ranked_turn_of_a_tree_is_a_group_of_its_own():
    tree = CASES["oasst-trees"](0)
    assert isinstance(tree, dict)
    first, second = tree["prompt"]["replies"]
    replies = [{**each, "text": f"{each['text']} Again."} for each in (first, second)]
    first["replies"] = [{"text": "More?", "role": "prompter", "rank": None, "replies": replies}]
    data = PreferenceDataset([tree])
    assert [pair.metadata["group"] for pair in data] == ["pairs:1.1", "pairs:1.2"]
    assert [m.role for m in as_messages(data[1].prompt)] == ["user", "assistant", "user"]


def test_a_layout_of_a_user_is_complete_when_nothing_is_left_to_fill_in():
    assert Layout.of({"columns": {"prompt": "q"}, "group": ["c"]}).required == {"q", "c"}
