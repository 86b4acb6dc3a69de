"""A user's own `BaseRewardModel` gives rewards; what reads weights, tokens or rendering says that it needs ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rm_optimizer
from rm_optimizer import (
    ActiveLearner,
    BaseRewardModel,
    HessianAnalyzer,
    PreferencePair,
    RMPublisherAdapter,
    diagnose,
    evaluate_model,
    measure_readiness,
)
from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.data_efficiency.acquisition import MarginSampling

PAIRS = [PreferencePair("Why?", "Because.", "No."), PreferencePair("Who?", "I.", "You.")]
EXEMPT = {"RewardModelEnsemble load"}
"""Parameters that name a `BradleyTerryRM` and take no model: a function that loads one."""


class Length(BaseRewardModel):
    """Rewards by length."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return attention_mask.sum(-1).float()

    def compute_loss(self, chosen_ids: Tensor, chosen_mask: Tensor, rejected_ids: Tensor, rejected_mask: Tensor) -> Any:
        return (self(rejected_ids, rejected_mask) - self(chosen_ids, chosen_mask)).mean()

    def tokenize(self, prompt: Prompt, response: str) -> dict[str, Tensor]:
        return dict.fromkeys(("input_ids", "attention_mask"), torch.ones(1, len(response), dtype=torch.int64))


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, constructors and methods, by name."""
    for name in rm_optimizer.__all__:
        found = getattr(rm_optimizer, name)
        if not inspect.isclass(found):
            yield name, found
            continue
        yield name, found.__init__
        for method in vars(found):
            if not method.startswith("_") and callable(getattr(found, method)):
                yield f"{name}.{method}", getattr(found, method)


CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "AcquisitionFunction.score model_or_ensemble": lambda model, at: MarginSampling().score(PAIRS, model),
    "ActiveLearner.ask model": lambda model, at: ActiveLearner(folder=at / "asked", pool=PAIRS).ask(1, model),
    "ActiveLearner model_or_ensemble": lambda model, at: ActiveLearner(model),
    "HessianAnalyzer model": lambda model, at: HessianAnalyzer(model),
    "RMPublisherAdapter.publish weights": lambda model, at: RMPublisherAdapter("http://localhost:9").publish(
        model, "1"
    ),
    "diagnose model": lambda model, at: diagnose(model, seed=0),
    "evaluate_model model": lambda model, at: evaluate_model(
        model, PAIRS, checkpoint="theirs", output_dir=at / "out", token_budget=64, num_bootstrap=0, seed=0
    ),
    "measure_readiness model": lambda model, at: measure_readiness(model, PAIRS, None, None),
}


def test_every_public_call_that_reads_a_model_of_ours_is_tried():
    named = {
        f"{name} {parameter.name}"
        for name, function in callables()
        for parameter in inspect.signature(function).parameters.values()
        if "BradleyTerryRM" in str(parameter.annotation)
    }
    assert named - EXEMPT == CALLS.keys()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("model", [Length(), torch.nn.Linear(2, 1), "folder", None], ids=lambda m: type(m).__name__)
def test_another_model_is_refused_in_one_sentence(call: str, model: object, tmp_path: Path):
    if model is None and call.startswith("A"):
        pytest.skip("an acquisition without a model is one that reads none")
    with pytest.raises(TypeError, match=f"must be a BradleyTerryRM, .* got {type(model).__name__}; load one with"):
        CALLS[call](model, tmp_path)
    assert not (tmp_path / "out").exists()
