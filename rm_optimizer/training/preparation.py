"""Preparation of a run: its pairs, its base model and the plan of its steps."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.classifier.building import compile_backbone
from rm_optimizer.core.classifier.head import head_side_modules, keep_exact, require_trainable_head
from rm_optimizer.core.classifier.router_loss import RouterBalance
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair, digest
from rm_optimizer.core.rows.bad_rows import SkippedRow
from rm_optimizer.core.storage.model_files import TRAINED_PAIRS_FILE, TrainedPairs
from rm_optimizer.core.tokens.audit import content_notes, layout_examples
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.core.tokens.splits import TrainVal, load_training_data
from rm_optimizer.core.tokens.tokenizer import tokenizer_of_pairs
from rm_optimizer.errors import ConfigError
from rm_optimizer.optim.param_groups import partition
from rm_optimizer.records.codec import from_values
from rm_optimizer.records.files import write_text
from rm_optimizer.records.orders import PairOrder
from rm_optimizer.records.run_options import options_of
from rm_optimizer.schema import ModelConfig, TrainConfig
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.schema.config import FREEZE_BACKBONE
from rm_optimizer.schema.data import OWN_MARGINS, DataConfig
from rm_optimizer.training.callbacks.evaluation import SCORE_METRICS, Evaluation, SuiteCallback
from rm_optimizer.training.callbacks.evaluation_plan import PairMetric, require_monitored
from rm_optimizer.training.data.in_memory import PreferenceDataModule
from rm_optimizer.training.data.run_data import data_module, load_data, order_of
from rm_optimizer.training.folder.record import TOY_WARNING, RunRecord, is_toy
from rm_optimizer.training.folder.start import Start, recorded, require_same_order, require_same_pairs
from rm_optimizer.training.lightning_module import RunModule
from rm_optimizer.training.loggers import COLUMNS

log = logging.getLogger("rm_optimizer")


def trainable_model(config: TrainConfig, train: PreferenceDataset) -> BradleyTerryRM:
    """The base model of a run in training mode, with the run's beta and adapter, and a head that can be trained."""
    model = build_model(config.model, train, config.seed, quantize=config.adapter.kind == AdapterKind.qlora)
    model.renderer.store_rules(config.data.thinking, config.data.special_tokens, is_new=model.has_new_head)
    model.beta = config.loss.beta
    if counts := add_adapter(model.model, config.adapter, seed=config.seed):
        log.info("%s: %s", config.adapter.kind.value, counts)
    if config.model.freeze is not None:
        freeze(model, config.model.freeze)
    if config.model.router_aux_loss_coef is not None:
        model.router_balance = RouterBalance(model.model)
    require_trainable_head(model.train().model)
    return model


def _require_scores(config: TrainConfig, data: TrainVal) -> None:
    """Refuse a fit to scores that pairs lack or that lie outside of their range, and a metric of scores without one.

    Raises:
        ConfigError: if there are such pairs, with their number, or the metric is monitored.
    """
    if config.loss.score_range is None:
        if config.training.monitor.removeprefix("val/") in SCORE_METRICS:
            raise ConfigError(f"training.monitor={config.training.monitor} needs loss.score_range")
        return
    low, high = config.loss.score_range
    for split, pairs in (("training", data.train.pairs), ("validation", data.val.pairs)):
        if missing := sum(pair.scores is None for pair in pairs):
            raise ConfigError(
                f"loss.score_range needs the scores of both responses of every pair, which {missing} of {len(pairs)} "
                f"{split} pairs lack; give rows with prompt, response and score, with responses and scores, or with "
                "the columns chosen_score and rejected_score"
            )
        if outside := [score for pair in pairs for score in pair.scores or () if not low <= score <= high]:
            raise ConfigError(
                f"loss.score_range={config.loss.score_range} must hold every score, and {len(outside)} of the {split} "
                f"pairs lie outside, such as {outside[0]:g}"
            )


