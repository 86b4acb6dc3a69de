from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from rm_optimizer.core.pairs import synthetic
from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.core.pairs.synthetic import Gold, PreferenceWorld, synthetic_world
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.schema.data import SyntheticConfig

STORED = {0: ("1980b99d930c947a", "41ffb771a774a69a", 0.8815), 3: ("925ccd993ca7d614", "3455a7736888f26b", 0.8835)}
"""Fingerprints of the quick start's pairs and their ceiling by seed, stored with NumPy 2.4.6."""
gold_reward = Gold()


def world(num_train=2000, num_val=1000, noise=1.0, seed=0):
    return synthetic_world(SyntheticConfig(num_train=num_train, num_val=num_val, noise=noise, seed=seed))


@pytest.fixture(scope="module")
def default():
    return world()


def margins(pairs):
    return np.array([pair.metadata["gold_margin"] for pair in pairs])


def share_of_wins(differences):
    return np.mean((differences > 0) + 0.5 * (differences == 0))


def content(pairs):
    return [pair.to_dict() for pair in pairs]


def test_the_seed_determines_every_text_and_label(default):
    again = world()
    assert (content(again.train), content(again.val), again.ceiling) == (
        content(default.train),
        content(default.val),
        default.ceiling,
    )
    assert content(world(seed=1).train) != content(default.train)


@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_the_pairs_of_the_quick_start_never_change(seed):
    built = synthetic_world(SyntheticConfig(seed=seed))
    train, val = (PreferenceDataset(pairs).fingerprint for pairs in (built.train, built.val))
    assert (train, val, built.ceiling) == STORED[seed]


def test_a_seed_draws_the_gold_reward_of_its_world():
    golds = [PreferenceWorld(seed).gold for seed in range(6)]
    assert len(set(golds)) == 6
    assert golds == [Gold.drawn(seed) for seed in range(6)]
    for drawn in golds:
        ratios = [getattr(drawn, name) / getattr(Gold(), name) for name in ("fact_value", "rude_cost", "rambling_cost")]
        assert all(0.49 < ratio < 2.01 for ratio in ratios)
        assert (0.4 <= drawn.fact_decay <= 0.8, drawn.length_cost) == (True, 0.0)
    built = PreferenceWorld(1).pairs(600, 400)
    assert 0.7 < built.ceiling < 0.97
    assert content(built.train) != content(world(600, 400, seed=1).train)


def test_more_of_anything_is_worse_in_the_end_where_the_gold_reward_is_concave():
    for seed in range(3):
        built = PreferenceWorld(seed, concave=True)
        prompt = next(text for text in built.prompts() if "chess" in text and text.endswith("."))
        for sentence in ("Good chess needs pawns.", "Many thanks for asking.", "Good tools help."):
            rewards = [built.gold(prompt, " ".join([sentence] * count)) for count in range(2, 40)]
            assert np.diff(rewards, n=2).max() < 1e-5
            assert rewards[-1] < min(rewards[:8])
        assert replace(built.gold, length_cost=0.0) == PreferenceWorld(seed).gold


