"""Spectra of one loss at several weights: along a run, and between models with overlaps and loss barriers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, cluster_totals
from rm_optimizer.core.model.identity import differing_settings, tensors_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.loading import load_weights, read_checkpoint
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.analysis_context import AnalysisContext, AnalysisResult, ReadWeights
from rm_optimizer.landscape.estimates.by_pair import clusters_of
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.landscape.visualization import LandscapeRecord
from rm_optimizer.records.codec import from_values, json_values

EVOLUTION_FILE = "evolution.jsonl"
"""File in the folder of results with the spectrum of each measured step."""

WeightsByStep = dict[int, ReadWeights]
"""Readers of the classifier's weights by name, by optimizer step, ascending."""
BETWEEN_FILE = "between.jsonl"
"""File in the folder of results that holds each spectrum and path once it is measured."""

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Evolution(LandscapeRecord, indent=1):
    """Spectra of one loss along a run.

    Args:
        steps: optimizer steps, ascending; 0 is the model before training.
        spectra: spectrum at each of them, over the same pairs.
        overlaps: overlap of the subspace of the largest eigenvalues with that of the step before, in [0, 1]; None at
            the first step, or if the vectors of the step before were not kept.
        missing: steps that an interruption left out.
        source: run and pairs, in words.
    """

    steps: tuple[int, ...]
    spectra: tuple[HessianSpectrum, ...]
    overlaps: tuple[float | None, ...]
    missing: tuple[int, ...]
    source: str = ""

    @property
    def num_top(self) -> int:
        """Number of largest eigenvalues that every spectrum has."""
        return min(spectrum.num_top for spectrum in self.spectra)


def readers(checkpoints: Mapping[int, Path]) -> WeightsByStep:
    """Readers of checkpoint files by step."""
    return {step: partial(lambda path: read_checkpoint(path)[1], path) for step, path in checkpoints.items()}


def measure_evolution(context: AnalysisContext, weights: WeightsByStep) -> AnalysisResult[Evolution]:
    """Measure the spectrum at each step, starting from the vectors of the step before plus a random part.

    Afterwards the model of the context has the weights of the last step.

    Raises:
        KeyboardInterrupt: if the user stopped it before the first spectrum was complete.
    """
    identity = [context.measured_loss.fingerprint(), list(weights), *context.spectrum_settings]
    with context.ledger(EVOLUTION_FILE, identity, len(weights)) as ledger:
        found = context.spectra(ledger, {f"step {step:,}": read for step, read in weights.items()}, follows=True)
    steps = tuple(weights)
    if len(found) == len(steps):
        context.vectors_file(len(steps) - 1).unlink(missing_ok=True)
    spectra, overlaps = zip(*found, strict=True)
    missing = steps[len(found) :]
    result = Evolution(steps[: len(found)], spectra, overlaps, missing, context.source_without_step)
    return AnalysisResult(result, is_partial=bool(missing))


def read_models(checkpoints: Sequence[str], paths: Sequence[str | Path]) -> dict[str, ReadWeights]:
    """Readers of the weights of each model by its name.

    Args:
        checkpoints: the models as given.
        paths: files that their weights are read from.

    Raises:
        ConfigError: if a model reads text as other tokens than the first one, or computes otherwise on them.
    """
    models: dict[str, ReadWeights] = {}
    first: BradleyTerryRM | None = None
    for name, path in zip(names_of(checkpoints), paths, strict=True):
        model = BradleyTerryRM.from_pretrained(path)
        first = first or model
        own, other = ({(key, value.shape) for key, value in each.model.state_dict().items()} for each in (first, model))
        if differing := differing_settings(first, model) or sorted({key for key, _ in own ^ other}):
            shown = f"{', '.join(differing[:3])}{' …' * (len(differing) > 3)}"
            raise ConfigError(
                f"landscape.others must be models that differ from the checkpoint in their weights alone, and {name} "
                f"has another {shown}; compare models of one architecture and tokenizer"
            )
        models[name] = partial(dict, {key: value.detach().clone() for key, value in model.model.state_dict().items()})
    return models


def names_of(checkpoints: Sequence[str]) -> list[str]:
    """Names of models: the ends of their paths, of as many parts as tell them apart, numbered where none do.

    Example:
        >>> names_of(["runs/a/best", "runs/lr0.1/best"]), names_of(["org/name", "org/name"])
        (['a/best', 'lr0.1/best'], ['org/name (1)', 'org/name (2)'])
    """
    parts = [Path(os.path.abspath(each) if os.path.exists(each) else each).parts for each in checkpoints]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]).removesuffix(".ckpt") for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{each} ({number})" for number, each in enumerate(checkpoints, start=1)]


@dataclass(frozen=True)
class LossPath:
    """Loss along the straight line between the weights of two models.

    Args:
        first: index of the model at position 0.
        second: index of the model at position 1.
        positions: positions along the line, from 0 to 1.
        losses: loss at each position.
        barrier: largest loss along the line less the larger loss of the ends, with its 95 % interval over resampled
            prompts, both at least 0. Frankle et al. (2020, arXiv 1912.05671) subtract the mean of the ends.
    """

    first: int
    second: int
    positions: tuple[float, ...]
    losses: tuple[float, ...]
    barrier: Estimate


