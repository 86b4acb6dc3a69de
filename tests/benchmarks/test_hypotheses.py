"""Planted effects are found, planted nothing is not, and a miniature run of all hypotheses can be repeated."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.special import log_expit
from scipy.stats import t as student

from rm_optimizer.core.metrics.pairwise import evaluate_pairs
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.schema.data import SyntheticConfig

SEEDS, PROMPTS, PAIRS = 3, 60, 240
NAMES = [f"prompt {i % PROMPTS}" for i in range(PAIRS)]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def hypotheses() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import hypotheses  # type: ignore[import-not-found]

        return hypotheses


@pytest.fixture(scope="module")
def effects(hypotheses: ModuleType) -> ModuleType:
    return sys.modules["paired_effects"]


def margins(seed: int, shift: float = 0.0) -> np.ndarray:
    """What prompts and pairs decide is shared; each (seed, pair) adds its own noise."""
    shared = np.random.default_rng(99).normal(0.5, 1.0, size=PAIRS)
    return shared + shift + np.random.default_rng(seed).normal(0.0, 0.3, size=(SEEDS, PAIRS))


@pytest.mark.parametrize("score", ["accuracy", "nll"])
def test_a_planted_effect_is_confirmed_its_reverse_refuted_and_nothing_undecided(effects, score):
    found = {
        name: effects.verdict(effects.effect(better, worse, NAMES, score), 0.0)
        for name, better, worse in (
            ("planted", margins(1, 1.0), margins(2)),
            ("reversed", margins(1), margins(2, 1.0)),
            ("nothing", margins(1), margins(2)),
        )
    }
    assert found == {"planted": "confirmed", "reversed": "refuted", "nothing": "undecided"}


def test_a_planted_calibration_effect_is_confirmed(effects):
    rng = np.random.default_rng(0)
    logits = rng.normal(0.0, 1.5, size=(SEEDS, 4000))
    calibrated = np.where(rng.random(logits.shape) < 1 / (1 + np.exp(-logits)), logits, -logits)
    names = [str(i) for i in range(4000)]
    estimate = effects.effect(calibrated, 4 * calibrated, names, "ece")
    assert effects.verdict(estimate, 0.0) == "confirmed"
    assert effects.verdict(effects.effect(4 * calibrated, calibrated, names, "ece"), 0.0) == "refuted"


def test_equal_arms_are_no_worse_than_each_other_with_certainty(effects):
    estimate = effects.effect(margins(1), margins(1), NAMES, "accuracy")
    assert (estimate.value, estimate.low, estimate.high) == (0.0, 0.0, 0.0)
    assert effects.verdict(estimate, -0.03) == "confirmed"


@pytest.mark.parametrize("score", ["accuracy", "nll", "ece"])
def test_effects_are_mean_differences_of_the_package_s_own_metrics(effects, score):
    better, worse = margins(1), margins(2, -0.4)

    def mean(arm: np.ndarray) -> float:
        zeros = np.zeros(PAIRS)
        rows = [evaluate_pairs(row, zeros, beta=1.0, prompt_ids=NAMES, num_bootstrap=0, seed=0) for row in arm]
        return float(np.mean([getattr(row, score).value for row in rows]))

    sign = 1.0 if score == "accuracy" else -1.0
    assert effects.effect(better, worse, NAMES, score).value == pytest.approx(sign * (mean(better) - mean(worse)))
    assert effects.effect(better, None, NAMES, score).value == pytest.approx(mean(better))


def test_intervals_reduce_to_student_s_where_only_seeds_or_only_prompts_vary(effects):
    per_seed = np.array([0.1, 0.2, 0.6])
    seeds = effects.crossed_estimate(per_seed, 0.0, 50)
    half = student.ppf(0.975, 2) * per_seed.std(ddof=1) / math.sqrt(3)
    assert (seeds.low, seeds.high) == pytest.approx((0.3 - half, 0.3 + half))
    prompts = effects.crossed_estimate(np.full(3, 0.3), 0.05, 50)
    assert prompts.high - 0.3 == pytest.approx(student.ppf(0.975, 49) * 0.05)


def test_one_seed_gives_no_interval_and_no_verdict(effects):
    estimate = effects.effect(margins(1, 3.0)[:1], margins(2)[:1], NAMES, "nll")
    assert estimate.low is None
    assert effects.verdict(estimate, 0.0) == "undecided"


@pytest.mark.parametrize(("seed_std", "prompt_std"), [(0.0, 1.0), (0.1, 0.2), (0.3, 1.0), (0.1, 0.0)])
def test_intervals_hold_the_truth_at_least_as_often_as_they_say(effects, seed_std, prompt_std):
    rng = np.random.default_rng(3)
    repetitions, truth, held = 1500, 0.7, 0
    for _ in range(repetitions):
        table = truth + rng.normal(0, seed_std, (SEEDS, 1)) + rng.normal(0, prompt_std, (1, PROMPTS))
        table += rng.normal(0, 0.5, (SEEDS, PROMPTS))
        prompt_error = table.mean(axis=0).std(ddof=1) / math.sqrt(PROMPTS)
        estimate = effects.crossed_estimate(table.mean(axis=1), prompt_error, PROMPTS)
        held += estimate.low <= truth <= estimate.high
    assert held / repetitions > 0.95 - 3 * math.sqrt(0.95 * 0.05 / repetitions)


def test_two_parts_are_as_good_as_the_weaker(effects):
    words = ("confirmed", "undecided", "refuted")
    found = {effects.both(a, b) for a in words for b in words if "refuted" in (a, b)}
    assert found == {"refuted"}
    assert [effects.both("confirmed", word) for word in words] == list(words)
    assert effects.both("undecided", "undecided") == "undecided"


def batching_rows(ratio: float, difference: float) -> list[dict[str, float]]:
    noise = np.random.default_rng(0).normal(0, 0.01, 12)
    return [
        {"log_time_ratio": ratio + n, "gradient_difference": difference, "mean_of_means_difference": 0.3} for n in noise
    ]


def test_pair_aware_batching_needs_both_the_time_and_the_gradient(hypotheses):
    rows = {
        "confirmed": batching_rows(0.4, 1e-6),
        "refuted": batching_rows(0.4, 1e-2),
        "undecided": batching_rows(0.0, 1e-6),
    }
    assert {word: hypotheses.h1(found).verdict for word, found in rows.items()} == {word: word for word in rows}


def arms(**changed: np.ndarray) -> dict[str, np.ndarray]:
    names = ("ablation_a1", "ablation_a2", "ablation_a3", "ablation_a4", "full_finetune", "lora_r16")
    return {name: margins(10 + i) for i, name in enumerate(names)} | changed


def found(hypotheses: ModuleType, test: dict[str, np.ndarray], saved: float = 0.3) -> dict[str, object]:
    train = {"ablation_a1": margins(5, 2.0), "ablation_a2": margins(6, 1.0)}
    results = hypotheses.findings(test, train, np.array([saved, saved + 0.01, saved - 0.01]), NAMES)
    return {result.name[:2]: result for result in results}


def test_the_gap_is_test_less_training_nll_of_one_arm_less_that_of_the_other(hypotheses):
    test = arms()

    def gap(arm: str, fitted: np.ndarray) -> float:
        return float(-log_expit(test[arm]).mean() + log_expit(fitted).mean())

    result = found(hypotheses, test)["h2"]
    expected = gap("ablation_a1", margins(5, 2.0)) - gap("ablation_a2", margins(6, 1.0))
    assert result.effect.value == pytest.approx(expected)
    assert result.verdict == "confirmed"


def test_lora_is_not_judged_against_a_model_that_learned_nothing(hypotheses):
    coin = np.where(np.arange(PAIRS) % 2, 1.0, -1.0) + 0.01 * margins(1)
    assert found(hypotheses, arms(full_finetune=coin, lora_r16=coin))["h4"].verdict == "undecided"
    assert found(hypotheses, arms(full_finetune=margins(1, 1), lora_r16=margins(1, 1)))["h4"].verdict == "confirmed"
    assert found(hypotheses, arms(full_finetune=margins(1, 2), lora_r16=margins(1)))["h4"].verdict == "refuted"


def test_early_stopping_must_keep_the_nll_and_save_steps(hypotheses):
    kept = margins(12)
    same = arms(ablation_a3=kept, ablation_a4=kept)
    assert found(hypotheses, same)["h5"].verdict == "confirmed"
    assert found(hypotheses, same, saved=0.0)["h5"].verdict == "undecided"
    assert found(hypotheses, arms(ablation_a3=margins(12, 1.0)))["h5"].verdict == "refuted"


def test_parts_share_no_prompt_and_hold_few_pairs_of_each(hypotheses):
    prompts = ["common"] * 100 + [str(i % 50) for i in range(200)]
    select, test = hypotheses.divided(prompts, 3, (20, 60), np.random.default_rng(0))
    names = [[prompts[row] for row in part] for part in (select, test)]
    assert not set(names[0]) & set(names[1])
    assert max(part.count(name) for part in names for name in part) <= 3
    assert len(names[0]) <= 20
    assert len(names[1]) == 60
    assert len(set(select) | set(test)) == len(select) + len(test)


@pytest.fixture(scope="module")
def miniature(hypotheses, tmp_path_factory) -> list[str]:
    """Arguments of a finished run on the tiny model and the synthetic world."""
    folder = tmp_path_factory.mktemp("hypotheses")
    world = synthetic_world(SyntheticConfig(num_train=32, num_val=40))
    for name, pairs in (("train", world.train), ("val", world.val)):
        columns = {column: [getattr(pair, column) for pair in pairs] for column in ("prompt", "chosen", "rejected")}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    sizes = ["--num-train", "16", "--num-test", "16", "--num-select", "8", "--epochs", "1", "--batch-size", "8"]
    files = ["--train", str(folder / "train.parquet"), "--val", str(folder / "val.parquet")]
    rest = ["--model", "tiny", "--output", str(folder / "out"), "--seeds", "0", "--batching-steps", "1"]
    hypotheses.main([*files, *sizes, *rest])
    return [*files, *sizes, *rest]


def test_a_finished_run_is_read_not_repeated(hypotheses, miniature, capsys, monkeypatch):
    monkeypatch.setattr(hypotheses, "train_reward_model", None)
    monkeypatch.setattr(hypotheses, "gradients", None)
    hypotheses.main(miniature)
    lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines() if ": " in line)
    assert {lines[f"h{i}_verdict"] for i in range(1, 6)} <= {"confirmed", "refuted", "undecided"}


def test_other_settings_need_another_folder(hypotheses, miniature):
    with pytest.raises(SystemExit, match="begun with other epochs"):
        hypotheses.main([*miniature, "--epochs", "2"])


def test_arms_of_equal_options_share_a_trial_and_weights_are_not_kept(miniature):
    output = Path(miniature[miniature.index("--output") + 1])
    records = [json.loads(path.read_text()) for path in output.glob("trials/*/trial.json")]
    assert {record["arm"] for record in records} == {f"ablation_a{i}" for i in range(1, 5)} | {"lora_r16"}
    assert not list(output.glob("trials/*/run/checkpoints"))
    assert all(record["steps"] == record["all_steps"] == 2 for record in records)


def test_the_pairs_that_stop_training_are_not_those_that_judge_it(miniature):
    data = Path(miniature[miniature.index("--output") + 1], "data")
    select, test = (set(pq.read_table(data / f"{name}.parquet")["prompt"].to_pylist()) for name in ("select", "test"))
    assert not select & test
