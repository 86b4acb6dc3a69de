"""The readiness study: stacked training is training alone, the world's claims, and a small study from end to end."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import readiness
import torch
from readiness import SCORE, resampled_taus, tau_of
from readiness_worlds import (
    LABEL_BETA,
    NUM_PROMPTS,
    Algorithm,
    Population,
    RewardWorld,
    Schedule,
    Texts,
    advantages,
    population,
    top_eigenvalues,
    train_policies,
    train_stack,
    training_pairs,
)
from scipy.stats import kendalltau

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.errors import ConfigError
from rm_optimizer.rl_coupling.readiness.fitted import FittedReadiness, fitted_readiness
from rm_optimizer.rl_coupling.readiness.probe import RATER_BETA

SMALL = {"models": 6, "steps": 10, "architectures": ("bag",)}


@pytest.fixture(scope="module")
def world() -> RewardWorld:
    return RewardWorld(11)


def few(size: int) -> list:
    return [replace(spec, num_pairs=130 + 70 * number, epochs=1) for number, spec in enumerate(population(11, size))]


def test_gold_has_mean_zero_and_unit_spread_within_prompts(world: RewardWorld):
    generator = torch.Generator().manual_seed(5)
    prompts = torch.arange(NUM_PROMPTS).repeat_interleave(200)
    gold = world.gold(world.respond(prompts, generator)).reshape(NUM_PROMPTS, 200)
    assert abs(float(gold.mean())) < 0.03
    assert float(gold.var(dim=1).mean().sqrt()) == pytest.approx(1, abs=0.03)


def test_more_of_a_liked_token_is_worse_in_the_end(world: RewardWorld):
    liked = int(world._slopes.argmax())
    rare = int(world._slopes.abs().argmin())
    tokens = torch.full((9, 8), rare)
    for count in range(9):
        tokens[count, :count] = liked
    gold = world.gold(Texts(torch.zeros(9, dtype=torch.long), tokens))
    assert float(gold[8]) < float(gold.max())


def test_raters_of_a_real_measurement_err_as_those_of_the_study():
    assert RATER_BETA == LABEL_BETA


@pytest.mark.parametrize("kind", [("bag", 8), ("bigram", 8), ("gru", 8)])
def test_a_stack_trains_each_model_as_it_trains_alone(world: RewardWorld, kind: tuple[str, int]):
    optimizers = ("adam", "adamw", "sgd")
    specs = [
        replace(spec, architecture=kind[0], width=kind[1], optimizer=optimizer)
        for spec, optimizer in zip(few(3), optimizers, strict=True)
    ]
    together = train_stack(world, specs)
    for number, spec in enumerate(specs):
        alone = train_stack(world, [spec])
        for stacked, single in zip(together.parameters, alone.parameters, strict=True):
            torch.testing.assert_close(stacked[number : number + 1], single, rtol=1e-3, atol=1e-3)


def test_a_policy_does_not_depend_on_those_beside_it(world: RewardWorld):
    first, second, third = (replace(spec, architecture="bag", width=8) for spec in few(3))
    prompts = torch.arange(8)
    courses = [
        train_policies(
            world,
            Population.trained(world, [first, other]),
            prompts,
            Algorithm.grpo,
            schedule=Schedule.annealed(4),
            seed=3,
        )
        for other in (second, third)
    ]
    torch.testing.assert_close(courses[0].divergence[:, 0], courses[1].divergence[:, 0], rtol=1e-3, atol=1e-5)
    assert not torch.allclose(courses[0].divergence[3, 1], courses[1].divergence[3, 1])


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_a_heavy_penalty_keeps_a_policy_near_the_first_one(world: RewardWorld, algorithm: Algorithm):
    models = Population.trained(world, few(1))
    free, held = (
        train_policies(world, models, torch.arange(8), algorithm, schedule=Schedule(3e-3, (weight,) * 25), seed=3)
        for weight in (0.0, 3.0)
    )
    assert float(held.divergence[-1]) < 0.3 * float(free.divergence[-1])
    torch.testing.assert_close(held.divergence[0], torch.zeros(1), atol=1e-5, rtol=0)


def test_the_penalty_falls_from_its_first_weight_to_its_last():
    schedule = Schedule.annealed(200)
    assert schedule.penalties[0] == 0.6
    assert schedule.penalties[-1] == pytest.approx(0.02, rel=0.02)
    ratios = np.diff(np.log(schedule.penalties))
    np.testing.assert_allclose(ratios, ratios[0])


@pytest.mark.parametrize("architecture", ["bag", "bigram", "gru"])
def test_the_top_eigenvalue_is_that_of_the_whole_hessian(world: RewardWorld, architecture: str):
    spec = replace(few(1)[0], architecture=architecture, width=2)
    models = Population.trained(world, [spec])
    better, worse = (Texts(side.prompts[:24], side.tokens[:24]) for side in training_pairs(world, spec))
    before = [part.clone() for part in models.stacks[0][1].parameters]
    stack = copy.deepcopy(models.stacks[0][1])
    shapes = [part.shape for part in stack.parameters]
    start = torch.cat([part.flatten() for part in stack.parameters]).double()

    def gradient(flat: torch.Tensor) -> torch.Tensor:
        for part, value in zip(stack.parameters, flat.split([shape.numel() for shape in shapes]), strict=True):
            part.data = value.view(part.shape).clone()
            part.requires_grad_()
        margins = stack.rewards(Texts(better.prompts[None], better.tokens[None])) - stack.rewards(
            Texts(worse.prompts[None], worse.tokens[None])
        )
        loss = -torch.nn.functional.logsigmoid(margins).mean()
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, stack.parameters)])

    steps = torch.eye(len(start), dtype=torch.double) * 1e-6
    hessian = torch.stack([(gradient(start + step) - gradient(start - step)) / 2e-6 for step in steps])
    values = torch.linalg.eigvalsh((hessian + hessian.T) / 2)
    assert top_eigenvalues(models, better, worse)[0] == pytest.approx(float(values.abs().max()), rel=0.05)
    for part, unchanged in zip(models.stacks[0][1].parameters, before, strict=True):
        torch.testing.assert_close(part, unchanged)


def test_advantages_of_groups():
    rewards = torch.arange(16.0).reshape(1, 16)
    others = (rewards.reshape(1, 2, 8).sum(-1, keepdim=True) - rewards.reshape(1, 2, 8)) / 7
    torch.testing.assert_close(advantages(rewards, Algorithm.rloo), rewards - others.reshape(1, 16))
    grpo = advantages(rewards, Algorithm.grpo).reshape(2, 8)
    torch.testing.assert_close(grpo.std(dim=1), torch.ones(2), rtol=1e-3, atol=1e-3)


def test_resampled_taus_are_those_of_the_copies():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=9), rng.integers(4, size=9).astype(float)
    counts = rng.multinomial(9, np.full(9, 1 / 9), size=20)
    for draw, found in zip(counts, resampled_taus(first, second, counts), strict=True):
        copies = np.repeat(np.arange(9), draw)
        assert found == pytest.approx(kendalltau(first[copies], second[copies]).statistic)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("readiness") / "study"
    with pytest.raises(ConfigError, match="without a frozen choice would be no test"):
        readiness.judge_once(folder, SMALL, (20, 21), (22, 23))
    readiness.develop(folder, SMALL, (20, 21))
    readiness.judge_once(folder, SMALL, (20, 21), (22, 23))
    return folder


@pytest.mark.slow
def test_a_small_study_leaves_a_score_that_measurements_take(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """It is read from its stored worlds with the stored result."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(readiness, "measure_world", None)
    stored = (finished / "validation.json").read_text()
    fitted = FittedReadiness.from_json((finished / "fitted.json").read_text())
    assert fitted.provenance.fitted_worlds == (20, 21)
    assert fitted.provenance.tested_worlds == (22, 23)
    assert set(fitted.outcomes) == {"bon", "rloo_kl", "grpo"}
    validation = readiness.judge_once(finished, SMALL, (20, 21), (22, 23))
    assert (finished / "validation.json").read_text() == stored
    assert fitted.outcomes["rloo_kl"].tau.value == tau_of(validation, SCORE, "rloo_kl_6")["tau"].value
    assert validation["num_models"] == 12
    assert readiness.draw(validation, finished).stat().st_size > 10_000
    readiness.show(validation)
    assert "readiness score" in capsys.readouterr().out


