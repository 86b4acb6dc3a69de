"""`rm-opt serve`: the server's process, from loading the model to the last answer."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rm_optimizer.errors import ConfigError, MissingExtra, RMOptimizerError, did_you_mean

if TYPE_CHECKING:
    import uvicorn

    from rm_optimizer.serving.service import RewardService

GRACEFUL_SECONDS = 30
"""Longest that requests may take to be answered once the server is told to stop."""
WATCH_SECONDS = 0.5
ENGINES = ("auto", "transformers", "vllm")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ServeOptions:
    """What `rm-opt serve` was told.

    Args:
        checkpoint: anything `BradleyTerryRM.from_pretrained` loads.
        engine: `transformers`, `vllm`, or `auto`, which is vllm where it is installed and the model suits it.
        host: address to bind.
        port: port to bind.
        api_key: what every request must bring; None asks for nothing.
        dtype: type of the backbone's weights.
        token_budget: tokens of one pass; None measures.
        max_queued_tokens: most tokens of unanswered requests.
        weights_root: folder below which weight updates may name files; None allows none.
        served_model_name: what requests call the model.
        threads: CPU threads of the model; None leaves PyTorch's own number.
    """

    checkpoint: str
    engine: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    dtype: str = "float32"
    token_budget: int | None = None
    max_queued_tokens: int = 131_072
    weights_root: Path | None = None
    served_model_name: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for option, value, known in (("--engine", self.engine, ENGINES), ("--dtype", self.dtype, DTYPES)):
            if value not in known:
                raise ConfigError(did_you_mean(option, value, known))
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("--api-key must not be empty")
        if self.weights_root is not None and not self.weights_root.is_dir():
            raise ConfigError(f"--weights-root must be a folder that exists, got {self.weights_root}")


def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C; what was accepted by then is answered first.

    Raises:
        MissingExtra: if the server's packages, or vLLM where it was asked for, are not installed.
        RMOptimizerError: if the model cannot be loaded, or the port is taken.
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package.replace("_", "-"), "serve")
    if _takes_vllm(options):
        _serve_with_vllm(options)
    else:
        asyncio.run(_serve(options))


def _takes_vllm(options: ServeOptions) -> bool:
    if options.engine != "auto":
        return options.engine == "vllm"
    if importlib.util.find_spec("vllm") is None:
        return False
    from rm_optimizer.serving.vllm_folder import suits_vllm

    return suits_vllm(options.checkpoint)


def _serve_with_vllm(options: ServeOptions) -> None:
    from rm_optimizer.serving.vllm_launch import VllmOptions, serve_with_vllm

    values = {key: value for key, value in vars(options).items() if key not in ("engine", "served_model_name")}
    serve_with_vllm(VllmOptions(**values, model_name=options.served_model_name or Path(options.checkpoint).name))


async def _serve(options: ServeOptions) -> None:
    import uvicorn

    from rm_optimizer.serving.app import create_app
    from rm_optimizer.serving.bounded_headers import BoundedHeaders
    from rm_optimizer.serving.protocol import Transport
    from rm_optimizer.serving.receiver import WeightReceiver
    from rm_optimizer.serving.service import RewardService
    from rm_optimizer.serving.transformers_engine import TransformersEngine
    from rm_optimizer.serving.weight_routes import weight_router
    from rm_optimizer.serving.worker import WorkerOptions

    worker = WorkerOptions(
        options.checkpoint, dtype=options.dtype, token_budget=options.token_budget, threads=options.threads
    )
    name = options.served_model_name or Path(options.checkpoint).name
    service = RewardService(TransformersEngine(worker), model_name=name, max_queued_tokens=options.max_queued_tokens)
    receiver = WeightReceiver(service, root=options.weights_root, transports=frozenset(Transport))
    app = create_app(service, api_key=options.api_key, routers=[weight_router(receiver)])
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        http=BoundedHeaders,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACEFUL_SECONDS,
    )
    try:
        await _run(uvicorn.Server(config), service, options)
    finally:
        await receiver.close()


async def _run(server: uvicorn.Server, service: RewardService, options: ServeOptions) -> None:
    """Listen at once and load beside it: `/health` answers while `/ready` does not.

    uvicorn catches SIGTERM and raises it again at its end; by then everything is answered, and nothing is left to do.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    listening = asyncio.create_task(_listen(server))
    answering = asyncio.create_task(_answer(service, options))
    try:
        await asyncio.wait({listening, answering}, return_when=asyncio.FIRST_COMPLETED)
        failure = answering.exception() if answering.done() else None
        if failure is not None:
            server.should_exit = True
        await listening
        if failure is not None:
            raise failure
    finally:
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await service.stop()
    print("rm-opt serve: stopped", flush=True)


async def _listen(server: uvicorn.Server) -> None:
    try:
        await server.serve()
    except SystemExit as stop:  # uvicorn's way to say that the port is taken; its log has the reason
        host, port = server.config.host, server.config.port
        raise RMOptimizerError(f"cannot listen on {host}:{port}; choose another --port") from stop


async def _answer(service: RewardService, options: ServeOptions) -> None:
    """Load the model, and return never: a server that can answer no more ends with the reason.

    Raises:
        RMOptimizerError: if the model cannot be loaded, is not the one of its certificate, or is lost for good.
    """
    await _load(service, options)
    while service.engine.failure is None:
        await asyncio.sleep(WATCH_SECONDS)
    raise RMOptimizerError(f"the server can answer no more: {service.engine.failure}")


async def _load(service: RewardService, options: ServeOptions) -> None:
    url = f"http://{options.host}:{options.port}"
    print(f"rm-opt serve: loading {options.checkpoint}; {url}/health answers meanwhile", flush=True)
    await service.start()
    description, parity = service.engine.description, service.parity
    shown = "no certificate to compare with"
    if parity is not None:
        shown = f"parity {parity.max_difference:.2g}, {parity.flipped_pairs} of {parity.num_pairs} orders flipped"
    if service.obstacle is not None:
        raise RMOptimizerError(f"{options.checkpoint} cannot be served: {service.obstacle}")
    print(
        f"rm-opt serve: ready: {url} serves '{service.model_name}' ({description.architecture}, {description.dtype}, "
        f"{description.device}, passes of {description.token_budget} tokens; {shown}); API at {url}/docs",
        flush=True,
    )
