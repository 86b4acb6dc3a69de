"""The receiving end of each transport: where the tensors land, and when they are all there."""

from __future__ import annotations

import asyncio
import errno
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

from rm_optimizer.errors import RMOptimizerError
from rm_optimizer.serving.engine import WeightsRefused
from rm_optimizer.serving.protocol import Begin, Transport
from rm_optimizer.serving.weights.weight_file import check_weight_file, most_header_bytes, num_bytes

COPIED_BYTES = 8 * 2**20
"""Bytes that are copied at once."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Errors of the file that is written, not of the one that is read."""


class Incoming(Protocol):
    """One update on its way in."""

    async def stand(self) -> None:
        """Return once the sender may transfer.

        Raises:
            RMOptimizerError: if it never may.
        """
        ...

    async def file(self) -> Path:
        """The file with everything that was sent; waits for what is under way.

        Raises:
            RMOptimizerError: if it did not come whole.
        """
        ...

    def drop(self) -> None:
        """Remove what came."""
        ...


def incoming(begin: Begin, *, root: Path | None, spool: Path) -> Incoming:
    """The receiving end that an update asks for.

    Args:
        begin: the announcement.
        root: where files of the transport `path` must lie; None has no such transport.
        spool: folder for what arrives.

    Raises:
        WeightsRefused: if the announcement lacks what its transport needs, or the path is not allowed.
    """
    landing = spool / f"{uuid.uuid4().hex}.safetensors"
    if begin.transport is Transport.path:
        return FromPath(begin, root, landing)
    return FromBody(begin, landing) if begin.transport is Transport.inline else FromGroup(begin, landing)


class FromPath:
    """A file that the sender has put below the weights root, copied, as its sender may write it again in place.

    Args:
        begin: the announcement.
        root: of the weights.
        landing: the file it is copied to.

    Raises:
        WeightsRefused: if there is no root, or the path is not below it.
    """

    def __init__(self, begin: Begin, root: Path | None, landing: Path) -> None:
        if root is None:
            raise WeightsRefused("transport path needs a server with a weights root; use inline, gloo or nccl")
        if begin.path is None:
            raise WeightsRefused("transport path needs path, the safetensors file below the weights root")
        self._root, self._path, self._landing = root, begin.path, landing
        self._is_dropped = False
        checked_path(self._root, self._path)

    async def stand(self) -> None:
        """The file is read at the commit; there is nothing to wait for."""

    async def file(self) -> Path:
        """A copy of the file, which is looked at once more.

        Raises:
            WeightsRefused: if it cannot be copied; nothing of the copy is left then.
        """
        return await asyncio.to_thread(self._copied, checked_path(self._root, self._path))

    def _copied(self, source: Path) -> Path:
        try:
            with source.open("rb") as given, self._landing.open("wb") as copy:
                while not self._is_dropped and (piece := given.read(COPIED_BYTES)):
                    copy.write(piece)
        except OSError as error:
            self._landing.unlink(missing_ok=True)
            verb = "written" if error.errno in NO_ROOM else "read"
            raise WeightsRefused(f"the update's file cannot be {verb}: {error.strerror}") from error
        return self._landing

    def drop(self) -> None:
        """Remove the copy; the file is its sender's."""
        self._is_dropped = True
        self._landing.unlink(missing_ok=True)


def checked_path(root: Path, path: str) -> Path:
    """A safetensors file below the root, reached without `..` and without links.

    Raises:
        WeightsRefused: if it is anything else. The answer is the same whether or not a file outside exists.
    """
    base = root.resolve()
    given = Path(path) if Path(path).is_absolute() else base / path
    inside = given.is_relative_to(base) or given.is_relative_to(root)
    if "\0" in path or ".." in given.parts or not inside:
        raise WeightsRefused("path must lie below the server's weights root")
    own = base / given.relative_to(base if given.is_relative_to(base) else root)
    if own.suffix != ".safetensors":
        raise WeightsRefused(f"path must end with .safetensors, got {own.name!r}")
    try:
        is_direct, is_there = own.resolve() == own, own.is_file()
    except (OSError, ValueError) as error:  # a name that the file system does not take
        raise WeightsRefused("path is no name of a file here") from error
    if not is_direct:
        raise WeightsRefused("path must not lead through a link")
    if not is_there:
        raise WeightsRefused("there is no file at that path")
    return own