@pytest.mark.slow
def test_a_touched_test_takes_no_other_choice(finished: Path, monkeypatch: pytest.MonkeyPatch):
    choose = readiness.choose
    monkeypatch.setattr(readiness, "choose", lambda *given: choose(*given) | {"models": 7})
    with pytest.raises(ConfigError, match="were measured under another choice"):
        readiness.develop(finished, SMALL, (20, 21))
    assert json.loads((finished / "choice.json").read_text())["models"] == 6
    with pytest.raises(ConfigError, match="has another size"):
        readiness.develop(finished, SMALL | {"steps": 11}, (20, 21))


@pytest.mark.parametrize(
    ("options", "expected"), [(["--worlds", "test"], "--worlds development"), (["--models", "5"], "at least 6")]
)
def test_the_command_refuses_a_test_without_a_choice(tmp_path: Path, monkeypatch, capsys, options, expected):
    monkeypatch.setattr(sys, "argv", ["readiness.py", str(tmp_path / "s"), *options])
    with pytest.raises(SystemExit, match="2"):
        readiness.main()
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_the_fit_that_ships_is_the_one_of_the_test_that_is_stored_here():
    stored = (
        json.loads((Path(readiness.__file__).parent / f"readiness_{name}.json").read_text())
        for name in ("validation", "choice")
    )
    fitted, (validation, choice) = fitted_readiness(), stored
    assert list(fitted.provenance.tested_worlds) == validation["worlds"] == [*readiness.TEST]
    assert list(fitted.provenance.fitted_worlds) == choice["development"] == [*readiness.DEVELOPMENT]
    assert fitted.provenance.num_tested == validation["num_models"] == 288
    assert fitted.outcomes.keys() == choice["fits"].keys() == readiness.OUTCOMES.keys()
    assert fitted.outcomes["rloo_kl"].tau.value == tau_of(validation, SCORE, "rloo_kl_6")["tau"]["value"]
    for algorithm, outcome in fitted.outcomes.items():
        assert [term.name for term in outcome.features] == [
            term.partition("@")[0] for term in readiness.terms_of(choice, algorithm)
        ]
        best = {term.name: Estimate(term.high, None, 1) for term in outcome.features}
        worst = {term.name: Estimate(term.low, None, 1) for term in outcome.features}
        assert outcome.score(best).value > outcome.score(worst).value
