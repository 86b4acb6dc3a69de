"""Context and result of an analysis."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.core.storage.loading import load_weights
from rm_optimizer.landscape.comparison import compare_spectra
from rm_optimizer.landscape.hessian import Matrix
from rm_optimizer.landscape.measured_loss import MeasuredLoss
from rm_optimizer.landscape.solvers.lanczos import Progress
from rm_optimizer.landscape.spectrum import HessianSpectrum, SpectrumStatus
from rm_optimizer.landscape.surface.directions import Directions
from rm_optimizer.landscape.surface.results import GridDescription
from rm_optimizer.records.codec import JsonRecord, from_values, json_values
from rm_optimizer.records.files import replacing
from rm_optimizer.records.ledger import Ledger, open_ledger
from rm_optimizer.schema.landscape import LandscapeConfig, SpectrumMethod

POINTS_FILE, DIRECTIONS_FILE, LAYERS_FILE, STATE_FILE = "points.jsonl", "directions.pt", "layers.jsonl", "lanczos.json"
"""Files in the folder of results: measured points, their directions, measured layers, and the state of an iteration."""
ReadWeights: TypeAlias = Callable[[], Mapping[str, Tensor]]
"""Reader of a classifier's weights by name."""
ResultT = TypeVar("ResultT", bound=JsonRecord)


SCHEMA_VERSION = 1
"""Version of the JSON of results. It rises when an entry is removed or changes its meaning, not when one is added."""


@dataclass(frozen=True)
class AnalysisInput:
    """Weights and pairs of an analysis, stated in its results.

    Args:
        checkpoint: run folder, exported folder, checkpoint or hub id, as given.
        step: optimizer steps that the weights were trained for; None where it is not recorded.
        data: path or name of the pairs, and their split.
        pairs: digest of the drawn pairs; the same draw on another machine has the same digest.
        params: measured parameters.
    """

    checkpoint: str
    step: int | None
    data: str
    pairs: str
    params: str

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step:,}"
        return f"{self.checkpoint}{step}; pairs of {self.data}"


@dataclass(frozen=True)
class AnalysisResult(Generic[ResultT]):
    """Result of an analysis, partial after an interruption.

    Args:
        result: measured values.
        is_partial: True if the user stopped the analysis before its end.
        is_kept: True if the same analysis can continue from it.
        subject: weights and pairs; None before they are known.
    """

    result: ResultT
    is_partial: bool
    is_kept: bool = True
    subject: AnalysisInput | None = None

    def to_json(self) -> str:
        """The result as JSON text, preceded by the version of its entries and the input."""
        header = {"schema_version": SCHEMA_VERSION, "analysis": json_values(self.subject)}
        return json.dumps(header | self.result.entries(), allow_nan=False, indent=1)