class FromBody:
    """A safetensors body of an HTTP request.

    Args:
        begin: the announcement.
        landing: the file it is written to.
    """

    def __init__(self, begin: Begin, landing: Path) -> None:
        self._landing = landing
        self._specs = begin.tensors
        self._most = sum(map(num_bytes, begin.tensors)) + most_header_bytes(begin.tensors)
        self._whole = False

    async def stand(self) -> None:
        """The route is always there."""

    async def receive(self, chunks: AsyncIterator[bytes]) -> int:
        """Write the body; a repeated one replaces the first. The bytes that came.

        Raises:
            WeightsRefused: if it is no safetensors file with the manifest's tensors, or the disk has no room for it.
        """
        self._whole, size = False, 0
        try:
            with self._landing.open("wb") as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > self._most:
                        raise WeightsRefused(f"the body is longer than the manifest's tensors, which take {self._most}")
                    file.write(chunk)
            await asyncio.to_thread(check_weight_file, self._landing, self._specs)
        except OSError as error:
            raise WeightsRefused(f"the update's file cannot be written: {error.strerror}") from error
        self._whole = True
        return size

    async def file(self) -> Path:
        """The body as a file.

        Raises:
            WeightsRefused: if none came whole.
        """
        if not self._whole:
            raise WeightsRefused("no whole body was uploaded before the commit")
        return self._landing

    def drop(self) -> None:
        """Remove the file."""
        self._landing.unlink(missing_ok=True)


class FromGroup:
    """Tensors through a process group, received by a thread that a dead sender cannot keep from ending.

    Args:
        begin: the announcement.
        landing: the file they are written to.

    Raises:
        WeightsRefused: if it names no rendezvous.
    """

    def __init__(self, begin: Begin, landing: Path) -> None:
        if begin.rendezvous is None:
            raise WeightsRefused(f"transport {begin.transport.value} needs rendezvous, host:port of the sender's store")
        self._begin, self._rendezvous, self._landing = begin, begin.rendezvous, landing
        loop = asyncio.get_running_loop()
        self._standing: asyncio.Future[None] = loop.create_future()
        self._received: asyncio.Future[None] = loop.create_future()
        self._loop = loop
        self._dropped = False

    async def stand(self) -> None:
        """Connect to the sender's store; the thread then waits in the group.

        Raises:
            TransferFailed: if nobody listens there.
        """
        threading.Thread(target=self._run, name="rm-weights-receive", daemon=True).start()
        await self._standing

    async def file(self) -> Path:
        """The tensors as a file.

        Raises:
            TransferFailed: if the sender went away or was too slow.
        """
        await asyncio.shield(self._received)
        return self._landing

    def drop(self) -> None:
        """Remove the file, now or when the thread ends."""
        self._dropped = True
        self._landing.unlink(missing_ok=True)
        for future in (self._standing, self._received):
            future.cancel()

    def _run(self) -> None:
        from rm_optimizer.serving.weights.group_transfer import RECEIVER, GroupLink, connect_store, wait_for_sender
        from rm_optimizer.serving.weights.weight_file import WeightFileWriter

        begin = self._begin
        try:
            store = connect_store(self._rendezvous, begin.timeout_seconds)
            self._tell(_done, self._standing)
            wait_for_sender(store, begin.timeout_seconds, lambda: self._dropped)
            link = GroupLink(store, RECEIVER, begin.transport, begin.timeout_seconds)
            with WeightFileWriter(self._landing, begin.tensors) as writer:
                link.receive(begin.tensors, writer)
        except (RMOptimizerError, OSError) as error:
            failure = error if isinstance(error, RMOptimizerError) else WeightsRefused(f"cannot be kept: {error}")
            for future in (self._standing, self._received):
                self._tell(_failed, future, failure)
        else:
            self._tell(_done, self._received)
        if self._dropped:
            self._landing.unlink(missing_ok=True)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the server has stopped
            return


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _failed(future: asyncio.Future[None], error: RMOptimizerError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # seen, should nobody wait for it
