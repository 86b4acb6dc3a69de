"""A stream gives what memory gives, in an order of the seed's, from any step on, to any number of ranks."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rm_optimizer.core.data_loader import PreferenceDataset, RayPreferenceDataset, load_pairs
from rm_optimizer.core.streaming import blocks as ray_blocks
from rm_optimizer.core.streaming import order as ray_order
from rm_optimizer.core.streaming.blocks import Block, BlockTokenizer, BlockTokens
from rm_optimizer.core.streaming.order import MacroBatchStream, StreamOrder, StreamPosition
from rm_optimizer.core.streaming.workers import TokenizerPool
from rm_optimizer.core.tokens.batching import BatchShape, MacroBatch
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.errors import ConfigError, DataError, MissingExtra
from rm_optimizer.schema.data import DataConfig
from tests.builders import decoder_tokenizer
from tests.core.test_template_zoo import KNOWN_ROLES

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "far", "away", "home"]
SMALL_BLOCKS = 1500
SAME_ONCE_CUT = {"prompt": "p", "chosen": "a lazy dog " * 40 + "yes", "rejected": "a lazy dog " * 40 + "no"}
NUM_PAIRS = 175
"""Of `files`, without the one above."""


@pytest.fixture(scope="module")
def renderer() -> ConversationRenderer:
    return ConversationRenderer(decoder_tokenizer(), 48)


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS, rng.integers(low, high)))

    return [
        {
            "prompt": f"{seed}-{i} {text(2, 30)}",
            "chosen": text(1, 20) + " yes",
            "rejected": text(1, 20) + " no",
            "margin": float(rng.integers(1, 9)) / 4 if i % 3 else None,
            "label": 1.0 if i % 5 else 0.75,
            "weight": 1.0 + i % 2,
        }
        for i in range(count)
    ]


def json_lines(path: Path, items: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """JSON Lines with blank lines and a last one without an end, and Parquet in several row groups."""
    folder = tmp_path_factory.mktemp("stream")
    first = json_lines(folder / "a.jsonl", rows(70, 1))
    text = first.read_text().splitlines()
    first.write_text("\n".join([*text[:20], "", *text[20:]]))
    table = pa.Table.from_pylist(rows(90, 2))
    pq.write_table(table, folder / "b.parquet", row_group_size=40)
    json_lines(folder / "c.jsonl", [SAME_ONCE_CUT, *rows(15, 3)])
    return [folder / "a.jsonl", folder / "b.parquet", folder / "c.jsonl"]


class InProcess:
    """A pool without processes."""

    def __init__(self, data: RayPreferenceDataset, renderer: ConversationRenderer) -> None:
        self.tokenizer = BlockTokenizer(data.reader, renderer)

    def ask(self, blocks: Sequence[Block]) -> list[Block]:
        return list(blocks)

    def collect(self, asked: list[Block]) -> Iterator[BlockTokens]:
        return map(self.tokenizer.tokenize, asked)


@pytest.fixture(scope="module", params=["this process", pytest.param("ray", marks=pytest.mark.slow)])
def pool(
    request: pytest.FixtureRequest, files: list[Path], renderer: ConversationRenderer
) -> Iterator[InProcess | TokenizerPool]:
    """This process, then two workers of Ray, which all streams of `files` share."""
    if request.param == "this process":
        yield InProcess(dataset(files), renderer)
        return
    tokenizer = BlockTokenizer(dataset(files).reader, renderer)
    with closing(TokenizerPool(tokenizer, num_workers=2, store_mb=100, fetch_timeout=60)) as pool:
        yield pool


def dataset(files: list[Path]) -> RayPreferenceDataset:
    return RayPreferenceDataset([str(path) for path in files], block_bytes=SMALL_BLOCKS)


def stream(
    pool: Any, data: RayPreferenceDataset, *, seed: int = 3, shuffle: bool = True, rank: int = 0, world_size: int = 1
) -> MacroBatchStream:
    order = StreamOrder(data.blocks, window_blocks=3, seed=seed, shuffle=shuffle)
    return MacroBatchStream(pool, order, BatchShape(16, 400, rank, world_size), pad_token_id=0)


def epochs(found: MacroBatchStream, count: int) -> list[MacroBatch]:
    """The macro-batches of whole passes over the data, or what is left of them."""
    return list(itertools.takewhile(lambda batch: found.position.epoch < count, found))


def contents(batches: list[MacroBatch]) -> list[tuple[Any, ...]]:
    """Both sequences, margin, weight and label of each pair, in the order of the macro-batches."""
    found = []
    for batch in batches:
        of_pair = {}
        for micro in batch.micro:
            ids = [row[mask.bool()].tolist() for row, mask in zip(micro.input_ids, micro.attention_mask, strict=True)]
            for i, index in enumerate(micro.pair_index.tolist()):
                values = (micro.margin[i].item(), micro.weight[i].item(), micro.label[i].item())
                of_pair[index] = (tuple(ids[2 * i]), tuple(ids[2 * i + 1]), *values)
        found += [of_pair[index] for index in batch.pair_index.tolist() if index in of_pair]
    return found


def in_memory(files: list[Path], renderer: ConversationRenderer, cache: Path) -> list[tuple[Any, ...]]:
    data = PreferenceDataset([str(path) for path in files])
    tokens = tokenize_pairs(data, renderer, cache)
    assert tokens.report.num_identical_dropped == 1
    pairs = [data[i] for i in tokens.pair_index]
    return [
        (tuple(tokens.chosen(i)), tuple(tokens.rejected(i)), pair.margin or 0.0, pair.weight, pair.label)
        for i, pair in enumerate(pairs)
    ]


def test_unshuffled_it_gives_the_pairs_of_memory_in_their_order(
    pool: InProcess | TokenizerPool, files: list[Path], renderer: ConversationRenderer, tmp_path: Path
):
    found = stream(pool, dataset(files), shuffle=False)
    assert len(found.order.blocks) > 10
    batches = epochs(found, 1)
    assert contents(batches) == in_memory(files, renderer, tmp_path)
    assert [len(batch.pair_index) for batch in batches] == [16] * 10 + [15]
    assert [batch.step for batch in batches] == list(range(11))


def test_its_tally_is_the_report_of_memory(files: list[Path], renderer: ConversationRenderer, tmp_path: Path):
    data = PreferenceDataset([str(path) for path in files])
    expected = tokenize_pairs(data, renderer, tmp_path).report
    found = stream(InProcess(dataset(files), renderer), dataset(files))
    epochs(found, 3)
    report = found.tally.report(renderer.max_length)
    assert found.tally.num_kept == NUM_PAIRS
    assert replace(report, length_quantiles={}) == replace(expected, length_quantiles={})
    assert report.length_quantiles["1"] == expected.length_quantiles["1"]
    assert report.length_quantiles["0.5"] == pytest.approx(expected.length_quantiles["0.5"], abs=1)


def test_the_order_is_a_function_of_seed_and_epoch(
    pool: InProcess | TokenizerPool, files: list[Path], renderer: ConversationRenderer, tmp_path: Path
):
    data = dataset(files)
    first = contents(epochs(stream(pool, data), 2))
    assert first == contents(epochs(stream(InProcess(data, renderer), data), 2))
    epoch, later = first[:NUM_PAIRS], first[NUM_PAIRS:]
    memory = in_memory(files, renderer, tmp_path)
    assert epoch != later
    assert epoch != memory
    assert sorted(epoch) == sorted(later) == sorted(memory)
    assert contents(epochs(stream(pool, data, seed=4), 1)) != epoch


@pytest.mark.parametrize("step", [1, 10, 11, 14])
def test_it_resumes_at_a_step_with_the_rest_of_the_whole_stream(
    pool: InProcess | TokenizerPool, files: list[Path], step: int
):
    found = stream(pool, dataset(files))
    batches = iter(found)
    list(itertools.islice(batches, step))
    position = found.position
    rest = contents(list(itertools.islice(batches, 6)))
    assert position.step == step
    resumed = stream(pool, dataset(files))
    resumed.position = position
    assert contents(list(itertools.islice(resumed, 6))) == rest
    sought = stream(pool, dataset(files))
    sought.seek(step)
    tail = list(itertools.islice(sought, 6))
    assert contents(tail) == rest
    assert [batch.step for batch in tail] == list(range(step, step + 6))


def test_seeking_the_start_is_where_a_stream_begins(files: list[Path], renderer: ConversationRenderer):
    found = stream(InProcess(dataset(files), renderer), dataset(files))
    found.seek(0)
    assert found.position == StreamPosition()


def test_two_ranks_share_each_macro_batch(pool: InProcess | TokenizerPool, files: list[Path]):
    data = dataset(files)
    whole = epochs(stream(pool, data), 1)
    shares = [epochs(stream(pool, data, rank=rank, world_size=2), 1) for rank in range(2)]
    for batch, *parts in zip(whole, *shares, strict=True):
        taken = [set(np.concatenate([micro.pair_index for micro in part.micro]).tolist()) for part in parts]
        assert not taken[0] & taken[1]
        assert taken[0] | taken[1] == set(batch.pair_index.tolist())
        assert all(part.total_weight == batch.total_weight for part in parts)
        assert all((part.pair_index == batch.pair_index).all() for part in parts)


def test_pair_index_names_file_and_row(files: list[Path], renderer: ConversationRenderer):
    data = dataset(files)
    assert data.num_rows == 71 + 90 + 16
    batches = epochs(stream(InProcess(data, renderer), data, shuffle=False), 1)
    index = np.concatenate([batch.pair_index for batch in batches])
    assert data.row_name(int(index[0])) == f"{files[0]}, line 1"
    assert data.row_name(int(index[20])) == f"{files[0]}, line 22"  # line 21 is blank
    assert data.row_name(int(index[70])) == f"{files[1]}, row 1"
    assert data.row_name(int(index[-1])) == f"{files[2]}, line 16"


@pytest.mark.parametrize("rows_at_once", [1, 7, 30])
def test_parts_of_a_row_group_join_to_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int):
    monkeypatch.setattr(ray_blocks, "_MOST_ROWS", rows_at_once)
    path = tmp_path / "groups.parquet"
    pq.write_table(pa.Table.from_pylist(rows(50, 8)), path, row_group_size=33)
    found = RayPreferenceDataset(str(path), block_bytes=2000)
    assert found.first_pairs(1000).pairs == PreferenceDataset(str(path)).pairs


@pytest.mark.parametrize("block_bytes", [1, 300, 5000, 10**6])
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_parts_of_a_file_of_lines_join_to_its_lines(tmp_path: Path, block_bytes: int, end: str):
    path = json_lines(tmp_path / "lines.jsonl", rows(20, 9))
    path.write_text(path.read_text().rstrip("\n") + end)
    found = RayPreferenceDataset(str(path), block_bytes=block_bytes)
    assert found.first_pairs(1000).pairs == PreferenceDataset(str(path)).pairs
    assert found.num_rows == path.read_bytes().count(b"\n") + (end == "")
    if block_bytes == 1:
        assert len(found.blocks) >= 20


def test_patterns_and_whole_weights_name_files_as_often_as_they_say(tmp_path: Path):
    for name in "yx":
        json_lines(tmp_path / f"{name}.jsonl", rows(3, ord(name)))
    data = RayPreferenceDataset({"path": str(tmp_path / "*.jsonl"), "weight": 2})
    assert [Path(file.source.path).name for file in data.reader.files] == ["x.jsonl", "y.jsonl", "x.jsonl", "y.jsonl"]
    assert data.num_rows == 12


def test_a_bad_row_stops_the_stream_in_the_words_of_memory(tmp_path: Path, renderer: ConversationRenderer):
    items = rows(60, 5)
    items[55]["chosen"] = 7
    path = json_lines(tmp_path / "bad.jsonl", items)
    with pytest.raises(DataError) as expected:
        load_pairs(str(path), DataConfig())
    data = RayPreferenceDataset(str(path), block_bytes=SMALL_BLOCKS)
    with data.macro_batches(renderer, batch_size=16, micro_token_budget=400, seed=0, num_workers=1) as found:
        workers = [child for child in psutil.Process().children(recursive=True) if child.name().startswith("ray::")]
        assert {worker.nice() for worker in workers} == {psutil.Process().nice()}, "busy cores leave a run its data"
        with pytest.raises(DataError) as stopped:
            next(iter(found))
    assert str(stopped.value) == str(expected.value)
    assert "bad.jsonl, line 56: chosen must be text" in str(stopped.value)
    kept = PreferenceDataset(str(path), on_bad_row="drop").pairs
    assert data.first_pairs(55).pairs == kept[:55]


def test_dropped_rows_are_listed_once(tmp_path: Path, renderer: ConversationRenderer):
    items = rows(40, 6)
    items[30]["rejected"] = ""
    path = json_lines(tmp_path / "bad.jsonl", items)
    data = RayPreferenceDataset(str(path), on_bad_row="drop", block_bytes=SMALL_BLOCKS)
    found = stream(InProcess(data, renderer), data)
    assert len(contents(epochs(found, 2))) == 2 * 39
    assert [str(row) for row in found.tally.skipped] == [f"{path}, line 31: rejected must not be empty"]


def test_a_held_out_prompt_stops_the_stream(tmp_path: Path, renderer: ConversationRenderer):
    items = rows(20, 7)
    path = json_lines(tmp_path / "pairs.jsonl", items)
    data = RayPreferenceDataset(str(path), held_out_prompts=[f" {items[12]['prompt'].upper()}\n"])
    with pytest.raises(DataError, match=r"line 13: its prompt is also in data\.val"):
        next(iter(stream(InProcess(data, renderer), data)))


def test_a_row_that_the_template_refuses_is_bad_in_a_stream_too(tmp_path: Path):
    items: list[dict[str, Any]] = rows(40, 6)
    items[30]["prompt"] = [{"role": "narrator", "content": "Once."}, {"role": "user", "content": "Why?"}]
    path = json_lines(tmp_path / "bad.jsonl", items)
    refusing = ConversationRenderer(decoder_tokenizer(chat_template=KNOWN_ROLES), 48)
    data = RayPreferenceDataset(str(path), block_bytes=SMALL_BLOCKS)
    with pytest.raises(DataError, match=r"bad\.jsonl, line 31: .*prints nothing.*data\.on_bad_row=drop"):
        contents(epochs(stream(InProcess(data, refusing), data), 1))
    data = RayPreferenceDataset(str(path), on_bad_row="drop", block_bytes=SMALL_BLOCKS)
    found = stream(InProcess(data, refusing), data)
    assert len(contents(epochs(found, 2))) == 2 * 39
    assert [row.row for row in found.tally.skipped] == [31]
    assert len(data.first_pairs(100).accepted_by(refusing)) == 39


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_a_share_of_bad_rows_stops_the_stream(tmp_path: Path, renderer: ConversationRenderer, share: float):
    items = rows(40, 6)
    for item in items[::8]:
        item["rejected"] = ""
    path = json_lines(tmp_path / "bad.jsonl", items)
    data = RayPreferenceDataset(str(path), on_bad_row="drop", max_bad_share=share, block_bytes=SMALL_BLOCKS)
    found = stream(InProcess(data, renderer), data)
    if share == 0.2:
        assert len(contents(epochs(found, 1))) == 35
        return
    with pytest.raises(DataError, match=r"5 of 40 rows are bad, more than the 10% .*data\.max_bad_share=0\.13"):
        contents(epochs(found, 1))


def test_the_share_of_bad_rows_is_judged_before_a_long_file_ends(
    tmp_path: Path, renderer: ConversationRenderer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray_order, "JUDGED_ROWS", 30)
    items = rows(80, 6)
    for item in items[:20]:
        item["rejected"] = ""
    path = json_lines(tmp_path / "bad.jsonl", items)
    data = RayPreferenceDataset(str(path), on_bad_row="drop", max_bad_share=0.5, block_bytes=SMALL_BLOCKS)
    with pytest.raises(DataError, match=r"20 of (3|4)\d rows are bad"):
        contents(epochs(stream(InProcess(data, renderer), data, shuffle=False), 1))


def test_kwise_rows_give_the_pairs_of_memory(tmp_path: Path):
    items = [
        {"prompt": f"q{i}", "responses": ["home", "far away", "a dog"], "scores": [i % 3, 1.0, 2.5]} for i in range(30)
    ]
    path = json_lines(tmp_path / "kwise.jsonl", items)
    found = RayPreferenceDataset(str(path), kwise_rule="adjacent", block_bytes=300)
    assert len(found.blocks) > 3
    assert found.first_pairs(1000).pairs == PreferenceDataset(str(path), kwise_rule="adjacent").pairs


def test_a_stream_without_a_pair_ends_in_a_sentence(tmp_path: Path, renderer: ConversationRenderer):
    path = json_lines(tmp_path / "same.jsonl", [SAME_ONCE_CUT] * 5)
    data = RayPreferenceDataset(str(path))
    found = stream(InProcess(data, renderer), data)
    with pytest.raises(DataError, match="no pair is left to train on"):
        next(iter(found))
    with pytest.raises(DataError, match="no pair is left to train on"):
        found.seek(3)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("nothing-*.jsonl", "no file matches this pattern"),
        ("pairs.csv", r"streaming reads \.parquet and \.jsonl files"),
        ("missing.jsonl", "no such file"),
    ],
)
def test_files_that_cannot_be_streamed_are_told(tmp_path: Path, source: str, problem: str):
    with pytest.raises(DataError, match=problem):
        RayPreferenceDataset(str(tmp_path / source))


def test_single_responses_and_fractions_need_memory(tmp_path: Path):
    path = json_lines(tmp_path / "single.jsonl", [{"prompt": "q", "response": "a", "score": 1.0}] * 3)
    with pytest.raises(DataError, match="one response a row"):
        RayPreferenceDataset(str(path))
    with pytest.raises(ConfigError, match=r"must be a whole number, got 0\.5"):
        RayPreferenceDataset({"path": str(path), "weight": 0.5})


def test_without_ray_the_extra_is_named(
    files: list[Path], renderer: ConversationRenderer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"ray is not installed; pip install 'rm-optimizer\[ray\]'"):
        dataset(files).macro_batches(renderer, batch_size=1, micro_token_budget=1, seed=0)


def test_core_does_not_import_ray():
    code = "import sys, rm_optimizer.core.streaming.dataset; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
