"""Every option is classified: free, decided by the pairs, a length that may grow, or fixed once a run has started."""

from __future__ import annotations

from typing import Any

import pytest

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.run_options import BY_CONTENT, FREE, LENGTH, flat, is_among, options_of, require_same_options
from rm_optimizer.schema import TrainConfig, compose, typed

FIXED = (
    *("seed", "loss", "optimizer", "schedule", "adapter"),
    *("model.name", "model.path", "model.revision", "model.architecture", "model.vocab_size", "model.max_length"),
    *(
        "model.dropout",
        "model.pooling_head",
        "model.freeze",
        "model.dtype",
        "model.router_aux_loss_coef",
        "batching.batch_size",
    ),
    *(
        "data.val_fraction",
        "data.split_seed",
        "data.format",
        "data.columns",
        "data.kwise_rule",
        "data.max_pairs",
        "data.winner",
        "data.layout",
        "data.over_long",
        "data.thinking",
        "data.special_tokens",
    ),
    *("data.streaming", "data.synthetic", "data.curriculum", "data.curriculum_easy", "data.curriculum_hard"),
    *("data.curriculum_quantiles", "data.curriculum_covers"),
    *("training.gradient_clip_norm", "training.evals_per_epoch", "training.eval_at_start", "training.monitor"),
    *("training.mode", "training.early_stopping"),
    *("hardware.accelerator", "hardware.devices", "hardware.num_nodes", "hardware.strategy", "hardware.precision"),
)
"""What decides the result of a run. A new option belongs here, or into `schema/run_options.py`."""


def options(*overrides: str) -> dict[str, Any]:
    return options_of(typed(compose(["output_dir=runs/a", *overrides]), TrainConfig))


def test_every_option_is_in_one_class():
    for name, _ in flat(options()):
        classes = [group for group in (FREE, BY_CONTENT, LENGTH, FIXED) if is_among(name, group)]
        assert len(classes) == 1, f"{name} must be classified for resume=auto"


@pytest.mark.parametrize(
    "override",
    [
        *("data.fetch_timeout=600", "batching.micro_token_budget=512", "batching.eval_token_budget=512"),
        *("hardware.pass_tokens=512", "hardware.eval_pass_tokens=512", "data.cache_dir=cache", "data.num_workers=2"),
        *("training.keep_checkpoints=5", "training.checkpoint_every=7", "training.num_bootstrap=200"),
        *("model.attn_implementation=eager", "model.gradient_checkpointing=true", "logger.wandb=true"),
        *("training.progress=false", "output_dir=runs/b", "data.on_bad_row=drop", "data.train=moved.jsonl"),
        *("data.train=[{path: moved.jsonl, weight: 2}]", "training.max_steps=99", "training.epochs=3"),
    ],
)
def test_what_changes_no_result_is_accepted(override: str):
    assert options(override) != options()
    require_same_options(options(), options(override))


def test_the_direction_that_the_monitor_implies_is_the_same_option():
    assert options("training.mode=min") == options()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("seed=1", "seed was 0, is 1"),
        ("training.monitor=val/accuracy", "training.mode was min, is max; training.monitor was val/nll"),
        ("data.max_pairs=5", "data.max_pairs was null, is 5"),
        ("training.epochs=0.5", r"longer, not shorter, but training\.epochs was 1\.0, is 0\.5"),
    ],
)
def test_what_changes_the_result_is_refused_by_name(override: str, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        require_same_options(options(), options(override))


def test_fewer_steps_are_refused():
    with pytest.raises(ConfigError, match=r"training\.max_steps was 9, is 8"):
        require_same_options(options("training.max_steps=9"), options("training.max_steps=8"))
