"""TensorBoard and offline W&B hold the same numbers as `metrics.csv`."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.recorder import read_rows

Build = Callable[..., TrainConfig]


def test_tensorboard_holds_the_losses(small_config: Build, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_reward_model(small_config(tmp_path, "logger.tensorboard=true"))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    logged = {event.step: event.value for event in events.Scalars("train/loss")}
    rows = [row for row in read_rows(tmp_path / "metrics.csv") if row["train_loss"]]
    assert logged == {int(row["step"]): pytest.approx(float(row["train_loss"]), rel=1e-6) for row in rows}


def leveldb_records(data: bytes, header: int = 7, block: int = 32768) -> Iterator[bytes]:
    """Records of W&B's transaction log: a 7-byte header, then LevelDB's log format (CRC, length, type, payload)."""
    place, whole = header, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def test_offline_wandb_files_read_back_hold_the_evaluations(small_config: Build, tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    train_reward_model(small_config(tmp_path, "logger=wandb", "logger.tensorboard=false"))
    [path] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history = []
    for data in leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
    accuracies = [row["val/accuracy"] for row in history if "val/accuracy" in row]
    rows = [row for row in read_rows(tmp_path / "metrics.csv") if row["eval_acc"]]
    assert accuracies == pytest.approx([float(row["eval_acc"]) for row in rows])
