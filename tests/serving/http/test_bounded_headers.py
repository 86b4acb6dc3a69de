"""Clients that never finish their headers: told so in time and in our form, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress

import httpx
import pytest

from rm_optimizer.serving.http.slow_clients import BoundedHeaders
from rm_optimizer.serving.protocol import ErrorBody
from rm_optimizer.serving.service.api_errors import MAX_HEADER_BYTES
from tests.serving.running import app_running

SECONDS = 0.5
HEAD = b"GET / HTTP/1.1\r\nHost: server\r\n"
ANSWER = b"it is answered"


class Impatient(BoundedHeaders):
    seconds = SECONDS


async def application(scope, receive, send) -> None:
    """Answers at once, whatever of the body has come; `/later` after more than the headers' time."""
    await asyncio.sleep(3 * SECONDS if scope["path"] == "/later" else 0)
    length = (b"content-length", str(len(ANSWER)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": ANSWER})


@pytest.fixture(scope="module")
def url():
    with app_running(application, Impatient) as running:
        yield running


def connected(url: str) -> socket.socket:
    target = httpx.URL(url)
    return socket.create_connection((target.host, target.port), timeout=20)


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and kind of an answer in our form that closes its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    headers = head.lower().split(b"\r\n")
    assert {b"connection: close", b"content-type: application/json"} <= set(headers)
    assert b"content-length: %d" % len(body) in headers
    error = ErrorBody.model_validate(json.loads(body)).error
    assert error.code == int(head.split()[1])
    return error.code, error.type


def next_answer(connection: socket.socket) -> bytes:
    """The body of one answer 200, and not a byte of the next."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += received(connection, 1)
    assert head.startswith(b"HTTP/1.1 200 ")
    return received(connection, len(ANSWER))


def received(connection: socket.socket, count: int) -> bytes:
    """So many bytes; fails where the server closes before."""
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        assert part, "the server closed the connection"
        data += part
    return data


@pytest.mark.parametrize(
    "sent", [b"GE", b"GET / HTTP/1.1\r\n", HEAD, HEAD + b"\r"], ids=["word", "line", "head", "end"]
)
def test_a_client_that_stops_in_its_headers_is_told_408_and_its_connection_is_closed(url, sent):
    started = time.monotonic()
    with connected(url) as connection:
        connection.sendall(sent)
        assert error_of(rest_of(connection)) == (408, "SlowHeaders")
    assert SECONDS <= time.monotonic() - started < 10


def test_a_client_that_sends_nothing_is_hung_up_on_without_a_word(url):
    with connected(url) as connection:
        assert rest_of(connection) == b""


def test_a_client_that_trickles_is_ended_though_it_never_pauses_for_long(url):
    answer, done = bytearray(), threading.Event()

    def read(connection: socket.socket) -> None:
        answer.extend(connection.recv(65536))
        done.set()

    started = time.monotonic()
    with connected(url) as connection:
        connection.sendall(HEAD)
        reader = threading.Thread(target=read, args=(connection,))
        reader.start()
        with suppress(OSError):  # the server has closed
            while not done.wait(SECONDS / 20):
                connection.sendall(b"x: 1\r\n")
        reader.join()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - started < 10


def test_a_second_request_on_a_connection_has_no_more_time_than_the_first(url):
    with connected(url) as connection:
        connection.sendall(HEAD + b"\r\n")
        assert next_answer(connection) == ANSWER
        connection.sendall(HEAD)
        assert error_of(rest_of(connection)) == (408, "SlowHeaders")


def header_of(num_bytes: int) -> bytes:
    """A whole request, so many bytes long."""
    return HEAD + b"x: " + b"y" * (num_bytes - len(HEAD) - 7) + b"\r\n" + b"\r\n"


@pytest.mark.parametrize("piece", [1000, MAX_HEADER_BYTES + 1])
def test_headers_without_an_end_are_refused_at_their_most_bytes(url, piece):
    head = header_of(MAX_HEADER_BYTES + 1)[:-2] + b"z:"
    assert len(head) == MAX_HEADER_BYTES + 1
    with connected(url) as connection:
        for start in range(0, len(head), piece):
            connection.sendall(head[start : start + piece])
        assert error_of(rest_of(connection)) == (431, "HeadersTooLarge")


def test_headers_of_the_most_bytes_are_taken(url):
    head = header_of(MAX_HEADER_BYTES)
    with connected(url) as connection:
        for start in range(0, len(head), 1000):
            connection.sendall(head[start : start + 1000])
        assert next_answer(connection) == ANSWER


def test_what_is_no_http_is_refused_in_our_form(url):
    with connected(url) as connection:
        connection.sendall(b"\x16\x03\x01 no such thing\r\n\r\n")
        assert error_of(rest_of(connection)) == (400, "InvalidRequest")


def test_an_answer_may_take_longer_than_the_headers(url):
    with connected(url) as connection:
        connection.sendall(b"GET /later HTTP/1.1\r\nHost: server\r\n\r\n")
        assert next_answer(connection) == ANSWER
        connection.sendall(HEAD + b"\r\n")
        assert next_answer(connection) == ANSWER


def test_the_rest_of_a_body_that_was_answered_early_is_no_header(url):
    body = b"x" * (8 * MAX_HEADER_BYTES)
    with connected(url) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nHost: server\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:10])
        assert next_answer(connection) == ANSWER
        connection.sendall(body[10:])
        connection.sendall(HEAD + b"\r\n")
        assert next_answer(connection) == ANSWER


def test_requests_sent_at_once_are_all_answered(url):
    with connected(url) as connection:
        connection.sendall(b"GET /later HTTP/1.1\r\nHost: server\r\n\r\n" + HEAD + b"\r\n")
        assert next_answer(connection) == ANSWER
        assert next_answer(connection) == ANSWER


def test_many_slow_clients_keep_nobody_waiting(url):
    connections = [connected(url) for _ in range(200)]
    for connection in connections:
        connection.sendall(HEAD)
    slowest = 0.0
    with httpx.Client(base_url=url, timeout=20) as client:
        for _ in range(20):
            started = time.monotonic()
            assert client.get("/").is_success
            slowest = max(slowest, time.monotonic() - started)
    assert slowest < SECONDS * 10
    assert {error_of(rest_of(connection)) for connection in connections} == {(408, "SlowHeaders")}
    for connection in connections:
        connection.close()
