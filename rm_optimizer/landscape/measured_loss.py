"""Measured loss: a model, its loss and its fixed pairs, and how `rm-opt analyze` loads them and other models."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from rm_optimizer.core.model.identity import differing_settings, weights_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair, digest
from rm_optimizer.core.tokens.dataset import PreferenceDataset, load_pairs
from rm_optimizer.core.tokens.splits import TrainVal, load_training_data
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.evaluation.draws import PairSample, draw_pairs
from rm_optimizer.landscape.estimates.by_pair import DescribedPair, pair_indices
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.operators.objective import PairObjective, measuring
from rm_optimizer.landscape.operators.parameters import TRAINABLE, select_parameters
from rm_optimizer.landscape.operators.single_pairs import pairs_digest
from rm_optimizer.records.accelerator import fastest_device
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.records.run_options import FREE, is_among, options_of
from rm_optimizer.schema import LossConfig
from rm_optimizer.schema.data import DataConfig, Streaming
from rm_optimizer.schema.landscape import AnalyzeConfig, Split

Weights: TypeAlias = Mapping[str, Tensor]
"""Weights of a classifier by name."""
ReadWeights: TypeAlias = Callable[[], Weights]


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

    def measuring(self) -> AbstractContextManager[PairObjective]:
        """Objective over the pairs, with fixed weights and modes.

        Raises:
            ConfigError: if no parameter is selected, or the model cannot be differentiated twice.
        """
        return measuring(self.model, self.sample.batches, self.loss, params=self.params, dtype=self.dtype)

    @property
    def analyzer(self) -> HessianAnalyzer:
        """Analyzer of this loss, for spectra of `sample`."""
        return HessianAnalyzer(self.model, loss=self.loss, params=self.params, dtype=self.dtype, seed=self.sample.seed)

    def fingerprint(self) -> str:
        """Digest of everything that a measurement depends on: weights, pairs, loss, parameters and type."""
        weights = weights_digest(self.model)
        return digest([weights, pairs_digest(self.sample.batches), vars(self.loss), self.params, str(self.dtype)])


_log = logging.getLogger("rm_optimizer")

_PROMPT = 80
"""Number of characters of a prompt by which a pair is named."""


def load_measured_loss(options: AnalyzeConfig, checkpoint: Path | None = None) -> MeasuredLoss:
    """Load the model of a checkpoint and draw pairs according to the options.

    Args:
        options: the composed options.
        checkpoint: checkpoint of the same run to load in place of `options.checkpoint`.

    Raises:
        CheckpointError: if the model cannot be loaded.
        ConfigError: if no pairs are named, or no parameter is selected.
        DataError: if the pairs cannot be read, or fewer than two are left.
    """
    model = BradleyTerryRM.from_pretrained(checkpoint or options.checkpoint, max_length=options.max_length)
    model.to(fastest_device())
    if model.beta not in (1.0, options.loss.beta):
        _log.warning(
            "the loss is measured with loss.beta=%g, but %s was trained with %g; loss.beta=%g measures that loss",
            options.loss.beta, options.checkpoint, model.beta, model.beta,
        )  # fmt: skip
    wanted = options.landscape.params
    params = wanted if isinstance(wanted, str) else tuple(map(str, wanted))
    select_parameters(model, params)
    data = _pairs(options)
    for note in data.notes if checkpoint is None else ():
        _log.warning(note)
    pairs, config = data.accepted_by(model.renderer).pairs, options.landscape
    sample = draw_pairs(model, pairs, config.num_pairs, options.seed, token_budget=config.token_budget)
    dtype = getattr(torch, options.landscape.dtype.value)
    return MeasuredLoss(model.eval(), sample, options.loss, params, dtype, _described(pairs, sample))


def _described(pairs: Sequence[PreferencePair], sample: PairSample) -> dict[int, DescribedPair]:
    """The drawn pairs, with the columns that group them."""
    indices = pair_indices(sample.batches)
    columns = [
        column
        for column in ("source", "subset")
        if len({str(pairs[index].metadata.get(column, "(none)")) for index in indices}) > 1
    ]

    def described(pair: PreferencePair) -> DescribedPair:
        prompt = pair.prompt if isinstance(pair.prompt, str) else pair.prompt[-1].content
        groups = {column: str(pair.metadata.get(column, "(none)")) for column in columns}
        return DescribedPair(pair.pair_id, " ".join(prompt.split())[:_PROMPT], groups)

    return {index: described(pairs[index]) for index in indices}


def _pairs(options: AnalyzeConfig) -> PreferenceDataset:
    """Pairs that the options name; a run's pairs must be the ones that it was trained on.

    Raises:
        ConfigError: if the options name none and no run records them.
        DataError: if the fingerprints differ from the run's.
    """
    run = RunFolder.of(options.checkpoint)
    if options.data.train is None and run is None:
        raise ConfigError(
            f"data.train must name pairs, since no run folder of {options.checkpoint} records them; "
            "add --data PAIRS (data.train=PAIRS)"
        )
    if options.split == Split.all and options.data.train is not None:
        return load_pairs(options.data.train, options.data)
    data = load_training_data(options.data)
    found = data.val if options.split == Split.val else data.train
    identity = run.identity if run is not None else None
    if run is None or identity is None:
        return found
    as_trained, read = {**run.options["data"], **identity.sources}, options_of(options.data)
    if any(read[name] != as_trained.get(name) for name in read if not is_among(f"data.{name}", FREE)):
        return found
    require_trained_pairs(run, data, options.data)
    return found


def require_trained_pairs(run: RunFolder, data: TrainVal, config: DataConfig) -> None:
    """Require the pairs that a run was trained on; a run without a record of them is not checked.

    Args:
        run: the run.
        data: the pairs that were read.
        config: options by which they were read.

    Raises:
        DataError: if the fingerprints differ.
    """
    if (identity := run.identity) is None:
        return
    is_streamed = config.streaming != Streaming.off  # its training fingerprint is taken of the files
    train = identity.train_fingerprint if is_streamed else data.train.fingerprint
    for option, was, now in (
        ("data.train", identity.train_fingerprint, train),
        ("data.val", identity.val_fingerprint, data.val.fingerprint),
    ):
        if was != now:
            raise DataError(
                f"{config.train or 'the synthetic world'}: the pairs of {option} are not those that the run in "
                f"{run.path} was trained on (fingerprint was {was}, is {now}); bring them back, or name pairs with "
                "--data PAIRS"
            )


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
