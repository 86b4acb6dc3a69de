"""Spectra of one loss at several weights: along runs and between models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import cluster_bootstrap, cluster_totals
from rm_optimizer.core.model.identity import tensors_digest
from rm_optimizer.core.storage.loading import load_weights, read_checkpoint
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.analysis_context import AnalysisContext, AnalysisInput, AnalysisResult
from rm_optimizer.landscape.estimates.by_pair import clusters_of
from rm_optimizer.landscape.measured_loss import ReadWeights, Weights
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus
from rm_optimizer.landscape.visualization import LandscapeRecord
from rm_optimizer.records.codec import JsonRecord, from_values, json_values
from rm_optimizer.records.files import replacing
from rm_optimizer.records.ledger import Ledger
from rm_optimizer.schema.checks import require
from rm_optimizer.schema.landscape import SpectrumMethod

EVOLUTION_FILE, BETWEEN_FILE = "evolution.jsonl", "between.jsonl"
"""Files in the folder of results with each spectrum of a run, and with each spectrum and path between models."""
WeightsByStep = dict[int, ReadWeights]
"""Readers of weights by optimizer step, ascending."""


@dataclass(frozen=True)
class SpectrumComparison(JsonRecord):
    """Changes from one spectrum to another.

    Args:
        ratios: largest eigenvalues of the second divided by the first's; NaN if the first is 0.
        bottom_ratios: the same ratios for the smallest ones, the smallest first.
        trace_ratio: ratio of the traces; None where either is missing or the first is 0.
        subspace_overlap: `||V_1 V_2^T||_F^2 / k` of the top k eigenvectors, 1 where both span the same space and about
            k / parameters for independent spaces; None if eigenvectors were not kept.
        num_compared: number of compared eigenvalues, k.
        num_pairs: number of pairs of each spectrum.
    """

    ratios: tuple[float, ...]
    bottom_ratios: tuple[float, ...]
    trace_ratio: float | None
    subspace_overlap: float | None
    num_compared: int
    num_pairs: tuple[int, int]


def compare_spectra(first: HessianSpectrum, second: HessianSpectrum, *, top_k: int | None = None) -> SpectrumComparison:
    """Compare eigenvalues, trace and top subspace of two spectra.

    Args:
        first: the reference, such as an earlier step of a run.
        second: spectrum of the same matrix over the same parameters, of the same loss and pairs at other weights.
        top_k: number of eigenvalues to compare at each end; None takes as many as both spectra have.

    Raises:
        ConfigError: if they are of different matrices, parameters, losses or pairs, or do not both have the k largest
            eigenvalues.
    """
    kinds = [(spectrum.matrix, spectrum.params, spectrum.num_parameters) for spectrum in (first, second)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"spectra to compare must be of the same matrix and parameters, got {kinds[0]} and {kinds[1]}"
        )
    for what, one, other in (
        ("loss options", first.loss_options, second.loss_options),
        ("pairs", first.pairs_digest, second.pairs_digest),
    ):
        if one and other and one != other:
            raise ConfigError(f"spectra to compare must be of the same {what}, got {one} and {other}; measure one anew")
    available = min(first.num_top, second.num_top)
    count = available if top_k is None else top_k
    expected = f"lie in [1, {available}], the largest eigenvalues of both spectra"
    require(1 <= count <= available, "top_k", expected, count)
    at_bottom = min(first.num_bottom, second.num_bottom, count)
    overlap, trace_ratio = None, None
    if first.eigenvectors is not None and second.eigenvectors is not None:
        old, new = (each[:count].double() for each in (first.eigenvectors, second.eigenvectors))
        overlap = float((old @ new.to(old.device).T).square().sum() / count)
    if first.trace is not None and second.trace is not None and first.trace.value:
        trace_ratio = second.trace.value / first.trace.value
    return SpectrumComparison(
        ratios=_ratios(second.eigenvalues[:count], first.eigenvalues[:count]),
        bottom_ratios=_ratios(second.eigenvalues[::-1][:at_bottom], first.eigenvalues[::-1][:at_bottom]),
        trace_ratio=trace_ratio,
        subspace_overlap=overlap,
        num_compared=count,
        num_pairs=(first.num_pairs, second.num_pairs),
    )


def _ratios(new: Sequence[float], old: Sequence[float]) -> tuple[float, ...]:
    return tuple(after / before if before else float("nan") for after, before in zip(new, old, strict=True))


def _measured_spectra(
    context: AnalysisContext, ledger: Ledger, weights: Mapping[str, ReadWeights], *, follows: bool = False
) -> list[tuple[HessianSpectrum, float | None]]:
    """Measure the spectrum at each of several weights; after Ctrl-C those that are complete.

    Each is in the ledger once it is measured, and its eigenvectors in `_vectors_file`. Afterwards the model has the
    last weights.

    Args:
        context: loss and options.
        ledger: ledger of the spectra.
        weights: readers of the classifier's weights, by their names.
        follows: True if the weights belong to successive steps. A search then starts from the vectors of the step
            before, the overlap with these vectors is measured, and the vectors of earlier steps are removed.

    Returns:
        Each spectrum, with the overlap of its subspace with the step before; None if it is not known.

    Raises:
        KeyboardInterrupt: if the user stopped it before the first spectrum was complete.
    """
    found = [
        (from_values(HessianSpectrum, row["spectrum"]), row["overlap"]) for row in ledger.values() if "spectrum" in row
    ]
    try:
        for index, (name, read) in list(enumerate(weights.items()))[len(found) :]:
            context.on_progress(name, index, len(weights), "")
            load_weights(context.measured_loss.model.model, read(), Path(name))
            before = _with_vectors(context, found[-1][0], index - 1) if follows and found else None
            now = context.spectrum(start=before if context.config.method == SpectrumMethod.lanczos else None)
            if now.status == SpectrumStatus.interrupted:
                raise KeyboardInterrupt
            with replacing(_vectors_file(context, index)) as temporary:
                torch.save(now.eigenvectors, temporary)
            overlap = _overlap(context, before, now)
            ledger.append({"spectrum": now.entries(), "overlap": overlap})
            found.append((now, overlap))
            if follows:
                _vectors_file(context, index - 1).unlink(missing_ok=True)
    except KeyboardInterrupt:
        if not found:
            raise
    return found


def _settings(context: AnalysisContext) -> list[Any]:
    """Settings that spectra of several models depend on, beyond loss and weights."""
    config = context.config
    how = [config.method.value, config.which.value, config.top_k, config.num_sampled, config.tolerance]
    return [*how, config.max_products, config.num_probes, config.trace_method.value, context.measured_loss.sample.seed]


def _vectors_file(context: AnalysisContext, index: int) -> Path:
    """File in the folder with the eigenvectors of one of several spectra."""
    return context.folder / f"vectors-{index}.pt"


def _with_vectors(context: AnalysisContext, spectrum: HessianSpectrum, index: int) -> HessianSpectrum | None:
    """One of several spectra with its eigenvectors; None if they were not kept."""
    path = _vectors_file(context, index)
    return replace(spectrum, eigenvectors=torch.load(path, weights_only=True)) if path.exists() else None


def _overlap(context: AnalysisContext, first: HessianSpectrum | None, second: HessianSpectrum | None) -> float | None:
    """Overlap of two spectra's top subspaces; None if one is missing."""
    if first is None or second is None:
        return None
    count = min(first.num_top, second.num_top, context.config.top_k)
    return compare_spectra(first, second, top_k=count).subspace_overlap


