"""Publisher of live weights from a trainer to a server."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
    require_known,
)
from rm_optimizer.schema.checks import require_key
from rm_optimizer.schema.publish import PublishConfig, RewardModelTrainingMode, Transport
from rm_optimizer.serving.client.connection import (
    RETRIED_ERRORS,
    RETRIED_STATUSES,
    Deadline,
    PickledByArguments,
    bearer,
    retry_after,
)
from rm_optimizer.serving.engine import new_revision
from rm_optimizer.serving.options import is_loopback
from rm_optimizer.serving.protocol import WireModel
from rm_optimizer.serving.update_protocol import Abort, Begin, Commit, Outcome, OutcomeStatus, WeightProbe, WeightStatus
from rm_optimizer.serving.weights.sending import Payload, outgoing, sent_tensors, weight_probe

ATTEMPTS = 3
"""Most attempts of a whole update, after a lost update or a broken transfer."""
CONFLICT = 409
"""Status of an update that another one blocks; with `Retry-After` if waiting helps."""
FORGOTTEN = frozenset({"UnknownUpdate", "UpdateConflict"})
"""Kinds of refusals after which the update may start again: the server lost it, or another update came first."""
OTHER_FAILED = "another server did not prepare them"
"""Reason of a server that refused nothing, of several."""
GIVING_UP_SECONDS = 5.0
"""Seconds for the server to report the outcome of an update that failed here."""
_log = logging.getLogger("rm_optimizer")


class _Decision:
    """Meeting of the publishers to several servers, which swap once all have prepared a version.

    Args:
        number: number of the servers.
    """

    def __init__(self, number: int) -> None:
        self._is_made = threading.Event()
        self._barrier = threading.Barrier(number, action=self._is_made.set)

    @property
    def is_known(self) -> bool:
        """True once all servers may swap."""
        return self._is_made.is_set()

    def is_made(self, seconds: float) -> bool:
        """True once all have prepared the version; False if one fails or the time is over."""
        with suppress(threading.BrokenBarrierError):
            self._barrier.wait(seconds)
        return self.is_known

    def leave(self) -> None:
        """Release those that wait; without an effect once the decision is made."""
        self._barrier.abort()


@dataclass(frozen=True)
class _Version:
    """Weights to publish, with their name and number."""

    payload: Payload
    probe: WeightProbe | None
    name: str
    revision: int
    decision: _Decision | None = None


class CommitUnanswered(RewardServerUnavailable):
    """The outcome of a commit is unknown: the server has not answered."""


def _may_be_repeated(answer: httpx.Response, deadline: Deadline) -> bool:
    """True if the same message may succeed later: the update has not ended, and the blocking one will soon."""
    if answer.status_code == CONFLICT:
        wait = retry_after(answer)
        return wait is not None and deadline.left >= 2 * wait
    if answer.status_code not in RETRIED_STATUSES:
        return False
    try:
        Outcome.model_validate_json(answer.content)  # a repeated message gets the same outcome again
    except ValidationError:
        return True
    return False


@dataclass(eq=False, repr=False)
class RMPublisherAdapter(PickledByArguments):
    """Publisher of a model's weights to a running reward server, or to several at once.

    An update is announced with its manifest, transferred once the server is ready, checked and swapped in whole. Every
    wait has a limit and every message may be repeated. The server checks the new weights by rewards of this model
    before they answer any request. Several servers swap once all of them have checked the weights, and give them the
    same revision.

    Args:
        url: address of the server, `http://host:port`; several are separated by commas.
        mode: set of tensors to send: `full`, `head_only` or `lora`.
        transport: `inline`, one HTTP body; `path`, a file below the server's weights root on one machine; `gloo` or
            `nccl`, a process group.
        api_key: bearer token; None sends none.
        timeout_seconds: seconds for one update.
        host: address of this machine that the server reaches, for gloo and NCCL.

    Raises:
        ConfigError: if a word is unknown, or no header can carry the key.
    """

    _: KW_ONLY
    mode: RewardModelTrainingMode | str = RewardModelTrainingMode.full
    transport: Transport | str = Transport.inline
    api_key: str | None = None
    timeout_seconds: float = 120.0
    host: str = "127.0.0.1"

    def _prepare(self) -> None:
        for name, word, words in (
            ("mode", self.mode, RewardModelTrainingMode),
            ("transport", self.transport, Transport),
        ):
            require_known(name, word, list(words))
        self._session_options: dict[str, Any] = {
            "headers": bearer(self.api_key),
            "trust_env": not is_loopback(httpx.URL(self.urls[0]).host),
        }
        self._sessions: dict[int, httpx.Client] = {}
        several = self.urls if len(self.urls) > 1 else []
        self.members = [RMPublisherAdapter(**{**self.__getstate__(), "url": url}) for url in several]
        self._published: tuple[str, int] | None = None

    @property
    def _session(self) -> httpx.Client:
        """Connections of this process, never a parent's from before a fork."""
        here = os.getpid()
        if here not in self._sessions or self._sessions[here].is_closed:
            self._sessions[here] = httpx.Client(**self._session_options)
        return self._sessions[here]

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
            payload, probe = Payload(weights), None
        else:
            require_bradley_terry(weights)
            payload = Payload(sent_tensors(weights, RewardModelTrainingMode(self.mode)))
            probe = weight_probe(weights)
        if not self.members:
            revision = new_revision(0 if self._published is None else self._published[1])
            return self._send(_Version(payload, probe, version, revision))
        with ThreadPoolExecutor(len(self.members)) as pool:
            revision = new_revision(max(pool.map(lambda member: member._known_revision(version), self.members)))
            new = _Version(payload, probe, version, revision, _Decision(len(self.members)))
            tasks = [pool.submit(member._send, new) for member in self.members]
        failures = [error for task in tasks if (error := task.exception()) is not None]
        if failures:
            raise next((error for error in failures if not str(error).endswith(OTHER_FAILED)), failures[0])
        return tasks[0].result()

    def _known_revision(self, version: str) -> int:
        """Serial number of the weights that serve, before a version is published.

        Raises:
            PublishFailed: if the server does not answer.
        """
        try:
            return self.status().revision
        except (RewardServerUnavailable, RewardServerRefused) as error:
            raise self._do_not_serve(version, str(error)) from error

    def _send(self, new: _Version) -> Outcome:
        """Publish a version to one server, with further attempts after failures that may pass."""
        try:
            return self._sent(new)
        finally:
            if new.decision is not None:
                new.decision.leave()

    def _sent(self, new: _Version) -> Outcome:
        batch_id, deadline = uuid.uuid4().hex, Deadline(self.url, self.timeout_seconds)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._attempt(new, batch_id, deadline)
            except (TransferFailed, RewardServerRefused, RewardServerUnavailable) as error:
                ended = self._given_up(batch_id, new, error)
                if isinstance(ended, Outcome):
                    return ended
                has_died = isinstance(error, RewardServerRefused) and error.status in RETRIED_STATUSES
                is_lost = isinstance(error, TransferFailed) or getattr(error, "kind", "") in FORGOTTEN
                if attempt == ATTEMPTS or not (has_died or is_lost):
                    raise ended from error
                try:
                    time.sleep(deadline.pause(str(ended)))
                except RewardServerUnavailable as late:
                    raise ended from late
        raise AssertionError("the last attempt returns or raises")

    def status(self, timeout_seconds: float | None = None) -> WeightStatus:
        """Status of the server: the served weights and the update in progress.

        Args:
            timeout_seconds: seconds to wait for the server; None takes an update's.

        Raises:
            RMOptimizerError: if the server does not answer.
        """
        deadline = Deadline(self.url, timeout_seconds or self.timeout_seconds)
        return WeightStatus.model_validate(self._request("GET", "status", deadline).json())

    def close(self) -> None:
        """Close the session; a second call does nothing, and a later message opens another."""
        for member in self.members:
            member.close()
        if os.getpid() in self._sessions:
            self._session.close()

    def __enter__(self) -> RMPublisherAdapter:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _attempt(self, new: _Version, batch_id: str, deadline: Deadline) -> Outcome:
        status = self.status(deadline.left)
        if (status.version, status.revision) == (new.name, new.revision):  # an earlier attempt, whose server ended then
            self._published = new.name, new.revision
            return Outcome(batch_id=batch_id, status=OutcomeStatus.committed, version=new.name, revision=new.revision)
        if self._published is not None and self._published != (status.version, status.revision):
            _log.warning(
                "%s serves weights %s where %s were published: it was started again, or another trainer publishes to "
                "it; rewards meanwhile were not this run's. %s are published now",
                *(self.url, status.version, self._published[0], new.name),
            )
            self._published = None
        transport = Transport(self.transport)
        with outgoing(transport, new.payload, status, host=self.host, timeout_seconds=deadline.left) as (address, send):
            try:
                begin = Begin(
                    batch_id=batch_id,
                    mode=RewardModelTrainingMode(self.mode),
                    version=new.name,
                    base_revision=status.revision,
                    revision=new.revision,
                    tensors=new.payload.specs,
                    transport=transport,
                    timeout_seconds=deadline.left,
                    probe=new.probe,
                    path=address.get("path"),
                    rendezvous=address.get("rendezvous"),
                )
            except ValidationError as error:
                first = error.errors()[0]
                raise ConfigError(f"an update's {first['loc'][0]} is not valid: {first['msg']}") from error
            self._post("begin", begin, deadline)

            def upload(body: Iterator[bytes], size: int) -> None:
                headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
                self._request("PUT", f"upload/{batch_id}", deadline, content=body, headers=headers)

            send(upload)
            self._meet(new, batch_id, deadline)
            try:
                outcome = Outcome.model_validate(self._post("commit", Commit(batch_id=batch_id), deadline).json())
            except (RewardServerUnavailable, RewardServerRefused) as error:
                status_code = getattr(error, "status", 500)
                if status_code < 500 or status_code in RETRIED_STATUSES:  # there is no such update, or its engine died
                    raise
                raise CommitUnanswered(str(error)) from error
        if outcome.status is not OutcomeStatus.committed:
            raise self._do_not_serve(new.name, _reason(outcome))
        self._published = outcome.version, outcome.revision
        return outcome

    def _meet(self, new: _Version, batch_id: str, deadline: Deadline) -> None:
        """Prepare the version, and wait until the other servers have.

        Raises:
            PublishFailed: if this or another server has not.
        """
        if new.decision is None or new.decision.is_known:
            return
        message = Commit(batch_id=batch_id, only_prepares=True)
        outcome = Outcome.model_validate(self._post("commit", message, deadline).json())
        if outcome.status is not OutcomeStatus.prepared:
            raise self._do_not_serve(new.name, _reason(outcome))
        if not new.decision.is_made(deadline.left):
            failure = self._do_not_serve(new.name, OTHER_FAILED)
            self._given_up(batch_id, new, failure)
            raise failure

    def _post(self, route: str, message: WireModel, deadline: Deadline) -> httpx.Response:
        return self._request("POST", route, deadline, json=message.model_dump(mode="json"))

    def _request(self, method: str, route: str, deadline: Deadline, **content: Any) -> httpx.Response:
        """Successful answer to a message, which carries the update's id and so may be repeated.

        Raises:
            RewardServerRefused: if the server refuses.
            RewardServerUnavailable: if it does not answer in time.
            TransferFailed: if a body breaks off: it is read once, and the update is tried again as a whole.
        """
        url = f"{self.url}/rm/weights/{route}"
        while True:
            got: httpx.Response | httpx.HTTPError
            try:
                got = self._session.request(method, url, timeout=deadline.timeout(), **content)
            except httpx.HTTPError as error:
                if "content" in content and isinstance(error, RETRIED_ERRORS):
                    raise TransferFailed(f"the upload broke off: {error}") from error
                got = error
            judged = deadline.judge(got, self.url, lambda answer: _may_be_repeated(answer, deadline))
            if isinstance(judged, httpx.Response):
                return judged
            time.sleep(judged)

    def _given_up(self, batch_id: str, new: _Version, error: RMOptimizerError) -> Outcome | PublishFailed:
        """Abort the update on the server, and return its outcome with the best known reason."""
        abort = Abort(batch_id=batch_id, reason=str(error))
        try:
            answer = self._post("abort", abort, Deadline(self.url, GIVING_UP_SECONDS))
        except RMOptimizerError as silence:
            is_told = isinstance(silence, RewardServerRefused) and silence.status < 500  # it has no such update
            if isinstance(error, CommitUnanswered) and not is_told:
                return PublishFailed(
                    f"all of weights {new.name} were sent, but {self.url} did not answer whether it serves them; "
                    f"ask GET {self.url}/rm/weights/status, or publish again: {error}"
                )
            return self._do_not_serve(new.name, str(error))
        outcome = Outcome.model_validate(answer.json())
        if outcome.status is OutcomeStatus.committed:  # its answer was lost
            self._published = outcome.version, outcome.revision
            return outcome
        is_refused = outcome.status is OutcomeStatus.refused
        return self._do_not_serve(new.name, _reason(outcome) if is_refused else str(error))

    def _do_not_serve(self, version: str, reason: str) -> PublishFailed:
        return PublishFailed(f"weights {version} do not serve at {self.url}: {reason}")


