"""Ray processes that tokenize blocks or compute with a model; they start with little memory and output."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import distributed

from rm_optimizer.core.streaming.blocks import Block, BlockTokenizer, BlockTokens
from rm_optimizer.errors import ConfigError, DataError, DataStalled, MissingExtra, RMOptimizerError

Model = TypeVar("Model")
Chunk = TypeVar("Chunk")
Result = TypeVar("Result")
_LOCAL = "local"
"""Address of a Ray of this process alone; without an address Ray joins any cluster that it finds on this machine."""
_MEGABYTE = 2**20
_START_SECONDS = 300
_CANCEL_SECONDS = 10
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",
}
"""Settings of Ray: little output, and workers with the priority of this process.

With Ray's own priority of 15 the workers get a fortieth of a busy core. On a machine whose cores are all busy, a run
then waits for its data: a stream that starts in 10 s took 90 s.
"""


class BlockWorker:
    """Worker that tokenizes blocks in its own process; a user's mistake is returned as its message."""

    def __init__(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a worker
        self._tokenizer: BlockTokenizer | None = None

    def prepare(self, shared: Sequence[Any]) -> BlockTokenizer:
        """Fetch the tokenizer, once; a worker that died and was started again has none."""
        if self._tokenizer is None:
            self._tokenizer = load_ray().get(shared[0])
        return self._tokenizer

    def is_ready(self, shared: Sequence[Any]) -> bool:
        """True once the tokenizer is there."""
        return self.prepare(shared) is not None

    def tokenize(self, shared: Sequence[Any], block: Block) -> BlockTokens | str:
        """The block's tokens, or what is wrong with it."""
        try:
            return self.prepare(shared).tokenize(block)
        except DataError as error:
            return str(error)


class TokenizerPool:
    """Workers that tokenize blocks in parallel and return them in the order of the requests.

    If Ray already runs in this process, or `RAY_ADDRESS` names a cluster with the same files, the workers join it.
    Otherwise a local instance without dashboard or telemetry is started, and ended by `close`. It ends with this
    process, also after a kill.

    Args:
        tokenizer: tokenizer of blocks that each worker runs.
        num_workers: processes.
        store_mb: memory of the local object store, through which tokens travel.
        fetch_timeout: seconds that one block may take.

    Raises:
        MissingExtra: if Ray is not installed.
        DataStalled: if the workers do not start.
    """

    def __init__(self, tokenizer: BlockTokenizer, *, num_workers: int, store_mb: int, fetch_timeout: float) -> None:
        self._ray = load_ray()
        self._timeout = fetch_timeout
        self._started = not self._ray.is_initialized()
        if self._started:
            _start(self._ray, num_workers, store_mb)
        # A cluster places workers by the cores they take; in one machine two streams may share them.
        cores = int("RAY_ADDRESS" in os.environ)
        actor = self._ray.remote(num_cpus=cores, max_restarts=-1, max_task_retries=-1)(BlockWorker)
        self._shared = [self._ray.put(tokenizer)]  # in a list, or each call would unpack it anew
        self._workers = [actor.remote() for _ in range(num_workers)]
        self._asked = 0
        self._pending: set[Any] = set()
        started = [worker.is_ready.remote(self._shared) for worker in self._workers]
        try:  # waits here, so that loading torch in each worker does not count as fetching
            self._ray.get(started, timeout=_START_SECONDS)
        except self._ray.exceptions.GetTimeoutError as error:
            self.close()
            raise DataStalled(
                f"Ray's workers did not start within {_START_SECONDS} s; lower data.num_workers, or free memory"
            ) from error

    def ask(self, blocks: Sequence[Block]) -> list[Any]:
        """Start on blocks; `collect` takes what is returned."""
        first, self._asked = self._asked, self._asked + len(blocks)
        workers = (self._workers[(first + i) % len(self._workers)] for i in range(len(blocks)))
        asked = [worker.tokenize.remote(self._shared, block) for worker, block in zip(workers, blocks, strict=True)]
        self._pending.update(asked)
        return asked

    def collect(self, asked: Sequence[Any]) -> Iterator[BlockTokens]:
        """Blocks in the order asked.

        Raises:
            DataError: if a block holds a bad row.
            DataStalled: if a block does not come in time.
        """
        for reference in asked:
            try:
                tokens = self._ray.get(reference, timeout=self._timeout)
            except self._ray.exceptions.GetTimeoutError as error:
                raise DataStalled(
                    f"no Ray worker delivered the next block within {self._timeout:g} s; look for a slow or lost disk, "
                    "or raise data.fetch_timeout"
                ) from error
            self._pending.discard(reference)
            if isinstance(tokens, str):
                raise DataError(tokens)
            yield tokens

    def close(self) -> None:
        """End the workers, and Ray with them if it was started here."""
        if self._pending and self._ray.is_initialized():
            for reference in self._pending:
                self._ray.cancel(reference)
            self._ray.wait(list(self._pending), num_returns=len(self._pending), timeout=_CANCEL_SECONDS)
        self._pending.clear()
        self._workers = []  # Ray ends an actor that nothing refers to
        if self._started and self._ray.is_initialized():
            self._ray.shutdown()

    def __enter__(self) -> TokenizerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def load_ray() -> Any:
    """The `ray` module.

    Raises:
        MissingExtra: if it is not installed.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtra("ray", "ray") from error


def connected_ray(address: str | None = None) -> Any:
    """The `ray` module, connected to a cluster.

    Args:
        address: address of the cluster; None uses `RAY_ADDRESS`, or starts Ray on this machine.

    Raises:
        MissingExtra: if Ray is not installed.
    """
    ray = load_ray()
    if not ray.is_initialized():
        address = address or os.environ.get("RAY_ADDRESS") or _LOCAL
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    return ray


class _Computer:
    """Actor with an object, which each call brings by a reference in a list, since Ray would unpack it anew."""

    _object: Any = None

    def computed(self, compute: Callable[[Any, Any], Any], shared: Sequence[Any], chunk: Any) -> Any:
        torch.set_num_threads(1)  # a sum's last bits depend on the number
        if self._object is None:
            self._object = load_ray().get(shared[0])
        return compute(self._object, chunk)


_leads = threading.Event()
"""Set in the first process of several while the others wait in `follow_chunks`."""


def lead_chunks() -> None:
    """Let `map_chunks` deal chunks to the other processes of torch.distributed until `end_chunks`."""
    torch.set_num_threads(1)  # a sum's last bits depend on the number
    _leads.set()


def change_model() -> None:
    """End `follow_chunks` in the other processes; the launcher ends those that an error has interrupted."""
    if _leads.is_set():
        distributed.scatter_object_list([None], [None] * distributed.get_world_size())


def end_chunks() -> None:
    """Change the model for the last time: `map_chunks` computes in this process again."""
    change_model()
    _leads.clear()


def follow_chunks(model: Any) -> None:
    """Compute chunks that the first process deals until it ends.

    Args:
        model: the object that the first process gives to `map_chunks`.
    """
    torch.set_num_threads(1)
    while True:
        received: list[Any] = [None]
        distributed.scatter_object_list(received)
        if received[0] is None:
            return
        distributed.gather_object(_answer(model, *received[0]))


def _answer(model: Any, compute: Callable[[Any, Any], Any], chunk: Any) -> Any:
    """Result of a chunk, or the error that ends the command; None for a chunk that fills a round."""
    try:
        return None if chunk is None else compute(model, chunk)
    except RMOptimizerError as error:
        return error


def _over_processes(compute: Callable[[Any, Any], Any], model: Any, chunks: Iterable[Any]) -> Iterator[Any]:
    """Results of chunks, one for each process in a round."""
    rest, size = iter(chunks), distributed.get_world_size()
    for dealt in iter(lambda: list(islice(rest, size)), []):
        tasks = [(compute, chunk) for chunk in [*dealt, *[None] * (size - len(dealt))]]
        own: list[Any] = [None]
        answers: list[Any] = [None] * size
        _leads.clear()
        distributed.scatter_object_list(own, tasks)
        distributed.gather_object(_answer(model, *own[0]), answers)
        _leads.set()
        for answer in answers[: len(dealt)]:
            if isinstance(answer, RMOptimizerError):
                raise answer
            yield answer


def map_chunks(
    compute: Callable[[Model, Chunk], Result], model: Model, chunks: Iterable[Chunk], num_workers: int | None
) -> Iterator[Result]:
    """Results of the chunks in their order, the same for any number of workers on Ray or of processes of torchrun.

    A worker has at most two chunks at a time, and Ray replaces one that dies.

    Args:
        compute: function of the model and a chunk.
        model: object that every worker receives once.
        chunks: read as they are needed.
        num_workers: actors with one thread or one GPU each; None computes in this process, and in those that it leads.

    Raises:
        MissingExtra: if Ray is not installed.
        ConfigError: if there are more workers than Ray has GPUs, unless it has none.
        RMOptimizerError: if Ray ends.
    """
    if num_workers is None:
        yield from _over_processes(compute, model, chunks) if _leads.is_set() else (compute(model, c) for c in chunks)
        return
    ray = connected_ray()
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if 0 < num_gpus < num_workers:
        raise ConfigError(
            f"--ray (of select: --ray-workers) must be at most {num_gpus}, the GPUs that Ray has, got {num_workers}"
        )
    shared = [ray.put(model)]
    cores = int("RAY_ADDRESS" in os.environ)  # a cluster places workers by their cores; on one machine they share them
    need = {"num_gpus": 1} if num_gpus else {"num_cpus": cores}
    actor = ray.remote(**need, max_restarts=-1, max_task_retries=-1)(_Computer)
    workers = [actor.remote() for _ in range(num_workers)]
    waiting = deque[Any]()
    try:
        for number, chunk in enumerate(chunks):
            if len(waiting) == 2 * num_workers:
                yield ray.get(waiting.popleft())
            waiting.append(workers[number % num_workers].computed.remote(compute, shared, chunk))
        while waiting:
            yield ray.get(waiting.popleft())
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        reason = str(error).splitlines()[0]
        raise RMOptimizerError(
            f"Ray's workers ended ({reason}); the same command continues from what is done"
        ) from error
    finally:
        for worker in workers:
            ray.kill(worker)


def _start(ray: Any, num_workers: int, store_mb: int) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    handler = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {"logging_level": logging.ERROR, "configure_logging": False, "log_to_driver": False}
    if not os.environ.get("RAY_ADDRESS"):
        memory = store_mb * _MEGABYTE
        options |= {
            "address": _LOCAL,
            "num_cpus": num_workers,
            "object_store_memory": memory,
            "include_dashboard": False,
        }
    try:
        ray.init(**options)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray takes it; a run saves a checkpoint on it
