from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("trl", reason="the bench extra is not installed")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "parity_trl.py"
    spec = importlib.util.spec_from_file_location("parity_trl", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity_trl"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model_type", ["llama", "bert"])
@pytest.mark.parametrize(("has_margin", "center_rewards"), [(False, 0.0), (True, 0.01)])
def test_loss_and_gradients_equal_those_of_trl(
    parity: ModuleType, model_type: str, has_margin: bool, center_rewards: float
):
    difference = parity.measure(model_type, has_margin=has_margin, center_rewards=center_rewards)
    assert difference.loss <= 1e-5
    assert difference.gradient <= 1e-5
    assert difference.largest_gradient > 1e-3