@dataclass(frozen=True)
class Evolution(LandscapeRecord, indent=1):
    """Spectra of one loss along a run.

    Args:
        steps: optimizer steps, ascending; 0 is the model before training.
        spectra: spectrum at each of them, over the same pairs.
        overlaps: overlap of the subspace of the largest eigenvalues with the step before, in [0, 1]; None at the
            first step, or if the vectors of the step before were not kept.
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
    identity = [context.measured_loss.fingerprint(), list(weights), *_settings(context)]
    with context.ledger(EVOLUTION_FILE, identity, len(weights)) as ledger:
        named = {f"step {step:,}": read for step, read in weights.items()}
        found = _measured_spectra(context, ledger, named, follows=True)
    steps = tuple(weights)
    if len(found) == len(steps):
        _vectors_file(context, len(steps) - 1).unlink(missing_ok=True)
    spectra, overlaps = zip(*found, strict=True)
    subject, missing = context.subject, steps[len(found) :]
    source = str(replace(subject, step=None) if isinstance(subject, AnalysisInput) else subject)
    result = Evolution(steps[: len(found)], spectra, overlaps, missing, source)
    return AnalysisResult(result, is_partial=bool(missing))


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
        raise ConfigError("landscape=between needs other models than the checkpoint; add landscape.others=[RUN, …]")
    sample, readers = context.measured_loss.sample, list(models.values())
    pairs = list(combinations(range(len(models)), 2))
    of_models = [[name, tensors_digest(read())] for name, read in models.items()]
    identity = [context.measured_loss.fingerprint(), of_models, *_settings(context), context.config.num_points]
    with context.ledger(BETWEEN_FILE, identity, len(models) + len(pairs)) as ledger:
        spectra = [spectrum for spectrum, _ in _measured_spectra(context, ledger, models)]
        paths = [row for row in ledger.values() if "path" in row]
        with suppress(KeyboardInterrupt):
            for first, second in pairs[len(paths) :] if len(spectra) == len(models) else ():
                context.on_progress("paths", len(paths), len(pairs), "")
                path = _path(context, readers[first](), readers[second](), (first, second))
                ends = (_with_vectors(context, spectra[index], index) for index in (first, second))
                row = {"path": json_values(path), "overlap": _overlap(context, *ends)}
                ledger.append(row)
                paths.append(row)
    is_partial = len(paths) < len(pairs)
    for index in range(0 if is_partial else len(models)):
        _vectors_file(context, index).unlink(missing_ok=True)
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
        between = {  # buffers that are not floating-point come from the start
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
