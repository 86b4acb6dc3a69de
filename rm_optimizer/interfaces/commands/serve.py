"""`rm-opt serve`: the server process, from loading the model to the last response."""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rm_optimizer.errors import Interrupted, MissingExtra, RMOptimizerError
from rm_optimizer.records.files import held
from rm_optimizer.schema.publish import Transport
from rm_optimizer.serving.child_process import keep_running
from rm_optimizer.serving.options import ServeOptions, WorkerOptions

if TYPE_CHECKING:
    import uvicorn

    from rm_optimizer.serving.engine import Engine
    from rm_optimizer.serving.service.service import RewardService

GRACEFUL_SECONDS = 30
"""Seconds to answer open requests after SIGTERM."""
LISTENER_MODULES = (
    "uvicorn",
    "transformers.tokenization_utils_tokenizers",
    "rm_optimizer.serving.embedded.engine",
    "rm_optimizer.serving.http.app",
)
"""Modules of the process that listens; their import takes seconds."""
WATCH_SECONDS = 0.5
KEEP_ALIVE_SECONDS = 75
"""Seconds that an idle connection stays open; longer than the defaults of load balancers and clients."""


def serve(options: ServeOptions) -> None:
    """Serve a reward model over HTTP until SIGTERM. Rewards are raw unless a request asks for their sigmoid."""
    from rm_optimizer.core.storage.model_files import refuse_by_files

    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package.replace("_", "-"), "serve")
    if options.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vLLM", "vllm")
    with bound_socket(options.host, options.port) as listening, kept_state(options) as options:
        if options.warning is not None:
            print(f"rm-opt serve: warning: {options.warning}", file=sys.stderr, flush=True)
        refuse_by_files(options.checkpoint)
        if options.check is not None and not Path(options.check).is_file():
            refuse_by_files(options.check)
        if options.engine == "auto":
            takes_vllm = False
            if not options.ray and importlib.util.find_spec("vllm") is not None:
                from rm_optimizer.serving.embedded.vllm_model import suits_vllm

                takes_vllm = suits_vllm(options.checkpoint)
            options = replace(options, engine="vllm" if takes_vllm else "transformers")
        _serve(options, listening)


@contextmanager
def kept_state(options: ServeOptions) -> Iterator[ServeOptions]:
    """Hold the folder of published weights; several replicas get a temporary one, and a process that restarts theirs.

    Raises:
        ConfigError: if another server holds the folder.
    """
    if options.replicas == 1 and not options.ray and options.state is None:
        yield options
        return
    folder = Path(tempfile.mkdtemp(prefix="rm-state-")) if options.state is None else options.state.resolve()
    starter = os.getpid()
    try:
        with held(folder, "update", remedy="choose another --state"):
            if options.replicas > 1 or options.ray:
                for module in LISTENER_MODULES:  # a restart forks this process, and so imports nothing
                    importlib.import_module(module)
                keep_running("the server")
            yield replace(options, state=folder)
    finally:
        if options.state is None and os.getpid() == starter:
            shutil.rmtree(folder, ignore_errors=True)


