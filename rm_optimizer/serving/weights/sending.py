"""Sending end of an update: its tensors, and their way to the server by each transport."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from rm_optimizer.core.classifier.adapters import has_adapter
from rm_optimizer.core.classifier.quantization import dtype_name
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.adapter_files import merged_state
from rm_optimizer.core.storage.certificate import DEFAULT_PROBE, LOADED_HALF_TOLERANCE, LOADED_TOLERANCE
from rm_optimizer.errors import ConfigError, RMOptimizerError
from rm_optimizer.schema.publish import RewardModelTrainingMode, Transport
from rm_optimizer.serving.update_protocol import TensorSpec, WeightProbe, WeightStatus
from rm_optimizer.serving.weights.group_transfer import SENDER, GroupLink, open_store
from rm_optimizer.serving.weights.live_weights import as_bytes, names_of_mode, tensor_sha256
from rm_optimizer.serving.weights.weight_file import Layout, in_file_order, write_weight_file

PROBE_TOLERANCE = {"cpu": 1e-4}
OTHER_TOLERANCE = 1e-3
"""Tolerance of a sender on another kind of device than the CPU."""


def sent_tensors(model: BradleyTerryRM, mode: RewardModelTrainingMode) -> dict[str, Tensor]:
    """The tensors of a mode, by their names in the `transformers` classifier.

    `full` is the plain classifier, an adapter merged into it; `head_only` the final layer; `lora` the adapter with the
    head-side modules that train with it.

    Raises:
        ConfigError: if the mode is `lora` and the model has no adapter, or `head_only` and it has.
    """
    inner = model.model
    if mode is RewardModelTrainingMode.lora and not has_adapter(inner):
        raise ConfigError("mode lora sends an adapter, and the model has none; use full or head_only")
    if mode is RewardModelTrainingMode.head_only and has_adapter(inner):
        raise ConfigError("mode head_only leaves out the adapter that the model has; use lora or full")
    if mode is RewardModelTrainingMode.full and has_adapter(inner):
        return merged_state(inner)
    state = inner.state_dict()
    return {name: state[name] for name in sorted(names_of_mode(inner, mode))}


def manifest(tensors: Mapping[str, Tensor]) -> list[TensorSpec]:
    """Names, shapes, types and digests, in the order of a safetensors file."""
    return in_file_order(
        TensorSpec(name=name, shape=list(tensor.shape), dtype=dtype_name(tensor.dtype), sha256=tensor_sha256(tensor))
        for name, tensor in tensors.items()
    )


def weight_probe(model: BradleyTerryRM) -> WeightProbe:
    """Probe of short conversations with their rewards by the model in memory."""
    prompts, responses = (list(column) for column in zip(*DEFAULT_PROBE[:4], strict=True))
    return WeightProbe(
        input_ids=[list(encoding.ids) for encoding in model.renderer.encode_batch(prompts, responses)],
        rewards=model.score(prompts, responses).tolist(),
        tolerance=max(
            PROBE_TOLERANCE.get(model.device.type, OTHER_TOLERANCE),
            LOADED_TOLERANCE.get(dtype_name(model.model.dtype), LOADED_HALF_TOLERANCE),
        ),
    )


class Payload:
    """Tensors of one update, with their manifest.

    Args:
        tensors: tensors by name.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.specs = tensors, manifest(tensors)

    def pieces(self) -> Iterator[tuple[str, memoryview]]:
        """Names and bytes on the CPU, one tensor at a time."""
        for spec in self.specs:
            yield spec.name, as_bytes(self.tensors[spec.name]).cpu().numpy().data

    def body(self) -> Iterator[bytes]:
        """Pieces of one safetensors body with the tensors."""
        yield Layout.of(self.specs).head
        for _, data in self.pieces():
            yield bytes(data)


Upload: TypeAlias = Callable[[Iterator[bytes], int], None]
"""Function that uploads a body of that many bytes for an update."""
Send: TypeAlias = Callable[[Upload], None]
"""Function that transfers the tensors once the receiver is ready."""


@contextmanager
def outgoing(
    transport: Transport, payload: Payload, status: WeightStatus, *, host: str, timeout_seconds: float
) -> Iterator[tuple[dict[str, str], Send]]:
    """Sending end of a transport: its fields of `Begin`, and its transfer. Leaving the block removes files and store.

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
        yield {}, lambda upload: upload(payload.body(), Layout.of(payload.specs).size)
    elif transport is Transport.path:
        root = Path(status.root or "")
        if not root.is_dir():
            raise RMOptimizerError(
                f"the server's weights root {root} is not on this machine; use transport inline, or gloo between hosts"
            )
        path = root / f"{uuid.uuid4().hex}.safetensors"
        try:
            write_weight_file(path, payload.specs, payload.pieces())
        except OSError as error:
            raise RMOptimizerError(f"the weights cannot be written to {root}: {error.strerror}") from error
        try:
            yield {"path": str(path)}, lambda upload: None
        finally:
            path.unlink(missing_ok=True)
    else:
        store = open_store(host, timeout_seconds)

        def send(upload: Upload) -> None:
            link = GroupLink(store, SENDER, transport, timeout_seconds)
            link.send((spec.name, payload.tensors[spec.name]) for spec in payload.specs)

        yield {"rendezvous": f"{host}:{store.port}"}, send
