"""Curvature along a run: extreme eigenvalues at each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rm_optimizer.core.storage.loading import read_checkpoint
from rm_optimizer.landscape.analysis_context import AnalysisContext, AnalysisResult, ReadWeights
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.landscape.visualization import LandscapeRecord

EVOLUTION_FILE = "evolution.jsonl"
"""File in the folder of results with the spectrum of each measured step."""

WeightsByStep = dict[int, ReadWeights]
"""Readers of the classifier's weights by name, by optimizer step, ascending."""


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
