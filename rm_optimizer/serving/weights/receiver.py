"""Receiver of weight updates on a server: one at a time, checked before the model changes, with a time limit.

begin -> ready -> transfer -> commit. The manifest is compared with the served model before a byte moves, the file's
header before it is read, the tensors' digests and values (by `Engine.stage`) before they replace any; after any
failure the old weights stay and the sender gets the reason. An update keeps the id of its sender, so that every message
may be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import shutil
import tempfile
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rm_optimizer.errors import EngineUnavailable, RMOptimizerError, WeightsRefused
from rm_optimizer.records.files import write_text
from rm_optimizer.schema.publish import RewardModelTrainingMode, Transport
from rm_optimizer.serving.engine import Engine, StagedWeights, new_revision
from rm_optimizer.serving.protocol import ErrorDetail
from rm_optimizer.serving.service.api_errors import ApiError, NotReady
from rm_optimizer.serving.service.service import RewardService
from rm_optimizer.serving.update_protocol import (
    Abort,
    Begin,
    Commit,
    Outcome,
    OutcomeStatus,
    Ready,
    Received,
    WeightStatus,
)
from rm_optimizer.serving.weights.incoming import FromBody, Incoming, incoming
from rm_optimizer.serving.weights.weight_file import check_names, num_bytes

KEPT_NAMES = 10_000
"""Most names kept; answers of older names are still distinguished by their revision."""
KEPT_OUTCOMES = 128
"""Ended updates whose outcome is kept."""
MAX_TIMEOUT_SECONDS = 3600.0
LEASE_SECONDS = 20.0
"""Seconds without a message or a byte from its sender after which an update gives way to another one."""
MAX_RETRY_SECONDS = 5
"""Longest `Retry-After` while another update is in progress, in seconds; that update may end early."""
SWAP_GRACE_SECONDS = 15.0
"""Seconds beyond an update's time limit that a commit waits for the swap."""
ROLLBACK_SECONDS = 1.0
"""Seconds that an outcome waits for the worker to discard the staged weights; the next update waits longer."""
DEFAULT_TRANSPORTS = frozenset({Transport.inline, Transport.path})
"""Transports for which the server opens no connection."""
_log = logging.getLogger("rm_optimizer")


class UpdateConflict(ApiError):
    """Another update is in progress, or the served weights are not those that the sender expects."""

    status, kind = 409, "UpdateConflict"


class VersionTaken(ApiError):
    """The version name was already used for other weights on this server."""

    status, kind = 409, "VersionTaken"


class UnknownUpdate(ApiError):
    """The server does not have an update of this id, or no longer has it."""

    status, kind = 404, "UnknownUpdate"


class ServedNames:
    """Digests of the served weights by version name.

    Args:
        engine: engine that serves the weights.
        file: file that keeps the names for a later server; None keeps none.
    """

    def __init__(self, engine: Engine, file: Path | None = None) -> None:
        self._engine, self._file = engine, file
        kept = file.read_text(encoding="utf-8") if file is not None and file.is_file() else "{}"
        self._contents: OrderedDict[str, str | None] = OrderedDict(json.loads(kept))

    def may_be(self, update: Begin | StagedWeights) -> bool:
        """True if the update's name is new, or was used for the same resulting weights."""
        self.note()
        if update.version not in self._contents:
            return True
        content = _content(self._engine, update)
        return content is not None and content == self._contents[update.version]

    def note(self) -> None:
        """Record the names of the served weights and of the checkpoint's own."""
        known = len(self._contents)
        self._contents.setdefault(self._engine.description.version, self._engine.description.version)
        self._contents.setdefault(self._engine.version, _content(self._engine))
        if self._file is not None and len(self._contents) > known:
            write_text(self._file, json.dumps(self._contents))
        while len(self._contents) > KEPT_NAMES:
            self._contents.popitem(last=False)


def _content(engine: Engine, *updates: Begin | StagedWeights) -> str | None:
    """Digest of the model with further updates; None if a sender omitted a tensor's digest."""
    digests: dict[str, str | None] = {"": engine.description.version}  # digest of the tensors that no update replaces
    for update in (*engine.committed, *updates):
        kept = {} if update.mode is RewardModelTrainingMode.full else digests
        digests = kept | {spec.name: spec.sha256 and f"{spec.dtype} {spec.sha256}" for spec in update.tensors}
    if None in digests.values():
        return None
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


