"""Who may ask for what: keys, hosts, sizes of headers and numbers of connections, and that every refusal is counted."""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import time

import httpx
import pytest

from rm_optimizer.serving.http.gate import most_connections
from rm_optimizer.serving.protocol import ErrorBody
from rm_optimizer.serving.service.api_errors import MAX_HEADER_BYTES
from tests.serving.engines import FakeEngine, client_of, served_without_reader
from tests.serving.running import app_running

JSON = {"content-type": "application/json"}


def application(**options: object):
    return served_without_reader(FakeEngine(), **options)


def statuses(app, *requests: tuple[str, str, dict[str, str]]) -> list[int]:
    async def main() -> list[int]:
        async with client_of(app) as client:
            return [(await client.request(method, path, headers=head)).status_code for method, path, head in requests]

    return asyncio.run(main())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_the_key_of_updates_scores_nothing_and_the_key_of_scores_updates_nothing():
    app = application(api_key="score", update_key="update")
    update, info = ("GET", "/rm/weights/status"), ("GET", "/rm/info")
    asked = [(*update, bearer("score")), (*update, bearer("update")), (*info, bearer("update")), (*info, {}),
             ("POST", "/rm/weights/begin", bearer("score")), ("POST", "/rm/weights/begin/", {})]  # fmt: skip
    assert statuses(app, *asked) == [401, 503, 401, 401, 401, 401]  # it is loading


def test_a_key_of_updates_alone_leaves_scoring_open():
    app = application(update_key="update")
    assert statuses(app, ("GET", "/rm/weights/status", {}), ("GET", "/rm/info", {})) == [401, 503]


