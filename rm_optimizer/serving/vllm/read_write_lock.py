"""Who may use the model: many who score, or the one who changes its weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ReadWriteLock:
    """A lock for many readers or one writer; a writer who waits keeps new readers out, so it comes soon.

    What a reader sees between entering and leaving is of one version: the writer drains, changes, and admits again.
    """

    def __init__(self) -> None:
        self._change = asyncio.Condition()
        self._readers = 0
        self._writers = 0
        self._is_writing = False

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Among the readers, once no writer waits."""
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
        """Alone: the readers have left, and new ones wait."""
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
