from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rm_optimizer.core.metrics.pairwise import evaluate_pairs


@pytest.fixture(scope="module")
def quality() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "quality_trl.py"
    spec = importlib.util.spec_from_file_location("quality_trl", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quality_trl"] = module
    spec.loader.exec_module(module)
    return module


def test_equal_rewards_differ_by_nothing_and_with_certainty(quality: ModuleType):
    margin = np.random.default_rng(0).normal(size=40)
    prompts = [str(i // 4) for i in range(40)]
    for estimate in quality.paired_differences(margin, margin, prompts, num_bootstrap=50, seed=0).values():
        assert (estimate.value, estimate.low, estimate.high) == (0.0, 0.0, 0.0)


def test_differences_are_those_of_the_sides_own_metrics(quality: ModuleType):
    rng = np.random.default_rng(1)
    ours, theirs = rng.normal(1.0, 1.0, size=60), rng.normal(0.3, 2.0, size=60)
    theirs[:5] = 0.0  # ties count one half
    prompts = [str(i % 17) for i in range(60)]
    differences = quality.paired_differences(ours, theirs, prompts, num_bootstrap=50, seed=0)
    first, second = (
        evaluate_pairs(m, np.zeros(60), beta=1.0, prompt_ids=prompts, num_bootstrap=0, seed=0) for m in (ours, theirs)
    )
    for name, estimate in differences.items():
        expected = getattr(first, name).value - getattr(second, name).value
        assert estimate.value == pytest.approx(expected, abs=1e-12)
        assert estimate.num_samples == 17


def test_pairing_removes_what_the_sides_share(quality: ModuleType):
    rng = np.random.default_rng(2)
    shared = rng.normal(size=400)
    prompts = [str(i) for i in range(400)]
    close = quality.paired_differences(shared + 0.01, shared, prompts, num_bootstrap=200, seed=0)["nll"]
    apart = quality.paired_differences(shared + 0.01, rng.permutation(shared), prompts, num_bootstrap=200, seed=0)[
        "nll"
    ]
    assert close.standard_error is not None
    assert apart.standard_error is not None
    assert close.standard_error < apart.standard_error / 20


def test_our_options_compose_and_match_the_stated_settings(quality: ModuleType, tmp_path: Path):
    argv = [
        "--model",
        "m",
        "--train",
        "a.parquet",
        "--val",
        "b.parquet",
        "--output",
        str(tmp_path),
        "--num-pairs",
        "10",
    ]
    args = quality.options(argv)
    config = quality.our_config(args, tmp_path)
    assert (config.model.path, config.model.max_length, config.data.max_pairs) == ("m", 256, 10)
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.schedule.warmup_ratio) == (5e-5, 0.0, 0.03)
    assert (config.batching.batch_size, config.hardware.precision, config.seed) == (16, "bf16-mixed", 0)


def test_a_side_trained_with_other_settings_is_not_reused(quality: ModuleType, tmp_path: Path):
    argv = ["--model", "m", "--train", "a", "--val", "b", "--output", str(tmp_path), "--reuse"]
    first = quality.options(argv)
    side = quality.Side(quality.settings_of(first), "folder", 1, 1, 1.0, 1.0, 1.0)
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "side.json").write_text(quality.json.dumps(quality.asdict(side)))
    assert quality.trained(first, "trl") == side
    with pytest.raises(SystemExit, match="epochs"):
        quality.trained(quality.options([*argv, "--epochs", "2"]), "trl")
