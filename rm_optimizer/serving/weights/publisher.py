"""Publisher of live weights from a trainer to a server."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import httpx
from pydantic import ValidationError
from torch import Tensor

from rm_optimizer.core.model.reward_model import BradleyTerryRM, require_bradley_terry
from rm_optimizer.errors import (
    ConfigError,
    PublishFailed,
    RewardServerRefused,
    RewardServerUnavailable,
    RMOptimizerError,
    TransferFailed,
    did_you_mean,
)
from rm_optimizer.schema.checks import require_key
from rm_optimizer.schema.publish import PublishConfig, RewardModelTrainingMode, Transport
from rm_optimizer.serving.client.connection import RETRIED_STATUSES, Deadline, PickledByArguments, bearer, is_loopback
from rm_optimizer.serving.update_protocol import Abort, Begin, Outcome, OutcomeStatus, WeightProbe, WeightStatus
from rm_optimizer.serving.weights.sending import (
    CommitUnanswered,
    Payload,
    UpdateMessages,
    manifest,
    outgoing,
    sent_tensors,
    weight_probe,
)

ATTEMPTS = 3
"""Most attempts of a whole update, after a lost update or a broken transfer."""
FORGOTTEN = frozenset({"UnknownUpdate", "UpdateConflict"})
"""Kinds of refusals after which the update may start again: the server lost it, or another update came first."""
GIVING_UP_SECONDS = 5.0
"""Seconds for the server to report the outcome of an update that failed here."""

_log = logging.getLogger("rm_optimizer")


@dataclass(eq=False, repr=False)
class RMPublisherAdapter(PickledByArguments):
    """Publisher of a model's weights to a running reward server.

    An update is announced with its manifest, transferred once the server is ready, checked and swapped in whole. Every
    wait has a limit and every message may be repeated. The server checks the new weights by rewards of this model
    before they answer any request.

    Args:
        url: address of the server, `http://host:port`.
        mode: set of tensors to send.
        transport: one HTTP body, a file below the server's weights root on one machine, gloo, or NCCL.
        api_key: bearer token; None sends none.
        timeout_seconds: seconds for one update.
        host: address of this machine that the server reaches, for gloo and NCCL.
    """

    _: KW_ONLY
    mode: RewardModelTrainingMode = RewardModelTrainingMode.full
    transport: Transport = Transport.inline
    api_key: str | None = None
    timeout_seconds: float = 120.0
    host: str = "127.0.0.1"

    def _prepare(self) -> None:
        self._session_options: dict[str, Any] = {
            "headers": bearer(self.api_key),
            "trust_env": not is_loopback(self.url),
        }
        self._opened: list[tuple[int, UpdateMessages]] = []
        self._published: tuple[str, int] | None = None

    @property
    def _messages(self) -> UpdateMessages:
        """Messages over this process's connections, never over a parent's from before a fork."""
        if not self._opened or self._opened[-1][0] != os.getpid() or self._opened[-1][1].session.is_closed:
            session = httpx.Client(**self._session_options)
            self._opened.append((os.getpid(), UpdateMessages(self.url, session)))
        return self._opened[-1][1]

    def publish(self, weights: BradleyTerryRM | Mapping[str, Tensor], version: str) -> Outcome:
        """Publish the weights, and return the outcome once they are served.

        Args:
            weights: model, or the tensors of the mode by name, which are sent without a probe.
            version: name of the weights on the server.

        Raises:
            PublishFailed: if the server refuses the weights or exceeds the time, so that the old ones stay; or if the
                connection is lost during the swap, which the text then states.
            ConfigError: if the mode does not suit the model, or the version's name the protocol.
        """
        if isinstance(weights, Mapping):
            model, tensors = None, dict(weights)
        else:
            require_bradley_terry(weights)
            model, tensors = weights, sent_tensors(weights, self.mode)
        payload = Payload(tensors, manifest(tensors))
        probe = None if model is None else weight_probe(model)
        batch_id, deadline = uuid.uuid4().hex, Deadline(self.url, self.timeout_seconds)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._remembered(self._attempt(payload, probe, version, batch_id, deadline))
            except (TransferFailed, RewardServerRefused, RewardServerUnavailable) as error:
                ended = self._given_up(batch_id, version, error)
                if isinstance(ended, Outcome):
                    return self._remembered(ended)
                has_died = isinstance(error, RewardServerRefused) and error.status in RETRIED_STATUSES
                is_lost = isinstance(error, TransferFailed) or getattr(error, "kind", "") in FORGOTTEN
                if attempt == ATTEMPTS or not (has_died or is_lost):
                    raise ended from error
                try:
                    time.sleep(deadline.pause(str(ended)))
                except RewardServerUnavailable as late:
                    raise ended from late
        raise AssertionError("the last attempt returns or raises")

    def status(self) -> WeightStatus:
        """Status of the server: the served weights and the update in progress.

        Raises:
            RMOptimizerError: if the server does not answer.
        """
        return self._status(Deadline(self.url, self.timeout_seconds))

    def wait_reachable(self, seconds: float) -> None:
        """Return once the server accepts connections, for which a starting one has some seconds.

        Raises:
            RewardServerUnavailable: if it does not.
        """
        deadline = Deadline(self.url, seconds)
        while True:
            try:
                self._messages.session.get(f"{self.url}/health", timeout=deadline.timeout())
                return
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                time.sleep(deadline.pause(str(error) or type(error).__name__))
            except httpx.HTTPError:
                return

    def close(self) -> None:
        """Close the session; a second call does nothing, and a later message opens another."""
        for pid, messages in self._opened:
            if pid == os.getpid():
                messages.session.close()

    def __enter__(self) -> RMPublisherAdapter:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _attempt(
        self, payload: Payload, probe: WeightProbe | None, version: str, batch_id: str, deadline: Deadline
    ) -> Outcome:
        status = self._status(deadline)
        self._notice_others(status, version)
        with outgoing(self.transport, payload, status, host=self.host, timeout_seconds=deadline.left) as transfer:
            try:
                begin = Begin(
                    batch_id=batch_id,
                    mode=self.mode,
                    version=version,
                    base_revision=status.revision,
                    tensors=list(payload.specs),
                    transport=self.transport,
                    path=transfer.path,
                    rendezvous=transfer.rendezvous,
                    timeout_seconds=deadline.left,
                    probe=probe,
                )
            except ValidationError as error:
                first = error.errors()[0]
                raise ConfigError(f"an update's {first['loc'][0]} is not valid: {first['msg']}") from error
            self._messages.post("begin", begin, deadline)

            def upload(body: Iterator[bytes], size: int) -> None:
                headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
                self._messages.request("PUT", f"upload/{batch_id}", deadline, content=body, headers=headers)

            transfer.send(upload)
            outcome = self._messages.commit(batch_id, deadline)
        if outcome.status is not OutcomeStatus.committed:
            raise self._do_not_serve(version, _reason(outcome))
        return outcome

    def _status(self, deadline: Deadline) -> WeightStatus:
        return WeightStatus.model_validate(self._messages.request("GET", "status", deadline).json())

    def _remembered(self, outcome: Outcome) -> Outcome:
        self._published = outcome.version, outcome.revision
        return outcome

    def _notice_others(self, status: WeightStatus, version: str) -> None:
        """Warn if the server serves other weights than this publisher left there."""
        if self._published is not None and self._published != (status.version, status.revision):
            _log.warning(
                "%s serves weights %s where %s were published: it was started again, or another trainer publishes to "
                "it; rewards were not those of this run meanwhile. %s are published now",
                *(self.url, status.version, self._published[0], version),
            )
            self._published = None

    def _given_up(self, batch_id: str, version: str, error: RMOptimizerError) -> Outcome | PublishFailed:
        """Abort the update on the server, and return its outcome with the best known reason."""
        abort = Abort(batch_id=batch_id, reason=str(error)[:500])
        try:
            answer = self._messages.post("abort", abort, Deadline(self.url, GIVING_UP_SECONDS))
        except RMOptimizerError as silence:
            is_told = isinstance(silence, RewardServerRefused) and silence.status < 500  # it has no such update
            if isinstance(error, CommitUnanswered) and not is_told:
                return PublishFailed(
                    f"all of weights {version} were sent, but {self.url} did not answer whether it serves them; "
                    f"ask GET {self.url}/rm/weights/status, or publish again: {error}"
                )
            return self._do_not_serve(version, str(error))
        outcome = Outcome.model_validate(answer.json())
        if outcome.status is OutcomeStatus.committed:  # its answer was lost
            return outcome
        is_refused = outcome.status is OutcomeStatus.refused
        return self._do_not_serve(version, _reason(outcome) if is_refused else str(error))

    def _do_not_serve(self, version: str, reason: str) -> PublishFailed:
        return PublishFailed(f"weights {version} do not serve at {self.url}: {reason}")


def _reason(outcome: Outcome) -> str:
    return outcome.error.message if outcome.error is not None else f"the update was {outcome.status.value}"


def create_rm_publisher(
    url: str,
    *,
    mode: str = "full",
    transport: str = "inline",
    api_key: str | None = None,
    timeout_seconds: float = 120.0,
    host: str = "127.0.0.1",
) -> RMPublisherAdapter:
    """Create a publisher from plain strings.

    The mode is `full`, `head_only` or `lora`, and the transport `inline`, `path`, `gloo` or `nccl`. For the other
    arguments see `RMPublisherAdapter`.

    Raises:
        ConfigError: if a word is unknown.
    """
    for name, word, words in (("mode", mode, RewardModelTrainingMode), ("transport", transport, Transport)):
        if word not in list(words):
            raise ConfigError(did_you_mean(name, word, list(words)))
    return RMPublisherAdapter(
        url,
        mode=RewardModelTrainingMode(mode),
        transport=Transport(transport),
        api_key=api_key,
        timeout_seconds=timeout_seconds,
        host=host,
    )


STARTING_SECONDS = 3.0
"""Seconds for a server to accept connections before a run fails at its start; the server may still be starting."""


def open_publisher(config: PublishConfig) -> RMPublisherAdapter:
    """Publisher of a run's options, once the server has answered.

    Raises:
        ConfigError: if the variable of the API key is not set.
        PublishFailed: if the server does not answer, or does not accept the transport.
    """
    try:
        publisher = RMPublisherAdapter(
            str(config.url),
            mode=config.mode,
            transport=config.transport,
            api_key=_api_key(config),
            timeout_seconds=config.timeout_seconds,
            host=config.host,
        )
    except httpx.InvalidURL as error:
        raise ConfigError(f"publish.url must be like http://127.0.0.1:8000, got {config.url!r}: {error}") from error
    try:
        taken = _first_status(publisher).transports
    except RMOptimizerError:
        publisher.close()
        raise
    if publisher.transport not in taken:
        publisher.close()
        raise ConfigError(f"publish.transport must be one of {', '.join(taken)}, which the server accepts")
    return publisher


def _api_key(config: PublishConfig) -> str | None:
    if config.api_key_env is None:
        return None
    api_key = os.environ.get(config.api_key_env)
    if not api_key:
        raise ConfigError(f"publish.api_key_env names {config.api_key_env}, which is not set; export it")
    require_key(f"the key in {config.api_key_env} (publish.api_key_env)", api_key)
    return api_key


def _first_status(publisher: RMPublisherAdapter) -> WeightStatus:
    """Status of the server, after a wait if it is starting."""
    try:
        publisher.wait_reachable(min(STARTING_SECONDS, publisher.timeout_seconds))
    except RewardServerUnavailable as error:
        raise PublishFailed(
            f"publish.url: no server accepts connections at {publisher.url}; start one with rm-opt serve, or train "
            f"with publish.url=null: {error}"
        ) from error
    try:
        return publisher.status()
    except RMOptimizerError as error:
        raise PublishFailed(f"publish.url: {error}") from error
