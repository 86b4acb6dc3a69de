"""Verdicts on arms, comparisons of runs and tuned studies of optimizers, by their formulas on planted margins."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from scipy import optimize, stats
from scipy.special import expit

from rm_optimizer.errors import TrainingDiverged
from rm_optimizer.experiments import verdicts
from rm_optimizer.experiments.compared_runs import ComparedRun, FoundRuns
from rm_optimizer.experiments.optimizer_comparison import stages
from rm_optimizer.experiments.optimizer_comparison.findings import findings
from rm_optimizer.experiments.optimizer_comparison.setting import ComparisonOptions
from rm_optimizer.experiments.run_comparison import compare_runs
from rm_optimizer.experiments.trial import InlineExecutor
from rm_optimizer.records.run_folder import PairReward, RunFolder
from rm_optimizer.training.folder.record import RunResult
from tests.oracles.formulas import ends, jackknifed, student

SCORES = ("accuracy", "nll", "brier", "ece")


class Arm:
    """Scores of seeds on common pairs, and Student's tests of their means over seeds and prompts."""

    def __init__(self, margins: np.ndarray, prompts: Sequence[str], y: np.ndarray, w: np.ndarray) -> None:
        self.z, self.prompts, self.y, self.w = margins, prompts, y, w

    def scores(self, z: np.ndarray, rows: np.ndarray) -> dict[str, float]:
        """Scores of one seed on some of the pairs."""
        z, y, w = z[rows], self.y[rows], self.w[rows]
        p, decided = expit(z), y != 0.5
        right = np.where(z == 0, 0.5, (z > 0) == (y > 0.5))
        q, t = np.maximum(p, 1 - p), np.where(z > 0, y, np.where(z < 0, 1 - y, 0.5))
        gaps = np.bincount(np.minimum((q - 0.5) * 20, 9).astype(int), w * (q - t))
        return {
            "accuracy": float((w * right)[decided].sum() / w[decided].sum()),
            "nll": float(-(w * (y * np.log(p) + (1 - y) * np.log(1 - p))).sum() / w.sum()),
            "brier": float((w * (y * (1 - p) ** 2 + (1 - y) * p**2)).sum() / w.sum()),
            "ece": float(abs(gaps).sum() / w.sum()),
        }

    def per_seed(self, score: str, rows: np.ndarray | None = None) -> np.ndarray:
        rows = np.arange(len(self.y)) if rows is None else rows
        return np.array([self.scores(z, rows)[score] for z in self.z])

    def left_out(self, statistic: Any, score: str) -> list[Any]:
        """The statistic without each prompt that counts; one without a better response has no accuracy."""
        kept = np.flatnonzero((self.y != 0.5) | (score != "accuracy"))
        return jackknifed(lambda rows: statistic(kept[rows]), [self.prompts[i] for i in kept])

    def less(self, other: Arm | None, score: str) -> tuple[float, float, float]:
        """Mean difference, its error and degrees of freedom.

        `(S b - mean own b) / (S - 1)` is the prompts' variance, with the jackknife's b (Cameron et al., 2011), and the
        half width at 98 % that of Graybill and Wang (1980).
        """

        def effects(rows: np.ndarray | None = None) -> np.ndarray:
            return self.per_seed(score, rows) - (0.0 if other is None else other.per_seed(score, rows))

        each, count = effects(), len(self.z)
        left = np.array(self.left_out(effects, score))
        num = len(left)
        own, b = (num - 1) * left.var(axis=0), (num - 1) * left.mean(axis=1).var()
        of_prompts = max(count * b - own.mean(), 0) / (count - 1)
        of_seeds = each.var(ddof=1) / count
        error = math.sqrt(max(of_seeds + of_prompts, b))
        t_seeds, t_prompts = stats.t.ppf(0.99, count - 1), stats.t.ppf(0.99, num - 1)
        half = math.sqrt(max(t_seeds**2 * of_seeds + t_prompts**2 * of_prompts, t_prompts**2 * b))

        def excess(freedom: float) -> float:
            return float(stats.t.ppf(0.99, freedom) * error - half)

        few, many = sorted((count - 1, num - 1))
        freedom = few if excess(few) <= 0 else many if excess(many) >= 0 else optimize.brentq(excess, few, many)
        return float(each.mean()), error, float(freedom)

    def interval(self, other: Arm | None, score: str) -> tuple[float, ...]:
        value, error, freedom = self.less(other, score)
        half = stats.t.ppf(0.975, freedom) * error
        least = -math.inf if other is not None and score == "nll" else 0.0 if other is None else -1.0
        most = math.inf if score == "nll" else 1.0
        return value, error, max(value - half, least), min(value + half, most)


