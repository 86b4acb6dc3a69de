"""Ray: processes that tokenize blocks, and chunks computed by Ray Data, by other processes of torchrun or in this one.

It does not import torch, which takes seconds in each process of Ray Data.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from rm_optimizer.errors import ConfigError, DataError, DataStalled, MissingExtra, RMOptimizerError

if TYPE_CHECKING:
    from rm_optimizer.core.streaming.blocks import Block, BlockTokenizer, BlockTokens

Model = TypeVar("Model")
Chunk = TypeVar("Chunk")
Result = TypeVar("Result")
_MEGABYTE = 2**20
_CANCEL_SECONDS = 10
_START_SECONDS = 300
"""Seconds within which Ray must have started the processes of all workers."""
_LOCAL = "local"
"""Address of a Ray of this process alone; without an address Ray joins any cluster that it finds on this machine."""
_OPTION = "--ray (of select: --ray-workers)"
_ATTEMPTS = 3
"""Most workers that may die on one chunk. Ray Data has no option for it: `ray_remote_args` ends with Ray 2.64."""
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


def load_ray(name: str = "ray") -> Any:
    """The module `ray`, or a part of it.

    Args:
        name: full name of the module.

    Raises:
        MissingExtra: if Ray, or the pandas that Ray Data imports, is not installed.
    """
    for setting, value in _SETTINGS.items():
        os.environ.setdefault(setting, value)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("ray", "pandas"):
            raise
        raise MissingExtra(error.name, "ray") from error


def _cluster() -> str | None:
    address = os.environ.get("RAY_ADDRESS")
    return None if address == _LOCAL else address or None


def connected_ray(address: str | None = None, **local: int) -> Any:
    """The `ray` module, connected to a cluster, or to the Ray that already runs in this process.

    Args:
        address: address of the cluster; None uses `RAY_ADDRESS`, or starts Ray on this machine, which ends with this
            process, also after a kill.
        local: options of `ray.init` for a Ray that starts here.

    Raises:
        MissingExtra: if Ray is not installed.
    """
    ray = load_ray()
    if not ray.is_initialized():
        handler = signal.getsignal(signal.SIGTERM)
        address = address or _cluster()
        options: dict[str, Any] = {} if address else {**local, "include_dashboard": False}
        try:
            ray.init(address=address or _LOCAL, log_to_driver=False, logging_level=logging.ERROR, **options)
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray takes it; a run saves a checkpoint on it
    return ray


def _worker_resources(ray: Any, num_workers: int, option: str, *, uses_gpu: bool) -> dict[str, int]:
    """Resources that Ray reserves for a worker: a GPU where there are some, else a core.

    A cluster places workers by their cores. On one machine they share them, and reserve none.

    Args:
        ray: the connected module.
        num_workers: number of workers.
        option: option that sets the number.
        uses_gpu: False if workers need no GPU.

    Raises:
        ConfigError: if there are more workers than Ray has GPUs, or than a cluster has cores.
    """
    found = ray.cluster_resources()
    gpus, cores = (int(found.get(kind, 0)) for kind in ("GPU", "CPU"))
    most, unit = (gpus, "GPUs") if uses_gpu and gpus else (cores, "cores")
    if (unit == "GPUs" or _cluster()) and num_workers > most:
        raise ConfigError(f"{option} must be at most {most}, the {unit} that Ray has, got {num_workers}")
    return {"num_gpus": 1} if unit == "GPUs" else {"num_cpus": int(_cluster() is not None)}


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
        connected_ray(num_cpus=num_workers, object_store_memory=store_mb * _MEGABYTE)
        resources = _worker_resources(self._ray, num_workers, "data.num_workers", uses_gpu=False)
        actor = self._ray.remote(**resources, max_restarts=-1, max_task_retries=-1)(BlockWorker)
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
                f"Ray's workers did not start in {_START_SECONDS} s; lower data.num_workers, or free cores and memory"
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


def _one_thread() -> Any:
    """`torch` with one thread, since a sum's last bits depend on the number."""
    import torch

    torch.set_num_threads(1)
    return torch


def _answer(model: Any, compute: Callable[[Any, Any], Any], chunk: Any) -> Any:
    """Result of a chunk, or the error that ends the command, which may be the model or the chunk; None for None."""
    if isinstance(model, RMOptimizerError):
        return model
    try:
        return chunk if chunk is None or isinstance(chunk, RMOptimizerError) else compute(model, chunk)
    except RMOptimizerError as error:
        return error


class _Attempts:
    """Actor that counts how many times the workers have begun each chunk."""

    def __init__(self) -> None:
        self._counts = Counter[int]()

    def begin(self, number: int) -> int:
        """The number of attempts at a chunk, with this one."""
        self._counts[number] += 1
        return self._counts[number]


class _Computer:
    """Actor with a model and a function, which the first chunk fetches, and the handle of `_Attempts`."""

    _task: Any = None

    def __init__(self, shared: list[Any]) -> None:
        self._shared = shared

    def __call__(self, block: Any) -> dict[str, list[bytes]]:
        _one_thread()
        (entry,), ray = block["entry"].to_pylist(), load_ray()
        number, chunk = pickle.loads(entry)
        if ray.get(self._shared[1].begin.remote(number)) > _ATTEMPTS:
            told = f"{_ATTEMPTS} workers died on one chunk, perhaps for lack of memory; lower {_OPTION} or free memory"
            answer: Any = RMOptimizerError(f"{told}, and repeat the command, which continues from what is done")
        else:  # the model may be what does not fit into memory
            model, compute = self._task = self._task or ray.get(self._shared[0])
            answer = _answer(model, compute, chunk)
        return {"entry": [pickle.dumps(answer)]}


