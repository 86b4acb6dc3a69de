"""Messages between a server and its worker process: a JSON header and raw numbers, no pickle."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

_SIZE = struct.Struct("<I")


@dataclass(frozen=True)
class Frame:
    """One message.

    Args:
        header: JSON values; non-finite numbers belong in the payload.
        payload: numbers, as the header's kind of message lays down.
    """

    header: dict[str, Any]
    payload: bytes = b""

    def encode(self) -> bytes:
        """The frame as bytes."""
        header = json.dumps(self.header, allow_nan=False).encode()
        return _SIZE.pack(len(header)) + header + self.payload

    @classmethod
    def decode(cls, data: bytes) -> Frame:
        """The frame that `encode` wrote."""
        (size,) = _SIZE.unpack_from(data)
        start = _SIZE.size + size
        return cls(json.loads(data[_SIZE.size : start]), data[start:])


def sequences_frame(
    header: dict[str, Any], sequences: Sequence[Sequence[int]], group_sizes: Sequence[int] | None = None
) -> Frame:
    """A frame that carries token sequences, and how many neighbors make each group that starts alike.

    Example:
        >>> frame = sequences_frame({}, [[1, 2], [1, 3], [4]], [2, 1])
        >>> [row.tolist() for row in frame_sequences(frame)], frame_groups(frame)
        ([[1, 2], [1, 3], [4]], [range(0, 2), range(2, 3)])
    """
    flat = np.fromiter((token for row in sequences for token in row), dtype=np.int32)
    return Frame(header | {"lengths": [len(row) for row in sequences], "groups": group_sizes}, flat.tobytes())


def frame_sequences(frame: Frame) -> list[NDArray[np.int32]]:
    """The token sequences of a frame."""
    stops = np.cumsum(frame.header["lengths"])
    return np.split(np.frombuffer(frame.payload, dtype=np.int32), stops[:-1])


def frame_groups(frame: Frame) -> list[range] | None:
    """Places of the sequences of each group; None where the groups are to be found."""
    sizes: list[int] | None = frame.header["groups"]
    return (
        None
        if sizes is None
        else [range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    )


def rewards_frame(header: dict[str, Any], rewards: Float[np.ndarray, " sequences"]) -> Frame:
    """A frame that carries rewards, finite or not."""
    return Frame(header, rewards.astype(np.float64).tobytes())


def frame_rewards(frame: Frame) -> tuple[float, ...]:
    """The rewards of a frame."""
    return tuple(np.frombuffer(frame.payload, dtype=np.float64).tolist())
