"""Served model: engine, queue, rendering, parity and readiness."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
from prometheus_client import generate_latest

from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.core.storage.certificate import ParityCertificate
from rm_optimizer.core.tokens.chat import renderer_of
from rm_optimizer.records.codec import JsonRecord, from_values
from rm_optimizer.serving.engine import Engine, ScoredBatch, probe_sequences
from rm_optimizer.serving.options import DEFAULT_QUEUED_TOKENS
from rm_optimizer.serving.service.api_errors import NonFiniteScore, NotReady, Overloaded, UnknownModel
from rm_optimizer.serving.service.batcher import Batcher, FairShare
from rm_optimizer.serving.service.inputs import InputReader, Text, TokenSequence, num_characters
from rm_optimizer.serving.service.telemetry import ServerMetrics


@dataclass(frozen=True)
class ParityReport(JsonRecord):
    """Comparison of served rewards with those certified at export.

    Args:
        max_difference: largest |served - certified|.
        relative_difference: largest |served - certified| / max(1, |certified|).
        tolerance: largest accepted `relative_difference`.
        num_conversations: number of compared conversations.
        same_tokens: True if the server renders the conversations to the certified token ids.
        flipped_pairs: pairs, of `num_pairs`, that the served rewards order differently.
        num_pairs: pairs with different certified rewards.
        version: version of the compared weights.
    """

    max_difference: float
    relative_difference: float
    tolerance: float
    num_conversations: int
    same_tokens: bool
    flipped_pairs: int
    num_pairs: int
    version: str

    @property
    def is_passed(self) -> bool:
        """True if the server may answer; a reward that is not finite fails."""
        return self.same_tokens and self.relative_difference <= self.tolerance

    def entries(self) -> dict[str, Any]:
        """The fields, and whether the server may answer."""
        return super().entries() | {"is_passed": self.is_passed}


async def check_parity(engine: Engine, reader: InputReader, export: Mapping[str, Any]) -> ParityReport | None:
    """Score the certificate's conversations; None if the checkpoint has no certificate.

    Args:
        engine: engine with the checkpoint's own weights.
        reader: renderer of the conversations.
        export: the checkpoint's `export.json`.
    """
    if "certificate" not in export:
        return None
    certificate = from_values(ParityCertificate, export["certificate"])
    scores = certificate.scores
    encoded = reader.renderer.encode_batch([score.prompt for score in scores], [score.response for score in scores])
    fitting = [score for score in scores if len(score.input_ids) <= reader.max_length]
    scored = await engine.score([score.input_ids for score in fitting])
    served, certified = np.array(scored.rewards), np.array([score.reward for score in fitting])
    difference = np.nan_to_num(np.abs(served - certified), nan=np.inf)
    first, second = np.tril_indices(len(certified), -1)
    is_ordered = certified[first] != certified[second]
    is_flipped = is_ordered & ((certified[first] > certified[second]) != (served[first] > served[second]))
    return ParityReport(
        max_difference=float(difference.max(initial=0.0)),
        relative_difference=float((difference / np.maximum(1.0, np.abs(certified))).max(initial=0.0)),
        tolerance=certificate.loaded_tolerance(engine.description.dtype),
        num_conversations=len(fitting),
        same_tokens=all(
            encoding.ids == score.input_ids or len(encoding.ids) > reader.max_length
            for encoding, score in zip(encoded, scores, strict=True)
        ),
        flipped_pairs=int(is_flipped.sum()),
        num_pairs=int(is_ordered.sum()),
        version=scored.version,
    )


MAX_WAITING_CHARACTERS = 16 * 2**20
"""Most characters that wait for tokenization before a new request: some seconds' work."""
MOST_CHARACTERS_A_TOKEN = 16
"""Characters that count as one token before a text is tokenized; most texts have more tokens."""
WARNINGS = {
    "truncated": "/get_reward was sent texts of more than the model's {most} tokens; they are cut from the left as in "
    "training, extra_logs.truncated says which, rm_truncated counts them",
    "control_tokens": "texts hold control tokens such as <|im_end|>, which the model reads as if the template had "
    "written them, as in training, and a policy can forge a turn so: strip them from responses, or train with "
    "data.special_tokens=as_text. rm_control_tokens counts such texts",
}
"""Sentences about texts that are counted, by the names of their counters."""
_log = logging.getLogger("rm_optimizer")
RewardsOf: TypeAlias = Callable[[Sequence[Prompt], Sequence[str]], Sequence[float]]
T = TypeVar("T")
Value = TypeVar("Value", bound=Text)