def test_the_policy_answers_prompts_by_its_generator():
    built = PreferenceWorld(2)
    prompts = built.prompts()
    assert len(set(prompts)) == synthetic.PROMPTS_IN_ALL
    assert {pair.prompt for pair in built.pairs(4, 4).val} == set(prompts[:2])
    samples = [[built.sample_response(text, np.random.default_rng(i)) for text in prompts[:40]] for i in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    assert {type(built.gold(text, response)) for text, response in zip(prompts, samples[0], strict=False)} == {float}


@pytest.mark.slow
def test_the_world_is_the_same_in_another_process_with_another_string_hash_seed(default):
    code = (
        "from rm_optimizer.core.pairs.synthetic import synthetic_world;from rm_optimizer.core.pairs.pair import digest;"
        "from rm_optimizer.schema.data import SyntheticConfig;"
        "w = synthetic_world(SyntheticConfig(num_train=2000, num_val=1000));"
        "print(digest([p.to_dict() for p in w.train]))"
    )
    environment = {"PYTHONHASHSEED": "123", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == digest(content(default.train))


def test_the_global_random_state_is_left_alone():
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    world(num_train=20, num_val=10)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_more_training_pairs_keep_the_first_ones_and_the_validation_pairs(default):
    small = world(num_train=500)
    assert content(small.train) == content(default.train[:500])
    assert content(small.val) == content(default.val)


@pytest.mark.parametrize(("num_train", "num_val"), [(2000, 1000), (3, 2), (2 * synthetic.PROMPTS_IN_ALL + 7, 9)])
def test_sizes_are_as_asked_and_no_prompt_is_on_both_sides(num_train, num_val):
    built = world(num_train=num_train, num_val=num_val)
    assert (len(built.train), len(built.val)) == (num_train, num_val)
    assert not {p.prompt_id for p in built.train} & {p.prompt_id for p in built.val}


def test_every_prompt_of_the_grid_is_another_text():
    prompts = [synthetic._prompt(index)[0] for index in range(synthetic.PROMPTS_IN_ALL)]
    assert len(set(prompts)) == synthetic.PROMPTS_IN_ALL


def test_each_fact_belongs_to_one_topic_and_no_topic_hides_in_another_phrase():
    facts = list(itertools.chain.from_iterable(synthetic.TOPICS.values()))
    assert len(set(facts)) == len(facts)
    phrases = [*facts, *synthetic.CONTEXTS, *synthetic.CONSTRAINTS.values(), *synthetic.TASKS.values()]
    assert not [(topic, phrase) for topic in synthetic.TOPICS for phrase in phrases if topic in phrase]


def test_rows_say_where_they_come_from_and_what_the_gold_margin_is(default):
    for pair in default.train[:200]:
        assert pair.metadata["source"] == "synthetic"
        assert pair.metadata["subset"] in synthetic.TASKS
        difference = gold_reward(pair.prompt, pair.chosen) - gold_reward(pair.prompt, pair.rejected)
        assert pair.metadata["gold_margin"] == pytest.approx(difference, abs=1e-5)


def test_the_gold_reward_is_its_formula():
    prompt = "I do chess at home. Explain chess. Give an example."
    one, two = "Start with pawns.", "Start with pawns. In chess, start with gambits."
    assert gold_reward(prompt, "Good tools help.") == 0.0
    assert gold_reward(prompt, one) == pytest.approx(8 * 0.4)
    assert gold_reward(prompt, f"{one} {one}") == gold_reward(prompt, one)
    assert gold_reward(prompt, two) == pytest.approx(8 * (1 - 0.6**2))
    assert gold_reward(prompt, f"{two} Start with yeast.") == pytest.approx(8 * (1 - 0.6**2) - 0.5)
    assert gold_reward(prompt, "For example, my neighbour did so.") == 2.0
    assert gold_reward(prompt, "Many thanks for asking.") == 0.0
    bad = " ".join([*synthetic.RUDE[:2], *synthetic.HEDGING[:2], *synthetic.RAMBLING[:2]])
    assert gold_reward(prompt, bad) == pytest.approx(-2 - 2 * 0.7 - 2 * 1.0)


def test_the_same_response_is_worth_more_where_its_topic_and_constraint_are_asked_for():
    response = "Start with pawns. Many thanks for asking."
    assert gold_reward("Explain chess. Say thanks.", response) - gold_reward("Explain chess.", response) == 2.0
    assert gold_reward("Explain chess.", response) - gold_reward("Explain baking.", response) == pytest.approx(3.7)


@pytest.mark.parametrize(("num_words", "reward"), [(20, 2.0), (21, 0.0)])
def test_brief_means_at_most_twenty_words(num_words, reward):
    assert gold_reward("Explain chess. Keep it brief.", " ".join(["word"] * num_words)) == reward


def test_a_prompt_of_another_world_has_no_gold_reward():
    with pytest.raises(ValueError, match="must name one of the synthetic world's topics, got 'Why\\?'"):
        gold_reward("Why?", "Because.")


def test_labels_without_noise_follow_the_sign_of_the_margin():
    built = world(noise=0.0)
    assert margins(built.train).min() >= 0
    assert built.ceiling == share_of_wins(margins(built.val)) > 0.97


def test_noisy_labels_are_bernoulli_of_the_sigmoid():
    for noise in (0.5, 1.0, 4.0):
        signed = margins(world(noise=noise).train)
        probability = 1 / (1 + np.exp(-np.abs(signed) / noise))
        wins = (signed > 0) + 0.5 * (signed == 0)
        standard_error = math.sqrt(np.mean(probability * (1 - probability)) / len(signed))
        assert abs(np.mean(wins - probability)) < 4 * standard_error


def test_the_ceiling_is_the_accuracy_of_the_gold_reward(default):
    scored = [gold_reward(p.prompt, p.chosen) - gold_reward(p.prompt, p.rejected) for p in default.val]
    assert default.ceiling == share_of_wins(np.round(scored, 6))
    assert 0.8 < default.ceiling < 0.95


def test_responses_have_one_to_sixty_words(default):
    lengths = [len(text.split()) for pair in default.train for text in (pair.chosen, pair.rejected)]
    assert max(lengths) <= synthetic.MOST_WORDS
    assert np.quantile(lengths, [0.05, 0.95])[1] > 5 * np.quantile(lengths, [0.05, 0.95])[0]


def test_longer_is_not_better(default):
    longer = [len(p.chosen.split()) - len(p.rejected.split()) for p in default.train + default.val]
    assert 0.45 < share_of_wins(np.array(longer)) < 0.58


def test_tasks_and_topics_are_even(default):
    tasks = Counter(pair.metadata["subset"] for pair in default.train)
    assert set(tasks) == set(synthetic.TASKS)
    assert max(tasks.values()) < 1.5 * min(tasks.values())


def test_a_bag_of_the_responses_words_stays_far_below_the_ceiling():
    """A linear model that does not see the prompt cannot know which facts and manners were asked for."""
    built = world(num_train=6000)
    vectorizer = CountVectorizer(binary=True)
    train = vectorizer.fit_transform([text for p in built.train for text in (p.chosen, p.rejected)]).astype(float)
    val = vectorizer.transform([text for p in built.val for text in (p.chosen, p.rejected)]).astype(float)
    sign = np.where(np.arange(len(built.train)) % 2, -1.0, 1.0)
    features = (train[0::2] - train[1::2]).multiply(sign[:, None]).tocsr()
    model = LogisticRegression(fit_intercept=False, C=0.1, max_iter=1000).fit(features, sign)
    accuracy = share_of_wins(model.decision_function(val[0::2] - val[1::2]))
    assert 0.55 < accuracy < built.ceiling - 0.12