def freeze(model: BradleyTerryRM, weights: str) -> None:
    """Keep a part of the weights out of training, and log how many stay.

    Args:
        model: the base model, without an adapter.
        weights: `backbone` for all weights before the reward head's side, or a number: the embeddings and as many
            layers after them.

    Raises:
        ConfigError: if the model has no more layers than that.
    """
    parts = partition(model, head_names=model.head_parameter_names())
    if weights == FREEZE_BACKBONE:
        side = tuple(f"model.{name}." for name in head_side_modules(model.model))
        frozen = [each.parameter for each in parts.parameters if not each.name.startswith(side)]
        for name in head_side_modules(model.model):
            keep_exact(model.model.get_submodule(name))
    elif (count := int(weights)) < parts.num_layers:
        frozen = [each.parameter for each in parts.parameters if each.layer is not None and each.layer <= count]
    else:
        raise ConfigError(
            f"model.freeze must be less than the {parts.num_layers} layers of {model.model_name}, or "
            f"{FREEZE_BACKBONE}, got {weights}"
        )
    for parameter in frozen:
        parameter.requires_grad_(False)
    kept, whole = sum(map(Tensor.numel, frozen)), sum(map(Tensor.numel, model.parameters()))
    log.info("model.freeze=%s: %s of %s weights stay as they are", weights, f"{kept:,}", f"{whole:,}")


def starting_weights(options: Mapping[str, Any], data: DataConfig) -> dict[str, Tensor]:
    """Weights of the classifier before the first step of a run, by name, built again from the run's records.

    Args:
        options: the run's `options.json`.
        data: its pairs, on which the tokenizer of a small model is trained.

    Raises:
        CheckpointError: if the base model cannot be loaded.
        DataError: if the pairs are needed and no longer exist.
    """
    config, adapter = from_values(ModelConfig, options["model"]), from_values(AdapterConfig, options["adapter"])
    train = PreferenceDataset([]) if config.path is not None else load_training_data(data).train
    model = build_model(config, train, options["seed"])
    add_adapter(model.model, adapter, seed=options["seed"])
    weights: dict[str, Tensor] = model.model.state_dict()
    return weights


