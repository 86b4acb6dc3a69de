"""Context and result of an analysis."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch

from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.landscape.measured_loss import MeasuredLoss
from rm_optimizer.landscape.solvers.lanczos import Progress
from rm_optimizer.landscape.spectrum import HessianSpectrum
from rm_optimizer.landscape.surface.directions import Directions
from rm_optimizer.landscape.surface.grid import GridDescription
from rm_optimizer.records.codec import JsonRecord, json_values
from rm_optimizer.records.ledger import Ledger, open_ledger
from rm_optimizer.schema.landscape import LandscapeConfig

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
    def spectrum(self) -> partial[HessianSpectrum]:
        """Function for a spectrum at the present weights; see `compute_spectrum`."""
        return partial(
            self.measured_loss.analyzer.compute_spectrum,
            self.measured_loss.sample,
            self.config.method.value,
            top_k=self.config.top_k,
            options=self.config,
            on_iteration=self.on_iteration,
            on_product=self.on_product,
        )

    def on_iteration(self, progress: Progress) -> None:
        """Report a product of a Lanczos iteration."""
        self.on_progress("eigenvalues", progress.num_converged, progress.num_wanted, progress.remark)

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


def finite_loss(measured_loss: MeasuredLoss) -> float:
    """Loss at the weights of the analysis.

    Raises:
        TrainingDiverged: if it is NaN or infinite; names the pairs.
    """
    with measured_loss.measuring() as objective:
        return float(objective.checked(torch.tensor(objective.value())))
