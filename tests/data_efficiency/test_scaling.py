"""Learning curves: laws that are known, honest answers where they are not, and a study that goes on."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from rm_optimizer.data_efficiency.scaling import ScalingReport, fit_power_laws, scaling_report
from rm_optimizer.interfaces.cli import app
from tests.training.conftest import SMALL

SIZES = [250, 500, 1000, 2000, 4000]


def runs(level: float, scale: float, noise: float, seed: int = 0, exponent: float = 0.5, num_seeds: int = 3):
    """Accuracy of runs on a known law, with noise."""
    generator = np.random.default_rng(seed)
    law = level - scale * np.array(SIZES, dtype=float) ** -exponent
    return law + noise * generator.standard_normal((num_seeds, len(SIZES)))


def needed(level: float, scale: float, gain: float, exponent: float = 0.5) -> float:
    """Pairs beyond the largest size that the law needs."""
    reached = scale * SIZES[-1] ** -exponent
    return (scale / (reached - gain)) ** (1 / exponent) - SIZES[-1]


def test_a_law_is_found_and_continued():
    accuracy = runs(0.8, 2.0, noise=0.0)
    laws = fit_power_laws(np.array(SIZES, dtype=float), accuracy[:1])
    assert (laws.level[0], laws.scale[0], laws.exponent[0]) == pytest.approx((0.8, 2.0, 0.5), rel=1e-6)
    assert laws.reach(np.array([0.79])) == pytest.approx([200**2])
    assert np.isinf(laws.reach(np.array([0.81])))
    found = scaling_report(SIZES, accuracy, 1.5 - accuracy, gain=0.01)
    assert found.more.pairs == pytest.approx(needed(0.8, 2.0, 0.01), rel=1e-3)
    assert [point.accuracy.value for point in found.predicted] == pytest.approx(0.8 - 2 * np.array([8e3, 16e3]) ** -0.5)
    assert found.predicted[0].nll.value == pytest.approx(1.5 - found.predicted[0].accuracy.value)
    assert "1 point more accuracy: about 4,555 more pairs" in found.more.sentence
    assert ScalingReport.from_json(found.to_json()) == found


def test_intervals_hold_the_truth_where_an_answer_is_given():
    truth, held = needed(0.85, 3.0, 0.01), []
    for seed in range(40):
        accuracy = runs(0.85, 3.0, noise=0.004, seed=seed)
        more = scaling_report(SIZES, accuracy, -accuracy, gain=0.01, num_draws=300, seed=seed).more
        held.append(more.fewest <= truth and (more.most is None or truth <= more.most))
    assert np.mean(held) >= 0.85  # binomial noise of 40 at 0.95 is 0.034


@pytest.mark.parametrize("accuracy", [runs(0.7, 0.5, 0.01), runs(0.7, 0.0, 0.01), runs(0.7, -2.0, 0.0)])
def test_what_the_sizes_do_not_tell_is_not_told(accuracy):
    more = scaling_report(SIZES, accuracy, -accuracy, gain=0.05).more
    assert more.most is None
    assert more.fewest >= 0
    assert "not known; at least" in more.sentence


@pytest.mark.slow
def test_the_command_trains_fits_and_goes_on(tmp_path):
    sizes = "4,8,12,16"
    command = [
        "scaling",
        str(tmp_path),
        *SMALL,
        "training.evals_per_epoch=1",
        "--sizes",
        sizes,
        "--seeds",
        "2",
        "--executor",
        "inline",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "2 points more accuracy" in result.stdout
    report = ScalingReport.from_json((tmp_path / "scaling.json").read_text())
    assert [point.num_pairs for point in report.measured] == [4, 8, 12, 16]
    assert [point.num_pairs for point in report.predicted] == [32, 64]
    assert (tmp_path / "scaling_accuracy.png").stat().st_size > 10_000
    trials = [*(tmp_path / "trials").glob("*/work/run/run.json")]
    assert sorted({json.loads(path.read_text())["data"]["train_pairs"] for path in trials}) == [4, 8, 12, 16]
    stopped, *others = sorted((tmp_path / "trials").glob("*/result.json"))
    stopped.unlink()  # as if it had been killed in its last trial
    times = {path: path.stat().st_mtime_ns for path in others}
    again = CliRunner().invoke(app, command)
    assert ScalingReport.from_json((tmp_path / "scaling.json").read_text()) == report, again.output
    assert times == {path: path.stat().st_mtime_ns for path in others}
    assert "[8/8] " in again.output
    assert "[7/8] " not in again.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sizes", "8,16"), "at least 4 different sizes, got 2"),
        (("--sizes", "8,16,32,many"), "--sizes must be whole numbers"),
        (("--sizes", "8,16,32,6400"), "sizes must lie in [2, 96]"),
        (("--gain", "0"), "the gain must lie in (0, 100) points"),
        (("data.max_pairs=5",), "sets data.max_pairs itself"),
    ],
)
def test_what_makes_no_curve_is_refused(tmp_path, options, message):
    result = CliRunner().invoke(app, ["scaling", str(tmp_path / "out"), *SMALL, *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