def planted(seed: int, seeds: int, shift: float = 0.0) -> np.ndarray:
    """Margins of seeds on 32 pairs with a part in common; a shift agrees with the labels."""
    common, rng = np.random.default_rng(99), np.random.default_rng(seed)
    of_pairs = 0.5 + common.normal(size=32) + np.repeat(common.normal(size=16), 2)
    return np.asarray(
        of_pairs + shift * np.sign(LABEL - 0.5) + rng.normal(0, 0.1, (seeds, 1)) + rng.normal(0, 0.3, (seeds, 32))
    )


PROMPTS = [f"prompt {i % 11}" for i in range(32)]
LABEL = np.where(np.arange(32) % 11 == 4, 0.5, np.random.default_rng(1).choice([1.0, 1.0, 0.9, 0.5, 0.2], size=32))
WEIGHT = np.random.default_rng(2).choice([1.0, 0.5, 2.0], size=32)


def holm(p: Sequence[float]) -> list[float]:
    return [max(min(1.0, sum(other >= each for other in p) * each) for each in p if each <= own) for own in p]


def power(shift: float, freedom: float, level: float) -> float:
    """Probability that a two-sided Student test finds a shift in units of its error."""
    critical = stats.t.isf(level / 2, freedom)
    other_tail = np.nan_to_num(stats.nct.cdf(-critical, freedom, shift))  # scipy has no number for tiny ones
    return float(stats.nct.sf(critical, freedom, shift) + other_tail)


def test_every_number_of_a_verdict(monkeypatch: pytest.MonkeyPatch):
    margins = {"a": planted(0, 4, 0.9), "b": planted(1, 4), "c": planted(2, 4, -0.1), "d": planted(3, 4, -1.5)}
    arms = {name: Arm(each, PROMPTS, LABEL, WEIGHT) for name, each in margins.items()}
    limits = {"accuracy": 0.01, "nll": 0.2, "brier": 0.07, "ece": 0.01}
    monkeypatch.setattr(verdicts, "MARGINS", limits)
    found = verdicts.judge(margins, PROMPTS, reference="b", primary="brier", label=LABEL, weight=WEIGHT)
    assert [(each.score, each.arm) for each in found[:3]] == [("brier", name) for name in "acd"]
    words = set()
    for score, limit in limits.items():
        tests = {name: arms[name].less(arms["b"], score) for name in "acd"}
        p = [2 * stats.t.sf(abs(value) / error, freedom) for value, error, freedom in tests.values()]
        equal = [max(stats.t.sf((limit + s * v) / e, f) for s in (1, -1)) for v, e, f in tests.values()]
        is_primary, level = score == "brier", 0.05 / 3 if score == "brier" else 0.05
        for i, name in enumerate("acd"):
            (own,) = [each for each in found if (each.score, each.arm) == (score, name)]
            value, error, freedom = tests[name]
            half = stats.t.ppf(0.975, freedom) * error
            assert ends(own.difference) == pytest.approx((value, error, value - half, value + half), rel=1e-6)
            assert own.p_value == pytest.approx(p[i], rel=1e-6)
            different, equivalent = (holm(p)[i], holm(equal)[i]) if is_primary else (p[i], equal[i])
            assert own.holm_p == (pytest.approx(different) if is_primary else None)
            assert own.equivalence_p == pytest.approx(equivalent)
            better = (value > 0) == (score == "accuracy")
            word = ("better" if better else "worse") if different < 0.05 else "equivalent" if equivalent < 0.05 else ""
            assert own.verdict == (word or "inconclusive")
            words.add(own.verdict)
            assert own.power == pytest.approx(power(limit / error, freedom, level), abs=1e-6)
            assert power(own.detectable / error, freedom, level) == pytest.approx(0.8)
            both = np.corrcoef(arms[name].per_seed(score), arms["b"].per_seed(score))[0, 1]
            assert own.seed_correlation == pytest.approx(both)
            assert (own.reference, own.num_seeds, own.margin, own.is_primary) == ("b", 4, limit, is_primary)
    assert words == {"better", "worse", "equivalent", "inconclusive"}


