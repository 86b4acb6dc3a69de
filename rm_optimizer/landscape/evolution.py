"""Curvature along a run: extreme eigenvalues at each checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rm_optimizer.core.storage.loading import load_weights, read_checkpoint
from rm_optimizer.landscape.analysis_context import AnalysisContext, AnalysisResult
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus, compare_spectra
from rm_optimizer.records.codec import JsonRecord, from_values
from rm_optimizer.records.files import replacing
from rm_optimizer.schema.landscape import SpectrumMethod

EVOLUTION_FILE, VECTORS_FILE = "evolution.jsonl", "vectors.pt"
"""Files in the folder of results: the spectrum of each measured step, and the eigenvectors of the last one."""

WeightsByStep = dict[int, Callable[[], Mapping[str, Tensor]]]
"""Readers of the classifier's weights by name, by optimizer step, ascending."""


@dataclass(frozen=True)
class Evolution(JsonRecord, indent=1):
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
    return {step: partial(_weights, path) for step, path in checkpoints.items()}


def measure_evolution(context: AnalysisContext, weights: WeightsByStep) -> AnalysisResult[Evolution]:
    """Measure the spectrum at each step, starting from the vectors of the step before plus a random part.

    Afterwards the model of the context has the weights of the last step.

    Raises:
        KeyboardInterrupt: if the user stopped it before the first spectrum was complete.
    """
    identity = [context.measured_loss.fingerprint(), list(weights), *context.spectrum_settings]
    with context.ledger(EVOLUTION_FILE, identity, len(weights)) as ledger:
        found = {row["step"]: row for row in ledger.values()}
        try:
            for row in _measured(context, weights, found):
                ledger.append(row)
                found[row["step"]] = row
        except KeyboardInterrupt:
            if not found:
                raise
    if len(found) == len(weights):
        (context.folder / VECTORS_FILE).unlink(missing_ok=True)
    rows = [found[step] for step in weights if step in found]
    result = Evolution(
        tuple(row["step"] for row in rows),
        tuple(from_values(HessianSpectrum, row["spectrum"]) for row in rows),
        tuple(row["overlap"] for row in rows),
        tuple(step for step in weights if step not in found),
        context.source_without_step,
    )
    return AnalysisResult(result, is_partial=bool(result.missing))


def _measured(
    context: AnalysisContext, weights: WeightsByStep, found: Mapping[int, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Measure the steps that are not in the ledger yet."""
    classifier = context.measured_loss.model.model
    before = _kept(context.folder / VECTORS_FILE, found)
    is_lanczos = context.config.method == SpectrumMethod.lanczos
    for done, (step, read) in enumerate(weights.items()):
        if step in found:
            continue
        context.on_progress(f"step {step:,}", done, len(weights), "")
        load_weights(classifier, read(), Path(f"step {step}"))
        now = context.spectrum(start=before if is_lanczos else None)
        if now.status == SpectrumStatus.interrupted:
            raise KeyboardInterrupt
        overlap = None
        if before is not None:
            count = min(before.num_top, now.num_top, context.config.top_k)
            overlap = compare_spectra(before, now, top_k=count).subspace_overlap
        with replacing(context.folder / VECTORS_FILE) as temporary:
            torch.save({"step": step, "vectors": now.eigenvectors}, temporary)
        yield {"step": step, "spectrum": now.entries(), "overlap": overlap}
        before = now


def _weights(path: Path) -> Mapping[str, Tensor]:
    return read_checkpoint(path)[1]


def _kept(path: Path, found: Mapping[int, Mapping[str, Any]]) -> HessianSpectrum | None:
    """The last measured spectrum with its vectors; None if there is none, or the vectors are of another one."""
    if not found or not path.exists():
        return None
    kept, last = torch.load(path, weights_only=True), max(found)
    spectrum = from_values(HessianSpectrum, found[last]["spectrum"])
    return replace(spectrum, eigenvectors=kept["vectors"]) if kept["step"] == last else None
