"""Clients that send slowly, stop or leave: told 408 in time, their bytes given back, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest

from rm_optimizer.schema.publish import RewardModelTrainingMode, Transport
from rm_optimizer.serving.http import gate as gate_module
from rm_optimizer.serving.http.gate import Gate
from rm_optimizer.serving.protocol import ErrorBody
from rm_optimizer.serving.service.telemetry import ServerMetrics
from rm_optimizer.serving.update_protocol import Begin
from tests.serving.engines import InProcessEngine, exported, options_of, serve_options
from tests.serving.running import engine_running

SECONDS = 0.5
BODY = json.dumps({"input": [7, 8, 9]}).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that waits half a second for a byte."""
    folder = tmp_path_factory.mktemp("slow")
    exported("llama", folder / "export")
    engine = lambda: InProcessEngine(options_of(folder / "export", folder / "tokenizer"))  # noqa: E731
    with pytest.MonkeyPatch.context() as patch, engine_running(engine) as running:
        patch.setattr(gate_module, "BODY_SECONDS", SECONDS)
        yield running


def opened(url: str, path: str = "/classify", size: int = len(BODY), method: str = "POST") -> socket.socket:
    """A connection that has announced a body and not sent it."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    )
    connection.sendall(head.encode())
    return connection


def answer_of(connection: socket.socket) -> tuple[int, ErrorBody]:
    """The answer, once the server has closed the connection."""
    data = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), ErrorBody.model_validate(json.loads(body))


def test_a_client_that_stops_in_the_middle_is_told_408_and_its_connection_is_closed(server):
    started = time.monotonic()
    with opened(server.url) as connection:
        connection.sendall(BODY[:5])
        status, body = answer_of(connection)
    assert SECONDS <= time.monotonic() - started < 10
    assert (status, body.error.type, body.error.code) == (408, "SlowBody", 408)
    assert body.error.message.startswith("5 bytes of the body came in 0.")


def test_a_client_that_trickles_is_ended_though_it_never_pauses_for_long(server):
    with opened(server.url, size=10_000) as connection:
        done = threading.Event()

        def trickle() -> None:
            while not done.wait(SECONDS / 10):
                try:
                    connection.sendall(b" ")
                except OSError:  # the server has closed
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            head = connection.recv(65536)
        finally:
            done.set()
            thread.join()
    assert head.startswith(b"HTTP/1.1 408 ")


def test_an_upload_of_weights_that_stops_is_told_408_and_the_update_may_go_on(server):
    begin = Begin(
        batch_id="slow",
        mode=RewardModelTrainingMode.head_only,
        version="slow",
        tensors=list(server.engine.description.tensors[RewardModelTrainingMode.head_only]),
        transport=Transport.inline,
    )
    httpx.post(f"{server.url}/rm/weights/begin", json=begin.model_dump(mode="json")).raise_for_status()
    with opened(server.url, "/rm/weights/upload/slow", 1000, "PUT") as connection:
        connection.sendall(b"x" * 100)
        status, body = answer_of(connection)
    assert (status, body.error.type) == (408, "SlowBody")
    assert httpx.get(f"{server.url}/rm/weights/status").json()["active"] == "slow"
    outcome = httpx.post(f"{server.url}/rm/weights/abort", json={"batch_id": "slow"}).json()
    assert (outcome["status"], outcome["version"]) == ("aborted", server.engine.description.version)


def test_many_slow_clients_keep_nobody_waiting(server):
    connections = [opened(server.url) for _ in range(100)]
    for connection in connections:
        connection.sendall(BODY[:5])
    slowest = 0.0
    with httpx.Client(base_url=server.url, timeout=20) as client:
        for _ in range(20):
            started = time.monotonic()
            assert client.post("/classify", content=BODY, headers={"content-type": "application/json"}).is_success
            slowest = max(slowest, time.monotonic() - started)
    assert slowest < SECONDS * 10
    assert {answer_of(connection)[0] for connection in connections} == {408}
    for connection in connections:
        connection.close()


def test_a_slow_body_that_ends_in_time_is_answered(server):
    with opened(server.url) as connection:
        for place in range(0, len(BODY), 6):
            connection.sendall(BODY[place : place + 6])
            time.sleep(SECONDS / 50)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def scripted(parts):
    """Statuses and the admission control, after a POST whose body comes as `(seconds before it, bytes)`."""
    statuses = []

    async def read_all(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main():
        left = list(parts)

        async def receive():
            if not left:
                await asyncio.Event().wait()
            pause, body = left.pop(0)
            await asyncio.sleep(pause)
            return {"type": "http.request", "body": body, "more_body": bool(left)}

        async def send(message):
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        gate = Gate(read_all, ServerMetrics(), serve_options())
        await gate({"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}, receive, send)
        return gate

    return statuses, asyncio.run(main())


def test_every_byte_earns_time_and_none_is_held_after_the_end(monkeypatch):
    monkeypatch.setattr(gate_module, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(gate_module, "LEAST_BYTES_PER_SECOND", 100.0)
    earned = [(0.0, b"x" * 1000), *[(0.2, b"x")] * 3]  # waits 0.6 s, of 0.5 s and ten earned ones
    for parts, expected in ((earned, 200), ([(0.0, b"x"), *earned[1:]], 408), ([(0.8, b"x" * 1000)], 408)):
        statuses, gate = scripted(parts)
        assert statuses == [expected]
        assert (gate.bytes.total, gate.requests.total) == (0, 0)
