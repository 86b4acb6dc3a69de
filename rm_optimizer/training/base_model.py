"""The model that a run starts from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.classifier.head import require_trainable_head
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.dataset import PreferenceDataset, load_training_data
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.records.codec import from_values
from rm_optimizer.schema import ModelConfig, TrainConfig
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.schema.data import DataConfig

log = logging.getLogger("rm_optimizer")


def trainable_model(config: TrainConfig, train: PreferenceDataset) -> BradleyTerryRM:
    """The base model of a run in training mode, with the run's beta and adapter, and a head that can be trained."""
    model = build_model(config.model, train, config.seed, quantize=config.adapter.kind == AdapterKind.qlora)
    model.beta = config.loss.beta
    if count := add_adapter(model.model, config.adapter, seed=config.seed):
        log.info("%s: %s", config.adapter.kind.value, count)
    require_trainable_head(model.train().model)
    return model


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
    train = PreferenceDataset.from_pairs([]) if config.path is not None else load_training_data(data).train
    model = build_model(config, train, options["seed"])
    add_adapter(model.model, adapter, seed=options["seed"])
    weights: dict[str, Tensor] = model.model.state_dict()
    return weights


def build_model(config: ModelConfig, train: PreferenceDataset, seed: int, *, quantize: bool = False) -> BradleyTerryRM:
    """The base model of a run: loaded from `path`, or built small with a tokenizer trained on the pairs."""
    if config.path is not None:
        return BradleyTerryRM.from_pretrained(
            config.path,
            max_length=config.max_length,
            attn_implementation=config.attn_implementation.value,
            dropout=config.dropout,
            seed=seed,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            gradient_checkpointing=config.gradient_checkpointing,
            quantize=quantize,
            new_head=True,
        )
    assert config.max_length is not None, "checked with the options"
    return BradleyTerryRM.from_config(
        config.architecture,
        train_tokenizer(rendered_texts(train.pairs), config.vocab_size),
        max_length=config.max_length,
        attn_implementation=config.attn_implementation.value,
        dropout=config.dropout,
        seed=seed,
        gradient_checkpointing=config.gradient_checkpointing,
    )