def bound_socket(host: str, port: int) -> socket.socket:
    """Bound socket, reserved for this server.

    Raises:
        RMOptimizerError: if the address is in use, or does not belong to this machine.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        reason = (error.strerror or str(error)).lower()
        raise RMOptimizerError(f"cannot listen on {host}:{port} ({reason}); choose another --port or --host") from error
    return listening


def _serve(options: ServeOptions, listening: socket.socket) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
    from rm_optimizer.serving.embedded.engine import worker_ahead

    with nullcontext() if options.ray else worker_ahead(options.engine):
        _serve_http(options, listening)


def _serve_http(options: ServeOptions, listening: socket.socket) -> None:
    import uvicorn  # the imports take seconds, in which a signal ends the command at once

    from rm_optimizer.serving.embedded.engine import WorkerEngine
    from rm_optimizer.serving.http.app import create_app
    from rm_optimizer.serving.http.gate import MAX_BACKLOG, most_connections
    from rm_optimizer.serving.service.api_errors import MAX_HEADER_BYTES
    from rm_optimizer.serving.service.service import RewardService
    from rm_optimizer.serving.service.telemetry import install_tracing, show_server_log
    from rm_optimizer.serving.weights.receiver import WeightReceiver

    async def main() -> None:
        threads = options.threads
        if threads is None and options.replicas > 1:
            threads = max(1, (os.cpu_count() or 1) // options.replicas)
        worker = WorkerOptions(
            options.checkpoint,
            dtype=options.dtype,
            token_budget=options.token_budget,
            threads=threads,
            engine=options.engine,
            replicas=options.replicas,
        )
        engine: Engine
        if options.ray:
            from rm_optimizer.serving.embedded.ray_replicas import RayEngine

            assert options.state is not None, "a folder is made where none is given"
            engine = RayEngine(worker, options.state)
        else:
            engine = WorkerEngine(worker, folder=options.state)
        service = RewardService(engine, model_name=options.model_name, max_queued_tokens=options.max_queued_tokens)
        transports = frozenset(map(Transport, options.transport_names))
        receiver = WeightReceiver(service, root=options.weights_root, transports=transports, state=options.state)
        config = uvicorn.Config(
            create_app(service, options, receiver if options.takes_updates else None),
            host=options.host,
            port=options.port,
            http="h11",  # of uvicorn's two parsers the one with a limit on incomplete headers
            h11_max_incomplete_event_size=4 * MAX_HEADER_BYTES,  # up to this the answer is a typed 431
            limit_concurrency=most_connections(),
            backlog=MAX_BACKLOG,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACEFUL_SECONDS,
        )
        try:
            await _run(uvicorn.Server(config), listening, service, options)
        finally:
            await receiver.close()

    install_tracing()
    show_server_log()
    asyncio.run(main())


async def _run(server: uvicorn.Server, listening: socket.socket, service: RewardService, options: ServeOptions) -> None:
    """Listen at once and load the model meanwhile: `/health` answers before `/ready` does.

    After the first SIGTERM or SIGINT accepted requests are answered, and after the second they are not.

    Raises:
        RMOptimizerError: if the model cannot be loaded, or the engine fails for good.
        Interrupted: after SIGINT.
    """
    told: list[int] = []

    def stop(number: int) -> None:
        told.append(number)
        server.should_exit = True
        if len(told) > 1:
            server.force_exit = True
            for name in ("uvicorn.error", "rm_optimizer"):  # of each open request, and of the worker's end
                logging.getLogger(name).setLevel(logging.CRITICAL)
            for child in multiprocessing.active_children():
                child.kill()

    server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]  # its handlers raise signals again at the end
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    answering = asyncio.create_task(_answer(service, options))
    try:
        await asyncio.wait({serving, answering}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        failure = answering.exception() if answering.done() else None
        await serving
        if failure is not None and not told:  # a model that is still loading fails when it is stopped
            raise failure
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await service.stop()
    if signal.SIGINT in told:
        raise Interrupted("stopped")
    print("rm-opt serve: stopped", flush=True)


async def _answer(service: RewardService, options: ServeOptions) -> None:
    """Load the model and serve it without returning; a server that can no longer answer raises an error.

    Raises:
        RMOptimizerError: if the model cannot be loaded, does not match its certificate, or its engine has failed.
    """
    await _load(service, options)
    while service.engine.failure is None:
        await asyncio.sleep(WATCH_SECONDS)
    raise RMOptimizerError(f"the server cannot answer any more: {service.engine.failure}")


async def _load(service: RewardService, options: ServeOptions) -> None:
    url = options.url
    print(f"rm-opt serve: loading {options.checkpoint}; {url}/health answers meanwhile", flush=True)
    check = None
    if options.check is not None:
        from rm_optimizer.explanation.explain import require_rewards

        check = partial(require_rewards, options)
    await service.start(check)
    gc.collect()
    gc.freeze()  # loaded objects stay, so collections during requests need not visit them
    description, parity = service.engine.description, service.parity
    shown = "no certificate to compare with"
    if parity is not None:
        shown = f"parity {parity.max_difference:.2g}, {parity.flipped_pairs} of {parity.num_pairs} orders flipped"
    if service.obstacle is not None:
        raise RMOptimizerError(f"{options.checkpoint} cannot be served: {service.obstacle}")
    print(
        f"rm-opt serve: ready: {url} serves '{service.model_name}' ({description.engine}, {description.architecture}, "
        f"{description.dtype}, {description.device}, passes of {description.token_budget} tokens; {shown}); "
        f"API at {url}/docs",
        flush=True,
    )
