"""The sending end of each transport."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rm_optimizer.errors import RMOptimizerError
from rm_optimizer.serving.protocol import TensorSpec, Transport
from rm_optimizer.serving.weights.group_transfer import SENDER, GroupLink, byte_pieces, open_store
from rm_optimizer.serving.weights.receiver import WeightStatus
from rm_optimizer.serving.weights.weight_file import Layout, write_weight_file


@dataclass(frozen=True)
class Payload:
    """What is sent.

    Args:
        tensors: by name.
        specs: their manifest, in the order in which they go.
    """

    tensors: Mapping[str, Tensor]
    specs: Sequence[TensorSpec]

    def body(self) -> Iterator[bytes]:
        """The tensors as one safetensors body, piece by piece."""
        layout = Layout.of(self.specs)
        yield layout.head
        for name in sorted(layout.starts, key=layout.starts.__getitem__):
            for _, data in byte_pieces({name: self.tensors[name]}):
                yield bytes(data)


class Upload(Protocol):
    """Puts a body to the server, for an update of its id."""

    def __call__(self, body: Iterator[bytes], size: int) -> None:
        """Put it."""
        ...


@dataclass(frozen=True)
class Outgoing:
    """The sending end of one update, standing.

    Args:
        path: for `Begin.path`.
        rendezvous: for `Begin.rendezvous`.
    """

    path: str | None = None
    rendezvous: str | None = None

    def send(self, payload: Payload, upload: Upload) -> None:
        """Transfer, once the receiver is ready."""


@dataclass(frozen=True)
class ByBody(Outgoing):
    """One HTTP body."""

    def send(self, payload: Payload, upload: Upload) -> None:
        """Put the body."""
        upload(payload.body(), Layout.of(payload.specs).size)


@dataclass(frozen=True)
class ByGroup(Outgoing):
    """A process group.

    Args:
        store: open, where the receiver comes.
        transport: `gloo` or `nccl`.
        timeout_seconds: of the transfer.
    """

    store: TCPStore = field(kw_only=True)
    transport: Transport = field(kw_only=True)
    timeout_seconds: float = field(kw_only=True)

    def send(self, payload: Payload, upload: Upload) -> None:
        """Form the group and send in the manifest's order.

        Raises:
            TransferFailed: if the receiver goes away.
        """
        link = GroupLink(self.store, SENDER, self.transport, self.timeout_seconds)
        link.send((spec.name, payload.tensors[spec.name]) for spec in payload.specs)


def outgoing(
    transport: Transport, payload: Payload, status: WeightStatus, *, host: str, timeout_seconds: float
) -> AbstractContextManager[Outgoing]:
    """The sending end; leaving the block removes what it made.

    Args:
        transport: how to send.
        payload: what to send.
        status: the server's, which names its weights root.
        host: where a group's store listens; the server must reach it.
        timeout_seconds: of the transfer.

    Raises:
        RMOptimizerError: if the server does not take this transport, or its weights root is not on this machine.
    """
    if transport not in status.transports:
        taken = ", ".join(status.transports)
        raise RMOptimizerError(f"the server does not take transport {transport.value}; use one of {taken}")
    if transport is Transport.path:
        return _file_below(Path(status.root or ""), payload)
    return _standing(transport, host, timeout_seconds)


@contextmanager
def _standing(transport: Transport, host: str, timeout_seconds: float) -> Iterator[Outgoing]:
    if transport is Transport.inline:
        yield ByBody()
        return
    store = open_store(host, timeout_seconds)
    rendezvous = f"{host}:{store.port}"
    yield ByGroup(rendezvous=rendezvous, store=store, transport=transport, timeout_seconds=timeout_seconds)


@contextmanager
def _file_below(root: Path, payload: Payload) -> Iterator[Outgoing]:
    if not root.is_dir():
        raise RMOptimizerError(
            f"the server's weights root {root} is not on this machine; use transport inline, or gloo between hosts"
        )
    path = root / f"{uuid.uuid4().hex}.safetensors"
    try:
        write_weight_file(path, payload.specs, byte_pieces(payload.tensors))
    except OSError as error:
        raise RMOptimizerError(f"the weights cannot be written to {root}: {error.strerror}") from error
    try:
        yield Outgoing(path=str(path))
    finally:
        path.unlink(missing_ok=True)
