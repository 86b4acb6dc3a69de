"""Prometheus metrics of a server, served at `/metrics`."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

ENTRY: ContextVar[dict[str, Any] | None] = ContextVar("ENTRY", default=None)
"""Line of the access log about the request that this task answers; None outside of requests."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
OTHER_ROUTE = "other"
"""Label of requests that were refused before a route was found."""
UPDATE_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class ServerMetrics:
    """Counts of one server, in a separate registry."""

    def __init__(self) -> None:
        self.registry = here = CollectorRegistry()
        self.requests = Counter("rm_requests", "Requests by route and status.", ["route", "status"], registry=here)
        self.seconds = Histogram("rm_request_seconds", "Seconds to answer.", ["route"], buckets=SECONDS, registry=here)
        waited = "Seconds from a request's arrival in the queue until the engine has its first sequence."
        self.queue_seconds = Histogram("rm_queue_seconds", waited, ["route"], buckets=SECONDS, registry=here)
        computed = "Seconds from the engine's first sequence of a request to its last reward."
        self.engine_seconds = Histogram("rm_engine_seconds", computed, ["route"], buckets=SECONDS, registry=here)
        self.queued_tokens = Gauge("rm_queued_tokens", "Tokens of accepted, unanswered requests.", registry=here)
        self.disconnected = Counter("rm_disconnected", "Requests dropped because their client left.", registry=here)
        self.truncated = Counter("rm_truncated", "Sequences of /get_reward that were cut.", registry=here)
        held = "Texts of conversations with a control token inside."
        self.control_tokens = Counter("rm_control_tokens", held, registry=here)
        self.sequences = Counter("rm_sequences", "Sequences scored.", registry=here)
        self.tokens = Counter("rm_tokens", "Tokens of the sequences scored.", registry=here)
        self.unique_tokens = Counter("rm_unique_tokens", "Of these, common starts counted once.", registry=here)
        self.batch_tokens = Histogram("rm_batch_tokens", "Unique tokens of a batch.", buckets=TOKENS, registry=here)
        self.restarts = Counter("rm_worker_restarts", "Times that the worker process was restarted.", registry=here)
        self.updates = Counter("rm_updates", "Weight updates by how they ended.", ["outcome"], registry=here)
        self.update_seconds = Histogram(
            "rm_update_seconds",
            "Seconds from the beginning of an update to its end.",
            buckets=UPDATE_SECONDS,
            registry=here,
        )
        self.revision = Gauge("rm_weights_revision", "Serial number of the weights that answer.", registry=here)
        self.replicas = Gauge("rm_replicas", "Processes that serve the model.", registry=here)
        held = "Resident memory of a process that serves the model."
        self.replica_bytes = Gauge("rm_replica_memory_bytes", held, ["replica"], registry=here)
        self.ready = Gauge("rm_ready", "1 where /ready answers 200.", registry=here)
        self.weights = Info("rm_weights", "Version of the weights that answer.", registry=here)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=here)

    def note(self, *, sequences: int, tokens: int, queue_seconds: float, engine_seconds: float) -> None:
        """Count a request that the engine has answered, also in its line of the access log."""
        entry: dict[str, Any] = {} if (found := ENTRY.get()) is None else found
        route = entry.get("path", OTHER_ROUTE)
        self.queue_seconds.labels(route).observe(queue_seconds)
        self.engine_seconds.labels(route).observe(engine_seconds)
        entry |= {"sequences": sequences, "tokens": tokens}
        entry |= {"queue_seconds": round(queue_seconds, 6), "engine_seconds": round(engine_seconds, 6)}

    def text(self) -> bytes:
        """Prometheus' text form."""
        return generate_latest(self.registry)
