"""Data that teach or measure next to nothing are said, and nearly unique sources do not flood an evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.evaluation.pair_rewards import OTHER, PairRewards, metrics_of
from rm_optimizer.interfaces.inputs import PairOptions
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import train_reward_model
from tests.builders import prepared_run

Build = Callable[..., TrainConfig]


def write(path: Path, count: int, **columns: Any) -> Path:
    rows = [{"prompt": f"{path.stem} {i}", "chosen": f"yes {i}", "rejected": "no"} | columns for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("train", "val", "columns", "said"),
    [
        (1, 12, {}, "training has 1 pair; a reward model cannot be learned from so few"),
        (12, 1, {}, "validation has 1 pair, which measures next to nothing; raise data.val_fraction or set data.val"),
        (12, 12, {}, "batching.batch_size=16 is more than the 12 training pairs; each step takes all of them"),
        (20, 12, {"label": 0.5}, "every validation pair is labeled 0.5, a tie"),
    ],
)
def test_pairs_that_say_little_are_said(
    small_config: Build,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    train: int,
    val: int,
    columns: dict[str, Any],
    said: str,
):
    files = write(tmp_path / "train.jsonl", train, **columns), write(tmp_path / "val.jsonl", val, **columns)
    prepared_run(small_config(tmp_path, f"data.train={files[0]}", f"data.val={files[1]}"))
    assert said in caplog.text


def test_enough_pairs_bring_no_warning(small_config: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    prepared_run(small_config(tmp_path, "training.evals_per_epoch=null"))
    assert "next to nothing" not in caplog.text
    assert "so few" not in caplog.text


def test_a_recognized_layout_is_shown_by_its_first_pair_in_training_and_by_commands(
    small_config: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    rows = [
        {"question": f"{i} {'long ' * 20}?", "response_j": f"yes {i}", "response_k": "no", "qid": i} for i in range(12)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    PairOptions().load(str(path))
    PreferenceDataset(str(path))  # a Python call reads without a word more than its notes
    shown = f"  user: {rows[0]['question'][:50]}…\n  chosen (better): yes 0\n  rejected (worse): no"
    told = f"layout stack-exchange-paired: the first pair as it was understood\n{shown}"
    assert caplog.messages.count(told) == 1
    prepared_run(small_config(tmp_path, f"data.train={path}"))
    assert sum("the first pair as it was understood" in message for message in caplog.messages) == 2


def test_the_smallest_groups_are_taken_together_but_for_the_monitored_one(tmp_path: Path):
    path = tmp_path / "pairs.jsonl"
    names = [name for k, name in enumerate("abcdef") for _ in range(6 - k)]
    rows = [{"prompt": f"{i}", "chosen": "y", "rejected": "n", "source": name} for i, name in enumerate(names)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = PreferenceDataset(str(path))
    rewards = PairRewards(np.arange(21.0), np.zeros(21), np.arange(21))
    options: dict[str, Any] = {"beta": 1.0, "num_bootstrap": 0, "seed": 0}
    found = metrics_of(rewards, data, **options, most_groups=2, kept_group="f").groups["source"]
    assert {name: group.num_pairs for name, group in found.items()} == {"a": 6, "b": 5, "f": 1, OTHER: 9}
    assert len(metrics_of(rewards, data, **options).groups["source"]) == 6


def test_a_nearly_unique_source_is_cut_and_said(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("rm_optimizer.training.callbacks.evaluation.MOST_GROUPS", 3)
    rows = [{"prompt": f"{i}", "chosen": f"y {i}", "rejected": "n", "source": f"s{i}"} for i in range(30)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [f"data.train={tmp_path}/pairs.jsonl", "data.val_fraction=0.4", "training.max_steps=1"]
    result = train_reward_model(small_config(tmp_path / "run", *options))
    assert len(result.metrics.groups["source"]) == 4
    assert caplog.text.count("validation has more than 3 values of 'source'") == 1
