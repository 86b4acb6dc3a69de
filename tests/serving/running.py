"""Servers that answer over real HTTP: in a thread of this process around any engine, or as `rm-opt serve`."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from rm_optimizer.schema.publish import Transport
from rm_optimizer.serving.http.app import create_app
from rm_optimizer.serving.service.api_errors import MAX_HEADER_BYTES
from rm_optimizer.serving.service.service import RewardService
from rm_optimizer.serving.weights.receiver import WeightReceiver
from tests.serving.engines import serve_options
from tests.serving.server_processes import ServerProcess

READY_SECONDS = 300.0


def free_socket() -> socket.socket:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    return listening


@contextmanager
def app_running(app: ASGIApp, **options: object) -> Iterator[str]:
    """The URL of an application that runs in a thread, with options of uvicorn."""
    listening = free_socket()
    limits = {"http": "h11", "h11_max_incomplete_event_size": 4 * MAX_HEADER_BYTES}
    config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", **limits | options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        listening.close()


@contextmanager
def engine_running(make_engine, *, root: Path | None = None, **options: object) -> Iterator[SimpleNamespace]:
    """A whole server around an engine, with weight updates: `url`, `engine` and `receiver`."""
    state = SimpleNamespace()
    limits = {"max_queued_tokens": options.pop("max_queued_tokens", 20_000)}
    lock = asyncio.Lock()

    async def build() -> FastAPI:
        state.engine = make_engine()
        state.service = RewardService(state.engine, model_name="rm", **limits)
        state.receiver = WeightReceiver(state.service, root=root, transports=frozenset(Transport))
        app = create_app(state.service, serve_options(**options), state.receiver)
        await state.service.start()
        return app

    async def answer(scope, receive, send) -> None:  # built on the loop that will run it
        async with lock:
            if not hasattr(state, "app"):
                state.app = await build()
        await state.app(scope, receive, send)

    with app_running(answer) as url:
        state.url = url
        assert httpx.get(f"{url}/ready", timeout=60).status_code in (200, 401)
        yield state


@contextmanager
def serve_process(checkpoint: Path, *options: str, port: int | None = None) -> Iterator[SimpleNamespace]:
    """`rm-opt serve` as a forked process: `url` and `process`.

    Args:
        checkpoint: checkpoint that it serves.
        options: more options of the command.
        port: None takes a free one.
    """
    with free_socket() as taken:
        port = port or taken.getsockname()[1]
    arguments = [
        *("serve", str(checkpoint), "--port", str(port), "--threads", "1", "--token-budget", "512"),
        *("--transports", "inline,path,gloo", *options),
    ]
    process = ServerProcess(arguments)
    state = SimpleNamespace(url=f"http://127.0.0.1:{port}", process=process)
    try:
        wait_ready(state)
        yield state
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_ready(state: SimpleNamespace) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        assert state.process.poll() is None, "the server ended"
        try:
            if httpx.get(f"{state.url}/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise TimeoutError("the server did not become ready")
