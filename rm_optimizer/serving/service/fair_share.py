"""Fair admission: a client that fills the server's capacity is refused, and the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

CLIENT = ContextVar("CLIENT", default="")
"""Address of the client whose request this task answers."""


class FairShare:
    """Capacity for open requests, of which a new request counts only what fair queuing would do before it.

    Of each open request, or of all open requests of each client together, this is at most the new request's size, where
    a client's size includes its own open requests. The smaller of both sums counts.

    Args:
        most: sum at which a new request is refused.

    Attributes:
        total: size of all open requests.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.total = 0
        self._open: dict[object, tuple[str, int]] = {}

    def excess(self, size: int) -> int:
        """The sum that leaves no room for a new request of this size; 0 if there is room."""
        if self.total < self.most:
            return 0
        by_client = Counter[str]()
        for client, each in self._open.values():
            by_client[client] += each
        own = size + by_client[CLIENT.get()]
        ahead = min(
            sum(min(each, size) for _, each in self._open.values()), sum(min(each, own) for each in by_client.values())
        )
        return ahead if ahead >= self.most else 0

    def hold(self, key: object, size: int) -> None:
        """Count an open request of this size; a further call replaces its size."""
        self.release(key)
        self._open[key] = CLIENT.get(), size
        self.total += size

    def release(self, key: object) -> None:
        """Count the request no more."""
        self.total -= self._open.pop(key, ("", 0))[1]

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Context in which a request of this size is open."""
        key = object()
        self.hold(key, size)
        try:
            yield
        finally:
            self.release(key)
