"""Columns that look like content and are not read are named once; metadata is not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rm_optimizer.core.data_loader import PreferenceDataset, load_training_data
from rm_optimizer.interfaces.pairs import PairOptions
from rm_optimizer.schema import DataConfig

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
        data = PreferenceDataset.load(path)
    assert data.notes == tuple(caplog.messages)
    assert data.notes[0].startswith(f"{path}: {name} look like content but are not read; ")
    assert f"columns={{'{name}': None}}" in data.notes[0]
    assert PreferenceDataset.load(path, columns={name: None}).notes == ()


@pytest.mark.parametrize("name", METADATA)
def test_metadata_is_not(name: str, tmp_path: Path):
    assert PreferenceDataset.load(written(tmp_path / "pairs.jsonl", {name: METADATA[name]})).notes == ()


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
    assert note.endswith("data.columns={persona: null, document: null}")
    assert not caplog.messages