@dataclass(eq=False)
class _Update:
    """Update in progress; it keeps others out until `lease`."""

    begin: Begin
    incoming: Incoming
    started: float
    deadline: float
    standing: asyncio.Task[None]
    lease: float
    watchdog: asyncio.TimerHandle | None = None
    preparing: asyncio.Task[int] | None = None
    committing: asyncio.Task[Outcome] | None = None


class WeightReceiver:
    """Receiver of updates for the engine of a service.

    Args:
        service: service whose weights the updates replace.
        root: existing folder for the files of the transport `path`; None disables this transport.
        transports: accepted transports.
        state: existing folder that keeps the names of versions for a later receiver; None keeps none.
    """

    def __init__(
        self,
        service: RewardService,
        *,
        root: Path | None = None,
        transports: frozenset[Transport] = DEFAULT_TRANSPORTS,
        state: Path | None = None,
    ) -> None:
        self.service, self.engine = service, service.engine
        self.root = None if root is None else root.resolve()
        self.transports = transports - ({Transport.path} if root is None else set())
        for left in [] if state is None else state.glob("rm-incoming-*"):  # by a server that was killed
            shutil.rmtree(left, ignore_errors=True)
        self._spool = Path(tempfile.mkdtemp(prefix="rm-incoming-", dir=state))
        self._remove_spool = weakref.finalize(self, shutil.rmtree, self._spool, ignore_errors=True)
        self._active: _Update | None = None
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self._names = ServedNames(service.engine, None if state is None else state / "names.json")

    async def close(self) -> None:
        """Abort the update in progress and remove its files."""
        if self._active is not None and self._active.committing is None:
            await self._give_up(self._active, "the server is stopping")
        self._remove_spool()

    async def begin(self, begin: Begin) -> Ready:
        """Announce an update; returns once its receiving end is ready.

        Raises:
            WeightsRefused: if it does not fit the served model, or needs an unsupported transport.
            UpdateConflict: if another one is in progress, it has ended, or `base_version` is not served.
        """
        active = self._active
        if active is None or active.begin != begin or active.committing is not None:
            await self._make_room(begin)
            self._check(begin)
            loop, way_in = asyncio.get_running_loop(), incoming(begin, root=self.root, spool=self._spool)
            deadline = loop.time() + begin.timeout_seconds
            is_watched = begin.transport in DEFAULT_TRANSPORTS  # the bytes of a process group do not pass here
            lease = min(deadline, loop.time() + LEASE_SECONDS) if is_watched else deadline
            standing = asyncio.ensure_future(way_in.wait_ready())
            active = self._active = _Update(begin, way_in, time.monotonic(), deadline, standing, lease)
            active.watchdog = loop.call_later(begin.timeout_seconds, self._expire, active)
        try:
            async with asyncio.timeout_at(active.deadline):
                await asyncio.shield(active.standing)
        except (RMOptimizerError, TimeoutError) as error:
            self._release(active)
            raise WeightsRefused(str(error) or "its receiving end was not ready in time") from error
        return Ready(batch_id=begin.batch_id, version=self.engine.version, revision=self.engine.revision)

    async def upload(self, batch_id: str, chunks: AsyncIterator[bytes]) -> Received:
        """Receive the body of an `inline` update; a repeated one replaces the first.

        Raises:
            UnknownUpdate: if no such update is in progress.
            WeightsRefused: if it is no inline update, or the body has not the manifest's size.
        """
        update = self._under_way(batch_id)
        if not isinstance(update.incoming, FromBody) or update.committing is not None:
            reason = f"its transport is {update.begin.transport.value}, or it is committed"
            raise WeightsRefused(f"update {batch_id} accepts no body, since {reason}")

        async def renewing() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                update.lease = self._now() + LEASE_SECONDS
                yield chunk

        return Received(batch_id=batch_id, bytes=await update.incoming.receive(renewing()))

    async def commit(self, commit: Commit) -> Outcome:
        """Check the tensors, swap, and return the outcome; a repeated request gets the same answer.

        With `only_prepares` the swap waits for another commit, so that several servers can swap once all may.

        Raises:
            UnknownUpdate: if no such update was begun here.
            NotReady: if the swap exceeds the time limit; it continues, and the request may be repeated.
        """
        if (ended := self._outcomes.get(commit.batch_id)) is not None:
            return ended
        update = self._under_way(commit.batch_id)
        update.lease = self._now() + LEASE_SECONDS
        if update.preparing is None:
            update.preparing = asyncio.ensure_future(self._prepare(update))
        try:
            async with asyncio.timeout_at(max(update.deadline, self._now()) + SWAP_GRACE_SECONDS):
                if commit.only_prepares and update.committing is None:
                    await asyncio.wait({update.preparing})
                    if update.preparing.cancelled() and update.committing is None:
                        raise UnknownUpdate(f"update {commit.batch_id} was aborted; begin it again", "batch_id")
                    if not update.preparing.cancelled() and update.preparing.exception() is None:
                        update.lease = self._now() + LEASE_SECONDS
                        return self._outcome(update, OutcomeStatus.prepared)
                if update.committing is None:
                    update.committing = asyncio.ensure_future(self._commit(update))
                return await asyncio.shield(update.committing)
        except TimeoutError:
            raise NotReady(f"update {commit.batch_id} is still being swapped in; ask again", 1) from None

    async def abort(self, abort: Abort) -> Outcome:
        """Abort an update; one that is being committed is not interrupted.

        Raises:
            UnknownUpdate: if no such update was begun here.
        """
        if (ended := self._outcomes.get(abort.batch_id)) is not None:
            return ended
        update = self._under_way(abort.batch_id)
        if update.committing is not None:
            return await asyncio.shield(update.committing)
        return await self._give_up(update, abort.reason or "its sender aborted it")

    def status(self, batch_id: str | None = None) -> WeightStatus:
        """Served weights and update in progress.

        Args:
            batch_id: update whose outcome is requested; None is the last one that ended.

        Raises:
            NotReady: if the model is loading.
        """
        self.service.require_loaded()
        last = next(reversed(self._outcomes.values()), None)
        return WeightStatus(
            version=self.engine.version,
            revision=self.engine.revision,
            active=None if self._active is None else self._active.begin.batch_id,
            outcome=last if batch_id is None else self._outcomes.get(batch_id),
            root=None if self.root is None else str(self.root),
            transports=sorted(self.transports),
        )

    async def _make_room(self, begin: Begin) -> None:
        """Refuse a second update, unless the first one's sender began it again or shows no sign of life."""
        done, active = self._outcomes.get(begin.batch_id), self._active
        if done is not None and done.status is OutcomeStatus.committed:
            raise UpdateConflict(f"update {begin.batch_id} was committed already; choose another batch_id")
        is_own = active is not None and active.begin.batch_id == begin.batch_id
        if active is not None and (active.committing is not None or not (is_own or active.lease < self._now())):
            left = math.ceil(max(1.0, active.deadline - self._now()))
            raise UpdateConflict(
                f"update {active.begin.batch_id} is in progress and ends within {left} s; try again then",
                retry_after_seconds=min(left, MAX_RETRY_SECONDS),
            )
        if active is not None:
            silence = f"its sender was silent for {LEASE_SECONDS:.0f} s, and another update began"
            await self._give_up(active, "its sender began it again" if is_own else silence)
            await self._make_room(begin)  # another update may have begun meanwhile
        self._outcomes.pop(begin.batch_id, None)

    def _check(self, begin: Begin) -> None:
        """Compare the announcement with the served model and weights, and refuse unbounded waits."""
        if begin.transport not in self.transports:
            known = ", ".join(sorted(self.transports))
            raise WeightsRefused(f"transport {begin.transport.value} is not accepted here; use one of {known}")
        self.service.require_updatable()
        serving, revision = self.engine.version, self.engine.revision
        if begin.base_version not in (None, serving) or begin.base_revision not in (None, revision):
            followed = " ".join(str(base) for base in (begin.base_version, begin.base_revision) if base is not None)
            raise UpdateConflict(f"the update follows {followed}, but {serving} {revision} serves")
        if not self._names.may_be(begin):
            raise VersionTaken(
                f"version {begin.version} has served other weights here; publish these under another name", "version"
            )
        served = {spec.name: spec for spec in self.engine.description.tensors.get(begin.mode, ())}
        if not served:
            raise WeightsRefused(f"mode {begin.mode.value} has no tensors in the served model; serve one that has")
        check_names(set(served), {spec.name for spec in begin.tensors}, f"an update of mode {begin.mode.value}")
        if begin.timeout_seconds > MAX_TIMEOUT_SECONDS:
            raise WeightsRefused(f"timeout_seconds must be at most {MAX_TIMEOUT_SECONDS:.0f}")
        longest, size = self.engine.description.max_length, self.engine.description.vocab_size
        for number, row in enumerate(begin.probe.input_ids if begin.probe else ()):
            if not 1 <= len(row) <= longest or min(row) < 0 or max(row) >= size:
                raise WeightsRefused(f"probe[{number}] must hold 1 to {longest} token ids, each in [0, {size})")
        for spec in begin.tensors:
            num_bytes(spec)
            expected = served[spec.name]
            if spec.shape != expected.shape or ("float" in spec.dtype) != ("float" in expected.dtype):
                raise WeightsRefused(
                    f"{spec.name}: expected {expected.dtype}{expected.shape}, got {spec.dtype}{spec.shape}"
                )

    def _expire(self, update: _Update) -> None:
        """Abort the update after its time limit, for a sender that died."""
        if self._active is update and update.committing is None:
            reason = f"it was not committed within {update.begin.timeout_seconds:.0f} s"
            update.committing = asyncio.ensure_future(self._give_up(update, reason))

    def _under_way(self, batch_id: str) -> _Update:
        if self._active is None or self._active.begin.batch_id != batch_id:
            raise UnknownUpdate(f"no update {batch_id} is in progress; begin it again", "batch_id")
        return self._active

    async def _prepare(self, update: _Update) -> int:
        """Stage the update, and return its revision."""
        begin, revision = update.begin, new_revision(self.engine.revision)
        if begin.revision is not None and begin.revision > self.engine.revision:
            revision = begin.revision
        async with asyncio.timeout_at(update.deadline):
            file = await update.incoming.file()
            await self.engine.stage(
                StagedWeights(begin.version, revision, begin.mode, file, tuple(begin.tensors), begin.probe)
            )
        return revision

    async def _commit(self, update: _Update) -> Outcome:
        begin = update.begin
        assert update.preparing is not None, "a commit begins with the preparation"
        try:
            await self.engine.commit(await update.preparing)
        except (RMOptimizerError, TimeoutError) as error:
            seconds = f"{begin.timeout_seconds:.3g} s"
            reason = (
                str(error) or f"it was not received and checked within {seconds}; give it more time, or look at /ready"
            )
            return await self._failed(update, OutcomeStatus.refused, reason, error)
        finally:
            self._release(update)
        self._names.note()
        _log.info("weights %s serve now (%s, %s)", begin.version, begin.mode.value, begin.transport.value)
        return self._ended(update, OutcomeStatus.committed, None)

    async def _give_up(self, update: _Update, reason: str) -> Outcome:
        self._release(update)
        return await self._failed(update, OutcomeStatus.aborted, f"given up: {reason}")

    async def _failed(
        self, update: _Update, status: OutcomeStatus, message: str, error: BaseException | None = None
    ) -> Outcome:
        """Outcome after the engine has discarded the staged weights; a dead worker has lost them anyway."""

        async def rolled_back() -> None:
            with suppress(EngineUnavailable):
                await self.engine.rollback()

        await asyncio.wait({asyncio.ensure_future(rolled_back())}, timeout=ROLLBACK_SECONDS)
        kind = "UpdateAborted" if error is None else type(error).__name__
        code = 503 if isinstance(error, EngineUnavailable) else 400
        return self._ended(update, status, ErrorDetail(message=message, type=kind, code=code))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _release(self, update: _Update) -> None:
        update.incoming.drop()
        if update.preparing is not None:
            update.preparing.cancel()
        if update.watchdog is not None:
            update.watchdog.cancel()
        if self._active is update:
            self._active = None

    def _outcome(self, update: _Update, status: OutcomeStatus, error: ErrorDetail | None = None) -> Outcome:
        return Outcome(
            batch_id=update.begin.batch_id,
            status=status,
            version=self.engine.version,
            revision=self.engine.revision,
            error=error,
            seconds=time.monotonic() - update.started,
        )

    def _ended(self, update: _Update, status: OutcomeStatus, error: ErrorDetail | None) -> Outcome:
        outcome = self._outcome(update, status, error)
        self.service.metrics.updates.labels(status.value).inc()
        self.service.metrics.update_seconds.observe(outcome.seconds)
        if error is not None:
            _log.warning("weights %s do not serve: %s", update.begin.version, error.message)
        self._outcomes[outcome.batch_id] = outcome
        while len(self._outcomes) > KEPT_OUTCOMES:
            self._outcomes.popitem(last=False)
        return outcome
