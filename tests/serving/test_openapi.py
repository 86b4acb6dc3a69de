from __future__ import annotations

import asyncio
import socket
import threading
import time

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings

from rm_optimizer.serving.protocol import ErrorBody
from tests.serving.engines import InProcessEngine, exported, options_of, served

EXAMPLES = 10
"""Cases of each operation."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A server on a socket, in a thread."""
    folder = tmp_path_factory.mktemp("export") / "model"
    exported("llama", folder)
    port, servers = free_port(), []

    async def main():
        app = await served(InProcessEngine(options_of(folder, folder.parent / "tokenizer")))
        servers.append(uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", ws="none")))
        await servers[0].serve()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    deadline = time.monotonic() + 60
    while not (servers and servers[0].started) and time.monotonic() < deadline:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    servers[0].should_exit = True
    thread.join()


def test_no_request_that_the_document_allows_breaks_the_server(url):
    schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json").json())
    operations = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/classify", "/rm/score", "/get_reward", "/health"}
    seen = set()
    for operation in operations:

        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy())
        def check(case):
            answer = case.call(base_url=url)
            seen.add(answer.status_code)
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                assert ErrorBody.model_validate(answer.json()).error.code == answer.status_code

        check()
    assert {200, 400} <= seen


@pytest.mark.parametrize(
    "body", [b"", b"null", b"\x00", b"\xff\xfe", b'{"input": NaN}', b'{"input": 1e999}', b'{"input": "a"' * 9]
)
def test_bodies_that_are_no_request_get_a_typed_400(url, body):
    answer = httpx.post(f"{url}/classify", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert ErrorBody.model_validate(answer.json()).error.type == "InvalidRequest"
