"""Engines without a process: one that reads rewards off token ids, and one around the real worker."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
from fastapi import FastAPI

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import EngineUnavailable
from rm_optimizer.serving.embedded.worker import TransformersWorker
from rm_optimizer.serving.engine import EngineDescription, ScoredBatch, StagedWeights
from rm_optimizer.serving.http.app import create_app
from rm_optimizer.serving.options import ServeOptions, WorkerOptions
from rm_optimizer.serving.service.service import RewardService
from rm_optimizer.serving.weights.receiver import WeightReceiver
from tests.builders import tiny_reward_model


def fake_description(token_budget: int = 64, shares_prompts: bool = True) -> EngineDescription:
    return EngineDescription("fake", "Fake", "float32", "cpu", "v0", 256, 384, token_budget, shares_prompts)


class FakeEngine:
    """The reward is the sum of the ids; a batch waits until `gate` is open."""

    def __init__(self, *, token_budget: int = 64, shares_prompts: bool = True) -> None:
        self.description = fake_description(token_budget, shares_prompts)
        self.version, self.revision = "v0", 1
        self.is_up = True
        self.num_restarts = 0
        self.replica_bytes = {"0": 4096}
        self.gate = asyncio.Event()
        self.gate.set()
        self.batches: list[list[tuple[int, ...]]] = []
        self.failure: str | None = None

    async def start(self) -> None: ...

    async def restore(self) -> None: ...

    async def stop(self) -> None: ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> ScoredBatch:
        self.batches.append([tuple(row) for row in sequences])
        await self.gate.wait()
        if self.failure is not None:
            raise EngineUnavailable(self.failure)
        return ScoredBatch(tuple(float(sum(row)) for row in sequences), self.version, self.revision)


class InProcessEngine:
    """The real worker, called directly."""

    def __init__(self, options: WorkerOptions) -> None:
        self.worker = TransformersWorker(options, [])
        self.is_up = True
        self.num_restarts = 0
        self.replica_bytes = {"0": 4096}
        self.gate = asyncio.Event()
        self.gate.set()
        self.score_nan = False
        self.failure: str | None = None
        self.committed: list[StagedWeights] = []

    @property
    def description(self) -> EngineDescription:
        return self.worker.description

    @property
    def version(self) -> str:
        return self.worker.version

    @property
    def revision(self) -> int:
        return self.worker.revision

    async def start(self) -> None: ...

    async def restore(self) -> None: ...

    async def stop(self) -> None: ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> ScoredBatch:
        await self.gate.wait()
        scored = self.worker.score(sequences)
        return replace(scored, rewards=(math.nan,) * len(sequences)) if self.score_nan else scored

    async def stage(self, weights: StagedWeights) -> None:
        self.worker.expect(weights.revision)
        self.worker.stage(weights)
        self.worker.rehearse(weights.revision)
        self.staged = weights

    async def commit(self, revision: int) -> None:
        self.worker.commit(revision)
        self.committed.append(self.staged)

    async def rollback(self) -> None:
        self.worker.expect(None)


def exported(family: str, folder: Path, **fields: object) -> BradleyTerryRM:
    """A tiny model, also in `folder`."""
    model = tiny_reward_model(family, **fields)
    model.save_pretrained(folder)
    return model


def options_of(folder: Path, scratch: Path, **changes: object) -> WorkerOptions:
    """A worker that measures nothing."""
    scratch.mkdir(exist_ok=True)
    settings = {"token_budget": 256, "packed_linears": None, "tokenizer_folder": str(scratch)} | changes
    return WorkerOptions(str(folder), **settings)  # type: ignore[arg-type]


async def served(engine: InProcessEngine, **options: object) -> FastAPI:
    """A started application around the engine."""
    service = RewardService(engine, model_name="rm", max_queued_tokens=int(options.pop("max_queued_tokens", 20_000)))
    app = create_app(service, serve_options(**options))
    await service.start()
    return app


def serve_options(**options: object) -> ServeOptions:
    """Options of a server that takes requests of every host."""
    return ServeOptions("model", **{"host": "0.0.0.0"} | options)  # type: ignore[arg-type]


def served_without_reader(engine: FakeEngine, **options: object) -> FastAPI:
    """An application whose model never loads: what it refuses, it refuses by the body alone."""
    service = RewardService(engine, model_name="rm")
    return create_app(service, serve_options(**options), WeightReceiver(service))


def client_of(app: FastAPI, **options: object) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server", **options)  # type: ignore[arg-type]
