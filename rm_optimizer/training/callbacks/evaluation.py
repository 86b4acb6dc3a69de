"""Evaluations between the optimizer steps of a run: metrics, the best weights, the early stop, and calibration."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

from rm_optimizer.core.metrics.estimate import require_finite as require_finite_numbers
from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.core.model.losses import configured_pair_losses, score_targets
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.chat import Encoding
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.evaluation.pair_rewards import OTHER, PairRewards, ScoringStopped, metrics_of, write_evaluation
from rm_optimizer.evaluation.saved_model import ResponseScorer
from rm_optimizer.evaluation.suite import Suite, read_suite, sources_by_suite
from rm_optimizer.evaluation.suite_scores import official_number, score_on_suite, suite_result
from rm_optimizer.optim import evaluation_weights
from rm_optimizer.records.files import writing
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.schema import LossConfig, TrainConfig
from rm_optimizer.schema.config import CalibrationConfig
from rm_optimizer.schema.monitors import monitored_group
from rm_optimizer.training.callbacks.checkpoints import TEMPORARY, save_checkpoint
from rm_optimizer.training.callbacks.evaluation_plan import BestSoFar, PairMetric, plan_of, work_of_steps
from rm_optimizer.training.callbacks.run_callback import RunCallback
from rm_optimizer.training.data.in_memory import PreferenceDataModule
from rm_optimizer.training.lightning_module import RunModule
from rm_optimizer.training.loggers import ProgressLines, log_figure, log_histogram
from rm_optimizer.training.stopping import StopSignal, require_finite

log = logging.getLogger("rm_optimizer")

MOST_GROUPS = 50
"""Most sources or subsets that an evaluation reports separately."""


class Evaluation(pl.Callback):
    """Callback that evaluates every `plan.every` steps and after the last one, and keeps the best weights.

    Evaluations have the precision of training.

    Args:
        config: options of the run.
        datamodule: its pairs.
        own: further numbers of each evaluation, by name.
    """

    def __init__(self, config: TrainConfig, datamodule: PreferenceDataModule, own: Mapping[str, PairMetric]) -> None:
        self.datamodule = datamodule
        self.run_dir = Path(config.output_dir)
        self.config = config.training
        self.plan = plan_of(config, datamodule)
        self.every = self.plan.every
        self.own, self.loss = own, config.loss
        self._sample = self.plan.positions(datamodule.seed)
        assert self.config.mode is not None, "resolved with the options"
        self.best = BestSoFar(self.config.mode, self.config.early_stopping.min_delta)
        self._latest: dict[int, PairwiseMetrics] = {}
        self.stopped_early = False
        self.seconds = 0.0
        self._cut: set[str] = set()
        self.missed = False
        self.stop = StopSignal()
        self.lines: ProgressLines | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluate the untrained model, or make up for the evaluation in which the run was stopped.

        A resumed run ends here if it had stopped early, or had taken its last step.
        """
        assert isinstance(pl_module, RunModule)
        self.stop.arm()  # Lightning has installed its handlers, which end a run on SIGTERM without a message
        if self.best.value is not None and not (path := RunFolder(self.run_dir).best_checkpoint).is_file():
            self.best.value = None  # patience is not reset
            log.warning("%s is missing; only evaluations from step %d on can be the best", path, trainer.global_step)
        if self.missed or (trainer.global_step == 0 and self.config.eval_at_start):
            self._evaluate(trainer, pl_module)
        if trainer.global_step >= pl_module.num_steps:
            trainer.should_stop = True
        self._stop_if_stale(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Evaluate when it is due."""
        assert isinstance(pl_module, RunModule)
        step = trainer.global_step
        if step % self.every == 0 or step == pl_module.num_steps:
            self._evaluate(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Evaluate the last weights of a run that a callback has ended between two evaluations."""
        assert isinstance(pl_module, RunModule)
        is_ended = trainer.global_step == pl_module.num_steps or self.stopped_early or self.stop.requested
        if not is_ended and self.metrics_at(trainer.global_step) is None:
            self._evaluate(trainer, pl_module)

    def metrics_at(self, step: int) -> PairwiseMetrics | None:
        """Metrics of the evaluation after a step, without intervals; None without one."""
        return self._latest.get(step)

    def _evaluate(self, trainer: pl.Trainer, pl_module: RunModule) -> None:
        started = time.perf_counter()
        with evaluation_weights(trainer.optimizers[0]):
            try:
                with trainer.precision_plugin.forward_context():
                    rewards = self.rewards(pl_module.model, sample=self._sample)
            except ScoringStopped:
                self.missed = True
            else:
                self._record(trainer, pl_module, rewards)
                self.missed = False
        self.seconds += time.perf_counter() - started

    def metrics(self, rewards: PairRewards, *, num_bootstrap: int, seed: int) -> PairwiseMetrics:
        """Metrics of validation rewards; a source or subset column with many values is cut to its largest groups."""
        monitored = monitored_group(self.config.monitor)
        metrics = metrics_of(
            rewards,
            self.datamodule.data.val,
            beta=self.loss.beta,
            num_bootstrap=num_bootstrap,
            seed=seed,
            most_groups=MOST_GROUPS,
            kept_group=None if monitored is None else monitored[1],
        )
        for column, members in metrics.groups.items():
            if OTHER in members and column not in self._cut:
                self._cut.add(column)
                text = "validation has more than %d values of '%s'; the largest are reported, the others as %s"
                log.warning(text, MOST_GROUPS, column, OTHER)
        return metrics

    def own_metrics(self, rewards: PairRewards) -> dict[str, float]:
        """The further numbers of an evaluation."""
        found = {name: float(metric(rewards.chosen, rewards.rejected)) for name, metric in self.own.items()}
        if self.loss.score_range is None:
            return found
        return found | score_metrics(rewards, self.datamodule.data.val, self.loss.score_range)

    def rewards(self, model: BradleyTerryRM, *, sample: NDArray[np.int64] | None = None) -> PairRewards:
        """Rewards of the validation pairs, or a sample of them, with lines of progress if the run has them.

        Raises:
            ScoringStopped: if the run is asked to stop.
        """
        total = len(self.datamodule.val_tokens if sample is None else sample)
        return self.datamodule.score_validation(
            model,
            after_batch=None if self.lines is None else partial(self.lines.evaluated, total),
            should_stop=lambda: self.stop.requested,
            positions=sample,
        )

    def _record(self, trainer: pl.Trainer, pl_module: RunModule, rewards: PairRewards) -> None:
        """Log and write the numbers of an evaluation, and save its weights if they are the best so far."""
        step, val = trainer.global_step, self.datamodule.data.val
        require_finite(rewards, val, self.run_dir, step)
        metrics = self.metrics(rewards, num_bootstrap=0, seed=0)
        values = {f"val/{name}": value for name, value in metrics.flat().items()}
        values |= {f"val/{name}": value for name, value in self.own_metrics(rewards).items()}
        values["val/loss"] = _validation_loss(rewards, val, self.loss, metrics)
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": step / self.datamodule.steps_per_epoch, **values}, step=step)
        pl_module.validation_metrics = values
        self._latest = {step: metrics}
        if trainer.is_global_zero:
            folder = self.run_dir / "evaluations" / f"step-{step:08d}"
            with writing(folder):
                write_evaluation(folder, rewards, metrics, self.datamodule.val_tokens.report, step)
            for name in ("chosen", "rejected"):
                log_histogram(trainer.loggers, f"val/{name}_reward", getattr(rewards, name), step)
            log_histogram(trainer.loggers, "val/margin", rewards.margin, step)
        if self.best.update(values.get(self.config.monitor, float("nan")), step):
            path = RunFolder(self.run_dir).best_checkpoint
            with writing(path, first_in=TEMPORARY):
                save_checkpoint(trainer, path, weights_only=True)
        self._stop_if_stale(trainer)

    def _stop_if_stale(self, trainer: pl.Trainer) -> None:
        stopping = self.config.early_stopping
        if stopping.enabled and self.best.stale >= stopping.patience:
            self.stopped_early = True
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run: the best value so far, and if the evaluation of this step is still missing."""
        best = {name: getattr(self.best, name) for name in ("value", "step", "reference", "stale")}
        return best | {"missed": self.missed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best value so far."""
        self.missed = state_dict.get("missed", False)
        for name in state_dict.keys() - {"missed"}:
            setattr(self.best, name, state_dict[name])


def evaluation_of(trainer: pl.Trainer) -> Evaluation:
    """The callback that evaluates a run."""
    return next(callback for callback in trainer.callbacks if isinstance(callback, Evaluation))  # type: ignore[attr-defined]


SCORE_METRICS = ("score_mse", "score_spearman")
"""Names of `score_metrics`."""


def score_metrics(rewards: PairRewards, val: PreferenceDataset, score_range: Sequence[float]) -> dict[str, float]:
    """Mean squared error and Spearman's rank correlation of rewards and scores, each response counted once."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for index, *sides in zip(rewards.pair_index, rewards.chosen, rewards.rejected, strict=True):
        pair = val.pairs[index]
        for text, reward, score in zip((pair.chosen, pair.rejected), sides, pair.scores or (), strict=False):
            found[val.prompt_ids[index], text] = reward, score
    given = np.array(list(found.values())).reshape(-1, 2)
    errors = given[:, 0] - score_targets(torch.from_numpy(given[:, 1]), score_range).numpy()
    ranked = len(given) > 1 and np.ptp(given, axis=0).all()
    correlation = spearmanr(given).statistic if ranked else np.nan
    return {"score_mse": float(np.mean(errors**2)), "score_spearman": float(correlation)}


def _validation_loss(
    rewards: PairRewards, val: PreferenceDataset, config: LossConfig, metrics: PairwiseMetrics
) -> float:
    """Training loss, with all its terms, of the validation pairs; without additions it is the NLL."""
    if config == LossConfig(beta=config.beta):
        return metrics.nll.value
    pairs = [val.pairs[index] for index in rewards.pair_index]
    margin = torch.tensor([pair.margin or 0.0 for pair in pairs], dtype=torch.float64)
    label = torch.tensor([pair.label for pair in pairs], dtype=torch.float64)
    weight = torch.tensor([pair.weight for pair in pairs], dtype=torch.float64)
    chosen, rejected = torch.from_numpy(rewards.chosen), torch.from_numpy(rewards.rejected)
    scores = torch.tensor([pair.scores or (torch.nan, torch.nan) for pair in pairs], dtype=torch.float64)
    losses = configured_pair_losses(chosen, rejected, config, margin=margin, label=label, scores=scores)
    return float((weight * losses).sum() / weight.sum())


DrawReliability = Callable[[PairwiseMetrics, Path], Path]
"""Function that draws the reliability diagram of one evaluation as a PNG file and returns its path."""

SUITES_FOLDER = "suites"
"""Folder of the run's scores on suites, in the run folder."""
SUITES_SHARE = 0.1
"""Largest share of the work of all steps that suites take during training unless the user sets a number."""
CHUNK = 256
"""Responses of a suite that are scored between two looks at the signal to stop."""


class SuiteCallback(pl.Callback):
    """Callback that logs the official numbers of suites after some of the run's evaluations, with their weights.

    It comes after `Evaluation` among the callbacks. The exported weights are scored at the end by `score`.

    Args:
        config: options of the run.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        sources = sources_by_suite(config.training.suites)
        read = (read_suite(Suite.of(name), files, config.data) for name, files in sources.items())
        self.items = {items.suite.name: items for items in read}
        self._every: float = config.training.suites_every or math.inf
        self._encoded: dict[str, list[Encoding]] = {}

    @property
    def columns(self) -> dict[str, str]:
        """Columns of `metrics.csv` by metric name."""
        return {f"suite/{name}": f"suite_{name}" for name in self.items}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Encode the suites, space the scorings by their work, and score the untrained model if it was evaluated."""
        assert isinstance(pl_module, RunModule)
        for name, items in self.items.items():
            texts = [text for _, text in items.responses]
            self._encoded[name] = pl_module.model.encode([*items.responses.values()], texts)
        if self.config.training.suites_every is None:
            evaluation = evaluation_of(trainer)
            tokens = sum(len(each.ids) for encoded in self._encoded.values() for each in encoded)
            count = math.floor(SUITES_SHARE * work_of_steps(self.config, evaluation.datamodule) / tokens)
            self._every = math.ceil(evaluation.plan.count / count) if count else math.inf
        self._score_if_due(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Score after an evaluation, if it is due."""
        self._score_if_due(trainer, pl_module)

    def _score_if_due(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, RunModule)
        evaluation, step = evaluation_of(trainer), trainer.global_step
        is_due = not math.isinf(self._every) and (step // evaluation.every) % self._every == 0
        if not is_due or evaluation.metrics_at(step) is None:
            return
        with evaluation_weights(trainer.optimizers[0]), trainer.precision_plugin.forward_context():
            found = {name: self._number(pl_module.model, name, evaluation.stop) for name in self.items}
        for logger in trainer.loggers:
            logger.log_metrics({f"suite/{name}": value for name, value in found.items() if value is not None}, step)

    def _number(self, model: BradleyTerryRM, name: str, stop: StopSignal) -> float | None:
        """Official number of a suite; None if the run is asked to stop."""
        encoded, rewards = self._encoded[name], list[float]()
        for start in range(0, len(encoded), CHUNK):
            if stop.requested:
                return None
            rewards += model.score_encoded(encoded[start : start + CHUNK]).tolist()
        require_finite_numbers(rewards, lambda index: f"response {index + 1} of suite {name}")
        return official_number(self.items[name], rewards)

    def score(self, model: BradleyTerryRM, folder: Path) -> None:
        """Score exported weights, and write `suites/NAME/suite.json` into the run folder."""
        for name, items in self.items.items():
            place = folder / SUITES_FOLDER / name
            place.mkdir(parents=True, exist_ok=True)
            scorer = ResponseScorer(token_budget=self.config.batching.eval_token_budget, folder=place)
            found = [score_on_suite(model, str(folder), items, scorer)]
            training = self.config.training
            result = suite_result(items, found, num_bootstrap=training.num_bootstrap, seed=self.config.seed)
            result.write(place)
            log.info("%s of suite %s: %s", result.score, name, result.models[0].scores[result.score])


CALIBRATION_COLUMNS = {
    f"calibration/{name}": f"calibration_{name}"
    for name in ("ece", "ece_mass", "ece_noise_floor", "temperature", "nll_at_temperature")
}
"""Columns of `metrics.csv` by metric name, if calibration is logged."""

FIGURES = "figures"
"""Folder of the figures in the run folder."""


class CalibrationCallback(RunCallback):
    """Callback that logs the calibration of the run's evaluations.

    It comes after `Evaluation` among the callbacks and uses its last result, so that no pair is scored again. Figures
    are written to the run folder's `figures/`.

    Args:
        config: selection of the evaluations.
        draw: function that draws the reliability diagram.
    """

    option = "training.calibration.enabled"
    columns: ClassVar = CALIBRATION_COLUMNS

    def __init__(self, config: CalibrationConfig, draw: DrawReliability) -> None:
        self.config = config
        self.draw = draw

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the untrained model's calibration, if it was evaluated."""
        self._log_if_due(trainer, is_last=False)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Log the calibration of this step's evaluation, if there was one and it is selected."""
        assert isinstance(pl_module, RunModule)
        self._log_if_due(trainer, is_last=trainer.should_stop or trainer.global_step == pl_module.num_steps)

    def _log_if_due(self, trainer: pl.Trainer, *, is_last: bool) -> None:
        evaluation, step = evaluation_of(trainer), trainer.global_step
        metrics = evaluation.metrics_at(step)
        is_skipped = not is_last and (step // evaluation.every) % self.config.every
        if metrics is None or is_skipped or not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.log_metrics(calibration_values(metrics), step=step)
        path = evaluation.run_dir / FIGURES / f"reliability-step-{step:08d}.png"
        with writing(path):
            log_figure(trainer.loggers, "calibration/reliability", self.draw(metrics, path), step)


def calibration_values(metrics: PairwiseMetrics) -> dict[str, float]:
    """Calibration numbers of an evaluation, as logged; temperature and its NLL only if a finite one is best."""
    values = {
        "calibration/ece": metrics.ece.value,
        "calibration/ece_mass": metrics.ece_mass,
        "calibration/ece_noise_floor": metrics.ece_noise_floor,
    }
    fit = metrics.temperature
    if fit.temperature is not None and fit.nll is not None:
        values |= {"calibration/temperature": fit.temperature, "calibration/nll_at_temperature": fit.nll}
    return values