def _reason(outcome: Outcome) -> str:
    return outcome.error.message if outcome.error is not None else f"the update was {outcome.status.value}"


def create_rm_publisher(
    url: str,
    *,
    mode: RewardModelTrainingMode | str = RewardModelTrainingMode.full,
    transport: Transport | str = Transport.inline,
    api_key: str | None = None,
    timeout_seconds: float = 120.0,
    host: str = "127.0.0.1",
) -> RMPublisherAdapter:
    """Create a publisher; for the arguments see `RMPublisherAdapter`."""
    return RMPublisherAdapter(
        url, mode=mode, transport=transport, api_key=api_key, timeout_seconds=timeout_seconds, host=host
    )


STARTING_SECONDS = 3.0
"""Seconds for a server to answer before a run fails at its start; the server may still be starting."""


def open_publisher(config: PublishConfig) -> RMPublisherAdapter:
    """Publisher of a run's options, once the server has answered.

    Raises:
        ConfigError: if the variable of the API key is not set.
        PublishFailed: if the server does not answer, or does not accept the transport.
    """
    api_key = None
    if config.api_key_env is not None:
        api_key = os.environ.get(config.api_key_env)
        if not api_key:
            raise ConfigError(f"publish.api_key_env names {config.api_key_env}, which is not set; export it")
        require_key(f"the key in {config.api_key_env} (publish.api_key_env)", api_key)
    try:
        publisher = RMPublisherAdapter(
            str(config.url),
            mode=config.mode,
            transport=config.transport,
            api_key=api_key,
            timeout_seconds=config.timeout_seconds,
            host=config.host,
        )
    except ConfigError as error:
        raise ConfigError(f"publish.{error}") from error
    try:
        for one in publisher.members or [publisher]:
            taken = one.status(min(STARTING_SECONDS, publisher.timeout_seconds)).transports
            if publisher.transport not in taken:
                raise ConfigError(f"publish.transport must be one of {', '.join(taken)}, which {one.url} accepts")
    except RewardServerUnavailable as error:
        publisher.close()
        raise PublishFailed(
            f"publish.url: no server answers at {publisher.url}; start one with rm-opt serve, or train with "
            f"publish.url=null: {error}"
        ) from error
    except RMOptimizerError as error:
        publisher.close()
        raise error if isinstance(error, ConfigError) else PublishFailed(f"publish.url: {error}") from error
    return publisher
