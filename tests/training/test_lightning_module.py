"""The gradient of a step is the gradient of the whole macro-batch, however it is split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rm_optimizer.core.model.losses import bradley_terry_loss
from rm_optimizer.errors import ConfigError
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training.fitting import build_trainer
from tests.builders import prepared_run

Build = Callable[..., TrainConfig]

# Llama's RMSNorm computes in float32 even in a float64 model: a last-bit change before it becomes 6e-8 after it.
FLOAT32_ISLANDS = 1e-7


def gradient_of_first_step(config: TrainConfig) -> torch.Tensor:
    run = prepared_run(config)
    run.module.double()
    gradients: list[torch.Tensor] = []

    def keep(*_: object) -> torch.Tensor:
        gradients.append(torch.cat([p.grad.flatten() for p in run.module.parameters() if p.grad is not None]))
        return torch.ones(())

    run.module._clip = keep  # type: ignore[method-assign]
    trainer = build_trainer(config.hardware, [], [], 1)
    trainer.fit(run.module, datamodule=run.datamodule)
    return gradients[0]


@pytest.mark.parametrize("budget", [1, 400, 1000])
def test_any_budget_gives_the_same_gradient(small_config: Build, tmp_path: Path, budget: int):
    loss = ["loss.label_smoothing=0.1", "loss.center_rewards=0.01", "loss.reward_l2=0.1"]
    options = ["training.eval_at_start=false", *loss]
    whole = gradient_of_first_step(small_config(tmp_path, "batching.micro_token_budget=100000", *options))
    split = gradient_of_first_step(small_config(tmp_path, f"batching.micro_token_budget={budget}", *options))
    assert ((whole - split).abs().max() / whole.abs().max()).item() < 1e-10


def test_the_gradient_is_that_of_the_loss_on_single_sequences(small_config: Build, tmp_path: Path):
    config = small_config(tmp_path, "batching.micro_token_budget=500")
    ours = gradient_of_first_step(config)
    run = prepared_run(config)
    run.module.double()
    step = next(iter(run.datamodule.steps(0, 1)))
    model, tokens = run.module.model, run.datamodule.train_tokens
    place = {int(index): position for position, index in enumerate(tokens.pair_index)}
    rewards = []
    for index in step.pair_index:
        for ids in (tokens.chosen(place[int(index)]), tokens.rejected(place[int(index)])):
            row = torch.from_numpy(ids.astype("int64"))[None]
            rewards.append(model(row, torch.ones_like(row))[0])
    table = torch.stack(rewards).view(-1, 2)
    bradley_terry_loss(table[:, 0], table[:, 1]).backward()
    alone = torch.cat([p.grad.flatten() for p in run.module.parameters() if p.grad is not None])
    assert ((ours - alone).abs().max() / alone.abs().max()).item() < FLOAT32_ISLANDS


@pytest.mark.parametrize("budget", [1, 300, 100000])
def test_prefix_sharing_gives_the_same_gradient(small_config: Build, tmp_path: Path, budget: int):
    options = ["training.eval_at_start=false", f"batching.micro_token_budget={budget}"]
    apart = gradient_of_first_step(small_config(tmp_path, "batching.prefix_sharing=off", *options))
    shared = gradient_of_first_step(small_config(tmp_path, "batching.prefix_sharing=on", *options))
    assert ((apart - shared).abs().max() / apart.abs().max()).item() < FLOAT32_ISLANDS


def test_sharing_is_refused_by_name_where_it_cannot_be(small_config: Build, tmp_path: Path):
    on, auto = small_config(tmp_path, "batching.prefix_sharing=on"), small_config(tmp_path)
    for config in (on, auto):
        config.model.architecture = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 2}
    with pytest.raises(ConfigError, match=r"batching\.prefix_sharing=on is not possible: .*not a causal decoder"):
        prepared_run(on)
    assert not prepared_run(auto).datamodule.shares_prefixes
