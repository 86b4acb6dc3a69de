"""Prometheus metrics of a server, served at `/metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest

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
        self.ready = Gauge("rm_ready", "1 where /ready answers 200.", registry=here)
        self.weights = Info("rm_weights", "Version of the weights that answer.", registry=here)

    def text(self) -> bytes:
        """Prometheus' text form."""
        return generate_latest(self.registry)