@dataclass(frozen=True)
class BetweenModels(LandscapeRecord, indent=1):
    """Spectra of several models over the same pairs, with overlaps and losses between them.

    Args:
        names: names of the models.
        spectra: spectrum of each; fewer than the names after an interruption.
        overlaps: for each pair of models `(first, second)` in the order of `paths`, the overlap of the subspaces of
            their largest eigenvalues, in [0, 1]; None if vectors were not kept.
        paths: loss between each pair of models; fewer after an interruption.
        num_prompts: different prompts among the pairs.
        source: models with their steps, and pairs, in words.
    """

    names: tuple[str, ...]
    spectra: tuple[HessianSpectrum, ...]
    overlaps: tuple[float | None, ...]
    paths: tuple[LossPath, ...]
    num_prompts: int
    source: str = ""


def measure_between(
    context: AnalysisContext, models: Mapping[str, ReadWeights], source: str = ""
) -> AnalysisResult[BetweenModels]:
    """Measure the spectrum of each model and the loss between each two.

    Afterwards the model of the context has other weights.

    Args:
        context: pairs, loss and options; the model is the first one.
        models: readers of the classifiers' weights by the models' names.
        source: models and pairs in words.

    Raises:
        ConfigError: if there are fewer than two models.
        KeyboardInterrupt: if the user stopped it before the first spectrum was complete.
    """
    if len(models) < 2:
        raise ConfigError("landscape=between needs other models beside the checkpoint; add landscape.others=[RUN, …]")
    sample, readers = context.measured_loss.sample, list(models.values())
    pairs = list(combinations(range(len(models)), 2))
    of_models = [[name, tensors_digest(read())] for name, read in models.items()]
    identity = [
        context.measured_loss.fingerprint(),
        of_models,
        *context.spectrum_settings,
        context.config.num_points,
    ]
    with context.ledger(BETWEEN_FILE, identity, len(models) + len(pairs)) as ledger:
        spectra = [spectrum for spectrum, _ in context.spectra(ledger, models)]
        paths = [row for row in ledger.values() if "path" in row]
        with suppress(KeyboardInterrupt):
            for first, second in pairs[len(paths) :] if len(spectra) == len(models) else ():
                context.on_progress("paths", len(paths), len(pairs), "")
                path = _path(context, readers[first](), readers[second](), (first, second))
                one, other = (context.with_vectors(spectra[index], index) for index in (first, second))
                overlap = None if one is None or other is None else context.overlap(one, other)
                row = {"path": json_values(path), "overlap": overlap}
                ledger.append(row)
                paths.append(row)
    is_partial = len(paths) < len(pairs)
    for index in range(0 if is_partial else len(models)):
        context.vectors_file(index).unlink(missing_ok=True)
    result = BetweenModels(
        tuple(models),
        tuple(spectra),
        tuple(row["overlap"] for row in paths),
        tuple(from_values(LossPath, row["path"]) for row in paths),
        sample.num_prompts,
        source,
    )
    return AnalysisResult(result, is_partial)


def _path(context: AnalysisContext, start: Weights, end: Weights, ends: tuple[int, int]) -> LossPath:
    measured, positions = context.measured_loss, np.linspace(0, 1, context.config.num_points)
    rows: list[np.ndarray] = []
    for done, position in enumerate(positions.tolist()):
        context.on_point(done, len(positions))
        between = {  # buffers that are not floating-point are those of the start
            name: torch.lerp(value, end[name], position) if value.is_floating_point() else value
            for name, value in start.items()
        }
        load_weights(measured.model.model, between, Path("path"))
        with measured.measuring() as objective, torch.no_grad():
            losses = [
                objective.pair_losses(objective.rewards_at(objective.parameters, batch), batch) * batch.weight
                for batch in objective.batches
            ]
            rows.append(np.asarray(torch.cat(losses).double().cpu()))
    weights = torch.cat([batch.weight for batch in measured.sample.batches]).double().cpu().numpy()
    columns = np.column_stack([*rows, weights])
    sums = cluster_totals(columns, clusters_of(measured.sample.batches, measured.sample.prompts))
    barrier = barrier_of(sums, seed=measured.sample.seed)
    losses_at = columns[:, :-1].sum(axis=0) / weights.sum()
    return LossPath(*ends, tuple(positions.tolist()), tuple(losses_at.tolist()), barrier)


def barrier_of(sums: Float[np.ndarray, "clusters terms"], *, seed: int, num_bootstrap: int = 1000) -> Estimate:
    """Loss barrier with its interval over resampled clusters.

    The rise of the points between the ends is resampled, which may be negative. A barrier is never negative, so where a
    sample has none, its resamples would give an interval of length 0.

    Args:
        sums: totals of each cluster: weighted losses at the points of the line, and weights.
        seed: seed of the resampling.
        num_bootstrap: number of resamples.
    """

    def rise_of(totals: Float[np.ndarray, "... terms"]) -> Float[np.ndarray, "... one"]:
        losses = totals[..., :-1] / totals[..., -1:]
        ends = np.maximum(losses[..., 0], losses[..., -1])
        return np.asarray((losses[..., 1:-1].max(axis=-1) - ends)[..., None])

    (rise,) = cluster_bootstrap(sums, rise_of, num_bootstrap=num_bootstrap, seed=seed)
    low, high = (None if end is None else max(end, 0.0) for end in (rise.low, rise.high))
    return replace(rise, value=max(rise.value, 0.0), low=low, high=high)
