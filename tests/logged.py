"""Files that offline W&B leaves, read back."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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


def wandb_records(run_dir: Path, kind: str) -> list[Any]:
    """Records of a finished run; W&B's own process may still be writing the last ones."""
    [path] = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    until = time.monotonic() + 30
    while not (records := _records(path)) or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < until, f"{path} has no end"
        time.sleep(0.05)
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def _records(path: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    return [wandb_internal_pb2.Record.FromString(data) for data in leveldb_records(path.read_bytes())]


def wandb_history(run_dir: Path) -> list[dict[str, Any]]:
    histories = wandb_records(run_dir, "history")
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item}
        for history in histories
    ]
