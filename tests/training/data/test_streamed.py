"""A run whose pairs are streamed trains, resumes and refuses as one whose pairs are in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rm_optimizer.core.storage.model_files import TRAINED_PAIRS_FILE, TrainedPairs
from rm_optimizer.core.streaming import dataset as ray_dataset
from rm_optimizer.core.streaming.blocks import Block, BlockTokenizer, BlockTokens
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.schema import DataConfig, TrainConfig
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.callbacks import checkpoints
from rm_optimizer.training.data.run_data import stream_pairs
from tests.training.folder.test_resume import assert_same_outcome, stopped_after

Build = Callable[..., TrainConfig]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]


class InProcess:
    """A pool without processes, which knows whether it was closed."""

    opened: list[InProcess]

    def __init__(self, tokenizer: BlockTokenizer, **options: Any) -> None:
        self.tokenizer = tokenizer
        self.is_closed = False
        self.opened.append(self)

    def ask(self, blocks: Sequence[Block]) -> list[Block]:
        return list(blocks)

    def collect(self, asked: list[Block]) -> Iterator[BlockTokens]:
        return map(self.tokenizer.tokenize, asked)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> list[InProcess]:
    InProcess.opened = []
    monkeypatch.setattr(ray_dataset, "TokenizerPool", InProcess)
    return InProcess.opened


def write(path: Path, count: int, seed: int) -> Path:
    rng = np.random.default_rng(seed)

    def text(length: int) -> str:
        return " ".join(rng.choice(WORDS, length))

    rows = [{"prompt": f"{seed}-{i} {text(5)}", "chosen": text(9), "rejected": text(6)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    write(tmp_path / "train-1.jsonl", 60, 1)
    write(tmp_path / "train-2.jsonl", 40, 2)
    val = write(tmp_path / "val.jsonl", 30, 3)
    streamed = [f"data.train={tmp_path}/train-*.jsonl", f"data.val={val}", "data.streaming=ray"]
    return [*streamed, "training.max_steps=9", "training.checkpoint_every=1"]


def test_a_streamed_run_counts_its_pairs_and_closes_its_workers(
    small_config: Build, tmp_path: Path, options: list[str], pools: list[InProcess]
):
    result = train_reward_model(small_config(tmp_path / "run", *options))
    assert (result.steps, result.data.train_pairs, result.data.val_pairs) == (9, 100, 30)
    assert result.data.truncation["train"]["num_pairs"] == 100
    assert [pool.is_closed for pool in pools] == [True]
    trained = TrainedPairs.recorded(tmp_path / "run" / "best")
    assert trained is not None
    assert (len(trained.pairs), len(trained.prompts)) == (100, 100)


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.slow), 6, pytest.param(7, marks=pytest.mark.slow)])
def test_a_resumed_streamed_run_ends_bitwise_equal(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], step: int
):
    train_reward_model(small_config(tmp_path / "whole", *options))
    stopped_after(step, small_config(tmp_path / "cut", *options), monkeypatch)
    train_reward_model(small_config(tmp_path / "cut", *options, "resume=auto"))
    assert_same_outcome(tmp_path / "whole", tmp_path / "cut")
    records = [(tmp_path / run / TRAINED_PAIRS_FILE).read_bytes() for run in ("whole", "cut")]
    assert records[0] == records[1]


def test_the_pairs_read_so_far_are_on_disk_before_each_checkpoint(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
):
    counts: list[int] = []

    def counted(run_dir: Path, keep: int) -> None:
        counts.append(len(TrainedPairs.read(run_dir / TRAINED_PAIRS_FILE).pairs))

    monkeypatch.setattr(checkpoints, "prune", counted)
    train_reward_model(small_config(tmp_path / "run", *options))
    assert counts[0] >= 16
    assert counts[-1] == 100


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        (["data.val=null"], r"data\.val must be set"),
        (["training.max_steps=null"], r"training\.max_steps must be set"),
        (["data.train=null"], r"data\.train must be set"),
        (["data.max_pairs=5"], r"data\.max_pairs must be null"),
    ],
)
def test_what_streaming_needs_is_named(
    small_config: Build, tmp_path: Path, options: list[str], changes: list[str], option: str
):
    with pytest.raises(ConfigError, match=f"with data.streaming=ray, {option}"):
        train_reward_model(small_config(tmp_path / "run", *options, *changes))


def test_a_prompt_of_validation_is_refused_where_it_stands(small_config: Build, tmp_path: Path, options: list[str]):
    with (tmp_path / "train-2.jsonl").open("a") as file:
        file.write((tmp_path / "val.jsonl").read_text().splitlines()[4] + "\n")
    with pytest.raises(DataError, match=r"train-2\.jsonl, line 41: its prompt is also in data\.val"):
        train_reward_model(small_config(tmp_path / "run", *options))
    train_reward_model(small_config(tmp_path / "run", *options, "data.allow_prompt_overlap=true"))


def test_a_stream_and_its_validation_are_read_by_one_layout(tmp_path: Path):
    rows = [{"q": f"{i}?", "yes": "a", "no": "b", "turn": i % 2} for i in range(8)]
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(row | {"q": f"{name} {row['q']}"}) + "\n" for row in rows)
        )
    layout = {"columns": {"prompt": "q", "chosen": "yes", "rejected": "no"}, "where": {"turn": 1}}
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "val")}
    data = stream_pairs(DataConfig(**files, layout=layout), 9)
    assert [pair.prompt for pair in data.train] == [f"train {i}?" for i in (1, 3, 5, 7)]
    other = stream_pairs(DataConfig(**files, layout={**layout, "where": {"turn": 0}}), 9)
    assert other.stream.fingerprint != data.stream.fingerprint


def test_rows_left_out_are_listed(small_config: Build, tmp_path: Path, options: list[str]):
    with (tmp_path / "train-2.jsonl").open("a") as file:
        file.write("{}\n")
    result = train_reward_model(small_config(tmp_path / "run", *options, "data.on_bad_row=drop"))
    assert result.data.skipped_rows == 1
    assert "train-2.jsonl, line 41" in (tmp_path / "run" / "skipped_rows.txt").read_text()
