"""Rewards from a running vLLM engine by token ids, and the lock between scoring and updates."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from rm_optimizer.errors import EngineUnavailable


class ReadWriteLock:
    """Lock for many readers or one writer, with precedence for a waiting writer.

    A reader sees one version of the weights from its entrance to its exit.
    """

    def __init__(self) -> None:
        self._change = asyncio.Condition()
        self._readers = 0
        self._writers = 0
        self._is_writing = False

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Hold the lock as a reader, once no writer waits."""
        async with self._change:
            await self._change.wait_for(lambda: not self._writers)
            self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            await asyncio.shield(self._announce())

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Hold the lock as the only writer, once the readers have left; new readers wait."""
        self._writers += 1
        try:
            async with self._change:
                await self._change.wait_for(lambda: not self._readers and not self._is_writing)
                self._is_writing = True
            try:
                yield
            finally:
                self._is_writing = False
        finally:
            self._writers -= 1
            await asyncio.shield(self._announce())

    async def _announce(self) -> None:
        async with self._change:
            self._change.notify_all()


if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.lora.request import LoRARequest

WATCH_SECONDS = 5.0
"""Seconds between two checks that the engine is alive."""
SILENCE_SECONDS = 60.0
"""Longest time for its answer in seconds, since it answers between two passes."""
HUNG_EXIT_CODE = 70
UPDATE_SECONDS = 600.0
"""Time limit of the workers for one step of an update, in seconds."""
_log = logging.getLogger("rm_optimizer")


class Pooling:
    """vLLM's engine as a function from token ids to raw rewards."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._is_given_up = False
        self._num_updating = 0

    @property
    def is_up(self) -> bool:
        """True while the engine's processes run with valid weights."""
        return not self._is_given_up and not self.client.errored

    def give_up(self) -> None:
        """End the server, whose weights are in an unknown state; its supervisor starts another."""
        self._is_given_up = True
        os.kill(os.getpid(), signal.SIGTERM)

    async def watch(self, every: float = WATCH_SECONDS, silence: float = SILENCE_SECONDS) -> None:
        """End this process when the engine does not answer any more; its supervisor starts another.

        vLLM does not detect a stopped or hung engine, and its orderly shutdown would wait for it. The check calls the
        workers, since the engine's core still answers while they hang.

        Args:
            every: seconds between two checks.
            silence: longest time for an answer, in seconds.
        """
        while self.is_up:
            await asyncio.sleep(every)
            asked = asyncio.ensure_future(self.client.collective_rpc("rm_alive"))
            await asyncio.wait({asked}, timeout=silence)
            if asked.done():
                asked.exception()  # marks the exception as retrieved; a dead engine ends the loop
            elif not self._num_updating:
                _log.error("vLLM's engine gave no sign of life for %.0f s; its server ends", silence)
                os._exit(HUNG_EXIT_CODE)

    async def rewards(self, sequences: Sequence[Sequence[int]], adapter: LoRARequest | None) -> tuple[float, ...]:
        """Raw rewards of the sequences, no activation applied.

        When this returns or raises, none of the sequences is in the engine any more.

        Raises:
            EngineUnavailable: if the engine has died or was ended.
        """
        if not self.is_up:
            raise EngineUnavailable("vLLM's engine has stopped; its supervisor starts another")
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._reward(sequence, adapter)) for sequence in sequences]
        except ExceptionGroup as failures:
            first = failures.exceptions[0]
            raise EngineUnavailable(f"vLLM did not score a batch: {type(first).__name__}: {first}") from failures
        return tuple(task.result() for task in tasks)

    async def _reward(self, sequence: Sequence[int], adapter: LoRARequest | None) -> float:
        from vllm import PoolingParams
        from vllm.inputs.engine import tokens_input

        answers = self.client.encode(
            tokens_input(list(sequence)),
            PoolingParams(task="classify", use_activation=False),
            f"reward-{uuid.uuid4().hex}",
            lora_request=adapter,
        )
        async for answer in answers:
            if answer.finished:
                return float(answer.outputs.data.reshape(()))
        raise EngineUnavailable("vLLM's engine ended a sequence without its reward")

    async def ask_workers(self, method: str, *arguments: Any) -> str | None:
        """Call a method of `RewardWorkerExtension` in every worker; return the first error, or None.

        Raises:
            TimeoutError: if a worker did not finish in time.
        """
        self._num_updating += 1
        try:
            async with asyncio.timeout(UPDATE_SECONDS):
                answers: list[str | None] = await self.client.collective_rpc(method, args=arguments)
        finally:
            self._num_updating -= 1
        return next((answer for answer in answers if answer is not None), None)