def test_runs_are_compared_on_their_common_pairs_and_seeds():
    """Three arms of three, two and one runs; one run has a pair more, and one pair is there twice."""
    tables = {"adamw": planted(0, 3), "sgd": planted(1, 2, 0.3), "lion": planted(2, 1, -0.5)}
    tables["sgd"][1] *= 3.0  # so that an interval of two seeds reaches below 0
    seeds = {"adamw": (2, 0, 7), "sgd": (7, 2), "lion": (5,)}
    betas, runs = {"adamw": 1.3, "sgd": 0.8, "lion": 1.0}, []
    for arm, table in tables.items():
        for seed, margins in zip(seeds[arm], table, strict=True):
            same = [0 if i == 14 else i for i in range(32)]  # one pair is there twice
            rows = [
                PairReward(str(k), PROMPTS[i], LABEL[k], m, 0.25, WEIGHT[k])
                for i, k, m in zip(range(32), same, margins.tolist(), strict=True)
            ]
            rows = [*rows, PairReward("more", "another", 1.0, 3.0, 0.0, 1.0)] if arm == "lion" else rows
            about = {"steps": seed + 10, "best_step": 4, "wall_seconds": 2.5, "pairs_per_second": 7.0, "parameters": 99}
            given = {"metrics": SimpleNamespace(beta=betas[arm]), "commit": "c", "versions": {}, **about}
            own = {"optimizer.name": arm, "optimizer.lr": 0.1}
            result, folder = Mock(spec=RunResult, **given), RunFolder(Path(f"/runs/{arm}/{seed}"))
            name = f"{arm}/{seed}"
            runs.append(
                ComparedRun(name=name, folder=folder, seed=seed, options=own, result=result, rewards=tuple(rows))
            )
    found = compare_runs(FoundRuns(tuple(runs)), num_bootstrap=7)
    label, weight = LABEL.copy(), WEIGHT.copy()
    label[14], weight[14] = LABEL[0], WEIGHT[0]

    def arm_of(name: str, *kept: int) -> Arm:
        order = [seeds[name].index(seed) for seed in kept or sorted(seeds[name])]
        return Arm(betas[name] * (tables[name][order] - 0.25), PROMPTS, label, weight)

    assert (found.num_pairs, found.num_prompts, found.baseline) == (32, 11, "optimizer=adamw")
    assert [arm.seeds for arm in found.arms] == [(0, 2, 7), (2, 7), (5,)]
    everything = np.arange(32)
    for name, arm in zip(tables, found.arms, strict=True):
        own = arm_of(name)
        for score in SCORES:
            values = own.per_seed(score)
            assert arm.scores[score].value == pytest.approx(values.mean())
            if name == "lion":
                left = own.left_out(lambda rows, own=own, score=score: own.scores(own.z[0], rows)[score], score)
                error, low, high = student(values[0], left)
                expected = (values[0], error, 0.0 if score == "ece" else max(low, 0), high)
                assert arm.deviations[score] is None
            else:
                expected = own.interval(None, score)
                assert arm.deviations[score] == pytest.approx(values.std(ddof=1))
            high = expected[3] if score == "nll" else min(expected[3], 1.0)
            assert ends(arm.scores[score]) == pytest.approx((*expected[:3], high)), (name, score)
    for run in found.runs:
        own = arm_of(run.arm.removeprefix("optimizer="), run.seed)
        assert run.scores["ece"].value == pytest.approx(own.scores(own.z[0], everything)["ece"])
        assert run.costs == {
            "steps": run.seed + 10,
            "best_step": 4,
            "wall_seconds": 2.5,
            "pairs_per_second": 7.0,
            "parameters": 99,
        }
        assert run.num_pairs == (33 if run.arm.endswith("lion") else 32)
    for each in found.differences:
        if each.arm == "optimizer=sgd":
            assert each.num_seeds == 2
            expected = arm_of("sgd", 2, 7).interval(arm_of("adamw", 2, 7), each.score)
        else:
            one, other = arm_of("lion", 5), arm_of("adamw", 0)  # no common seed

            def gap(rows: np.ndarray, score: str = each.score, both: Any = (one, other)) -> float:
                return float(np.subtract(*(arm.scores(arm.z[0], rows)[score] for arm in both)))

            error, low, high = student(gap(everything), one.left_out(gap, each.score))
            expected = (gap(everything), error, low, high)
        assert ends(each.estimate) == pytest.approx(expected), (each.arm, each.score)


