"""Receiving end of each transport."""

from __future__ import annotations

import asyncio
import errno
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path

from rm_optimizer.errors import RMOptimizerError, WeightsRefused
from rm_optimizer.schema.publish import Transport
from rm_optimizer.serving.update_protocol import Begin
from rm_optimizer.serving.weights.weight_file import check_weight_file, most_header_bytes, num_bytes, write_weight_file

COPIED_BYTES = 8 * 2**20
"""Bytes that are copied at once."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""Errors of the written file, not of the read one."""


class Incoming(ABC):
    """Receiving end of one update.

    Args:
        begin: announcement of the update.
        landing: path of the received file.
    """

    def __init__(self, begin: Begin, landing: Path) -> None:
        self._begin, self._landing = begin, landing

    async def wait_ready(self) -> None:  # noqa: B027 - most can receive at once
        """Return once the sender may transfer.

        Raises:
            RMOptimizerError: if it cannot.
        """

    @abstractmethod
    async def file(self) -> Path:
        """File with all tensors, after waiting for the transfer.

        Raises:
            RMOptimizerError: if the transfer is incomplete.
        """

    def drop(self) -> None:
        """Remove the received file."""
        self._landing.unlink(missing_ok=True)


def incoming(begin: Begin, *, root: Path | None, spool: Path) -> Incoming:
    """Receiving end for an update's transport.

    Args:
        begin: announcement of the update.
        root: folder for the files of the transport `path`; None disables this transport.
        spool: folder for received files.

    Raises:
        WeightsRefused: if the announcement lacks a field of its transport, or the path is not allowed.
    """
    landing = spool / f"{uuid.uuid4().hex}.safetensors"
    if begin.transport is Transport.path:
        return FromPath(begin, root, landing)
    return FromBody(begin, landing) if begin.transport is Transport.inline else FromGroup(begin, landing)


class FromPath(Incoming):
    """Transport by a file below the weights root, copied because the sender may overwrite it.

    Raises:
        WeightsRefused: if there is no root, or the path is not below it.
    """

    def __init__(self, begin: Begin, root: Path | None, landing: Path) -> None:
        if root is None:
            raise WeightsRefused("transport path needs a server with --weights-root; use inline, gloo or nccl")
        if begin.path is None:
            raise WeightsRefused("transport path needs path, the safetensors file below the weights root")
        super().__init__(begin, landing)
        self._root, self._path, self._is_dropped = root, begin.path, False
        checked_path(self._root, self._path)

    async def file(self) -> Path:
        """Copy of the file, after a second check of its path.

        Raises:
            WeightsRefused: if it cannot be copied; nothing of the copy is left then.
        """

        def copied(source: Path) -> Path:
            try:
                with source.open("rb") as given, self._landing.open("wb") as copy:
                    while not self._is_dropped and (piece := given.read(COPIED_BYTES)):
                        copy.write(piece)
            except OSError as error:
                self._landing.unlink(missing_ok=True)
                verb = "written" if error.errno in NO_ROOM else "read"
                raise WeightsRefused(f"the update's file cannot be {verb}: {error.strerror}") from error
            return self._landing

        return await asyncio.to_thread(copied, checked_path(self._root, self._path))

    def drop(self) -> None:
        """Remove the copy; the file belongs to its sender."""
        self._is_dropped = True
        super().drop()


def checked_path(root: Path, path: str) -> Path:
    """Path of a safetensors file below the root, without `..` and without links.

    Raises:
        WeightsRefused: if it is anything else. The text does not reveal if a file outside exists.
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
    except (OSError, ValueError) as error:  # a name that the file system rejects
        raise WeightsRefused("path must be a name that this file system allows") from error
    if not is_direct:
        raise WeightsRefused("path must not lead through a link")
    if not is_there:
        raise WeightsRefused("there is no file at that path")
    return own


class FromBody(Incoming):
    """Transport by the safetensors body of an HTTP request."""

    def __init__(self, begin: Begin, landing: Path) -> None:
        super().__init__(begin, landing)
        self._most = sum(map(num_bytes, begin.tensors)) + most_header_bytes(begin.tensors)
        self._whole = False

    async def receive(self, chunks: AsyncIterator[bytes]) -> int:
        """Write the body and return its size; a repeated body replaces the first.

        Raises:
            WeightsRefused: if it is not a safetensors file with the manifest's tensors, or the disk has no room for it.
        """
        self._whole, size = False, 0
        try:
            with self._landing.open("wb") as file:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > self._most:
                        raise WeightsRefused(f"the body is longer than the manifest's tensors, which take {self._most}")
                    file.write(chunk)
            await asyncio.to_thread(check_weight_file, self._landing, self._begin.tensors)
        except OSError as error:
            raise WeightsRefused(f"the update's file cannot be written: {error.strerror}") from error
        self._whole = True
        return size

    async def file(self) -> Path:
        """File with the body.

        Raises:
            WeightsRefused: if no complete body was received.
        """
        if not self._whole:
            raise WeightsRefused("the body was not uploaded completely before the commit")
        return self._landing


class FromGroup(Incoming):
    """Transport by a process group, received in a thread that ends even if the sender dies.

    Raises:
        WeightsRefused: if it names no rendezvous.
    """

    def __init__(self, begin: Begin, landing: Path) -> None:
        if begin.rendezvous is None:
            raise WeightsRefused(f"transport {begin.transport.value} needs rendezvous, host:port of the sender's store")
        super().__init__(begin, landing)
        self._rendezvous, self._dropped = begin.rendezvous, False
        self._standing, self._received = Future[None](), Future[None]()

    async def wait_ready(self) -> None:
        """Connect to the sender's store, then start the receiving thread.

        Raises:
            TransferFailed: if nothing listens there.
        """
        threading.Thread(target=self._run, name="rm-weights-receive", daemon=True).start()
        await asyncio.wrap_future(self._standing)

    async def file(self) -> Path:
        """File with the tensors.

        Raises:
            TransferFailed: if the sender went away or was too slow.
        """
        await asyncio.shield(asyncio.wrap_future(self._received))
        return self._landing

    def drop(self) -> None:
        """Remove the file, now or when the thread ends."""
        self._dropped = True
        super().drop()
        for future in (self._standing, self._received):
            future.cancel()

    def _run(self) -> None:
        from rm_optimizer.serving.weights.group_transfer import RECEIVER, GroupLink, connect_store, wait_for_sender

        begin = self._begin
        try:
            store = connect_store(self._rendezvous, begin.timeout_seconds)
            _settle(self._standing)
            wait_for_sender(store, begin.timeout_seconds, lambda: self._dropped)
            link = GroupLink(store, RECEIVER, begin.transport, begin.timeout_seconds)
            write_weight_file(self._landing, begin.tensors, link.receive(begin.tensors))
        except (RMOptimizerError, OSError) as error:
            failure = error if isinstance(error, RMOptimizerError) else WeightsRefused(f"cannot be kept: {error}")
            for future in (self._standing, self._received):
                _settle(future, failure)
        else:
            _settle(self._received)
        if self._dropped:
            self._landing.unlink(missing_ok=True)


def _settle(future: Future[None], error: RMOptimizerError | None = None) -> None:
    """End a wait, unless it has ended or was cancelled."""
    if future.done() or not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
