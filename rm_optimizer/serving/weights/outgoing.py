"""Sending end of each transport."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rm_optimizer.errors import RMOptimizerError
from rm_optimizer.schema.publish import Transport
from rm_optimizer.serving.update_protocol import TensorSpec, WeightStatus
from rm_optimizer.serving.weights.group_transfer import SENDER, GroupLink, byte_pieces, open_store
from rm_optimizer.serving.weights.live_weights import as_bytes
from rm_optimizer.serving.weights.weight_file import Layout, write_weight_file


@dataclass(frozen=True)
class Payload:
    """Tensors of one update.

    Args:
        tensors: tensors by name.
        specs: manifest of the tensors, in the order of the transfer.
    """

    tensors: Mapping[str, Tensor]
    specs: Sequence[TensorSpec]

    def body(self) -> Iterator[bytes]:
        """Pieces of one safetensors body with the tensors."""
        layout = Layout.of(self.specs)
        yield layout.head
        for name in sorted(layout.starts, key=layout.starts.__getitem__):
            yield bytes(as_bytes(self.tensors[name]).cpu().numpy().data)


Upload: TypeAlias = Callable[[Iterator[bytes], int], None]
"""Function that uploads a body of that many bytes for an update."""


@dataclass(frozen=True)
class Outgoing:
    """Open sending end of one update.

    Args:
        path: value of `Begin.path`.
        rendezvous: value of `Begin.rendezvous`.
    """

    path: str | None = None
    rendezvous: str | None = None

    def send(self, payload: Payload, upload: Upload) -> None:
        """Transfer the tensors, once the receiver is ready."""


@dataclass(frozen=True)
class ByBody(Outgoing):
    """Transport by one HTTP body."""

    def send(self, payload: Payload, upload: Upload) -> None:
        """Upload the body."""
        upload(payload.body(), Layout.of(payload.specs).size)


@dataclass(frozen=True)
class ByGroup(Outgoing):
    """Transport by a process group.

    Args:
        store: open store of the sender.
        transport: `gloo` or `nccl`.
        timeout_seconds: seconds for the transfer.
    """

    store: TCPStore = field(kw_only=True)
    transport: Transport = field(kw_only=True)
    timeout_seconds: float = field(kw_only=True)

    def send(self, payload: Payload, upload: Upload) -> None:
        """Form the group and send the tensors in the manifest's order.

        Raises:
            TransferFailed: if the receiver goes away.
        """
        link = GroupLink(self.store, SENDER, self.transport, self.timeout_seconds)
        link.send((spec.name, payload.tensors[spec.name]) for spec in payload.specs)


@contextmanager
def outgoing(
    transport: Transport, payload: Payload, status: WeightStatus, *, host: str, timeout_seconds: float
) -> Iterator[Outgoing]:
    """Sending end of a transport; leaving the block removes its files and store.

    Args:
        transport: channel of the transfer.
        payload: tensors to send.
        status: status of the server, which names its weights root.
        host: address of this machine for a group's store, which the server must reach.
        timeout_seconds: seconds for the transfer.

    Raises:
        RMOptimizerError: if the server does not accept this transport, or its weights root is not on this machine.
    """
    if transport not in status.transports:
        taken = ", ".join(status.transports)
        raise RMOptimizerError(f"the server does not accept transport {transport.value}; use one of {taken}")
    if transport is Transport.inline:
        yield ByBody()
    elif transport is Transport.path:
        path = _written_below(Path(status.root or ""), payload)
        try:
            yield Outgoing(path=str(path))
        finally:
            path.unlink(missing_ok=True)
    else:
        store = open_store(host, timeout_seconds)
        rendezvous = f"{host}:{store.port}"
        yield ByGroup(rendezvous=rendezvous, store=store, transport=transport, timeout_seconds=timeout_seconds)


def _written_below(root: Path, payload: Payload) -> Path:
    if not root.is_dir():
        raise RMOptimizerError(
            f"the server's weights root {root} is not on this machine; use transport inline, or gloo between hosts"
        )
    path = root / f"{uuid.uuid4().hex}.safetensors"
    try:
        write_weight_file(path, payload.specs, byte_pieces(payload.tensors))
    except OSError as error:
        raise RMOptimizerError(f"the weights cannot be written to {root}: {error.strerror}") from error
    return path
