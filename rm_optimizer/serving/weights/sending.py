"""Sending end of an update: tensors, messages and transports."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx
from pydantic import ValidationError
from torch import Tensor

from rm_optimizer.core.classifier.adapters import has_adapter
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.adapter_files import merged_state
from rm_optimizer.core.storage.certificate import DEFAULT_PROBE
from rm_optimizer.errors import (
    ConfigError,
    RewardServerRefused,
    RewardServerUnavailable,
    RMOptimizerError,
    TransferFailed,
)
from rm_optimizer.schema.publish import RewardModelTrainingMode, Transport
from rm_optimizer.serving.client.connection import RETRIED_STATUSES, Deadline, broken, retry_after
from rm_optimizer.serving.protocol import WireModel
from rm_optimizer.serving.update_protocol import Commit, Outcome, TensorSpec, WeightProbe, WeightStatus
from rm_optimizer.serving.weights.group_transfer import SENDER, GroupLink, byte_pieces, open_store
from rm_optimizer.serving.weights.live_weights import as_bytes, dtype_name, names_of_mode, tensor_sha256
from rm_optimizer.serving.weights.weight_file import Layout, write_weight_file

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
    """Names, shapes, types and digests, in the order of the names."""
    return [
        TensorSpec(name=name, shape=list(tensor.shape), dtype=dtype_name(tensor.dtype), sha256=tensor_sha256(tensor))
        for name, tensor in sorted(tensors.items())
    ]


def weight_probe(model: BradleyTerryRM) -> WeightProbe:
    """Probe of short conversations with their rewards by the model in memory."""
    prompts, responses = (list(column) for column in zip(*DEFAULT_PROBE[:4], strict=True))
    return WeightProbe(
        input_ids=[list(encoding.ids) for encoding in model.renderer.encode_batch(prompts, responses)],
        rewards=model.score(prompts, responses).tolist(),
        tolerance=PROBE_TOLERANCE.get(model.device.type, OTHER_TOLERANCE),
    )


CONFLICT = 409
"""Status of an update that another one blocks; with `Retry-After` if waiting helps."""


class CommitUnanswered(RewardServerUnavailable):
    """The outcome of a commit is unknown: the server has not answered."""


@dataclass(frozen=True, eq=False)
class UpdateMessages:
    """Client of the routes under `/rm/weights`; every message carries the update's id, so it may be repeated.

    Args:
        url: address of the server.
        session: HTTP session, which its owner closes.
    """

    url: str
    session: httpx.Client

    def commit(self, batch_id: str, deadline: Deadline) -> Outcome:
        """Commit the update and return its outcome.

        Raises:
            CommitUnanswered: if the server does not answer.
            RewardServerRefused: if the server has no such update, or its engine died.
        """
        try:
            return Outcome.model_validate(self.post("commit", Commit(batch_id=batch_id), deadline).json())
        except RewardServerUnavailable as error:
            raise CommitUnanswered(str(error)) from error
        except RewardServerRefused as error:
            if error.status < 500 or error.status in RETRIED_STATUSES:
                raise
            raise CommitUnanswered(str(error)) from error

    def post(self, route: str, message: WireModel, deadline: Deadline) -> httpx.Response:
        """Answer to a JSON message; see `request`."""
        return self.request("POST", route, deadline, json=message.model_dump(mode="json"))

    def request(self, method: str, route: str, deadline: Deadline, **content: Any) -> httpx.Response:
        """Successful answer to a request.

        Raises:
            RewardServerRefused: if the server refuses.
            RewardServerUnavailable: if it does not answer in time.
            TransferFailed: if a body breaks off: it is read once, and the update is tried again as a whole.
        """
        url = f"{self.url}/rm/weights/{route}"
        while True:
            got: httpx.Response | httpx.HTTPError
            try:
                got = self.session.request(method, url, timeout=deadline.timeout(), **content)
            except httpx.HTTPError as error:
                if "content" in content:
                    broken(error, self.url)
                    raise TransferFailed(f"the upload broke off: {error}") from error
                got = error
            judged = deadline.judge(got, self.url, lambda answer: _may_be_repeated(answer, deadline))
            if isinstance(judged, httpx.Response):
                return judged
            time.sleep(judged)


def _may_be_repeated(answer: httpx.Response, deadline: Deadline) -> bool:
    """True if the same message may succeed later: the update has not ended, and the blocking one will soon."""
    if answer.status_code == CONFLICT:
        wait = retry_after(answer)
        return wait is not None and deadline.left >= 2 * wait
    return answer.status_code in RETRIED_STATUSES and not _is_outcome(answer)


def _is_outcome(response: httpx.Response) -> bool:
    """True if an answer is the outcome of an update, which a repeated message gets again."""
    try:
        Outcome.model_validate_json(response.content)
    except ValidationError:
        return False
    return True


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
        send: function that transfers the tensors, once the receiver is ready.
        path: value of `Begin.path`.
        rendezvous: value of `Begin.rendezvous`.
    """

    send: Callable[[Upload], None]
    path: str | None = None
    rendezvous: str | None = None


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
        yield Outgoing(lambda upload: upload(payload.body(), Layout.of(payload.specs).size))
    elif transport is Transport.path:
        path = _written_below(Path(status.root or ""), payload)
        try:
            yield Outgoing(lambda upload: None, path=str(path))
        finally:
            path.unlink(missing_ok=True)
    else:
        store = open_store(host, timeout_seconds)

        def send(upload: Upload) -> None:
            link = GroupLink(store, SENDER, transport, timeout_seconds)
            link.send((spec.name, payload.tensors[spec.name]) for spec in payload.specs)

        yield Outgoing(send, rendezvous=f"{host}:{store.port}")


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
