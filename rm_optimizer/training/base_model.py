"""The model that a run starts from."""

from __future__ import annotations

import logging

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.classifier.head import require_trainable_head
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.dataset import PreferenceDataset
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.schema import ModelConfig, TrainConfig
from rm_optimizer.schema.adapters import AdapterKind

log = logging.getLogger("rm_optimizer")


def trainable_model(config: TrainConfig, train: PreferenceDataset) -> BradleyTerryRM:
    """The base model of a run in training mode, with the run's beta and adapter, and a head that can be trained."""
    model = build_model(config.model, train, config.seed, quantize=config.adapter.kind == AdapterKind.qlora)
    model.beta = config.loss.beta
    if count := add_adapter(model.model, config.adapter, seed=config.seed):
        log.info("%s: %s", config.adapter.kind.value, count)
    require_trainable_head(model.train().model)
    return model


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
