"""Clients of a reward server, asynchronous and blocking."""

from __future__ import annotations

import asyncio
import math
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.core.rows.messages import read_messages
from rm_optimizer.core.rows.natural import Prompts, Texts, flat_groups, paired
from rm_optimizer.errors import HandshakeFailed, RewardServerRefused, RewardServerUnavailable, WrongVersion
from rm_optimizer.serving.client.connection import (
    CONVERSATION_FORM,
    TOKEN_FORM,
    ClientArguments,
    Connection,
    Deadline,
    Form,
    pieces,
)
from rm_optimizer.serving.client.handshake import ServerIdentity, shake_hands
from rm_optimizer.serving.engine import ScoredBatch

AVOIDED_SECONDS = 10.0
"""Seconds in which a server that failed or was slow is asked after the others."""
LEAST_PART = 16
"""Fewest sequences of a request to one of several servers, if the call has as many."""
PARTS_A_SERVER = 4
"""Requests to each of several servers that a call is divided into, so that none waits for the slowest for long."""
T = TypeVar("T")
_Work: TypeAlias = Callable[["AsyncRewardClient", Deadline], Coroutine[Any, Any, T]]


class AsyncRewardClient(Connection):
    """Asynchronous scorer behind servers: `rm-opt serve` with any engine, or a plain vLLM.

    With a renderer the client renders and tokenizes conversations, otherwise the server does. Every reward is raw.
    Connecting verifies the server's sigmoid and rendering; see `handshake`. For the arguments see `ClientArguments`.

    Of several servers a request goes to the one with the fewest open requests. After a failure or `hedge_seconds`
    another one is asked too, and the first answer counts. All rewards of a call come from the newest weights among
    its answers.
    """

    _identity: ServerIdentity | None = None
    _is_one_of_several = False
    _num_open = 0
    _failed_at = -math.inf
    _revision: int | None = None

    @cached_property
    def _members(self) -> list[AsyncRewardClient]:
        """Clients of the single servers, if there are several."""
        several = self.urls if len(self.urls) > 1 else []
        members = [AsyncRewardClient(**{**self.__getstate__(), "url": url}) for url in several]
        for member in members:
            member._is_one_of_several = True
        return members

    @property
    def _form(self) -> Form:
        return TOKEN_FORM if self.renderer is not None else CONVERSATION_FORM

    async def __aenter__(self) -> AsyncRewardClient:
        await self.connect()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self.close()

    async def connect(self) -> ServerIdentity:
        """Verify the server once; every other call does so first.

        Of several servers one must answer; another is verified before its first request.

        Raises:
            HandshakeFailed: if its rewards are not raw, or it renders conversations differently.
            RewardServerUnavailable: if it does not answer in time.
        """
        if self._members:
            return await self._first(lambda member, deadline: member.connect(), self._deadline())
        async with self._session().connecting:
            if self._identity is None:
                self._identity = await shake_hands(self, self._deadline())
            return self._identity

    def _deadline(self) -> Deadline:
        return Deadline(self.url, self.timeout_seconds, may_repeat=not self._is_one_of_several)

    async def close(self) -> None:
        """Close the sessions; a later call opens others."""
        await asyncio.gather(super().close(), *(member.close() for member in self._members))

    async def _first(self, work: _Work[T], deadline: Deadline) -> T:
        """First result of a server, which comes from the only one or from any of several.

        Raises:
            RewardServerUnavailable: if none answers in time.
        """
        if not self._members:
            return await work(self, deadline)
        while True:
            left = sorted(self._members, key=AsyncRewardClient._load)
            asked, failure = set[asyncio.Task[T]](), RewardServerUnavailable("no server was asked")
            try:
                while left or asked:
                    if left:
                        asked.add(asyncio.ensure_future(left.pop(0)._counted(work, deadline.left)))
                    seconds = min(self.hedge_seconds, deadline.left) if left else deadline.left
                    done, asked = await asyncio.wait(asked, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        try:
                            return task.result()
                        except RewardServerUnavailable as error:
                            failure = error
                    if not done and (not left or deadline.left <= 1e-3):
                        break
            finally:
                for task in asked:
                    task.cancel()
            await asyncio.sleep(deadline.pause(str(failure)))

    async def _counted(self, work: _Work[T], seconds: float) -> T:
        """Result of this server, of several, by one attempt within the seconds."""
        self._num_open += 1
        try:
            return await work(self, Deadline(self.url, seconds, may_repeat=False))
        except RewardServerRefused as error:
            if error.status < 500:
                raise
            self._failed_at = time.monotonic()
            raise RewardServerUnavailable(str(error)) from error
        except (RewardServerUnavailable, asyncio.CancelledError):  # it failed, or another was faster
            self._failed_at = time.monotonic()
            raise
        finally:
            self._num_open -= 1

    def _load(self) -> tuple[bool, int, float]:
        """Key of the order in which several servers are asked."""
        return time.monotonic() - self._failed_at < AVOIDED_SECONDS, self._num_open, random.random()

    async def score(self, prompts: Prompts, responses: Texts) -> Float[Tensor, "*sequences"]:
        """Rewards of the responses in the order given, float32 on the CPU, from one version of the weights.

        Args:
            prompts: text or messages, one for each response or a single one for all.
            responses: texts; a single text has a single number as reward.

        Raises:
            ValueError: if there are not as many prompts as responses.
            RewardServerUnavailable: if the server does not answer in time.
            RewardServerRefused: if it refuses the request.
        """
        rewards = torch.tensor((await self.score_versioned(prompts, responses)).rewards, dtype=torch.float32)
        return rewards[0] if isinstance(responses, str) else rewards

    async def score_groups(
        self, prompts: Prompts, responses_of_each: Iterable[Texts]
    ) -> list[Float[Tensor, " responses"]]:
        """Rewards of each prompt's responses, as `Scorer.score_groups` gives them."""
        flat, texts, sizes = flat_groups(prompts, responses_of_each)
        return list(torch.split(await self.score(flat, texts), sizes))

    async def score_pair(self, prompt: Prompt, response_a: str, response_b: str) -> float:
        """Margin: reward of `response_a` minus reward of `response_b`."""
        first, second = (await self.score_versioned([prompt, prompt], [response_a, response_b])).rewards
        return first - second

    async def score_versioned(
        self,
        prompts: Prompts,
        responses: Texts,
        *,
        expect_version: str | None = None,
        expect_revision: int | None = None,
    ) -> ScoredBatch:
        """Rewards as `score` returns them, with the version of the weights that computed them.

        A call of several requests repeats those that were answered before a weight update.

        Args:
            prompts: text or messages, one for each response or a single one for all.
            responses: texts.
            expect_version: version that must answer; None accepts any. A restarted server may give its name to others.
            expect_revision: serial number that must answer, `ScoredBatch.revision`; None accepts any. It is unique.

        Raises:
            WrongVersion: if other weights answered, for example after a restart of the server.
        """
        given, texts = paired(prompts, responses)
        each = [prompt if isinstance(prompt, str) else read_messages("prompts", prompt) for prompt in given]
        limits = (await self.connect()).limits
        deadline = Deadline(self.url, self.timeout_seconds)
        rows: list[Any] = list(zip(each, texts, strict=True))
        if self.renderer is not None:
            rows = [encoding.ids for encoding in self.renderer.encode_batch(each, texts)]
        if self._members:  # enough parts for all servers
            share = max(LEAST_PART, math.ceil(len(rows) / (PARTS_A_SERVER * len(self._members))))
            limits = replace(limits, items=min(limits.items, share))
        parts = list(pieces(rows, self._form.size, limits))
        only = self.revision if expect_revision is None else expect_revision
        answers: dict[int, ScoredBatch] = {}
        while outdated := [i for i in range(len(parts)) if i not in answers]:
            asked = ([rows[k] for k in parts[i]] for i in outdated)
            tasks = [asyncio.ensure_future(self._ask(part, only, deadline)) for part in asked]
            try:
                answers |= dict(zip(outdated, await asyncio.gather(*tasks), strict=True))
            finally:
                for task in tasks:  # the first failure cancels the others
                    task.cancel()
            newest = answers[outdated[-1]]
            if self._members:
                newest = max(answers.values(), key=lambda answer: answer.revision or 0)
            answers = {i: answer for i, answer in answers.items() if answer.weights == newest.weights}
            for member in self._members:
                if member._revision not in (None, newest.revision):
                    member._failed_at = time.monotonic()
        rewards = tuple(reward for i in range(len(parts)) for reward in answers[i].rewards)
        scored = ScoredBatch(rewards, *(answers[0].weights if answers else (await self.version(), only)))
        for name, expected, got in (("weights", expect_version, scored.version), ("revision", only, scored.revision)):
            if expected not in (None, got):
                raise WrongVersion(f"expected rewards of {name} {expected} from {self.url}, got {got}")
        return scored

    async def _ask(self, rows: Sequence[Any], only: int | None, deadline: Deadline) -> ScoredBatch:
        """Rewards of one request, which any of several servers answers that has the only accepted revision."""

        async def ask(member: AsyncRewardClient, deadline: Deadline) -> ScoredBatch:
            identity = await member.connect()
            self._identity = self._identity or identity
            if identity.template_hash != self._identity.template_hash:
                raise HandshakeFailed(f"{member.url} renders conversations unlike the others of {self.url}")
            scored = await member.ask(self._form, rows, identity.model, deadline)
            member._revision = scored.revision
            known = [each._revision for each in self._members if each._revision is not None]
            least = max(known, default=None) if only is None else only  # one that was started again has older weights
            if self._members and scored.revision not in (None, least):
                raise RewardServerUnavailable(f"expected revision {least} from {member.url}, got {scored.revision}")
            return scored

        if not self._members:
            return await ask(self, deadline)
        async with self._session().slots:
            return await self._first(ask, deadline)

    async def version(self) -> str:
        """Version of the weights that answer now; for a plain vLLM its model's name."""
        if self._members:
            return await self._first(lambda member, deadline: member.version(), self._deadline())
        identity = await self.connect()
        if not identity.is_rm_opt:
            return identity.model
        answer = await self.request("GET", "/rm/version", self._deadline())
        return str(answer.json()["version"])


SLACK_SECONDS = 10.0
"""Seconds to wait for a call beyond its own timeout."""
CALLS = 2
"""Most calls with separate timeouts in one call: the handshake and the request."""


@dataclass(eq=False, repr=False)
class RewardClient(ClientArguments, Scorer):
    """`AsyncRewardClient` for callers without an event loop; safe to share between threads.

    The constructor connects and verifies the server's sigmoid and rendering. For its arguments see `ClientArguments`.

    Args:
        check: model (folder, hub id, run or `BradleyTerryRM`) whose rewards the server must give, such as the run
            that trained it; a difference is explained as `explain_difference` does. A pickled copy checks nothing.

    Raises:
        HandshakeFailed: if the server's rewards are not raw, it renders conversations differently, or its rewards are
            different from those by `check`, with the cause.
        RewardServerUnavailable: if it does not answer in time.
    """

    _: KW_ONLY
    check: InitVar[object] = None

    def _prepare(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[_LoopThread] = []

    def __post_init__(self, check: object) -> None:
        super().__post_init__()
        try:
            self._run(lambda client: client.connect())
            if check is not None:
                from rm_optimizer.explanation.explain import explain_difference

                if not (found := explain_difference(check, self)).agrees:
                    raise HandshakeFailed(str(found))
        except HandshakeFailed:
            self.close()
            if check is not None and self.renderer is not None:  # the cause, found by the server's own rendering
                RewardClient(**{**self.__getstate__(), "renderer": None}, check=check).close()
            raise
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> str:
        """Version of the weights that answer now, from the server."""
        return self._run(lambda client: client.version())

    def score(self, prompts: Prompts, responses: Texts) -> Float[Tensor, "*sequences"]:
        """Rewards of the responses in the order given, float32 on the CPU; see `AsyncRewardClient.score`."""
        return self._run(lambda client: client.score(prompts, responses))

    def score_pair(self, prompt: Prompt, response_a: str, response_b: str) -> float:
        """Margin: reward of `response_a` minus reward of `response_b`."""
        return self._run(lambda client: client.score_pair(prompt, response_a, response_b))

    def score_versioned(
        self,
        prompts: Prompts,
        responses: Texts,
        *,
        expect_version: str | None = None,
        expect_revision: int | None = None,
    ) -> ScoredBatch:
        """Rewards and the version that computed them; see `AsyncRewardClient.score_versioned`."""
        expected = {"expect_version": expect_version, "expect_revision": expect_revision}
        return self._run(lambda client: client.score_versioned(prompts, responses, **expected))  # type: ignore[arg-type]

    def close(self) -> None:
        """Close the session; a second call does nothing, and a later request opens another session."""
        for thread in self._threads:
            thread.close()

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _run(self, work: Callable[[AsyncRewardClient], Coroutine[Any, Any, T]]) -> T:
        with self._lock:
            if not self._threads or not self._threads[-1].is_running:
                self._threads.append(_LoopThread(self))
        return self._threads[-1].run(work)


class _LoopThread:
    """Event loop in a thread of this process, with the client that runs on it."""

    def __init__(self, arguments: ClientArguments) -> None:
        self.pid = os.getpid()
        self._seconds = arguments.timeout_seconds
        self._url = arguments.url
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rm-client", daemon=True)
        self._thread.start()
        self._client = AsyncRewardClient(**arguments.__getstate__())

    @property
    def is_running(self) -> bool:
        """True while the thread runs in this process: threads do not survive a fork or a close."""
        return self.pid == os.getpid() and not self._loop.is_closed()

    def run(self, work: Callable[[AsyncRewardClient], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop, waiting no longer than the calls that it makes."""
        future = asyncio.run_coroutine_threadsafe(work(self._client), self._loop)
        try:
            return future.result(CALLS * self._seconds + SLACK_SECONDS)
        except TimeoutError as error:
            raise RewardServerUnavailable(f"{self._url} gave no answer within {self._seconds:g} s") from error
        finally:
            future.cancel()  # of no effect once it is done

    def close(self) -> None:
        """Close the session and end the thread, in the process that started it."""
        if self.is_running:
            self.run(lambda client: client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
