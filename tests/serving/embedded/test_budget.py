"""Linear layers and pass sizes that a worker chooses by measuring."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from rm_optimizer.serving.embedded.worker import BUDGETS, calibrated_budget
from rm_optimizer.serving.weights.live_weights import PackedLinear, install_packed_linears, packing_gain
from tests.builders import tiny_reward_model
from tests.core.classifier.test_scoring import one_by_one, sequences


@pytest.mark.skipif(
    packing_gain(torch.nn.Linear(64, 64)) == 0.0, reason="this build of PyTorch packs no float32 layers"
)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_packed_layers_give_the_same_rewards_and_the_same_state(family):
    model, rows = tiny_reward_model(family), sequences()
    before, state = one_by_one(model, rows), {key: value.clone() for key, value in model.state_dict().items()}
    assert install_packed_linears(model.model, least_gain=1e-9)
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    np.testing.assert_allclose(one_by_one(model, rows), before, atol=1e-4)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())


def test_layers_that_gain_nothing_stay_plain():
    model = tiny_reward_model("bert")
    assert not install_packed_linears(model.model, least_gain=1e9)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_the_measured_budget_is_one_of_those_tried_and_keeps_to_its_time():
    model, started = tiny_reward_model("llama"), time.perf_counter()
    assert calibrated_budget(model, seconds=0.2) in BUDGETS
    assert time.perf_counter() - started < 60  # the largest pass may overrun; the machine may be busy
