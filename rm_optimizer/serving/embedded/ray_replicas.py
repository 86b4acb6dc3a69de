"""Replicas of a model as a Ray Serve deployment, and the engine that scores with them.

Ray Serve starts, routes to, checks, scales and drains the replicas. The engine, in the process that speaks HTTP,
accepts rewards of its own revision alone. A replica that lacks it reads the recorded updates before it scores.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rm_optimizer.core.storage.certificate import ParityCertificate
from rm_optimizer.core.streaming.workers import connected_ray, load_ray
from rm_optimizer.errors import EngineUnavailable, RMOptimizerError, WeightsRefused
from rm_optimizer.records.codec import from_values
from rm_optimizer.serving.child_process import resident_bytes
from rm_optimizer.serving.embedded.engine import ATTEMPTS, BatchTime
from rm_optimizer.serving.embedded.worker import TransformersWorker
from rm_optimizer.serving.engine import Engine, EngineDescription, ScoredBatch, StagedWeights, WeightHistory
from rm_optimizer.serving.options import WorkerOptions

APPLICATION, DEPLOYMENT = "rm-opt", "Replica"
HEALTH_SECONDS = 2.0
"""Seconds between two checks of a replica's health; Ray Serve replaces one that fails three."""
DRAIN_SECONDS = 30.0
POLL_SECONDS = 0.5
START_SECONDS = 600.0
"""Longest time until the first replica has loaded its model, in seconds."""
OPEN_REQUESTS = 2
"""Batches of one replica at a time, so that the next one is there when the first is computed."""
_log = logging.getLogger("rm_optimizer")