def build_model(
    config: ModelConfig,
    train: PreferenceDataset,
    seed: int,
    *,
    quantize: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> BradleyTerryRM:
    """The base model of a run: loaded from `path`, or built small.

    Args:
        config: options of the model.
        train: pairs that the tokenizer of a small model is trained on.
        seed: seed of new weights.
        quantize: store the backbone's matrices in four bits.
        tokenizer: tokenizer of a small model; None trains one.
    """
    shared: dict[str, Any] = {"max_length": config.max_length, "dropout": config.dropout, "seed": seed}
    shared["attn_implementation"] = config.attn_implementation.value
    shared |= {"gradient_checkpointing": config.gradient_checkpointing, "pooling_head": config.pooling_head}
    if config.path is not None:
        origin: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        origin["dtype"] = config.dtype.value
        return BradleyTerryRM.from_pretrained(config.path, quantize=quantize, new_head=True, **origin, **shared)
    assert config.max_length is not None, "checked with the options"
    tokenizer = tokenizer or tokenizer_of_pairs(train.pairs, config.vocab_size)
    return BradleyTerryRM.from_config(config.architecture, tokenizer, **shared)


def from_start(config: TrainConfig, model: BradleyTerryRM, folder: Path) -> TrainConfig:
    """Options of a run whose base is the starting point of a model that was built small.

    Another set of pairs would give another tokenizer, and so other starting vectors to the same words.

    Args:
        config: options of the model's run; those with a base are returned unchanged.
        model: the trained model, for its tokenizer.
        folder: folder in which the starting point is written, unless it is there from an earlier call.
    """
    if config.model.path is not None:
        return config
    old = config.model
    vocabulary = json.loads(model.tokenizer.backend_tokenizer.to_str())["model"]  # without the last call's padding
    decisive = [options_of(old), config.seed, vocabulary, model.tokenizer.chat_template]
    start = folder / f"start-{digest(decisive)}"
    if not start.exists():
        build_model(old, PreferenceDataset([]), config.seed, tokenizer=model.tokenizer).save_pretrained(start)
    new = replace(old, name="custom", path=str(start), architecture={}, vocab_size=ModelConfig.vocab_size)
    return replace(config, model=replace(new, pooling_head=None))


SKIPPED_FILE = "skipped_rows.txt"
"""File in the run folder that lists the rows without a pair, one a line."""


@dataclass(frozen=True)
class Run:
    """Parts of one run, ready to be fitted.

    Args:
        config: the composed options.
        run_dir: the run folder.
        started: time at which preparation began, from `time.perf_counter`.
        module: the model and its optimization.
        datamodule: the pairs, tokenized, and their batches.
        evaluation: the evaluations, with the best weights so far.
        record: the run's identity and plan.
        notes: sentences on the pairs.
        suites: scoring of suites; None without any.
    """

    config: TrainConfig
    run_dir: Path
    started: float
    module: RunModule
    datamodule: PreferenceDataModule
    evaluation: Evaluation
    record: RunRecord
    notes: tuple[str, ...]
    suites: SuiteCallback | None

    def keep_trained_pairs(self) -> None:
        """Write fingerprints of all pairs that the weights, the base model's included, were trained on."""
        found, path = self.datamodule.trained_pairs(), self.run_dir / TRAINED_PAIRS_FILE
        for source in (self.config.model.path, path.parent if path.is_file() else None):
            earlier = None if source is None else TrainedPairs.recorded(source)
            found = found if earlier is None else found.merged(earlier)
        found.write(path)


def prepare(
    config: TrainConfig,
    start: Start,
    given: TrainVal | None = None,
    order: PairOrder | None = None,
    metrics: Mapping[str, PairMetric] = MappingProxyType({}),
) -> Run:
    """Read the pairs, load the model, tokenize and plan.

    Args:
        config: the composed options.
        start: the run's start.
        given: pairs in memory, in place of those in `config.data`.
        order: order of the training pairs; None shuffles them by the seed.
        metrics: further numbers of each evaluation, by name.

    Raises:
        ConfigError: if options conflict with the pairs, or the name of a metric is taken.
    """
    if bad := [name for name in metrics if not name.isidentifier() or f"val/{name}" in COLUMNS]:
        raise ConfigError(f"metrics need new names of letters, digits and underscores, got '{bad[0]}'; choose another")
    run_dir = Path(config.output_dir)
    started = time.perf_counter()
    if is_toy(config.model.path, given or config.data.train):
        log.warning(TOY_WARNING, config.model.name)
    data = load_data(config, given)
    if start.before is not None:
        require_same_pairs(start.before, data)
    order = order_of(data, config, order)
    if start.before is not None:
        require_same_order(start.before, order)
    if config.loss.margin_scale > 0 and data.train.pairs and all(pair.margin is None for pair in data.train.pairs):
        raise ConfigError("loss.margin_scale has an effect only on pairs with a margin, and no training pair has one")
    _require_scores(config, data)
    require_monitored(config.training.monitor, data.val)
    notes = data.notes(uses_margins=config.loss.margin_scale > 0 or config.data.curriculum == OWN_MARGINS)
    notes += seen_by_base(config.model.path, data.val.pairs)
    suites = SuiteCallback(config) if config.training.suites else None  # reads them before the model
    model = trainable_model(config, data.train)
    notes += content_notes(data.train.pairs, model.renderer)
    for note in (*notes, *layout_examples(data.train)):
        log.warning(note)
    datamodule = data_module(data, config, model, order)
    record = recorded(start, data, order, datamodule.num_steps)
    module = RunModule(model, config, datamodule)
    module.record = record
    evaluation = Evaluation(config, datamodule, metrics)
    if config.hardware.compile:
        compile_backbone(model.model)
    run = Run(config, run_dir, started, module, datamodule, evaluation, record, notes, suites)
    run.keep_trained_pairs()
    list_skipped([*datamodule.data.train.skipped, *datamodule.data.val.skipped], run_dir)
    return run


def seen_by_base(base: str | None, val: Sequence[PreferencePair]) -> tuple[str, ...]:
    """Sentence on validation pairs that the base model was trained on, by the record next to it; empty without any.

    Args:
        base: `model.path`.
        val: the validation pairs.
    """
    recorded = None if base is None else TrainedPairs.recorded(base)
    seen = None if recorded is None else recorded.count(val)
    if seen is None or not seen.num_pairs_of_prompts:
        return ()
    return (
        f"the base model {base} was trained on {seen.num_pairs} of the {len(val)} validation pairs and on the prompts "
        f"of {seen.num_pairs_of_prompts}; their accuracy is too good. Give data.val pairs that it has not seen",
    )


def list_skipped(skipped: Sequence[SkippedRow], run_dir: Path) -> None:
    """Log the number of rows that gave no pair, and list them in a file."""
    if skipped:
        path = write_text(run_dir / SKIPPED_FILE, "".join(f"{row}\n" for row in skipped))
        log.warning("%d rows gave no pair; %s lists them, the first is %s", len(skipped), path, skipped[0])