@dataclass(frozen=True)
class AnalysisContext:
    """Loss, options and folder of an analysis.

    Args:
        measured_loss: model, pairs and loss.
        config: the options.
        folder: folder for measured points, from which the same analysis continues after a kill.
        on_progress: function of the current step's name, its progress, its total (None if unknown) and a remark.
        subject: weights and pairs, for captions.
    """

    measured_loss: MeasuredLoss
    config: LandscapeConfig
    folder: Path
    on_progress: Callable[[str, int, int | None, str], None] = lambda what, done, total, remark: None
    subject: AnalysisInput | str = ""

    @property
    def source_without_step(self) -> str:
        """Checkpoint and pairs in words, for a result of several steps or models."""
        return str(replace(self.subject, step=None) if isinstance(self.subject, AnalysisInput) else self.subject)

    @property
    def spectrum_settings(self) -> list[Any]:
        """Settings that spectra of several models depend on, beyond loss and weights."""
        config = self.config
        how = [config.method.value, config.which.value, config.top_k, config.num_sampled, config.tolerance]
        return [*how, config.max_products, config.num_probes, config.trace_method.value, self.measured_loss.sample.seed]

    def spectrum(
        self,
        *,
        matrix: Matrix | None = None,
        with_density: bool = False,
        start: HessianSpectrum | None = None,
        state_file: Path | None = None,
    ) -> HessianSpectrum:
        """Spectrum at the present weights of the model; the arguments are those of `compute_spectrum`."""
        return self.measured_loss.analyzer.compute_spectrum(
            self.measured_loss.sample,
            self.config.method.value,
            top_k=self.config.top_k,
            matrix=matrix,
            options=self.config,
            with_density=with_density,
            start=start,
            state_file=state_file,
            on_iteration=self.on_iteration,
            on_product=self.on_product,
        )

    def spectra(
        self, ledger: Ledger, weights: Mapping[str, ReadWeights], *, follows: bool = False
    ) -> list[tuple[HessianSpectrum, float | None]]:
        """Spectrum at each of several weights; after Ctrl-C those that are complete.

        Each is in the ledger once it is measured, and its eigenvectors in `vectors_file`. Afterwards the model has the
        last weights.

        Args:
            ledger: ledger of the spectra.
            weights: readers of the classifier's weights, by their names.
            follows: True if the weights are those of successive steps. A search then starts from the vectors of the
                step before, the overlap with these vectors is measured, and the vectors of earlier steps are removed.

        Returns:
            Each spectrum, with the overlap of its subspace with that of the step before; None if it is not known.

        Raises:
            KeyboardInterrupt: if the user stopped it before the first spectrum was complete.
        """
        found = [
            (from_values(HessianSpectrum, row["spectrum"]), row["overlap"])
            for row in ledger.values()
            if "spectrum" in row
        ]
        try:
            for index, (name, read) in list(enumerate(weights.items()))[len(found) :]:
                self.on_progress(name, index, len(weights), "")
                load_weights(self.measured_loss.model.model, read(), Path(name))
                before = self.with_vectors(found[-1][0], index - 1) if follows and found else None
                has_start = before is not None and self.config.method == SpectrumMethod.lanczos
                now = self.spectrum(start=before if has_start else None)
                if now.status == SpectrumStatus.interrupted:
                    raise KeyboardInterrupt
                overlap = None if before is None else self.overlap(before, now)
                with replacing(self.vectors_file(index)) as temporary:
                    torch.save(now.eigenvectors, temporary)
                ledger.append({"spectrum": now.entries(), "overlap": overlap})
                found.append((now, overlap))
                if follows:
                    self.vectors_file(index - 1).unlink(missing_ok=True)
        except KeyboardInterrupt:
            if not found:
                raise
        return found

    def vectors_file(self, index: int) -> Path:
        """File in the folder with the eigenvectors of one of several spectra."""
        return self.folder / f"vectors-{index}.pt"

    def with_vectors(self, spectrum: HessianSpectrum, index: int) -> HessianSpectrum | None:
        """One of several spectra with its eigenvectors; None if they were not kept."""
        path = self.vectors_file(index)
        return replace(spectrum, eigenvectors=torch.load(path, weights_only=True)) if path.exists() else None

    def overlap(self, first: HessianSpectrum, second: HessianSpectrum) -> float | None:
        """Overlap of the subspaces of two spectra's largest eigenvalues."""
        count = min(first.num_top, second.num_top, self.config.top_k)
        return compare_spectra(first, second, top_k=count).subspace_overlap

    def on_iteration(self, progress: Progress) -> None:
        """Report a product of a Lanczos iteration."""
        remark = f"{progress.num_products} products, largest error {progress.worst_error:.1e}"
        self.on_progress("eigenvalues", progress.num_converged, progress.num_wanted, remark)

    def on_product(self, num_products: int) -> None:
        """Report products outside a Lanczos iteration."""
        self.on_progress("products", num_products, None, "")

    def on_point(self, done: int, total: int) -> None:
        """Report a point of a grid."""
        self.on_progress("points", done, total, "")

    def ledger(self, name: str, identity: Sequence[object], num_wanted: int) -> AbstractContextManager[Ledger]:
        """Open the ledger of a measurement in the folder.

        Args:
            name: name of the file.
            identity: everything that the pieces depend on.
            num_wanted: pieces of the whole measurement.

        Raises:
            DataError: if the file holds part of another measurement, or another process holds it.
        """
        return open_ledger(
            self.folder / name,
            digest(identity),
            other="a measurement of other weights, pairs or options",
            num_wanted=num_wanted,
            remedy="remove it, or set another output_dir",
        )

    def measured(self, directions: Directions) -> GridDescription:
        """Description of the measurement for captions."""
        sample = self.measured_loss.sample
        params = self.measured_loss.params
        return GridDescription(
            method=directions.method,
            names=directions.names,
            values=directions.values,
            params=params if isinstance(params, str) else ", ".join(params),
            num_parameters=directions.vectors.shape[1],
            num_pairs=sample.num_pairs,
            num_prompts=sample.num_prompts,
            seed=sample.seed,
            source=str(self.subject),
        )


def require_finite_loss(measured_loss: MeasuredLoss) -> None:
    """Require a finite loss at the weights of the analysis.

    Raises:
        TrainingDiverged: if it is NaN or infinite; names the pairs.
    """
    with measured_loss.measuring() as objective:
        objective.checked(torch.tensor(objective.value()))