class Replica:
    """Copy of a model in a Ray actor.

    Args:
        options: options of the worker.
        folder: folder of the updates, which every machine of the cluster reads.

    Raises:
        RMOptimizerError: if the model cannot be loaded.
    """

    def __init__(self, options: WorkerOptions, folder: str) -> None:
        self._source = options.checkpoint, options.dtype, folder
        self._history = Path(folder) / "history"
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._worker = TransformersWorker(options, ())
        self._applied = {self._worker.revision}
        self._thread = ThreadPoolExecutor(1)  # a call that is cancelled still ends before the next one begins
        record = self._worker.description.export
        scores = from_values(ParityCertificate, record["certificate"]).scores if "certificate" in record else ()
        rows = [score.input_ids for score in scores if len(score.input_ids) <= self._worker.model.max_length]
        self._certified = dict(zip(map(tuple, rows), self._worker.score(rows).rewards, strict=True))

    async def describe(self) -> tuple[EngineDescription, tuple[str, str, str]]:
        """Description of the model, whose tokenizer is written for the server that asks, and its source.

        The source is the checkpoint, the type of its weights and the folder of the updates.
        """
        folder = str(self._history.with_name("tokenizer"))
        self._worker.model.tokenizer.save_pretrained(folder)
        return replace(self._worker.description, tokenizer_folder=folder), self._source

    async def memory(self) -> tuple[str, int]:
        """Name of this replica, and the memory of its process in bytes."""
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id, resident_bytes(os.getpid())

    async def check_health(self) -> None:
        """Return at once; a stopped process does not."""

    async def certified(self, sequences: Sequence[Sequence[int]]) -> ScoredBatch:
        """Rewards that the checkpoint's own weights gave the conversations of its certificate."""
        description, rewards = self._worker.description, tuple(self._certified[tuple(row)] for row in sequences)
        return ScoredBatch(rewards, description.version, 0)

    async def score(self, revision: int, sequences: Sequence[Sequence[int]]) -> ScoredBatch:
        """Rewards of the sequences, by weights of this revision or of a later one."""

        def scored() -> ScoredBatch:
            if self._worker.revision != revision:
                self._follow()
            return self._worker.score(sequences)

        return await asyncio.get_running_loop().run_in_executor(self._thread, scored)

    async def prepare(self, weights: StagedWeights) -> None:
        """Read and check an update, and score its probe; the served weights stay.

        Raises:
            WeightsRefused: if a check fails.
        """

        def prepared() -> None:
            self._follow()  # it may not have scored since the last update
            self._worker.expect(weights.revision)
            self._worker.stage(weights)
            self._worker.rehearse(weights.revision)

        await asyncio.get_running_loop().run_in_executor(self._thread, prepared)

    async def discard(self) -> None:
        """Discard the prepared update."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._worker.expect, None)

    def _follow(self) -> None:
        """Apply the recorded updates that this replica does not have."""
        for weights in WeightHistory.read(self._history):
            if weights.revision in self._applied:
                continue
            try:
                self._worker.commit(weights.revision)  # it was prepared
            except WeightsRefused:
                self._worker.apply(weights)
            self._applied.add(weights.revision)


def application(arguments: dict[str, Any]) -> Any:
    """Ray Serve application of the replicas, as `serve deploy` builds it.

    Args:
        arguments: `checkpoint` and `folder`, and other fields of `WorkerOptions`.
    """
    from ray import serve

    folder = arguments.pop("folder")
    deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=arguments.pop("replicas", 1),
        max_ongoing_requests=OPEN_REQUESTS,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        ray_actor_options=arguments.pop("resources", {}),
    )(Replica)
    return deployment.bind(WorkerOptions(**arguments), folder)


class RayEngine(Engine):
    """Engine that scores with the replicas of a Ray Serve application, which it deploys unless it runs.

    Args:
        options: options of the replicas, whose number counts if the application is deployed here.
        folder: existing folder of the updates, which every machine of the cluster reads.
    """

    def __init__(self, options: WorkerOptions, folder: Path) -> None:
        super().__init__(WeightHistory(folder / "history"))
        self._options, self._folder = options, folder
        self._time, self._num_running = BatchTime(), 0
        self._bytes: dict[str, int] = {}
        self._is_restored = self._is_stopped = False
        self._handle: Any = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """True while a replica runs."""
        return self._num_running > 0 and not self._is_stopped

    @property
    def replica_bytes(self) -> Mapping[str, int]:
        """Memory of each replica at the last check; see `Engine.replica_bytes`."""
        return self._bytes

    async def start(self) -> None:
        """Deploy the replicas, or find them; see `Engine.start`."""
        await asyncio.to_thread(self._deploy)
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._running()
                description, source = await self._handle.describe.remote()
        except TimeoutError as error:
            raise EngineUnavailable(
                f"no replica loaded the model within {START_SECONDS:.0f} s; see serve status, and lower --replicas or "
                "--threads if the cluster has too few cores or GPUs"
            ) from error
        expected = self._options.checkpoint, self._options.dtype, str(self._folder)
        if source != expected:
            raise RMOptimizerError(
                f"expected the application {APPLICATION} of this cluster to serve {' '.join(expected)}, got "
                f"{' '.join(source)}; give the same model, --dtype and --state, or end it with serve shutdown"
            )
        self._description = replace(description, replicas=self._options.replicas)
        self._serve_checkpoint()
        self._watcher = asyncio.create_task(self._watch(), name="rm-ray-watch")

    def _deploy(self) -> None:
        os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")  # it would abort this process on SIGTERM
        ray = connected_ray()
        from ray import serve

        serve.start(proxy_location="Disabled")
        if APPLICATION in serve.status().applications:  # maybe not deployed whole yet
            return
        resources = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": self._options.threads or 1}
        arguments = {**vars(self._options), "folder": str(self._folder)}
        built = application({**arguments, "resources": resources})
        (self._folder / "deployed").touch()
        target = serve.RunTarget(target=built, name=APPLICATION, route_prefix=None)
        serve.run_many([target], wait_for_applications_running=False)

    async def _running(self) -> None:
        """Wait until a replica runs, and get the application's handle.

        Raises:
            RMOptimizerError: if Ray Serve gives up.
        """
        from ray import serve

        while not self._num_running:
            found = await self._status()
            if found.status == "DEPLOY_FAILED":
                reason = found.message.strip().splitlines()[-1]
                raise RMOptimizerError(f"Ray Serve cannot start the replicas (--replicas, --ray): {reason}")
            await asyncio.sleep(POLL_SECONDS)
        self._handle = await asyncio.to_thread(serve.get_app_handle, APPLICATION)

    async def _status(self) -> Any:
        """Status of the application, after counting its running replicas."""
        from ray import serve

        found: Any = (await asyncio.to_thread(serve.status)).applications[APPLICATION]
        if DEPLOYMENT in found.deployments:
            self._num_running = found.deployments[DEPLOYMENT].replica_states.get("RUNNING", 0)
        return found

    async def _watch(self) -> None:
        """Count the running replicas, and ask for their memory."""
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            with suppress(Exception):  # the controller restarts
                await self._status()
                async with asyncio.timeout(HEALTH_SECONDS):
                    answers = await self._handle.broadcast("memory").results_async(return_exceptions=True)
                    self._bytes = dict(answer for answer in answers if isinstance(answer, tuple))

    async def stop(self) -> None:
        """End the application that this server deployed; a second call does nothing."""
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._watcher is not None:
            self._watcher.cancel()
        if (self._folder / "deployed").is_file():
            from ray import serve

            await asyncio.to_thread(serve.delete, APPLICATION)
            (self._folder / "deployed").unlink()
        await asyncio.to_thread(load_ray().shutdown)

    async def score(self, sequences: Sequence[Sequence[int]]) -> ScoredBatch:
        """Rewards of the sequences; a batch whose replica dies goes to another. See `Engine.score`."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        failures = RayError, RayServeException, TimeoutError, WeightsRefused  # it died, hung or is not there
        tokens, failure = sum(map(len, sequences)), ""
        for _ in range(ATTEMPTS):
            while not self._is_stopped:
                started = time.monotonic()
                try:
                    async with asyncio.timeout(self._time.limit(tokens)):
                        if not self._is_restored:
                            found: ScoredBatch = await self._handle.certified.remote(sequences)
                            return replace(found, revision=self.revision)
                        scored: ScoredBatch = await self._handle.score.remote(self.revision, sequences)
                except failures as error:
                    failure = f"{type(error).__name__}: {error}".splitlines()[0]
                    self.num_restarts += 1
                    break
                self._time.note(tokens, time.monotonic() - started)
                if scored.revision == self.revision:
                    return scored
        raise EngineUnavailable(f"{ATTEMPTS} replicas failed on this batch: {failure or 'the engine has stopped'}")

    async def _read(self, weights: StagedWeights) -> None:
        answers = await self._handle.broadcast("prepare", weights).results_async(return_exceptions=True)
        refusals = [answer for answer in answers if isinstance(answer, WeightsRefused)]
        if refusals:
            raise WeightsRefused(str(getattr(refusals[0], "cause", refusals[0])))
        if not any(answer is None for answer in answers):
            raise EngineUnavailable("no replica has prepared the weights; try again")

    async def _swap_in(self, weights: StagedWeights) -> None:
        self._history.remember(weights)  # replicas swap it in before they score their next batch
        self.version, self.revision = weights.version, weights.revision

    async def _discard(self) -> None:
        await self._handle.broadcast("discard").results_async(return_exceptions=True)

    async def _restore(self) -> None:
        """Serve the recorded updates, which replicas read before they score."""

    async def restore(self) -> None:
        """Serve the recorded updates; see `Engine.restore`."""
        await super().restore()
        self._is_restored = True
