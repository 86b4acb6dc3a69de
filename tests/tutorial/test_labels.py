"""Curriculum and active learning as the tutorial calls them, on small models."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.data_efficiency.acquisition import AcquisitionFunction, UncertaintySampling
from rm_optimizer.data_efficiency.active_learning import ActiveLearner
from rm_optimizer.data_efficiency.margin_analysis import CurriculumSampler
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from tests.builders import tiny_reward_model

MARGINS = np.linspace(0.0, 1.0, 101)
POOL = [PreferencePair(f"ask {n}", f"yes {n}", f"no {n * n}", label=0.5) for n in range(12)]
ROWS = [{"prompt": pair.prompt, "response_a": pair.chosen, "response_b": pair.rejected} for pair in POOL]


@pytest.fixture(scope="module")
def ensemble():
    return RewardModelEnsemble([tiny_reward_model("llama", seed=seed, max_length=64) for seed in (0, 1, 2)], 0.5)


@pytest.mark.parametrize("pool", [POOL, ROWS, pd.DataFrame(ROWS), [SimpleNamespace(**row) for row in ROWS]], ids=type)
def test_uncertainty_is_the_variance_of_the_margin_over_members(ensemble, pool):
    own = np.array([[model.score_pair(p.prompt, p.chosen, p.rejected) for p in POOL] for model in ensemble.models])
    assert UncertaintySampling().score(pool, ensemble) == pytest.approx(own.var(axis=0, ddof=1), rel=1e-3)


def test_a_learner_selects_the_most_informative_pairs_as_they_were_given(ensemble):
    learner = ActiveLearner(ensemble, acquisition_fn=UncertaintySampling())
    order = np.argsort(-UncertaintySampling().score(POOL, ensemble))
    assert learner.select(ROWS, k=3) == [ROWS[place] for place in order[:3]]
    assert learner.select(POOL, k=100) == [POOL[place] for place in order]
    assert ActiveLearner(ensemble).acquisition.name == "uncertainty"
    assert len(ActiveLearner(ensemble.models[0]).select(iter(POOL), 2)) == 2


def test_a_loop_labels_the_pool_in_rounds(ensemble):
    learner, asked = ActiveLearner(ensemble), []

    def label_fn(selected):
        asked.append([item.prompt for item in selected])
        return [len(item.response_a) > len(item.response_b) for item in selected]

    rounds = learner.run_active_loop(POOL, label_fn, n_rounds=3, k=5)
    assert [found.num_labels for found in rounds] == [5, 10, 12]
    assert [len(each) for each in asked] == [5, 5, 2]
    assert {prompt for each in asked for prompt in each} == {pair.prompt for pair in POOL}
    assert all(len(pair.chosen) >= len(pair.rejected) for pair in learner.labeled_data)
    first = learner.select(POOL, 5)
    assert sorted(asked[0]) == sorted(pair.prompt for pair in first)


def test_mistakes_of_a_learner_are_one_sentence(ensemble):
    with pytest.raises(DataError, match="an answer to each of 5 questions, got 1"):
        ActiveLearner(ensemble).run_active_loop(POOL, lambda selected: ["A"], 1, k=5)
    with pytest.raises(DataError, match=r"a list of answers or a mapping .* got str"):
        ActiveLearner(ensemble).run_active_loop(POOL, lambda selected: "A", 1, k=5)
    with pytest.raises(ConfigError, match=r"config, .* and val, .* go together"):
        ActiveLearner(ensemble).run_active_loop(POOL, lambda selected: [], 1, patience=2)
    with pytest.raises(ConfigError, match=r"give ActiveLearner\(pool=PAIRS\)"):
        ActiveLearner(ensemble).ask(2)
    with pytest.raises(TypeError, match="got str; load one with"):
        ActiveLearner("outputs/learner")


def test_a_curriculum_has_its_three_sets():
    sampler = CurriculumSampler(MARGINS)
    assert sampler.easy_idx.tolist() == np.flatnonzero(MARGINS > 0.7).tolist()
    assert sampler.medium_idx.tolist() == np.flatnonzero((MARGINS >= 0.2) & (MARGINS <= 0.7)).tolist()
    assert sampler.hard_idx.tolist() == np.flatnonzero(MARGINS < 0.2).tolist()


@pytest.mark.parametrize(
    ("epoch", "counts"), [(None, (20, 60, 20)), (0, (50, 40, 10)), (3, (20, 60, 20)), (7, (10, 50, 40))]
)
def test_a_sample_has_exactly_the_shares_of_its_epoch(epoch, counts):
    sampler = CurriculumSampler(MARGINS)
    drawn = sampler.sample(100, epoch=epoch, total_epochs=10)
    found = tuple(int(np.isin(drawn, members).sum()) for members in sampler.bins)
    assert len(drawn) == 100
    assert found == counts
    assert drawn.tolist() == sampler.sample(100, epoch, 10).tolist()


def test_a_sample_of_one_kind_and_an_empty_one():
    assert len(CurriculumSampler([0.9, 0.8]).sample(5)) == 5
    with pytest.raises(ConfigError, match="n and total_epochs must be positive"):
        CurriculumSampler(MARGINS).sample(0)


def test_a_rule_of_ones_own_scores_pairs_with_the_model(ensemble):
    class Longest(AcquisitionFunction):
        """Pairs of long responses first."""

        def score(self, pairs, model_or_ensemble):
            assert model_or_ensemble is ensemble
            return np.array([len(pair.response_a) + len(pair.response_b) for pair in pairs])

    order = np.argsort([-len(pair.chosen) - len(pair.rejected) for pair in POOL], kind="stable")
    found = ActiveLearner(ensemble, Longest()).select(POOL, 2)
    assert {pair.prompt for pair in found} == {POOL[place].prompt for place in order[:2]}
    learner = ActiveLearner(ensemble, Longest(), pool=POOL)
    assert {question.prompt for question in learner.ask(2)} == {pair.prompt for pair in found}
    with pytest.raises(TypeError, match="Empty must define score"):
        type("Empty", (AcquisitionFunction,), {})