def _read_entries(shared: list[Any]) -> Iterator[dict[str, bytes]]:
    """Rows of Ray Data with the number and content of each chunk, and the error that ends them."""
    try:
        for entry in enumerate(load_ray().get(shared[0])):
            yield {"entry": pickle.dumps(entry)}
    except RMOptimizerError as error:
        yield {"entry": pickle.dumps((-1, error))}


def _over_ray_data(
    compute: Callable[[Any, Any], Any], model: Any, chunks: Iterable[Any], num_workers: int
) -> Iterator[Any]:
    """Results of chunks by the actor pool of Ray Data.

    Another process of this machine reads the chunks as they are needed, up to the memory that Ray Data plans for them.
    Ray replaces an actor that dies, and repeats its chunk, which `_Attempts` limits.
    """
    data, ray = load_ray("ray.data"), connected_ray()
    resources = _worker_resources(ray, num_workers, _OPTION, uses_gpu=True)
    dataset = data.from_items([0])
    context = dataset.context
    context.target_max_block_size = 1  # every chunk is a block, which is what an actor takes
    context.wait_for_min_actors_s, context.execution_no_progress_timeout_s = _START_SECONDS, -1
    context.raise_original_map_exception = context.execution_options.preserve_order = True
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}  # the machine that has the file
    attempts = ray.remote(num_cpus=0, label_selector=here)(_Attempts).remote()
    dataset = dataset.flat_map(
        lambda _, shared: _read_entries(shared), fn_args=[[ray.put(chunks)]], num_cpus=0, label_selector=here
    )
    dataset = dataset.map_batches(
        _Computer,
        fn_constructor_args=[[ray.put((model, compute)), attempts]],
        batch_size=1,  # also keeps the reader out of the actors
        batch_format="pyarrow",
        compute=data.ActorPoolStrategy(size=num_workers),
        **resources,
    )
    (results,) = dataset.streaming_split(1)  # runs Ray Data in a process of its own, whose output is not shown
    try:
        with closing(iter(results.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"))) as blocks:
            for block in blocks:
                for entry in block["entry"].to_pylist():
                    answer = pickle.loads(entry)
                    if isinstance(answer, RMOptimizerError):
                        raise answer
                    yield answer
    except ray.exceptions.GetTimeoutError as error:
        raise RMOptimizerError(
            f"Ray has not started {num_workers} workers within {_START_SECONDS} s; lower {_OPTION}, or wait until the "
            "cluster has free cores and memory"
        ) from error
    except ray.exceptions.RayError as error:
        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayTaskError):
            cause = cause.cause
        if not isinstance(cause, ray.exceptions.RayError):
            cause.args = tuple(  # without Ray Data's advice
                arg.partition("\nFailed to apply UDF")[0] if isinstance(arg, str) else arg for arg in cause.args
            )
            raise cause from error
        reason = str(cause).strip().splitlines()[0]
        raise RMOptimizerError(
            f"Ray's workers ended ({reason}); the same command continues from what is done"
        ) from error


_leads = threading.Event()
"""Set in the first process of several while the others wait in `follow_chunks`."""


def lead_chunks() -> None:
    """Let `map_chunks` deal chunks to the other processes of torch.distributed until `end_chunks`."""
    if _one_thread().distributed.get_world_size() > 1:
        _leads.set()


def change_model(*, goes_on: bool = True) -> None:
    """End `follow_chunks` in the other processes; the launcher ends those that an error has interrupted.

    Args:
        goes_on: True if chunks of another model follow.
    """
    if _leads.is_set():
        distributed = _one_thread().distributed
        distributed.scatter_object_list([None], [goes_on] * distributed.get_world_size())


def end_chunks() -> None:
    """End the last model: `map_chunks` computes in this process again."""
    change_model(goes_on=False)
    _leads.clear()


def follow_chunks(load: Callable[[], Any]) -> bool:
    """Compute chunks that the first process deals until it changes the model, and return True if it loads another.

    Args:
        load: function that loads what the first process gives to `map_chunks`. Its error answers the first chunk, since
            the first process would otherwise wait for a process that has ended.
    """
    distributed = _one_thread().distributed
    model = _answer(None, lambda _, load: load(), load)
    while True:
        received: list[Any] = [None]
        distributed.scatter_object_list(received)
        if isinstance(received[0], bool):
            return received[0]
        distributed.gather_object(_answer(model, *received[0]))


def _over_processes(compute: Callable[[Any, Any], Any], model: Any, chunks: Iterable[Any]) -> Iterator[Any]:
    """Results of chunks, one for each process in a round."""
    distributed = _one_thread().distributed
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

    Args:
        compute: function of the model and a chunk.
        model: object that every worker receives once.
        chunks: read as they are needed; for workers a list, or an object that can be pickled and reads in its iterator.
        num_workers: actors of Ray Data with one thread or one GPU each; None computes in this process, and in others
            of torchrun that it leads.

    Raises:
        MissingExtra: if there are workers and Ray or pandas is not installed.
        ConfigError: if there are more workers than Ray has GPUs or a cluster has cores.
        RMOptimizerError: if the workers do not start, or Ray ends.
    """
    if num_workers is not None:
        return _over_ray_data(compute, model, chunks, num_workers)
    return _over_processes(compute, model, chunks) if _leads.is_set() else (compute(model, chunk) for chunk in chunks)
