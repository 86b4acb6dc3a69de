"""Questions and answers that survive kills, and rounds of training on them."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest

from rm_optimizer import ActiveLearner, PreferenceDataset, PreferencePair, TrainConfig, compose, typed
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.data_efficiency import active_learning
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.schema.data import SyntheticConfig
from tests.builders import tiny_reward_model

POOL = [PreferencePair(f"ask {n}", f"yes {n}", f"no {n * n}", label=0.5) for n in range(20)]


def learner(folder, rule: str = "boundary_optimal", pool=POOL):
    return ActiveLearner(None, rule, folder=folder, pool=pool)


def run_active_loop(pool, label_fn, n_rounds, *, rule="boundary_optimal", **options):
    return ActiveLearner(None, rule).run_active_loop(pool, label_fn, n_rounds, **options)


def test_open_questions_are_asked_again_and_answered_ones_never(tmp_path):
    first = learner(tmp_path).ask(4)
    assert [question.rank for question in first] == [1, 2, 3, 4]
    assert learner(tmp_path).ask(7) == first
    found = learner(tmp_path).tell({first[0].pair_id: "A", first[1].pair_id: "skip", first[2].pair_id: 0.25})
    assert (len(found.pairs), found.num_skipped, found.num_open) == (2, 1, 1)
    assert found.pairs[0].chosen == first[0].response_a
    assert found.pairs[1].label == 0.75
    assert [question.pair_id for question in learner(tmp_path).ask(7)] == [first[3].pair_id]
    learner(tmp_path).tell({first[3].pair_id: "tie"})
    more = learner(tmp_path).ask(30, tiny_reward_model("llama", max_length=64))
    assert len(more) == 16
    assert not {question.pair_id for question in more} & {question.pair_id for question in first}
    learner(tmp_path).tell({question.pair_id: "B" for question in more})
    assert learner(tmp_path).ask(1) == []


def test_answers_of_several_people_are_averaged_and_counted(tmp_path):
    (question,) = learner(tmp_path).ask(1)
    for answer in ("A", "A", "B"):
        found = learner(tmp_path).tell({question.pair_id: answer})
    assert found.pairs[0].label == pytest.approx(2 / 3)
    assert (found.num_answers, found.num_contradicted) == (3, 1)


def test_nothing_is_kept_of_answers_that_cannot_be_read(tmp_path):
    first, second = learner(tmp_path).ask(2)
    for labels, message in [
        ({first.pair_id: "A", "0123": "B"}, "'0123' is no question that was asked"),
        ({first.pair_id: "A", second.pair_id: "C"}, "label must be A, B, tie, skip"),
    ]:
        with pytest.raises(DataError, match=message):
            learner(tmp_path).tell(labels)
    assert not learner(tmp_path).answers().pairs


def test_a_damaged_line_of_the_state_is_one_sentence(tmp_path):
    learner(tmp_path).tell({learner(tmp_path).ask(1)[0].pair_id: "A"})
    path = tmp_path / active_learning.LEDGER_FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:20] + "\n" + lines[2])
    with pytest.raises(DataError, match=r"questions\.jsonl, line 2: is damaged"):
        learner(tmp_path).open()


def _hold(folder, ready, done):
    with learner(folder)._state():
        ready.set()
        done.wait(30)


def test_two_processes_do_not_share_a_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    learner(tmp_path).ask(1)
    process = context.Process(target=_hold, args=(tmp_path, ready, done))
    process.start()
    try:
        assert ready.wait(30)
        with pytest.raises(DataError, match="another process is writing it"):
            learner(tmp_path).ask(1)
    finally:
        done.set()
        process.join()
    assert len(learner(tmp_path).ask(1)) == 1


def test_a_folder_belongs_to_its_pool_and_its_rule(tmp_path):
    learner(tmp_path).ask(1)
    for other in (learner(tmp_path, "random"), learner(tmp_path, pool=POOL[1:])):
        with pytest.raises(DataError, match="questions about another pool, or by another rule"):
            other.ask(1)


def test_a_pair_that_the_pool_holds_twice_is_asked_once_and_no_pair_is_refused(tmp_path):
    asked = learner(tmp_path, pool=[*POOL[:2], PreferencePair("ask 0", "no 0", "yes 0")]).ask(3)
    assert sorted(question.prompt for question in asked) == ["ask 0", "ask 1"]
    with pytest.raises(DataError, match="at least one pair"):
        learner(tmp_path, pool=[])


def test_a_rule_that_reads_no_model_chooses_the_first_questions_itself(tmp_path):
    pool = [PreferencePair(f"ask {n}", "y" * (1 + 100 * (n % 2)), "n", label=0.5) for n in range(20)]
    asked = learner(tmp_path, "length_stratified", pool=pool).ask(10)
    assert sum(len(question.response_a) + len(question.response_b) > 50 for question in asked) == 5


def small(folder) -> TrainConfig:
    few = ["training.max_steps=2", "training.evals_per_epoch=1", "batching.batch_size=4", "training.progress=false"]
    return typed(compose([*few, "hardware=cpu", f"output_dir={folder}"]), TrainConfig)


def test_rounds_train_on_all_answers_and_go_on_after_a_kill(tmp_path, monkeypatch):
    world = synthetic_world(SyntheticConfig(num_train=24, num_val=8))
    val = PreferenceDataset(world.val)
    right = {(pair.prompt, pair.chosen) for pair in world.train}
    calls = []

    def label(questions):
        calls.append(len(questions))
        return {
            question.pair_id: "A" if (question.prompt, question.response_a) in right else "B"
            for question in questions[:-1]
        }

    def run(folder, rounds: int = 2, k: int = 8):
        return run_active_loop(world.train, label, rounds, config=small(folder), val=val, k=k)

    whole = run(tmp_path / "whole")
    assert [found.num_labels for found in whole] == [7, 14]
    train = active_learning.run_training

    def killed(config, data):
        if config.output_dir.endswith("001"):
            raise KeyboardInterrupt
        return train(config, data=data)

    monkeypatch.setattr(active_learning, "run_training", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed")
    monkeypatch.undo()
    calls.clear()
    again = run(tmp_path / "killed")
    assert calls == []
    assert [found.result.metrics.nll.value for found in again] == [found.result.metrics.nll.value for found in whole]
    assert np.isfinite(again[-1].result.metrics.nll.value)
    with pytest.raises(ConfigError, match=r"round 1 of the loop .* asked 8 questions, and with k=4 .* would ask 4"):
        run(tmp_path / "killed", k=4)
    assert len(run(tmp_path / "killed", rounds=9)) == 3  # the pool ends
    assert calls == [8]


def test_loops_without_an_end_or_an_answer_are_refused(tmp_path):
    val = PreferenceDataset(POOL)
    with pytest.raises(ConfigError, match="must be positive"):
        run_active_loop(POOL, lambda questions: {}, 0, config=small(tmp_path), val=val)
    for answers, message in [
        ({}, "answered none of 2 questions"),
        (None, "a mapping of pair_id to an answer, got None"),
    ]:
        with pytest.raises(DataError, match=message):
            run_active_loop(POOL, lambda questions, given=answers: given, 1, config=small(tmp_path), val=val, k=2)
    questions = learner(tmp_path).open()
    assert len(questions) == 2  # none counts as skipped
    learner(tmp_path).tell({question.pair_id: "skip" for question in questions})
    with pytest.raises(DataError, match="every question so far was skipped"):
        run_active_loop(POOL, lambda questions: {}, 1, config=small(tmp_path), val=val, k=2)


@pytest.mark.parametrize("rule", ["bald", "stochastic_bald", "uncertainty"])
def test_a_rule_that_compares_models_is_refused_before_anything_is_asked(tmp_path, rule):
    with pytest.raises(ConfigError, match=f"rule '{rule}' compares models, and a round trains one"):
        run_active_loop(POOL, lambda questions: {}, 2, config=small(tmp_path), val=POOL, rule=rule)
    assert not [*tmp_path.iterdir()]


def test_warm_rounds_begin_at_the_weights_of_the_round_before(tmp_path, monkeypatch):
    world = synthetic_world(SyntheticConfig(num_train=24, num_val=8))
    val, configs = PreferenceDataset(world.val), []
    train = active_learning.run_training

    def spied(config, data):
        configs.append(config.model)
        return train(config, data=data)

    monkeypatch.setattr(active_learning, "run_training", spied)
    rounds = run_active_loop(world.train, all_a, 2, config=small(tmp_path), val=val, k=4, warm=True)
    assert [model.path for model in configs] == [None, rounds[0].result.export]


def all_a(questions):
    return {question.pair_id: "A" for question in questions}


def test_a_second_loop_in_the_folder_is_refused_before_it_asks(tmp_path):
    val = PreferenceDataset(POOL)

    def asks_at_once(questions):
        with pytest.raises(ConfigError, match="is in use"):
            run_active_loop(POOL, pytest.fail, 1, config=small(tmp_path), val=val, k=2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_active_loop(POOL, asks_at_once, 1, config=small(tmp_path), val=val, k=2)
    assert len(learner(tmp_path).open()) == 2