def num_lines(path: str) -> int:
    return len(Path(path).read_text().splitlines())


def graded(spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A trial that trains nothing: its NLL is the distance from the best rate, and its margins are planted."""
    arm, rate, seed = spec["arm"], spec["rate"], spec["options"]["seed"]
    if rate > 0.5 or (arm == "sgd" and spec["stage"] == "final" and seed == 3):
        raise TrainingDiverged("the loss became nan")
    best = {"adamw": 3e-5, "muon": 2e-2, "sgd": 1e-2}[arm]
    nll = 0.5 + abs(math.log10(rate / best)) + 0.01 * seed % 0.02
    points = [
        {"step": k, "tokens": 7 * k, "seconds": k / 2, "nll": nll + 0.3 - 0.1 * k, "accuracy": 0.5} for k in (2, 4)
    ]
    (folder / "curve.json").write_text(json.dumps({"points": points}))
    tables = {"val": np.zeros(num_lines(spec["scored"]["val"]))}
    found = {"val_nll": nll, "val_accuracy": 0.6, "initial": f"i{seed}", "order": f"o{seed}", "train_fingerprint": "t"}
    found |= {"half": spec["options"]["optimizer"].get("adamw_lr"), "step_seconds": rate, "tokens": 40 + seed}
    if "test" in spec["scored"]:
        tables["test"] = drawn_margins(arm, seed, num_lines(spec["scored"]["test"]))
        found |= {"test_nll": 0.1 * seed, "test_accuracy": 0.7, "top_eigenvalue": 2.0 + seed}
    np.savez(folder / "margins.npz", **tables)
    return found


def drawn_margins(arm: str, seed: int, count: int) -> np.ndarray:
    return np.random.default_rng([len(arm), seed]).normal(0.3 * len(arm), 1.0, count)


def test_sizes_of_budgets():
    for budget, *sizes in (
        ("smoke", 3, 1, 2, 16, 256),
        ("standard", 5, 1, 5, 64, None),
        ("paper", 7, 2, 10, 256, None),
    ):
        found = ComparisonOptions.of_budget(budget, "pairs", ["sgd", "adamw"])
        assert (found.budget, found.reference) == (budget, "adamw")
        given = [found.rates, found.tuning_seeds, found.seeds, found.curvature_pairs, found.test_pairs]
        assert given == sizes


def test_a_tuned_study_of_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As many rates and seeds for each arm; the rate of the least mean NLL; verdicts on test pairs of other prompts."""
    monkeypatch.setattr(stages, "TASK", f"{__name__}:graded")
    rng, rows = np.random.default_rng(3), []
    for i in range(120):
        row = {"prompt": f"ask {i // 2}", "chosen": f"yes {i}", "rejected": f"no {i}"}
        rows.append(row | {"label": float(rng.choice([1.0, 0.8, 0.3])), "weight": float(rng.choice([1.0, 2.0]))})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ComparisonOptions.of_budget(
        *("standard", str(tmp_path / "pairs.jsonl"), ["adamw", "muon", "sgd"]),
        **{"reference": "sgd", "rates": 3, "tuning_seeds": 2, "seeds": 4, "pairs": 40, "curvature_pairs": 0},
        **{"val_pairs": 3, "test_pairs": 9},
        overrides=("hardware=cpu", "model=tiny", "batching.batch_size=8", "training.epochs=2"),
    )
    frozen = stages.freeze(options, tmp_path / "out")
    files = {
        part: (tmp_path / "out/data" / f"{part}.jsonl").read_text().splitlines() for part in ("train", "val", "test")
    }
    splits = {part: [json.loads(line) for line in lines] for part, lines in files.items()}
    prompts = {part: [row["prompt"] for row in each] for part, each in splits.items()}
    assert frozen.sizes == {part: len(each) for part, each in splits.items()} == {"train": 40, "val": 3, "test": 9}
    assert frozen.steps == 2 * 5
    assert not {*prompts["train"]} & {*prompts["val"], *prompts["test"]}
    assert not {*prompts["val"]} & {*prompts["test"]}
    assert stages.Stages(tmp_path / "out").run(InlineExecutor()).is_done
    found = findings(tmp_path / "out")
    study = stages.Stages(tmp_path / "out")
    tried: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in found.rates:
        assert point.seed in (1000, 1001)
        tried[point.arm][point.rate].append(math.inf if math.isnan(point.nll) else point.nll)
    assert all(len(each) == 2 for rates in tried.values() for each in rates.values())
    chosen = {}
    for arm in found.arms:
        rates = sorted(tried[arm.name])
        assert 3 <= len(rates) <= 5
        assert [b / a for a, b in itertools.pairwise(rates)] == pytest.approx(
            [math.sqrt(10)] * (len(rates) - 1), rel=0.01
        )
        mean = {rate: float(np.mean(each)) for rate, each in tried[arm.name].items()}
        chosen[arm.name] = min(mean, key=mean.__getitem__)
        assert (arm.chosen.rate, arm.chosen.nll) == (chosen[arm.name], pytest.approx(mean[chosen[arm.name]]))
        assert arm.chosen.at_edge == (chosen[arm.name] in (rates[0], rates[-1]))
        assert arm.chosen.extra == len(rates) - 3
    target = min(np.mean(each) for each in tried["sgd"].values())
    assert found.target == pytest.approx(target)
    y, w = (np.array([row[key] for row in splits["test"]]) for key in ("label", "weight"))
    kept = {"adamw": (0, 1, 2, 3), "muon": (0, 1, 2, 3), "sgd": (0, 1, 2)}
    table = {name: np.stack([drawn_margins(name, seed, 9) for seed in seeds]) for name, seeds in kept.items()}
    for arm in found.arms:
        assert (arm.seeds, arm.diverged) == (kept[arm.name], 4 - len(kept[arm.name]))
        assert arm.means["tokens"] == pytest.approx(np.mean([40 + seed for seed in arm.seeds]))
        assert arm.means["step_seconds"] == pytest.approx(chosen[arm.name])
        assert arm.per_seed["nll"] == pytest.approx([0.1 * seed for seed in arm.seeds])
        assert arm.per_seed["top_eigenvalue"] == pytest.approx([2.0 + seed for seed in arm.seeds])
        own = Arm(table[arm.name], prompts["test"], y, w)
        for score in SCORES:
            assert ends(arm.scores[score]) == pytest.approx(own.interval(None, score), rel=1e-6), (arm.name, score)
        for z, curve in zip(own.z, arm.reliability, strict=True):
            q, t = expit(abs(z)), np.where(z > 0, y, 1 - y)
            bins = ((q - 0.5) * 20).astype(int)
            shares = [np.average(t[bins == each], weights=w[bins == each]) for each in np.unique(bins)]
            assert [each.frequency for each in curve] == pytest.approx(shares)
        first = [next((p.step for p in curve.points if p.nll <= target), math.inf) for curve in arm.curves]
        median = float(np.median(first))
        assert arm.target.missed == first.count(math.inf)
        assert arm.target.steps == (
            pytest.approx(median) if median < math.inf else pytest.approx(math.nan, nan_ok=True)
        )
        assert math.isnan(median) or arm.target.tokens == pytest.approx(7 * arm.target.steps, nan_ok=True)
    edges = [arm for arm in found.arms if arm.chosen.at_edge]
    beyond = [arm.name for arm in found.arms if arm.chosen.extra and not arm.chosen.at_edge]
    said = [f"best learning rate {arm.chosen.rate:g} is at the edge" for arm in edges]
    said += [f"{name}: learning rates added beyond the grid's edge" for name in beyond]
    said += ["of 4 final seeds, fewer are finished: sgd 3", "fewer than 5 seeds", "sgd: 1 final seeds diverged"]
    assert len(found.warnings) == len(said)
    assert all(any(words in warning for warning in found.warnings) for words in said)
    assert found.warnings[0].endswith("finished: sgd 3")
    for verdict in found.verdicts:  # over the seeds that every arm finished
        pair = (Arm(table[name][:3], prompts["test"], y, w) for name in (verdict.arm, "sgd"))
        value, error, _ = next(pair).less(next(pair), verdict.score)
        assert ends(verdict.difference)[:2] == pytest.approx((value, error), rel=1e-6)
        assert (verdict.num_seeds, verdict.is_primary) == (3, verdict.score == "nll")
    halves = {
        planned.spec["options"]["optimizer"]["adamw_lr"] for planned in study.trials() if planned.spec["arm"] == "muon"
    }
    assert halves == {chosen["adamw"]}