def test_probes_of_an_orchestrator_need_no_key():
    app = application(api_key="score", update_key="update")
    asked = [("GET", "/health", {}), ("GET", "/ping", {}), ("POST", "/health", {}), ("GET", "/health/", {})]
    assert statuses(app, *asked)[:2] == [200, 200]
    assert set(statuses(app, *asked)[2:]) == {401}


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("LOCALHOST", 200), ("evil.example", 400),
     ("localhost.evil.example", 400), ("127.0.0.1.evil.example:80", 400), ("", 400), ("[::1].evil", 400)],
)  # fmt: skip
def test_a_server_of_this_machine_answers_to_its_own_names_alone(host, status):
    assert statuses(application(host="127.0.0.1"), ("GET", "/health", {"host": host})) == [status]


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/metrics", "/version", "/rm/info", "/docs"])
def test_head_answers_as_get_does_and_without_a_body(path):
    with app_running(application(host="127.0.0.1")) as url:
        get, head = httpx.get(url + path), httpx.head(url + path)
        with connected(url) as probe:
            probe.sendall(f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
            old = b"".join(iter(lambda: probe.recv(65536), b""))
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert old.split()[1] == str(get.status_code).encode()
    assert old.endswith(b"\r\n\r\n")


def test_a_request_with_two_lengths_ends_its_connection():
    lengths = b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    request = b"POST /classify HTTP/1.1\r\nHost: localhost\r\n" + lengths
    with app_running(application()) as url, connected(url) as sender:
        sender.sendall(request + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        sender.settimeout(10)
        answer = b"".join(iter(lambda: sender.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    ("path", "head", "body", "text"),
    [("/classify", {}, b'{"input": "x"}', "content-type: application/json, got None"),
     ("/classify", {"content-type": "text/plain"}, b'{"input": "x"}', "content-type: application/json, got text/plain"),
     ("/classify", {"content-type": "application/x-www-form-urlencoded"}, b"input=x", "content-type: application/json"),
     ("/rm/weights/commit", {}, b"{}", "content-type: application/json"),
     ("/classify", {"content-encoding": "gzip"} | JSON, b"\x1f\x8b\x08", "content-encoding gzip"),
     ("/classify", JSON, b'{"input": "\xff"}', "can't decode byte 0xff"),
     ("/classify", JSON, b"9" * 5000, "4300 digits"),
     ("/classify", JSON, b'{"use_activation": false, "use_activation": true}', "got 'use_activation' 2 times"),
     ("/rm/weights/commit", JSON, b'{"batch_id": "a", "batch_id": "b"}', "got 'batch_id' 2 times"),
     ("/rm/score", JSON, b'{"items": [{"prompt": "a", "prompt": "b", "responses": []}]}', "got 'prompt' 2 times"),
     ("/rm/score", JSON, b'{"prompt": "a", "responses": ["b"]}', 'takes {"items"')],
)  # fmt: skip
def test_a_body_that_is_not_what_the_server_reads_is_told_what_it_expects(path, head, body, text):
    async def main() -> httpx.Response:
        async with client_of(application()) as client:
            return await client.post(path, content=body, headers=head)

    answer = asyncio.run(main())
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidRequest")
    assert text in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score", "/v1/embeddings", "/predict", "/pooling", "/rerank", "/rm"])
def test_a_route_of_another_server_names_the_routes_of_this_one(path):
    async def main() -> str:
        async with client_of(application()) as client:
            return (await client.post(path, content=b"{}")).json()["error"]["message"]

    message = asyncio.run(main())
    assert all(route in message for route in ("/classify", "/rm/score", "/get_reward", "/docs", f"POST {path}"))


def test_every_refusal_has_our_form_and_is_counted():
    app = application(api_key="score")

    async def main() -> tuple[list[httpx.Response], str]:
        async with client_of(app) as client:
            large = {"x": "y" * MAX_HEADER_BYTES}
            answers = [
                await client.post("/classify", json={}),
                await client.get("/nowhere", headers=bearer("score")),
                await client.post("/classify", content=b"x", headers=bearer("score") | {"content-length": str(2**40)}),
                await client.get("/health", headers=large),
                await client.post("/classify", json={"input": "a"}, headers=bearer("score")),
            ]
            return answers, (await client.get("/metrics", headers=bearer("score"))).text

    answers, text = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [401, 404, 413, 431, 503]
    for answer in answers:
        assert ErrorBody.model_validate(answer.json()).error.code == answer.status_code
    for status in (401, 404, 413, 431):
        assert f'rm_requests_total{{route="other",status="{status}"}} 1.0' in text
    assert 'rm_requests_total{route="/classify",status="503"} 1.0' in text


def test_the_page_of_the_api_needs_no_internet_and_no_script():
    async def main() -> tuple[str, dict[str, object]]:
        async with client_of(application(api_key="score")) as client:
            page = await client.get("/docs", headers=bearer("score"))
            return page.text, (await client.get("/openapi.json", headers=bearer("score"))).json()

    page, described = asyncio.run(main())
    assert '<a href="/openapi.json">' in page
    assert not re.search(r"<script|<link|src=|href=.http", page)
    assert all(f" {path}</code>" in page for path in described["paths"])
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    assert all(operation["security"] == [{"key": []}] for operation in operations)
    assert not any("422" in operation["responses"] for operation in operations)


def connected(url: str) -> socket.socket:
    return socket.create_connection((httpx.URL(url).host, httpx.URL(url).port or 80), timeout=20)


def test_a_connection_too_many_is_told_503_and_served_once_another_has_ended():
    with app_running(served_without_reader(FakeEngine()), limit_concurrency=4) as url:
        idle = [connected(url) for _ in range(4)]
        assert httpx.get(f"{url}/health").status_code == 503
        for connection in idle:
            connection.close()
        time.sleep(0.2)
        assert httpx.get(f"{url}/health").status_code == 200


def test_headers_without_an_end_are_refused():
    with app_running(served_without_reader(FakeEngine())) as url, connected(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: server\r\nx: " + b"y" * 100_000)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_a_whole_head_that_is_too_large_is_refused_over_http():
    with app_running(served_without_reader(FakeEngine())) as url, connected(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: server\r\nx: " + b"y" * 60_000 + b"\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("files", [64, 128, 256, 1024, 2**20, resource.RLIM_INFINITY])
def test_connections_leave_files_for_the_rest(monkeypatch, files):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    assert 16 <= most_connections() <= 2048
    assert most_connections() <= files - 48 or files == resource.RLIM_INFINITY