class RewardService:
    """Service behind the routes.

    Args:
        engine: not yet started.
        model_name: name of the model in requests.
        max_queued_tokens: most tokens of unanswered requests, and so of one request.
    """

    def __init__(self, engine: Engine, *, model_name: str, max_queued_tokens: int = DEFAULT_QUEUED_TOKENS) -> None:
        self.engine = engine
        self.model_name = model_name
        self.metrics = ServerMetrics()
        self.batcher = Batcher(engine, max_queued_tokens=max_queued_tokens, metrics=self.metrics)
        self.parity: ParityReport | None = None
        self._reader: InputReader | None = None
        self._broken_revision: int | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="rm-tokenizer")
        self._characters = FairShare(MAX_WAITING_CHARACTERS)
        self.created = int(time.time())
        self._has_warned = set[str]()
        self._sound_revision: int | None = None
        self._counted_restarts = 0

    async def start(self, check: Callable[[RewardsOf], None] | None = None) -> None:
        """Load the model and compare it with its certificate; no request is answered before.

        Args:
            check: further comparison, in a thread, of the rewards of prompts and responses by the checkpoint's own
                weights; its error ends the start.

        Raises:
            RMOptimizerError: if the model cannot be loaded, or renders conversations in another way.
        """
        await self.engine.start()
        description = self.engine.description
        reader = await asyncio.to_thread(
            InputReader.of, description, self.batcher.max_queued_tokens, partial(self.count, "control_tokens")
        )
        self.parity = await check_parity(self.engine, reader, description.export)
        if check is not None and (self.parity is None or self.parity.is_passed):
            loop, renderer = asyncio.get_running_loop(), renderer_of(reader.renderer, reader.max_length)

            def server(prompts: Sequence[Prompt], responses: Sequence[str]) -> Sequence[float]:
                rows = [encoding.ids for encoding in renderer.encode_batch(prompts, responses)]
                return asyncio.run_coroutine_threadsafe(self.engine.score(rows), loop).result().rewards

            await asyncio.to_thread(check, server)
        await self.engine.restore()
        self.batcher.start()
        self._reader = reader

    async def stop(self) -> None:
        """End the queue and the engine."""
        await self.batcher.stop()
        await self.engine.stop()
        self._threads.shutdown(wait=False)

    @property
    def obstacle(self) -> str | None:
        """Reason that the server is not ready, in words; None if it is ready."""
        if self._reader is None:
            return "the model is loading"
        if self.parity is not None and not self.parity.is_passed:
            return (
                f"the served rewards differ from the checkpoint's certificate by {self.parity.max_difference:.3g}, or "
                "the conversations are rendered to other tokens; export the checkpoint again"
            )
        if self._broken_revision == self.engine.revision:
            return f"weights {self.engine.version} give no finite reward; publish others"
        if self.engine.failure is not None:
            return f"the engine cannot answer any more: {self.engine.failure}"
        return None if self.engine.is_up else "the worker process is restarting"

    def require_updatable(self) -> None:
        """Refuse an update before the checkpoint's own weights were compared with their certificate.

        Raises:
            NotReady: if the model is loading, restarting, or differs from its certificate.
        """
        if self._reader is None or not self.engine.is_up or not (self.parity is None or self.parity.is_passed):
            raise NotReady(f"updates are not accepted yet: {self.obstacle or 'the model is loading'}")

    def reader(self, model: str | None = None) -> InputReader:
        """Reader of requests for a model.

        Args:
            model: name in the request; None if it names none.

        Raises:
            UnknownModel: if the name is not the served model's.
            NotReady: if the model is loading, failed its parity probe, or gives rewards that are not finite.
        """
        if model not in (None, self.model_name):
            raise UnknownModel(
                f"expected the model {self.model_name!r}, got {model!r}; rm-opt serve --served-model-name sets it",
                "model",
            )
        obstacle = self.obstacle
        if self._reader is None or (obstacle is not None and self.engine.is_up):
            raise NotReady(obstacle or "the model is loading")
        return self._reader

    async def read(self, tokenize: Callable[[Value], T], value: Value) -> T:
        """Tokenize in threads outside the event loop, two requests at a time.

        Args:
            tokenize: method of the `reader`.
            value: texts, messages or items of the request.

        Raises:
            Overloaded: if the engine's queue is full, or too much text waits.
        """
        size = num_characters(value)
        self.batcher.require_room(min(1 + size // MOST_CHARACTERS_A_TOKEN, self.batcher.max_queued_tokens))
        if ahead := self._characters.excess(size):
            raise Overloaded(f"{ahead} characters wait to be tokenized before this request, which is the most")
        with self._characters.holding(size):
            return await asyncio.get_running_loop().run_in_executor(self._threads, tokenize, value)

    def count(self, name: str, count: int, *, warns: bool = True) -> None:
        """Count texts of a kind in `WARNINGS`, and warn of the first."""
        if warns and name not in self._has_warned:
            self._has_warned.add(name)
            _log.warning(WARNINGS[name].format(most=self.engine.description.max_length))
        getattr(self.metrics, name).inc(count)

    async def score(self, sequences: list[TokenSequence]) -> ScoredBatch:
        """Finite rewards of the sequences, all of one version.

        Raises:
            NonFiniteScore: if a reward is NaN or infinite. If a probe's are too, the server is not ready until
                other weights come.
            Overloaded, EngineUnavailable: as `Batcher.score`.
        """
        scored = await self.batcher.score(sequences)
        for index, reward in enumerate(scored.rewards):
            if not math.isfinite(reward):
                if scored.revision not in (self._broken_revision, self._sound_revision):  # the weights or the sequence?
                    probe = await self.engine.score(probe_sequences(None, self.engine.description.max_length))
                    if all(map(math.isfinite, probe.rewards)):
                        self._sound_revision = probe.revision
                    else:
                        self._broken_revision = probe.revision
                raise NonFiniteScore(f"weights {scored.version} give the reward {reward} for sequence {index}")
        return scored

    def require_loaded(self) -> InputReader:
        """Reader of requests once the model is loaded, whether or not it may answer.

        Raises:
            NotReady: if the model is loading.
        """
        if self._reader is None:
            raise NotReady("the model is loading")
        return self._reader

    def metrics_text(self) -> bytes:
        """Prometheus' text form of the counts."""
        self.metrics.ready.set(self.obstacle is None)
        self.metrics.restarts.inc(self.engine.num_restarts - self._counted_restarts)
        self._counted_restarts = self.engine.num_restarts
        self.metrics.revision.set(self.engine.revision)
        memory = self.engine.replica_bytes
        self.metrics.replicas.set(len(memory))
        self.metrics.replica_bytes.clear()
        for replica, size in memory.items():
            self.metrics.replica_bytes.labels(replica).set(size)
        self.metrics.weights.info({"version": self.engine.version})
        return generate_latest(self.metrics.registry)
