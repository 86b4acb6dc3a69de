"""Read-write lock of a served model: many requests score, or one update changes the weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


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
