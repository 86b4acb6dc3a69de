"""Columns that look like content and are not read are named once; metadata is not."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from rm_optimizer.core.data_loader import PreferenceDataset, RayPreferenceDataset, load_training_data
from rm_optimizer.core.pairs import column_hints
from rm_optimizer.interfaces.inputs import PairOptions
from rm_optimizer.schema import DataConfig
from rm_optimizer.schema.composition import described

TEXT = "The {} harbor was closed for the winter, and so the ships lay still."
CONTENT: dict[str, Any] = {
    "instruction_context": "A letter number {} to the editor.",
    "persona": "a pirate",
    "document": TEXT,
    "extra_turns": [{"role": "user", "content": TEXT}],
    "scene": "They were all asleep in house number {} by the lake, and nobody heard the bell that rang.",
    "notes": "Answer as the old captain of the ship would have answered it, and never name the port. Be brief.",
}
METADATA: dict[str, Any] = {
    "id": "train-{}",
    "prompt_id": "a9c1e{}",
    "source": "a forum of the city of Rome on cats and dogs",
    "document_id": "doc {}",
    "context_type": "multi turn",
    "url": "https://example.org/question/{}/how-to-boil-an-egg-in-the-morning",
    "created": "Sun Nov 22 14:46:{} UTC 2026",
    "category": "helpful base set of the first round",
    "label_kind": "votes of a crowd",
    "annotators": ["ann", "ben"],
    "score_chosen": 3.5,
    "score_rejected": 1,
    "rank_chosen": 1,
    "rank_rejected": "2",
    "length_chosen": 3,
    "length_rejected": 9,
    "winner": "chosen",
    "annotator": "rejected by none",
    "answered_by": "gpt and a person",
    "title": "How to boil the egg {} in water",
    "question": "Why is it so, in case {}?",
    "messages": [{"role": "user", "content": "why is it  so, in case {}?"}],
    "votes_json": '{"ann of the first crowd": "a better one by far", "ben": "b of the two, by a little"}',
    "metadata": {"text": TEXT},
}


def filled(value: Any, i: int) -> Any:
    return json.loads(json.dumps(value).replace("{}", str(i)))


def written(path: Path, columns: dict[str, Any]) -> str:
    own = {"prompt": "Why is it so, in case {}?", "chosen": "Because of {}.", "rejected": "No."}
    path.write_text("".join(json.dumps(filled(own | columns, i)) + "\n" for i in range(12)))
    return str(path)


@pytest.mark.parametrize("name", CONTENT)
def test_content_that_is_not_read_is_named(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = written(tmp_path / "pairs.jsonl", METADATA | {name: CONTENT[name]})
    with caplog.at_level(logging.WARNING, "rm_optimizer"):
        data = PreferenceDataset(path)
    assert data.notes == tuple(caplog.messages)
    assert data.notes[0].startswith(f"{path}: {name} look like content but are not read; ")
    assert f"columns={{'{name}': None}}" in data.notes[0]
    assert PreferenceDataset(path, columns={name: None}).notes == ()


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_not(name: str, tmp_path: Path):
    assert PreferenceDataset(written(tmp_path / "pairs.jsonl", {name: METADATA[name]})).notes == ()


def test_a_command_says_it_once_a_source(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "pairs"
    folder.mkdir()
    for part in "ab":
        written(folder / f"{part}.jsonl", {"persona": "a pirate"})
    with caplog.at_level(logging.WARNING, "rm_optimizer"):
        PairOptions().load([str(folder)])
    (said,) = caplog.messages
    assert said.startswith(f"{folder}: persona look")
    assert said.endswith("--columns persona=null")
    PairOptions(columns=["persona=null"]).load([str(folder)])
    assert len(caplog.messages) == 1


def test_a_run_notes_it_once_for_both_splits_of_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = written(tmp_path / "pairs.jsonl", {"persona": "a pirate", "document": TEXT})
    data = load_training_data(DataConfig(train=path, val_fraction=0.4))
    (note,) = data.notes(uses_margins=False)
    assert "persona, document look like content" in note
    assert note.endswith("'data.columns={persona: null, document: null}'")
    assert not caplog.messages


UNREAD: dict[str, tuple[dict[str, Any], dict[str, str | None], str]] = {
    # unread columns of each of four pairs, mapping, what is said
    "scores": (
        {"score_chosen": 0.3, "score_rejected": 2.4},
        {},
        "score_chosen beside score_rejected .* in 4 of 4 pairs",
    ),
    "ratings": (
        {"chosen_rating": "1", "rejected_rating": "4"},
        {},
        "chosen_rating beside rejected_rating .* in 4 of 4",
    ),
    "scores-behind": ({"chosen_score": [1, 2, 3, None], "rejected_score": 2}, {}, "chosen_score .* in 1 of 2 pairs"),
    "dashes": ({"chosen-rating": 1, "rejected-rating": 4}, {}, "chosen-rating beside rejected-rating"),
    "ranks": ({"chosen_rank": 2, "rejected_rank": 1}, {}, "chosen_rank beside rejected_rank .* in 4 of 4"),
    "labels": ({"label": 0, "reward_chosen": 2, "reward_rejected": 1}, {}, "reward_chosen beside .* in 4 of 4"),
    "one-hot": (
        {"winner_model_a": [1, 0, 0, 1], "winner_model_b": [0, 1, 0, 0]},
        {"chosen": "response_a", "rejected": "response_b"},
        "winner_model_a beside winner_model_b .* in 1 of 3 pairs",
    ),
    "sides": (
        {"score_1": [1, 2, 3, 4], "score_2": 3},
        {"chosen": "answer1", "rejected": "answer2"},
        "score_1 beside score_2 .* in 2 of 3 pairs",
    ),
    "names": (
        {"side": ["left", "right", "right", "left"]},
        {"chosen": "left", "rejected": "right"},
        "side prefers the other response in 2 of 4 pairs and is not read: are the columns swapped, or is it the winner",
    ),
    "letters": (
        {"preference": ["A", "B", "tie", "A"]},
        {"chosen": "response_a", "rejected": "response_b"},
        "preference prefers the other response in 1 of 3 pairs",
    ),
    "words": (
        {"winner": ["model_a", "model_b", "tie", "model_b"]},
        {"chosen": "response_a", "rejected": "response_b"},
        "winner prefers the other response in 2 of 3 pairs",
    ),
    "ties": ({"result": ["tie", "win", "Both_bad", "win"]}, {}, "result is Both_bad, tie in 2 of 4 pairs and is not"),
    "is-tie": (
        {"is_tie": [True, False, False, False]},
        {},
        r"is_tie is True in 1 .* {where: {is_tie: {not: \[True\]}}}, or",
    ),
    "own-values": (
        {"verdict": ["yes", "no", "yes", "no"]},
        {"chosen": "left", "rejected": "right"},
        "verdict, which holds no, yes, may name the better of left and right and is not read",
    ),
}


@pytest.mark.parametrize("name", UNREAD)
def test_a_second_account_of_the_preference_is_counted_and_said(name: str, tmp_path: Path):
    unread, columns, says = UNREAD[name]
    own = {"prompt": "p", columns.get("chosen") or "chosen": "a", columns.get("rejected") or "rejected": "b"}
    rows = [own | {key: each[i] if isinstance(each, list) else each for key, each in unread.items()} for i in range(4)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    *labels, note = notes = PreferenceDataset(str(path), columns=columns).notes
    assert re.match(f"{re.escape(str(path))}: {says}", note)
    assert labels == [f"{path}: the label prefers rejected in 4 of 4 pairs"] * ("label" in unread)
    assert RayPreferenceDataset(str(path), columns=columns).notes == notes
    if not columns:
        assert PreferenceDataset(rows).notes == tuple(each.replace(str(path), "pairs", 1) for each in notes)


def test_every_sentence_and_pattern_of_the_hints_has_a_use():
    hints, code = described("layout/general/hints.yaml"), Path(column_hints.__file__).read_text()
    names = [*hints["sentences"], *hints["patterns"]]
    assert [name for name in names if not re.search(f"[\"']{name}[\"']", code)] == ["lost_input", "lost_system"]
    assert 'f"lost_{ours}"' in code


def test_an_account_that_agrees_or_is_left_out_is_not_said(tmp_path: Path):
    rows = [{"prompt": "p", "left": "a", "right": "b", "preferred": "left", "tone": side} for side in ("calm", "loud")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert PreferenceDataset(str(path), columns={"chosen": "left", "rejected": "right"}).notes == ()
    swapped: dict[str, str | None] = {"chosen": "right", "rejected": "left"}
    assert "2 of 2 pairs" in PreferenceDataset(str(path), columns=swapped).notes[0]
    assert PreferenceDataset(str(path), columns=swapped | {"preferred": None}).notes == ()
