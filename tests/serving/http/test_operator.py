"""What an operator reads: ids of requests, the access log, and the metrics of the process and of the queue."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import re
import runpy
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rm_optimizer.errors import ConfigError
from rm_optimizer.serving.options import ServeOptions
from rm_optimizer.serving.service import telemetry
from rm_optimizer.serving.service.telemetry import install_tracing
from tests.serving.engines import InProcessEngine, client_of, exported, options_of, served

BODY = {"items": [{"prompt": "Hi", "responses": ["Hello.", "Go away."]}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("export")
    exported("llama", found)
    return found


@pytest.fixture
def answers(folder, tmp_path):
    """Function that sends requests to a server with these options, one after the other."""

    def send(*requests, **options):
        async def main():
            app = await served(InProcessEngine(options_of(folder, tmp_path / "tokenizer")), **options)
            async with client_of(app) as client:
                return [await client.request(method, path, **more) for method, path, more in requests]

        return asyncio.run(main())

    return send


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "rm_optimizer.access"]


def test_a_request_keeps_its_id_or_gets_one_also_in_a_refusal(answers):
    own = {"headers": {"x-request-id": "step-7/part:3"}}
    kept, refused, new, bad = answers(
        ("POST", "/rm/score", {"json": BODY, **own}),
        ("POST", "/rm/score", {"json": {"items": 1}, **own}),
        ("GET", "/nowhere", {}),
        ("GET", "/health", {"headers": {"x-request-id": "two words"}}),
    )
    assert [each.headers["x-request-id"] for each in (kept, refused)] == ["step-7/part:3"] * 2
    assert [each.status_code for each in (kept, refused, new, bad)] == [200, 400, 404, 200]
    ids = {each.headers["x-request-id"] for each in (new, bad)}
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)
    assert len(ids) == 2


def test_a_line_about_each_request_has_its_work_and_where_its_time_went(answers, caplog):
    requests = (("POST", "/rm/score?a=1", {"json": BODY, "headers": {"x-request-id": "a"}}), ("GET", "/nowhere", {}))
    with caplog.at_level(logging.INFO, "rm_optimizer.access"):
        answers(*requests, access_log="json")
        scored, missing = (json.loads(record.message) for record in lines(caplog)[-2:])
        answers(*requests, access_log="text")
        texts = [record.message for record in lines(caplog)[-2:]]
        answers(*requests)
    assert len(lines(caplog)) == 4
    assert {name: scored[name] for name in ("id", "method", "path", "status", "sequences")} == {
        "id": "a",
        "method": "POST",
        "path": "/rm/score",
        "status": 200,
        "sequences": 2,
    }
    assert scored["queue_seconds"] >= 0
    assert 0 < scored["engine_seconds"] <= scored["seconds"] - scored["queue_seconds"]
    assert (missing["status"], "tokens" in missing) == (404, False)
    work = r"2 sequences, \d+ tokens, queue [\d.]+, engine [\d.]+"
    when = r"[\d-]{10} [\d:]{8} \S+"
    assert re.fullmatch(rf"{when} POST '/rm/score' 200 in [\d.]+ ms \({work}\) id=a", texts[0])
    assert re.fullmatch(rf"{when} GET '/nowhere' 404 in [\d.]+ ms id=[0-9a-f]{{32}}", texts[1])


def test_a_path_cannot_write_a_line_of_its_own(answers, caplog):
    with caplog.at_level(logging.INFO, "rm_optimizer.access"):
        answers(("GET", "/a%0Aforged", {}), access_log="text")
        answers(("GET", "/a%0Aforged", {}), access_log="json")
    assert [record.message.count("\n") for record in lines(caplog)] == [0, 0]


def test_metrics_tell_waiting_from_computing_and_describe_the_process(answers):
    *_, metrics = answers(("POST", "/rm/score", {"json": BODY}), ("GET", "/metrics", {}))
    samples = {
        (sample.name, sample.labels.get("route")): sample.value
        for family in text_string_to_metric_families(metrics.text)
        for sample in family.samples
    }
    for name in ("queue", "engine"):
        assert samples[f"rm_{name}_seconds_count", "/rm/score"] == 1
    parts = samples["rm_queue_seconds_sum", "/rm/score"] + samples["rm_engine_seconds_sum", "/rm/score"]
    assert 0 < parts <= samples["rm_request_seconds_sum", "/rm/score"]
    assert {("process_resident_memory_bytes", None), ("python_gc_collections_total", None)} <= samples.keys()


def test_an_unknown_form_of_the_log_is_refused():
    with pytest.raises(ConfigError, match="unknown --access-log 'jsno'; did you mean 'json'"):
        ServeOptions("model", access_log="jsno")


def test_the_examples_of_the_document_are_answered(answers):
    (told,) = answers(("GET", "/openapi.json", {}))
    document = told.json()
    requests = []
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        kind = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
        examples = document["components"]["schemas"].get(kind, {}).get("examples", ())
        requests += [("POST", path, {"json": example}) for example in examples]
    assert {path for _, path, _ in requests} == {"/classify", "/rm/score", "/get_reward"}
    assert [answer.text for answer in answers(*requests) if answer.status_code != 200] == []
    tags = {tag for operations in document["paths"].values() for each in operations.values() for tag in each["tags"]}
    assert tags == {"rewards", "operation"}


def test_a_request_has_a_span_below_its_senders(answers, monkeypatch):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    sender = {"traceparent": f"00-{7:032x}-{9:016x}-01", "x-request-id": "a"}
    answers(("POST", "/rm/score", {"json": BODY, "headers": sender}), ("POST", "/nowhere", {}))
    scored, missing = spans.get_finished_spans()
    assert (scored.name, scored.context.trace_id, scored.parent.span_id) == ("POST /rm/score", 7, 9)
    assert (scored.attributes["rm.id"], scored.attributes["rm.sequences"]) == ("a", 2)
    assert scored.attributes["rm.engine_seconds"] > 0
    assert (missing.name, missing.parent, missing.attributes["http.response.status_code"]) == ("POST", None, 404)


def test_a_collector_without_a_package_to_reach_it_is_named(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT is set, but opentelemetry.* pip install"):
        install_tracing()


def test_spans_can_be_turned_off_and_are_sent_by_one_protocol(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", object)
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf, .* got grpc; set it"):
        install_tracing()
    started = []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")  # which counts more
    monkeypatch.setattr("opentelemetry.sdk.trace.export.BatchSpanProcessor", lambda _: None)
    monkeypatch.setattr("opentelemetry.trace.set_tracer_provider", started.append)
    monkeypatch.setattr("opentelemetry.sdk.trace.TracerProvider.add_span_processor", lambda *_: None)
    install_tracing()
    assert len(started) == 1
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    install_tracing()
    assert len(started) == 1


def test_a_part_of_opentelemetry_alone_gives_no_spans(monkeypatch):
    has_part = {"opentelemetry": True}  # as the package of its messages, which Ray brings
    monkeypatch.setattr(importlib.util, "find_spec", has_part.get)
    assert not runpy.run_path(telemetry.__file__)["HAS_TRACING"]
