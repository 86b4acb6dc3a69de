"""Linear layers and pass sizes that a worker chooses by measuring."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from rm_optimizer.core.tokens.prefix_trees import TREE_TOKENS
from rm_optimizer.serving.embedded.worker import BUDGETS, TransformersWorker, calibrated_budget
from rm_optimizer.serving.weights.live_weights import PackedLinear, install_packed_linears, packing_gain
from tests.builders import tiny_reward_model
from tests.core.classifier.test_scoring import one_by_one, sequences
from tests.serving.engines import exported, options_of


@pytest.mark.skipif(
    packing_gain(torch.nn.Linear(64, 64)) == 0.0, reason="this build of PyTorch packs no float32 layers"
)
@pytest.mark.parametrize(
    ("family", "dtype", "atol"), [("llama", "float32", 1e-4), ("bert", "float32", 1e-4), ("llama", "bfloat16", 0.05)]
)
def test_packed_layers_give_the_same_rewards_and_the_same_state(family, dtype, atol):
    model, rows = tiny_reward_model(family), sequences()
    model.to(getattr(torch, dtype))
    before, state = one_by_one(model, rows), {key: value.clone() for key, value in model.state_dict().items()}
    assert install_packed_linears(model.model, least_gain=1e-9)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    np.testing.assert_allclose(one_by_one(model, rows), before, atol=atol)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())


def test_layers_that_gain_nothing_stay_plain():
    model = tiny_reward_model("bert")
    assert not install_packed_linears(model.model, least_gain=1e9)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_layers_in_float64_stay_plain():
    assert not install_packed_linears(tiny_reward_model("llama").double().model, least_gain=0.0)


def test_the_measured_budget_is_one_of_those_tried_and_keeps_to_its_time():
    model, started = tiny_reward_model("llama"), time.perf_counter()
    assert calibrated_budget(model, seconds=0.2) in BUDGETS
    assert time.perf_counter() - started < 60  # the largest pass may overrun; the machine may be busy


@pytest.mark.parametrize(("given", "expected"), [(None, TREE_TOKENS), (64, 64)])
def test_passes_over_trees_are_wide_unless_a_budget_was_given(tmp_path, monkeypatch, given, expected):
    monkeypatch.setattr("rm_optimizer.serving.embedded.worker.calibrated_budget", lambda model: 256)
    exported("llama", tmp_path / "model", max_position_embeddings=1024)
    worker = TransformersWorker(options_of(tmp_path / "model", tmp_path / "tokenizer", token_budget=given), [])
    assert (worker.description.token_budget, worker.description.tree_budget) == (given or 256, expected)
    widths, draws = list[int](), np.random.default_rng(0)
    worker.model.model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    prompt = draws.integers(5, 300, 40)
    rows = [np.concatenate([prompt, draws.integers(5, 300, 100)]).astype(np.int32) for _ in range(8)]
    rewards = worker.scorer.rewards(rows)
    assert widths == [40 + 8 * 100] if given is None else max(widths) <= 100 + 40
    np.testing.assert_allclose(rewards, one_by_one(worker.model, rows), atol=1e-5)
