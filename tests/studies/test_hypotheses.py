"""Each hypothesis is judged by its criteria, and a miniature study of all of them can be repeated."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import hypotheses
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypotheses import ARMS, CLAIMS, Finding, batching_finding, divided, training_findings
from scipy.special import log_expit
from scipy.stats import t as student_t

from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.errors import ConfigError
from rm_optimizer.schema.data import SyntheticConfig

SEEDS, PROMPTS, PAIRS = 3, 60, 240
NAMES = [f"prompt {i % PROMPTS}" for i in range(PAIRS)]


def margins(seed: int, shift: float = 0.0) -> np.ndarray:
    """What prompts and pairs decide is shared; each (seed, pair) adds its own noise."""
    shared = np.random.default_rng(99).normal(0.5, 1.0, size=PAIRS)
    return shared + shift + np.random.default_rng(seed).normal(0.0, 0.3, size=(SEEDS, PAIRS))


def batching_rows(ratio: float, difference: float) -> list[dict[str, float]]:
    noise = np.random.default_rng(0).normal(0, 0.01, 12)
    return [
        {"log_time_ratio": ratio + n, "gradient_difference": difference, "mean_of_means_difference": 0.3} for n in noise
    ]


def test_pair_aware_batching_needs_both_the_time_and_the_gradient():
    rows = {
        "better": batching_rows(0.4, 1e-6),
        "worse": batching_rows(0.4, 1e-2),
        "inconclusive": batching_rows(0.0, 1e-6),
    }
    assert {word: batching_finding(found).verdict for word, found in rows.items()} == {word: word for word in rows}


def arms(**changed: np.ndarray) -> dict[str, np.ndarray]:
    names = ("ablation_a1", "ablation_a2", "ablation_a3", "ablation_a4", "full_finetune", "lora_r16")
    return {name: margins(10 + i) for i, name in enumerate(names)} | changed


COSTS = {"full_finetune": np.full((SEEDS, 2), 100.0), "lora_r16": np.array([[390.0, 40], [400, 41], [410, 39]])}
"""Pairs a second and peak bytes of each seed."""


def found(test: dict[str, np.ndarray], saved: float = 0.3) -> dict[str, Finding]:
    train = {"ablation_a1": margins(5, 2.0), "ablation_a2": margins(6, 1.0)}
    results = training_findings(test, train, np.array([saved, saved + 0.01, saved - 0.01]), NAMES, COSTS)
    return {result.name[:2]: result for result in results}


def test_the_gap_is_test_less_training_nll_of_one_arm_less_that_of_the_other():
    test = arms()

    def gap(arm: str, fitted: np.ndarray) -> float:
        return float(-log_expit(test[arm]).mean() + log_expit(fitted).mean())

    result = found(test)["h2"]
    expected = gap("ablation_a1", margins(5, 2.0)) - gap("ablation_a2", margins(6, 1.0))
    assert result.effect.value == pytest.approx(expected)
    assert result.verdict == "better"


def test_lora_is_not_judged_against_a_model_that_learned_nothing():
    coin = np.where(np.arange(PAIRS) % 2, 1.0, -1.0) + 0.01 * margins(1)
    assert found(arms(full_finetune=coin, lora_r16=coin))["h4"].verdict == "inconclusive"
    assert found(arms(full_finetune=margins(1, 1), lora_r16=margins(1, 1)))["h4"].verdict == "equivalent"
    assert found(arms(full_finetune=margins(1, 2), lora_r16=margins(1)))["h4"].verdict == "worse"


def test_loras_speed_and_memory_are_told_as_ratios_beside_their_claims():
    also = found(arms())["h4"].also
    logs = np.log(np.array([3.9, 4.0, 4.1]))
    half = student_t.ppf(0.975, 2) * logs.std(ddof=1) / math.sqrt(3)
    ends = [also[f"speed_ratio{end}"] for end in ("_low", "", "_high")]
    assert ends == pytest.approx([math.exp(logs.mean() + side * half) for side in (-1, 0, 1)])
    assert also["memory_ratio"] == pytest.approx(math.exp(np.log([0.40, 0.41, 0.39]).mean()))
    assert also["memory_ratio_low"] < also["memory_ratio"] < also["memory_ratio_high"]
    assert (also["speed_as_claimed"], also["memory_as_claimed"]) == ("better", "better")
    slow = hypotheses.lora_costs(COSTS["lora_r16"], COSTS["lora_r16"][::-1])
    assert (slow["speed_as_claimed"], slow["memory_as_claimed"]) == ("worse", "worse")


def test_smoothing_also_tells_whether_it_keeps_the_accuracy():
    shown = found(arms())["h3"].also
    same = found(arms(ablation_a2=margins(12), ablation_a3=margins(12)))["h3"].also
    assert set(shown) == {"accuracy", "accuracy_within_2_points"}
    assert same["accuracy"] == 0.0
    lost = found(arms(ablation_a2=margins(12, 2.0), ablation_a3=margins(12)))["h3"].also
    assert lost["accuracy_within_2_points"] == "worse"


def test_early_stopping_must_keep_the_nll_and_save_steps():
    kept = margins(12)
    same = arms(ablation_a3=kept, ablation_a4=kept)
    assert found(same)["h5"].verdict == "equivalent"
    assert found(same, saved=0.0)["h5"].verdict == "inconclusive"
    assert found(arms(ablation_a3=margins(12, 1.0)))["h5"].verdict == "worse"


def test_parts_share_no_prompt_and_hold_few_pairs_of_each():
    prompts = ["common"] * 100 + [str(i % 50) for i in range(200)]
    select, test = divided(prompts, 3, (20, 60), np.random.default_rng(0))
    names = [[prompts[row] for row in part] for part in (select, test)]
    assert not set(names[0]) & set(names[1])
    assert max(part.count(name) for part in names for name in part) <= 3
    assert len(names[0]) <= 20
    assert len(names[1]) == 60
    assert len(set(select) | set(test)) == len(select) + len(test)


OVERRIDES = ["model=tiny", "hardware=cpu", "training.epochs=1", "batching.batch_size=8", "model.adamw_lr=0.001"]
SIZES = {"num_train": 16, "num_test": 16, "num_select": 8}


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], dict[str, Any]]:
    """Folder, files and report of a finished study of the tiny model on the synthetic world."""
    folder = tmp_path_factory.mktemp("hypotheses")
    world = synthetic_world(SyntheticConfig(num_train=32, num_val=40))
    for name, pairs in (("train", world.train), ("val", world.val)):
        columns = {column: [getattr(pair, column) for pair in pairs] for column in ("prompt", "chosen", "rejected")}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    files = [str(folder / f"{name}.parquet") for name in ("train", "val")]
    return folder / "out", files, hypotheses.run(folder / "out", *files, OVERRIDES, 1, **SIZES)


@pytest.mark.slow
def test_the_command_reads_the_stored_trials_and_prints_each_claim(miniature, monkeypatch, capsys):
    """A study of stored trials gives the stored findings, from a copied folder too; nothing is measured."""
    folder, files, report = miniature
    monkeypatch.setattr(hypotheses, "run_training", None)
    monkeypatch.setattr(hypotheses, "gradients", None)
    monkeypatch.setenv("COLUMNS", "200")
    stored = json.loads((folder / "hypotheses.json").read_text())
    moved = folder.rename(folder.with_name("moved"))
    sizes = [word for name, size in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    monkeypatch.setattr(sys, "argv", ["hypotheses.py", str(moved), *files, *OVERRIDES, "--seeds", "1", *sizes])
    hypotheses.main()
    moved.rename(folder)
    printed = capsys.readouterr().out
    assert all(claim in printed for claim in CLAIMS.values())
    again = json.loads((folder / "hypotheses.json").read_text())
    assert again == stored
    assert [found["name"][:2] for found in stored["findings"]] == [*CLAIMS]
    assert {found.verdict for found in report["findings"]} <= {"better", "worse", "equivalent", "inconclusive"}


def test_arms_share_epochs_and_rate_and_lora_takes_ten_times_it(miniature):
    folder, files, _ = miniature
    splits = hypotheses.draw_splits(folder / "data", *files, hypotheses.SIZES | SIZES)
    configs = {arm: hypotheses.config_of(arm, 0, splits, OVERRIDES) for arm in ARMS}
    assert {config.training.epochs for config in configs.values()} == {1}
    assert {config.optimizer.lr for arm, config in configs.items() if arm != "lora_r16"} == {0.001}
    assert configs["lora_r16"].optimizer.lr == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer=muon", "sets optimizer itself"),
        ("training.max_steps=3", "sets training.max_steps itself"),
        ("training.epochs=0.5", "must be a whole number"),
        ("batching.batch_size=8,16", "are the same in every run"),
    ],
)
def test_options_that_would_change_an_arm_are_refused(miniature, tmp_path, override, sentence):
    with pytest.raises(ConfigError, match=sentence):
        hypotheses.run(tmp_path, *miniature[1], [override], 1, **SIZES)


def test_other_settings_need_another_folder(miniature):
    folder, files, _ = miniature
    with pytest.raises(ConfigError, match="begun with other options"):
        hypotheses.run(folder, *files, OVERRIDES, 1, **SIZES | {"num_test": 15})


def test_arms_of_equal_options_share_a_trial_and_weights_are_not_kept(miniature):
    folder, _, report = miniature
    assert report["arms"]["ablation_a2"] == report["arms"]["full_finetune"]
    assert len(list(folder.glob("trials/*.json"))) == len(ARMS) - 1
    assert all(report["findings"][3].also[f"{name}_ratio"] > 0 for name in ("speed", "memory"))
    assert not (folder / "run").exists()


def test_the_pairs_that_stop_training_are_not_those_that_judge_it(miniature):
    data = miniature[0] / "data"
    select, test = (set(pq.read_table(data / f"{name}.parquet")["prompt"].to_pylist()) for name in ("select", "test"))
    assert not select & test
