"""Files that offline W&B leaves, read back."""

from __future__ import annotations

import json
import struct
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
    from wandb.proto import wandb_internal_pb2

    [path] = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    records = []
    for data in leveldb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == kind:
            records.append(getattr(record, kind))
    return records


def wandb_history(run_dir: Path) -> list[dict[str, Any]]:
    histories = wandb_records(run_dir, "history")
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item}
        for history in histories
    ]
