"""A function of the margins or rewards, named as module:function, is the loss of training and of its curvature."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rm_optimizer.core.model import losses
from rm_optimizer.core.model.losses import bradley_terry_pair_losses
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.schema import LossConfig, TrainConfig, compose, typed
from rm_optimizer.training.run import run_training
from tests.builders import tiny_reward_model

LOSSES_FILE = """
import torch


def logistic(z):
    return torch.nn.functional.softplus(-z)


def rewards(chosen, rejected, *, margin, label):
    return torch.relu(1 + margin - (2 * label - 1) * (chosen - rejected))


def mean(z):
    return logistic(z).mean()


def constant(z):
    return torch.zeros_like(z.detach())


def two(chosen, rejected):
    return chosen - rejected


number = 3
"""


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Module of losses that Python can import."""
    (tmp_path / "own_losses.py").write_text(LOSSES_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_losses"
    sys.modules.pop("own_losses", None)
    losses._imported.cache_clear()


def test_a_named_function_of_margins_is_the_loss(named: str):
    generator = torch.Generator().manual_seed(0)
    chosen, rejected, margin = torch.randn(3, 50, dtype=torch.float64, generator=generator)
    label = torch.rand(50, dtype=torch.float64, generator=generator)
    values = {"margin": margin, "label": label, "scores": torch.zeros(50, 2)}
    own = LossConfig(name=f"{named}:logistic", margin_scale=0.5)
    expected = bradley_terry_pair_losses(chosen, rejected, margin=0.5 * margin, label=label)
    torch.testing.assert_close(losses.configured_pair_losses(chosen, rejected, own, **values), expected)
    hinge = losses.configured_pair_losses(chosen, rejected, LossConfig(name=f"{named}:rewards"), **values)
    torch.testing.assert_close(hinge, torch.relu(1 - (2 * label - 1) * (chosen - rejected)))


def test_curvature_takes_a_named_loss(named: str):
    model = tiny_reward_model("llama")
    pairs = [PreferencePair(f"q{i}", f"good {i}", "bad") for i in range(4)]
    found = [
        HessianAnalyzer(model, loss=LossConfig(name=name), params="head", seed=0).compute_spectrum(
            pairs, top_k=2, progress=False
        )
        for name in (None, f"{named}:logistic")
    ]
    assert found[1].eigenvalues == pytest.approx(found[0].eigenvalues, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such_module:f", r"loss\.name must name modules that Python can import, got 'no_such_module'"),
        ("own_losses:logistik", r"unknown function of own_losses in loss\.name 'logistik'; did you mean 'logistic'"),
        ("own_losses:number", r"unknown function of own_losses in loss\.name 'number'"),
        ("own_losses:two", r"must take \(chosen, rejected, \*, margin, label\), or the margins alone, got"),
        ("own_losses:mean", "must not depend on the other pairs; leave out means"),
        ("own_losses:constant", "must be differentiable in both rewards"),
        ("lgistic", "unknown loss 'lgistic'"),
    ],
)
def test_a_function_that_is_no_loss_is_refused_before_anything_is_loaded(named: str, name: str, sentence: str):
    config = typed(compose(["model=tiny", "output_dir=unused", f"loss.name={name}"]), TrainConfig)
    with pytest.raises(ConfigError, match=sentence):
        run_training(config)
    assert not Path("unused").exists()
