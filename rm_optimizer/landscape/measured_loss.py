"""Measured loss: a model, its loss, and the fixed pairs of the average, with a fingerprint of all three."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.evaluation.draws import PairSample
from rm_optimizer.landscape.estimates.by_source import DescribedPair
from rm_optimizer.landscape.operators.identity import pairs_digest
from rm_optimizer.landscape.operators.objective import PairObjective, measuring
from rm_optimizer.landscape.operators.parameters import TRAINABLE
from rm_optimizer.schema import LossConfig


@dataclass(frozen=True)
class MeasuredLoss:
    """Model with fixed weights, its loss and its pairs. It can be sent to other processes.

    Args:
        model: the reward model.
        sample: the pairs.
        loss: training loss.
        params: parameters to derive by; see `select_parameters`.
        dtype: type to compute in, float32 or float64.
        described: the pairs of the sample by their position in the data.
    """

    model: BradleyTerryRM
    sample: PairSample
    loss: LossConfig
    params: str | tuple[str, ...] = TRAINABLE
    dtype: torch.dtype = torch.float32
    described: Mapping[int, DescribedPair] = field(default_factory=dict)

    @contextmanager
    def measuring(self) -> Iterator[PairObjective]:
        """Objective over the pairs, with fixed weights and modes.

        Raises:
            ConfigError: if no parameter is selected, or the model cannot be differentiated twice.
        """
        with measuring(self.model, self.sample.batches, self.loss, params=self.params, dtype=self.dtype) as objective:
            yield objective

    def fingerprint(self) -> str:
        """Digest of everything that a measurement depends on: weights, pairs, loss, parameters and type."""
        weights = weights_digest(self.model)
        return digest([weights, pairs_digest(self.sample.batches), vars(self.loss), self.params, str(self.dtype)])
