"""Spans of requests for OpenTelemetry, where its packages are installed and its usual variables name a collector."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from rm_optimizer.errors import ConfigError

ENDPOINTS = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""Variables by which OpenTelemetry finds its collector."""
PROTOCOLS = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
"""Variables by which OpenTelemetry chooses how it sends spans, of which the first one set counts."""
_PACKAGES = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
_HAS_PACKAGE = all(
    map(importlib.util.find_spec, ("opentelemetry", "opentelemetry.trace"))
)  # parts share the first name


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
    if not _HAS_PACKAGE:
        yield
        return
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
