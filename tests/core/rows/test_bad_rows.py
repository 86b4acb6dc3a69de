"""A row that the chat template refuses is a bad row: named by file and line, dropped, counted and limited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.rows.messages import Message
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.errors import DataError
from tests.builders import decoder_tokenizer
from tests.core.test_template_zoo import FORGETTING, KNOWN_ROLES

REFUSED = {"role": "narrator", "content": "Once."}


@pytest.fixture(scope="module")
def renderer() -> ConversationRenderer:
    return ConversationRenderer(decoder_tokenizer(chat_template=KNOWN_ROLES), 64)


def rows(count: int, refused: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [*([REFUSED] if i in refused else []), {"role": "user", "content": f"Question {i}?"}],
            "chosen": [{"role": "assistant", "content": "Yes."}],
            "rejected": [{"role": "assistant", "content": "No."}],
        }
        for i in range(count)
    ]


def written(folder: Path, items: list[dict[str, Any]]) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


def test_a_refused_row_is_named_by_file_and_line(tmp_path: Path, renderer: ConversationRenderer):
    data = PreferenceDataset(written(tmp_path, rows(10, (6,))))
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 7: .* role 'narrator'.*on_bad_row=\"drop\""):
        data.accepted_by(renderer)


def test_refused_rows_are_dropped_and_listed(tmp_path: Path, renderer: ConversationRenderer):
    items = rows(20, (6, 9))
    items[3]["chosen"] = 7
    data = PreferenceDataset(written(tmp_path, items), on_bad_row="drop").accepted_by(renderer)
    assert [row.row for row in data.skipped] == [4, 7, 10]
    assert len(data) == 17
    assert data.accepted_by(renderer) is data


@pytest.mark.parametrize("refused", [5, 4])
def test_rows_bad_in_reading_and_refused_count_together(tmp_path: Path, renderer: ConversationRenderer, refused: int):
    items = rows(30, tuple(range(refused)))
    for item in items[20:22]:
        item["chosen"] = 7
    data = PreferenceDataset(written(tmp_path, items), on_bad_row="drop")
    if refused == 4:  # with the two others 6 of 30, the share that is allowed
        assert len(data.accepted_by(renderer)) == 24
        return
    with pytest.raises(DataError, match=r"7 of 30 rows are bad, more than the 20% .*5: the tokenizer's chat template"):
        data.accepted_by(renderer)


def test_the_rows_of_a_part_are_judged_among_themselves(tmp_path: Path, renderer: ConversationRenderer):
    data = PreferenceDataset(written(tmp_path, rows(60, (0, 1, 2, 3, 4))), on_bad_row="drop")
    with pytest.raises(DataError, match="5 of 8 rows are bad"):
        data[:8].accepted_by(renderer)
    assert len(data.accepted_by(renderer)) == 55


def test_a_part_keeps_the_lines_of_its_pairs(tmp_path: Path, renderer: ConversationRenderer):
    whole = PreferenceDataset({"path": written(tmp_path, rows(40, (11,))), "weight": 2})
    sides = whole.split_by_prompt(0.3, seed=1)
    for data in (whole, whole[10:], whole.subset(78, 0), PreferenceDataset.joined([whole[:11], whole[11:]]), *sides):
        if any("narrator" in str(pair.prompt) for pair in data):
            with pytest.raises(DataError, match="line 12: "):
                data.accepted_by(renderer)


def test_a_row_of_many_pairs_is_dropped_once_and_its_good_pairs_stay(tmp_path: Path):
    forgetting = ConversationRenderer(decoder_tokenizer(chat_template=FORGETTING), 64)
    responses = ["Four.", "<think>2 + 2</think>Four!", "Five."]
    items = [{"prompt": f"{i} + 2?", "responses": responses, "scores": [3, 2, 1]} for i in range(2)]
    items[1]["responses"] = ["a", "b", "c"]
    data = PreferenceDataset(written(tmp_path, items), on_bad_row="drop").accepted_by(forgetting)
    assert [row.row for row in data.skipped] == [1]
    assert (data[0].chosen, data[0].rejected) == ("Four.", "Five.")
    assert len(data) == 4


def test_pairs_of_no_source_are_named_by_their_place(renderer: ConversationRenderer):
    pairs = [PreferencePair("2 + 2?", "4", "5"), PreferencePair((Message(**REFUSED),), "4", "5")]
    with pytest.raises(DataError, match=r"^pair 2: "):
        PreferenceDataset(pairs).accepted_by(renderer)
