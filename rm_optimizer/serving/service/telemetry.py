"""Telemetry of a server: Prometheus metrics, its logs, and spans of requests for OpenTelemetry.

Spans are sent where OpenTelemetry's packages are installed and its usual variables name a collector.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
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
)
from starlette.datastructures import Headers
from starlette.types import Scope

from rm_optimizer.errors import ConfigError

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
        counter, gauge = partial(Counter, registry=here), partial(Gauge, registry=here)
        histogram = partial(Histogram, registry=here)
        self.requests = counter("rm_requests", "Requests by route and status.", ["route", "status"])
        self.seconds = histogram("rm_request_seconds", "Seconds to answer.", ["route"], buckets=SECONDS)
        waited = "Seconds from a request's arrival in the queue until the engine has its first sequence."
        self.queue_seconds = histogram("rm_queue_seconds", waited, ["route"], buckets=SECONDS)
        computed = "Seconds from the engine's first sequence of a request to its last reward."
        self.engine_seconds = histogram("rm_engine_seconds", computed, ["route"], buckets=SECONDS)
        self.queued_tokens = gauge("rm_queued_tokens", "Tokens of accepted, unanswered requests.")
        self.disconnected = counter("rm_disconnected", "Requests dropped because their client left.")
        self.truncated = counter("rm_truncated", "Sequences of /get_reward that were cut.")
        self.control_tokens = counter("rm_control_tokens", "Texts of conversations with a control token inside.")
        self.sequences = counter("rm_sequences", "Sequences scored.")
        self.tokens = counter("rm_tokens", "Tokens of the sequences scored.")
        self.unique_tokens = counter("rm_unique_tokens", "Of these, common starts counted once.")
        self.batch_tokens = histogram("rm_batch_tokens", "Unique tokens of a batch.", buckets=TOKENS)
        self.restarts = counter("rm_worker_restarts", "Times that the worker process was restarted.")
        self.updates = counter("rm_updates", "Weight updates by how they ended.", ["outcome"])
        ended = "Seconds from the beginning of an update to its end."
        self.update_seconds = histogram("rm_update_seconds", ended, buckets=UPDATE_SECONDS)
        self.revision = gauge("rm_weights_revision", "Serial number of the weights that answer.")
        self.replicas = gauge("rm_replicas", "Processes that serve the model.")
        held = "Resident memory of a process that serves the model."
        self.replica_bytes = gauge("rm_replica_memory_bytes", held, ["replica"])
        self.ready = gauge("rm_ready", "1 where /ready answers 200.")
        self.weights = Info("rm_weights", "Version of the weights that answer.", registry=here)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=here)


def show_server_log() -> None:
    """Write the package's log from level INFO, which includes weight updates; a second call does nothing."""
    log = logging.getLogger("rm_optimizer")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s rm-opt serve: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
        access, lines = logging.getLogger("rm_optimizer.access"), logging.StreamHandler(sys.stdout)
        access.addHandler(lines)  # whole lines, which a collector of logs reads
        access.propagate = False


def log_line(entry: Mapping[str, Any], form: str) -> str:
    """Line of the access log about a request.

    Args:
        entry: its id, client, method, path, status and seconds; of a scored one, also sequences, tokens and the seconds
            in the queue and in the engine.
        form: `json` for one object with the time, `text` for words.
    """
    if form == "json":
        return json.dumps({"time": round(time.time(), 3), **entry}, ensure_ascii=False)
    what = f"{entry['client']} {entry['method']} {entry['path']!r} {entry['status']} in {1e3 * entry['seconds']:.1f} ms"
    if "tokens" in entry:
        waited, computed = 1e3 * entry["queue_seconds"], 1e3 * entry["engine_seconds"]
        what += (
            f" ({entry['sequences']} sequences, {entry['tokens']} tokens, queue {waited:.1f}, engine {computed:.1f})"
        )
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what} id={entry['id']}"


ENDPOINTS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""Variables by which OpenTelemetry finds its collector."""
PROTOCOLS = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
"""Variables by which OpenTelemetry chooses how it sends spans, of which the first one set counts."""
_PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
HAS_TRACING = all(map(importlib.util.find_spec, ("opentelemetry", "opentelemetry.trace")))
"""True where OpenTelemetry's API is installed; other parts of it share the first name."""


def install_tracing() -> None:
    """Send spans to the collector that the environment names, unless `opentelemetry-instrument` does so already.

    Raises:
        ConfigError: if the environment names one, and its protocol is another or OpenTelemetry's exporter is missing.
    """
    named = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if named is None or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        if isinstance(trace.get_tracer_provider(), TracerProvider):
            return
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"{named} is set, but {error.name} is missing; pip install {_PACKAGES}, or unset it"
        ) from error
    option = next((name for name in PROTOCOLS if os.environ.get(name)), None)
    if option is not None and (protocol := os.environ[option]) != "http/protobuf":
        raise ConfigError(
            f"{option} must be http/protobuf, by which the server sends spans, got {protocol}; set it and the port of "
            f"{named} (4318), or OTEL_TRACES_EXPORTER=none"
        )
    name = os.environ.get("OTEL_SERVICE_NAME", "rm-opt")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


@contextmanager
def request_span(scope: Scope, entry: Mapping[str, Any]) -> Iterator[None]:
    """Span of a request, below its sender's by `traceparent`, with the fields of its line in the access log.

    Args:
        scope: the request.
        entry: fields of the line, complete at the end of the block.
    """
    from opentelemetry import propagate, trace

    sender = propagate.extract(dict(Headers(scope=scope)))
    tracer = trace.get_tracer("rm_optimizer")
    with tracer.start_as_current_span(scope["method"], context=sender, kind=trace.SpanKind.SERVER) as span:
        try:
            yield
        finally:
            route = getattr(scope.get("route"), "path", None)
            names = {"method": "http.request.method", "status": "http.response.status_code", "path": "url.path"}
            names |= {"client": "client.address"}
            for name, value in entry.items():
                span.set_attribute(names.get(name, f"rm.{name}"), value)
            if route is not None:
                span.set_attribute("http.route", route)
                span.update_name(f"{scope['method']} {route}")
            if entry.get("status", 0) >= 500:
                span.set_status(trace.StatusCode.ERROR)
