"""Transfer of tensors from a trainer to a server over a process group of the two: gloo for CPUs, NCCL for GPUs.

The group is independent of any group that the trainer has already. The sender opens a store and waits in it. The
receiver connects to it before it answers that it is ready, so neither end waits for a fixed time.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistError, ProcessGroupGloo, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from rm_optimizer.errors import TransferFailed
from rm_optimizer.schema.publish import Transport
from rm_optimizer.serving.options import is_loopback
from rm_optimizer.serving.update_protocol import TensorSpec
from rm_optimizer.serving.weights.live_weights import as_bytes
from rm_optimizer.serving.weights.weight_file import num_bytes

SENDER, RECEIVER = 0, 1
PIECE_BYTES = 64 * 2**20
"""Bytes sent at once, and held at once by the receiver."""
PIECE_SECONDS = 60.0
"""Time limit of one piece in seconds, since gloo's wait cannot be interrupted."""
CONNECT_SECONDS = 10.0
_POLL_SECONDS = 0.0005
_KEY_SECONDS = 0.02
_SENDER_KEY = "sender"


def open_store(host: str, timeout_seconds: float) -> TCPStore:
    """Store of the sender, which listens at a free port of `host`.

    Raises:
        TransferFailed: if it cannot listen there.
    """
    try:
        return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds))
    except (DistError, OSError) as error:
        raise TransferFailed(f"the store of the transfer cannot listen on {host}: {error}") from error


def connect_store(rendezvous: str, timeout_seconds: float) -> TCPStore:
    """Connection of the receiver to a sender's store at `host:port`.

    Raises:
        TransferFailed: if nothing listens there. The text is the same for every reason, so that it reveals no host.
    """
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdigit():
        raise TransferFailed(f"rendezvous must be host:port, got {rendezvous!r}")
    try:
        seconds = min(CONNECT_SECONDS, timeout_seconds)
        socket.create_connection((host, int(port)), timeout=seconds).close()  # TCPStore retries for long
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    except (DistError, OSError, OverflowError, ValueError):
        raise TransferFailed(f"no sender can be reached at {rendezvous}") from None
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


def wait_for_sender(store: TCPStore, timeout_seconds: float, is_given_up: Callable[[], bool]) -> None:
    """Return once the sender has begun to form the group, which cannot be interrupted.

    Args:
        store: store from `connect_store`.
        timeout_seconds: longest wait, in seconds.
        is_given_up: function that returns True once the update was abandoned; called repeatedly.

    Raises:
        TransferFailed: if it does not come, or the update was abandoned.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        while not store.check([_SENDER_KEY]):
            if is_given_up() or time.monotonic() > deadline:
                raise TransferFailed("the sender did not begin to send")
            time.sleep(_KEY_SECONDS)
    except DistError:
        raise TransferFailed("the sender went away") from None


class GroupLink:
    """One end of a process group of two.

    Args:
        store: store from `open_store` or `connect_store`.
        rank: `SENDER` or `RECEIVER`.
        transport: `gloo` or `nccl`.
        timeout_seconds: time limit of the whole transfer, in seconds.

    Raises:
        TransferFailed: if the other end does not come.
    """

    def __init__(self, store: TCPStore, rank: int, transport: Transport, timeout_seconds: float) -> None:
        self.rank = rank
        self.deadline = time.monotonic() + timeout_seconds
        self.device = torch.device("cpu" if transport is Transport.gloo else "cuda")
        timeout = timedelta(seconds=timeout_seconds)
        try:
            if rank == SENDER:
                store.set(_SENDER_KEY, "1")
            kind: Any = ProcessGroupGloo if transport is Transport.gloo else distributed_c10d.ProcessGroupNCCL
            options = kind._Options() if transport is Transport.gloo else kind.Options()  # without type stubs
            options._timeout = timeout
            if transport is Transport.gloo:
                is_here = is_loopback(store.host)
                options._devices = [
                    kind.create_device(hostname="127.0.0.1") if is_here else kind.create_default_device()
                ]
            else:  # later than the poll's, after which the group is aborted
                options._timeout += timedelta(seconds=60)
            self.group: Any = kind(store, rank, 2, options)
        except (DistError, RuntimeError) as error:
            raise TransferFailed(f"the {transport.value} group did not form: {_first_line(error)}") from error

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send tensors' bytes, in order.

        Raises:
            TransferFailed: if the receiver goes away or the time is up.
        """
        for name, tensor in tensors:
            for piece in as_bytes(tensor).to(self.device).split(PIECE_BYTES):  # type: ignore[no-untyped-call]
                self._finish(self.group.send([piece], RECEIVER, 0), name)

    def receive(self, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, memoryview]]:
        """Names and bytes of the tensors of a manifest, in its order.

        Raises:
            TransferFailed: if the sender goes away or the time is up.
        """
        for spec in specs:
            whole = torch.empty(num_bytes(spec), dtype=torch.uint8)
            for piece in whole.split(PIECE_BYTES):  # type: ignore[no-untyped-call]
                landing = piece if self.device.type == "cpu" else torch.empty_like(piece, device=self.device)
                self._finish(self.group.recv([landing], SENDER, 0), spec.name)
                if landing is not piece:
                    piece.copy_(landing)
            yield spec.name, whole.numpy().data

    def _finish(self, work: Any, name: str) -> None:
        """Wait for one piece. It is polled, since NCCL's own timeout would end the process."""
        try:
            if self.device.type == "cpu":
                left = min(PIECE_SECONDS, max(0.001, self.deadline - time.monotonic()))
                work.wait(timedelta(seconds=left))
                return
            while not work.is_completed():
                if time.monotonic() > self.deadline:
                    self.group.abort()
                    raise TransferFailed(f"{name} was not transferred in time")
                time.sleep(_POLL_SECONDS)
        except (DistError, RuntimeError) as error:
            raise TransferFailed(f"{name} was not transferred: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
