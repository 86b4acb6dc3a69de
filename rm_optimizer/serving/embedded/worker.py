"""Process that holds a model, on `transformers` or in vLLM, and answers the questions of its server."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from rm_optimizer.core.classifier.quantization import dtype_name
from rm_optimizer.core.classifier.scoring import PromptCache, SequenceScorer
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.loading import parse_dtype
from rm_optimizer.core.storage.model_files import read_record
from rm_optimizer.core.tokens.prefix_trees import TREE_TOKENS
from rm_optimizer.errors import RMOptimizerError, WeightsRefused
from rm_optimizer.records.accelerator import fastest_device, synchronize
from rm_optimizer.records.locations import SourceKind, resolve_source
from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.engine import (
    EngineDescription,
    ScoredBatch,
    StagedWeights,
    check_rewards,
    checkpoint_revision,
    probe_sequences,
)
from rm_optimizer.serving.options import WorkerOptions
from rm_optimizer.serving.weights import live_weights

BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
DEFAULT_BUDGET = 512
"""Tokens of a pass without a measurement."""
LENGTHS = (64, 384)
"""Range of the synthetic lengths, in tokens, typical of chat answers."""
WORSE = 1.25
"""Slowdown relative to the best budget so far that ends the search."""


def calibrated_budget(model: BradleyTerryRM, seconds: float = 2.0) -> int:
    """Budget with the least time per token, among those tried within `seconds`."""
    deadline, generator = time.perf_counter() + seconds, np.random.default_rng(0)
    size = model.model.get_input_embeddings().weight.shape[0]
    low, high = (min(length, model.max_length) for length in LENGTHS)
    rows: list[NDArray[np.int32]] = []
    while sum(map(len, rows)) < BUDGETS[-1]:
        rows.append(generator.integers(0, size, int(generator.integers(low, high + 1))).astype(np.int32))
    SequenceScorer(model, max(8, model.max_length)).rewards(rows[:1])  # the first pass is slow
    best, least = DEFAULT_BUDGET, float("inf")
    for budget in BUDGETS:
        count = next(n for n in range(1, len(rows) + 1) if sum(map(len, rows[:n])) >= max(budget, 1024))
        cost = _seconds_a_token(model, budget, rows[:count], deadline)
        if cost < least:
            best, least = budget, cost
        if cost > WORSE * least or time.perf_counter() > deadline:
            break
    return best


def _seconds_a_token(model: BradleyTerryRM, budget: int, batch: Sequence[NDArray[np.int32]], deadline: float) -> float:
    """Least wall time per token over up to three scorings of a batch in passes of a budget."""
    scorer, times = SequenceScorer(model, budget), list[float]()
    while len(times) < 3 and not (times and time.perf_counter() > deadline):
        started = time.perf_counter()
        scorer.rewards(batch)
        synchronize(model.device)
        times.append(time.perf_counter() - started)
    return min(times) / sum(map(len, batch))


ALIVE_SECONDS = 1.0
"""Seconds between two signs of life."""


class Worker(ABC):
    """Loaded model with the name and number of its weights, and the staged weights with their tensors.

    Args:
        description: description of the model with the checkpoint's own weights.
    """

    def __init__(self, description: EngineDescription) -> None:
        self.description = description
        self.version, self.revision = description.version, checkpoint_revision(description.version)
        self.staged: tuple[StagedWeights, Any] | None = None
        self.expected: int | None = None

    def score(self, sequences: Sequence[Sequence[int]]) -> ScoredBatch:
        """Rewards of the sequences; see `Engine.score`."""
        return ScoredBatch(tuple(self._rewards(sequences)), self.version, self.revision)

    def expect(self, revision: int | None) -> None:
        """Discard the staged weights and accept only this revision from now on; None accepts none."""
        self.staged, self.expected = None, revision

    def stage(self, weights: StagedWeights) -> None:
        """Read and check new weights, and keep them if they are still expected afterwards.

        Raises:
            WeightsRefused: if a check fails.
        """
        tensors = self._read(weights)
        if self.expected == weights.revision:
            self.staged = weights, tensors

    @abstractmethod
    def rehearse(self, revision: int) -> None:
        """Check the probe of the staged weights, after which the old ones serve again.

        Raises:
            WeightsRefused: if nothing of this revision is staged, or the probe fails; nothing is staged then.
        """

    @abstractmethod
    def commit(self, revision: int) -> None:
        """Swap in the staged weights.

        Raises:
            WeightsRefused: if nothing of this revision is staged.
        """

    def apply(self, weights: StagedWeights) -> None:
        """Serve committed weights.

        Raises:
            WeightsRefused: if they cannot be loaded.
        """
        self.expect(weights.revision)
        self.stage(weights)
        self.rehearse(weights.revision)
        self.commit(weights.revision)

    @abstractmethod
    def _rewards(self, sequences: Sequence[Sequence[int]]) -> Sequence[float]:
        """Rewards by the model in its present state."""

    @abstractmethod
    def _read(self, weights: StagedWeights) -> Any:
        """Read and check the tensors; the model stays unchanged."""

    def _staged(self, revision: int) -> tuple[StagedWeights, Any]:
        if self.staged is None or self.staged[0].revision != revision:
            raise WeightsRefused("the new weights are not staged any more; begin the update again")
        return self.staged


class TransformersWorker(Worker):
    """Worker with a classifier of `transformers`, whose swap moves pointers only.

    Args:
        options: checkpoint, device and data types.
        committed: updates to apply to the checkpoint, oldest first.

    Raises:
        RMOptimizerError: if the model or an update cannot be loaded.
    """

    def __init__(self, options: WorkerOptions, committed: Sequence[StagedWeights]) -> None:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.model = BradleyTerryRM.from_pretrained(options.checkpoint, dtype=parse_dtype(options.dtype))
        device = fastest_device(options.replica) if options.device == "auto" else options.device
        self.model.requires_grad_(False).to(device)
        source = resolve_source(options.checkpoint)
        record = read_record(Path(source.location))
        folder = Path(source.location) if source.kind is SourceKind.FOLDER else None
        version = live_weights.checkpoint_version(self.model.model, folder, {} if folder is None else record)
        if options.packed_linears is not None:
            live_weights.install_packed_linears(self.model.model, least_gain=options.packed_linears)
        budget = options.token_budget or calibrated_budget(self.model)
        # Splitting a tree computes its prompt again, which costs more than the attention of a wide row.
        trees = options.tree_budget or options.token_budget or max(budget, TREE_TOKENS)
        self.prompts = PromptCache()
        # Each kept start has a pass of its own, which on an accelerator costs more than the start itself.
        kept = self.prompts if self.model.device.type == "cpu" else None
        self.scorer = SequenceScorer(self.model, budget, trees, kept)
        if options.tokenizer_folder:
            self.model.tokenizer.save_pretrained(options.tokenizer_folder)
        description = EngineDescription(
            engine="transformers",
            architecture=type(self.model.model).__name__,
            dtype=dtype_name(self.model.model.dtype),
            device=self.model.device.type,
            version=version,
            max_length=self.model.max_length,
            vocab_size=self.model.model.get_input_embeddings().weight.shape[0],
            token_budget=budget,
            tree_budget=trees,
            shares_prompts=self.scorer.shares,
            pad_token_id=self.model.pad_choice.token_id,
            tensors={mode: live_weights.tensor_specs(self.model.model, mode) for mode in RewardModelTrainingMode},
            tokenizer_folder=options.tokenizer_folder,
            identity=self.model.renderer.identity(),
            export=record,
        )
        super().__init__(description)
        for weights in committed:
            self.apply(weights)

    def rehearse(self, revision: int) -> None:
        """Swap in the staged weights, check their probe, and swap back; see `Worker.rehearse`."""
        weights, update = self._staged(revision)
        self.staged = None
        replaced = self._swap(update)
        try:
            rewards = self._rewards(probe_sequences(weights.probe, self.model.max_length))
            check_rewards(rewards, weights.probe, self.description.dtype)
        finally:
            self._swap(replaced)
        self.staged = weights, update

    def commit(self, revision: int) -> None:
        """Swap in the staged weights; see `Worker.commit`."""
        weights, update = self._staged(revision)
        self._swap(update)
        self.staged, self.version, self.revision = None, weights.version, revision

    def _swap(self, update: live_weights.Update) -> live_weights.Update:
        self.prompts.clear()  # no weights may read the keys and values of others
        return live_weights.swap(self.model.model, update)

    def _rewards(self, sequences: Sequence[Sequence[int]]) -> Sequence[float]:
        rewards: list[float] = self.scorer.rewards(sequences).tolist()
        return rewards

    def _read(self, weights: StagedWeights) -> live_weights.Update:
        return live_weights.read_update(self.model.model, weights.file, weights.tensors, weights.mode)


def run_worker(connection: Connection, load: Callable[[], Worker]) -> None:
    """Main function of the process: load, report, and answer until the pipe closes.

    A question is its number, the name of a method of `Worker` and its arguments; None ends the process. The answer is
    the number, the result, and the reason if the method refuses weights.
    """
    transformers_logging.disable_progress_bar()
    lock = threading.Lock()

    def send(*message: object) -> None:
        with lock:
            connection.send(message)

    def show_life() -> None:  # independent of the other threads
        with suppress(OSError):
            while True:
                send("alive")
                time.sleep(ALIVE_SECONDS)

    def answer(number: int, method: Callable[..., object], arguments: Sequence[Any]) -> None:
        try:
            send(number, method(*arguments), None)
        except WeightsRefused as error:
            send(number, None, str(error))

    threading.Thread(target=show_life, name="rm-worker-alive", daemon=True).start()
    try:
        worker = load()
    except RMOptimizerError as error:
        send("failed", type(error).__name__, str(error))
        return
    with suppress(EOFError, OSError):  # the server has ended
        send("up", worker.description)
        while (question := connection.recv()) is not None:
            number, name, *arguments = question
            if name == "stage":  # beside the batches
                worker.expect(arguments[0].revision)
                threading.Thread(target=answer, args=(number, worker.stage, arguments), daemon=True).start()
            else:
                answer(number, getattr(worker, name), arguments)
