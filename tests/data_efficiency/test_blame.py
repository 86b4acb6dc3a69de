"""Influence of training pairs: a direct solve, retraining without a pair, projections, groups and the score."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.data_efficiency.blame import GroupBlame, Half, datamodeling_score, groups_of_column
from rm_optimizer.data_efficiency.influence import BlameTarget, blame, word_influence
from rm_optimizer.data_efficiency.margin_analysis import fit_linear_reward
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.evaluation.draws import draw_pairs
from rm_optimizer.landscape.operators import damped
from rm_optimizer.landscape.operators.objective import measuring
from rm_optimizer.schema import LossConfig
from tests.builders import tiny_reward_model
from tests.landscape.worlds import EVERYTHING, INNER, PLAIN, pairs, reward_model


def _groups_of(given: list[PreferencePair], influence: np.ndarray, seed: int) -> list[GroupBlame]:
    names = np.array([str(pair.metadata["annotator"]) for pair in given])
    prompts = [pair.prompt_id for pair in given]
    return groups_of_column("annotator", names, influence, influence, [influence], prompts, seed)


def rewards_and_gradients(
    model: BradleyTerryRM, given: list[PreferencePair], params: tuple[str, ...] | str
) -> tuple[np.ndarray, np.ndarray]:
    """Both rewards `(pairs, 2)` of each pair and their gradients `(pairs, 2, parameters)`, one pass a pair."""
    sample = draw_pairs(model, given, None, 0, token_budget=8192, fewest=1)
    rewards, rows = np.zeros((len(given), 2)), [np.zeros(0)] * len(given)
    with measuring(model, sample.batches, PLAIN, params=params, twice=False) as objective:
        for batch in objective.batches:
            found = objective.model.rewards_of(batch)
            for place, index in enumerate(batch.pair_index.tolist()):
                both = []
                for side in (2 * place, 2 * place + 1):
                    parts = torch.autograd.grad(
                        found[side], objective.parameters, retain_graph=True, materialize_grads=True, allow_unused=True
                    )
                    both.append(torch.cat([part.reshape(-1) for part in parts]).double().numpy())
                    rewards[index, side - 2 * place] = float(found[side].detach())
                rows[index] = np.stack(both)
    return rewards, np.stack(rows)


def by_direct_solve(
    model: BradleyTerryRM,
    train: list[PreferencePair],
    target: list[PreferencePair],
    loss: LossConfig,
    share: float,
    params: tuple[str, ...] | str = INNER,
) -> np.ndarray:
    """Influence on the mean margin of the target from whole matrices, one of them for each pair that is left out."""
    rewards, rows = rewards_and_gradients(model, train, params)
    _, aims = rewards_and_gradients(model, target, params)
    aim = np.average(aims[:, 0] - aims[:, 1], axis=0, weights=[pair.weight for pair in target])

    def of(pair: PreferencePair, at: torch.Tensor) -> torch.Tensor:
        from rm_optimizer.core.model.losses import configured_pair_losses

        label, margin = (torch.tensor([float(value)], dtype=torch.float64) for value in (pair.label, pair.margin or 0))
        return configured_pair_losses(
            at[:1], at[1:], loss, margin=margin, label=label, scores=torch.full((1, 2), torch.nan)
        ).sum()

    blocks, slopes = [], []
    for pair, both, row in zip(train, rewards, rows, strict=True):
        at = torch.tensor(both)
        slope = torch.autograd.functional.jacobian(lambda x, pair=pair: of(pair, x), at).numpy()
        block = torch.autograd.functional.hessian(lambda x, pair=pair: of(pair, x), at).numpy()
        blocks.append(pair.weight * row.T @ block @ row)
        slopes.append(pair.weight * slope @ row)
    matrix = np.sum(blocks, axis=0)
    damped = matrix + share * np.linalg.eigvalsh(matrix)[-1] * np.eye(len(matrix))
    without = zip(slopes, blocks, strict=True)
    return np.array([-slope @ np.linalg.solve(damped - block, aim) for slope, block in without])


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("loss", [PLAIN, EVERYTHING])
def test_the_influence_is_that_of_a_direct_solve(family: str, loss: LossConfig):
    model = reward_model(family)
    given = list(pairs(14))
    train, target = given[:10], given[10:]
    found = blame(model, train, target, loss=loss, params=INNER, damping=0.03)
    expected = by_direct_solve(model, train, target, loss, 0.03)
    np.testing.assert_allclose(found.influence, expected, rtol=2e-3, atol=2e-5 * np.abs(expected).max())
    assert (found.rule, found.projection_error) == ("given", 0)


def trained_head(model: BradleyTerryRM, train: list[PreferencePair], ridge: float) -> np.ndarray:
    """Set the head to the minimum of the ridge loss over the pairs, and return the pairs' gradients by it."""
    _, rows = rewards_and_gradients(model, train, "head")
    differences = rows[:, 0] - rows[:, 1]
    weights = fit_linear_reward(differences, np.ones(len(train)), ridge=ridge)
    with torch.no_grad():
        model.reward_head.weight.copy_(torch.from_numpy(weights)[None])
    return differences


def test_the_influence_predicts_retraining_a_convex_head_without_a_pair():
    model = tiny_reward_model("llama")
    given = [replace(pair, label=1.0, weight=1.0, margin=None) for pair in pairs(60)]
    train, target = given[:48], given[48:]
    ridge = 2000.0  # a pair moves the weights little, so that one Newton step is the retraining
    differences = trained_head(model, train, ridge)
    _, rows = rewards_and_gradients(model, target, "head")
    aim = (rows[:, 0] - rows[:, 1]).mean(axis=0)
    chances = 1 / (1 + np.exp(-differences @ model.reward_head.weight[0].detach().double().numpy()))
    largest = np.linalg.eigvalsh(differences.T * (chances * (1 - chances)) @ differences)[-1]
    found = blame(model, train, target, params="head", damping=ridge / largest)
    whole = fit_linear_reward(differences, np.ones(48), ridge=ridge) @ aim
    without = [
        fit_linear_reward(np.delete(differences, place, axis=0), np.ones(47), ridge=ridge) @ aim for place in range(48)
    ]
    change = whole - np.array(without)
    np.testing.assert_allclose(found.influence, change, rtol=0.02, atol=2e-3 * np.abs(change).max())
    assert {each.row for each in found.raised[:3]} == {1 + int(place) for place in np.argsort(-change)[:3]}


def test_the_rule_finds_the_damping_with_which_a_convex_head_was_trained():
    """The loss of pairs that are left out of the training is the held-out loss; no other damping predicts it."""
    model = tiny_reward_model("llama")
    given = [replace(pair, label=1.0, weight=1.0, margin=None) for pair in pairs(80)]
    train, held_out = given[:60], given[60:]
    differences = trained_head(model, train, 1.0)
    found = blame(model, train, held_out[:2], params="head", held_out=held_out)
    assert found.rule.startswith("the training pairs' loss")
    chances = 1 / (1 + np.exp(-differences @ model.reward_head.weight[0].detach().double().numpy()))
    matrix = differences.T * (chances * (1 - chances)) @ differences
    damped = matrix + found.damping[0] * np.linalg.eigvalsh(matrix)[-1] * np.eye(len(matrix))
    reach = np.einsum("ia,ab,ib->i", differences, np.linalg.inv(damped), differences)
    margins = differences @ model.reward_head.weight[0].detach().double().numpy()
    out = margins - reach * (1 - chances) / (1 - reach * chances * (1 - chances))
    _, rows = rewards_and_gradients(model, held_out, "head")
    seen = (rows[:, 0] - rows[:, 1]) @ model.reward_head.weight[0].detach().double().numpy()
    assert np.log1p(np.exp(-out)).mean() == pytest.approx(np.log1p(np.exp(-seen)).mean(), rel=2e-3)


def test_a_projection_changes_inner_products_within_its_stated_error(tmp_path: Path):
    model, given = tiny_reward_model("llama"), list(pairs(40))
    exact = blame(model, given[:30], given[30:], damping=0.1)
    rough = blame(model, given[:30], given[30:], damping=0.1, memory_gib=40 * 4 * 2000 / 2**30, folder=tmp_path)
    assert (exact.projection_error, rough.projection_error) == (0, pytest.approx((2 / 2000) ** 0.5))
    assert np.corrcoef(exact.influence, rough.influence)[0, 1] > 0.9
    (stored,) = tmp_path.glob("gradients-*.npy")
    rows = np.load(stored, mmap_mode="r+")
    assert rows.shape == (40, 2000)
    rows[7] = np.nan  # as a stopped call leaves it
    again = blame(model, given[:30], given[30:], damping=0.1, memory_gib=40 * 4 * 2000 / 2**30, folder=tmp_path)
    np.testing.assert_array_equal(again.influence, rough.influence)


def test_a_group_that_moves_the_target_stands_out_and_shuffled_ones_do_not():
    model, given = tiny_reward_model("llama"), list(pairs(60))
    base = blame(model, given[:50], given[50:], damping=0.1)
    top = set(np.argsort(-base.influence)[:10].tolist())
    rng = np.random.default_rng(0)
    named = [
        replace(pair, metadata={"annotator": "z" if place in top else str(rng.integers(4)), "source": "one"})
        for place, pair in enumerate(given[:50])
    ]
    found = blame(model, named, given[50:], damping=0.1)
    first = found.groups[0]
    assert (first.column, first.name, first.num_pairs) == ("annotator", "z", 10)
    assert first.p_value < 0.01
    assert {group.column for group in found.groups} == {"annotator"}  # a column with one group has nothing to compare
    assert all(group.p_value > 0.05 for group in found.groups if group.name != "z" and group.total.value > 0)
    assert sum(group.total.value for group in found.groups) == pytest.approx(found.influence.sum())
    low = 0
    for seed in range(40):
        shuffled = [
            replace(pair, metadata={"annotator": str(name)})
            for pair, name in zip(given[:50], np.random.default_rng(seed).integers(5, size=50).tolist(), strict=True)
        ]
        low += min(group.p_value for group in _groups_of(shuffled, base.influence, seed)) < 0.05
    assert low <= 6  # 5 % of 40, and what chance adds


def test_the_score_of_a_linear_world_is_one_and_of_noise_is_zero():
    rng = np.random.default_rng(0)
    influence = rng.normal(size=(40, 6))
    parts = [rng.permutation(40)[:20] for _ in range(16)]
    right = [Half(part.tolist(), influence[part].sum(axis=0).tolist()) for part in parts]
    assert datamodeling_score(influence, right).value == pytest.approx(1)
    other = rng.normal(size=influence.shape)
    less = datamodeling_score(influence, right, less=other)
    assert less.value == pytest.approx(1 - datamodeling_score(other, right).value)
    same = datamodeling_score(other, right, less=other)
    assert (same.low, same.high) == (0, 0)  # both scores are of the same resamples
    noise = [Half(part.tolist(), rng.normal(size=6).tolist()) for part in parts]
    found = datamodeling_score(influence, noise)
    low, high = found.low or 0.0, found.high or 0.0
    assert low < 0 < high
    with pytest.raises(DataError, match="at least 4"):
        datamodeling_score(influence, right[:3])


def test_words_follow_weight_and_label():
    train = [PreferencePair("p", "good fine", "bad"), PreferencePair("p", "bad", "good fine", label=0.0, weight=3.0)]
    found = word_influence(train, [PreferencePair("q", "good", "bad")])[:, 0]
    assert found.tolist() == [pytest.approx(found[1] / 3), pytest.approx(3 * abs(found[0]))]
    turned = replace(train[0], label=0.5)
    assert word_influence([turned], [PreferencePair("q", "good", "bad")])[0, 0] == 0


def test_refusals_name_what_is_missing():
    model, given = tiny_reward_model("llama", max_length=16), list(pairs(4))
    with pytest.raises(DataError, match="at least 2 training pairs"):
        blame(model, given[:1], given[1:])
    with pytest.raises(ConfigError, match="damping must be positive"):
        blame(model, given[:2], given[2:], damping=0.0)
    long = PreferencePair("a", "word " * 60 + "b", "word " * 60 + "c")
    with pytest.raises(DataError, match="no pair of the target is left"):
        blame(model, [PreferencePair("a", "b", "c"), PreferencePair("a", "c", "d")], long)


def test_the_result_can_be_stored_and_read():
    model, given = tiny_reward_model("llama"), list(pairs(12))
    found = blame(model, given[:10], BlameTarget("held-out loss", given[10:], "loss"), columns=["prompt"])
    again = type(found).from_json(found.to_json())
    assert (again.groups, again.raised, again.value) == (found.groups, found.raised, found.value)
    assert list(found.to_pandas().column)[:1] == ["prompt"]
    assert found.rule.startswith("the default")


@pytest.mark.parametrize("loss", [PLAIN, EVERYTHING])
def test_few_columns_and_few_pairs_give_one_influence(loss: LossConfig):
    """The head has fewer weights than there are pairs, so the system is solved in the weights, else in the pairs."""
    model, given = reward_model("llama"), list(pairs(40))
    wide = blame(model, given[:32], given[32:], loss=loss, params="head", damping=0.03)
    rewards, rows = rewards_and_gradients(model, given[:32], "head")
    assert rewards.shape == (32, 2)
    assert rows.shape[2] < 32
    expected = by_direct_solve(model, given[:32], given[32:], loss, 0.03, "head")
    np.testing.assert_allclose(wide.influence, expected, rtol=2e-3, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("count", [6, 40])
def test_the_first_eigenvector_is_a_target(count: int):
    model, given = reward_model("llama"), list(pairs(count))
    found = blame(model, given, BlameTarget("first", (), "eigenvector"), params="head", damping=0.03)
    _, rows = rewards_and_gradients(model, given, "head")
    rewards, _ = rewards_and_gradients(model, given, "head")
    chances = 1 / (1 + np.exp(rewards[:, 1] - rewards[:, 0]))
    weight = np.array([pair.weight for pair in given])
    differences = rows[:, 0] - rows[:, 1]
    matrix = differences.T * (weight * chances * (1 - chances)) @ differences
    values, vectors = np.linalg.eigh(matrix)
    assert found.value == pytest.approx(values[-1] / weight.sum(), rel=1e-4)
    blocks = [w * p * (1 - p) * np.outer(row, row) for w, p, row in zip(weight, chances, differences, strict=True)]
    damped = matrix + 0.03 * values[-1] * np.eye(len(matrix))
    slopes = weight * (chances - np.array([pair.label for pair in given]))
    expected = np.array([
        -slope * row @ np.linalg.solve(damped - block, vectors[:, -1])
        for slope, row, block in zip(slopes, differences, blocks, strict=True)
    ])  # fmt: skip
    np.testing.assert_allclose(found.influence, expected * np.sign(expected.sum()), rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("of", ["margin", "loss"])
def test_a_copy_of_the_target_in_training_raises_its_margin_and_lowers_its_loss(of: str):
    model, given = reward_model("llama"), [replace(pair, label=1.0, margin=None) for pair in pairs(24)]
    found = blame(model, given, BlameTarget("copy", given[5:6], of), damping=0.1)
    assert (found.raised if of == "margin" else found.lowered)[0].row == 6


def test_a_gradient_file_that_a_stopped_call_left_incomplete_is_not_read(tmp_path: Path):
    """A file gets its name once all of its rows are marked as missing."""
    model, given = tiny_reward_model("llama"), list(pairs(12))
    first = blame(model, given[:10], given[10:], damping=0.1, folder=tmp_path)
    (stored,) = tmp_path.iterdir()
    stored.rename(tmp_path / f".{stored.name}.99.tmp")
    again = blame(model, given[:10], given[10:], damping=0.1, folder=tmp_path)
    np.testing.assert_array_equal(first.influence, again.influence)


def test_a_column_that_groups_nothing_is_refused_and_unreachable_losses_are_told(monkeypatch: pytest.MonkeyPatch):
    model, given = tiny_reward_model("llama"), [replace(pair, metadata={"a": 1}) for pair in pairs(12)]
    with pytest.raises(ConfigError, match=r"'b' groups no training pairs, .* their columns are a"):
        blame(model, given[:10], given[10:], columns=["b"])
    monkeypatch.setattr(damped, "_SHARES", (1e4, 1e5))
    wrong = [replace(pair, chosen=pair.rejected, rejected=pair.chosen) for pair in given]
    found = blame(model, given[:10], given[10:], held_out=wrong[:10], loss=LossConfig(beta=30.0))
    assert found.rule.startswith("the smallest, since no damping")


def test_few_bytes_solve_the_system_in_few_columns():
    model, given = tiny_reward_model("llama"), list(pairs(60))
    found = blame(model, given[:50], given[50:], damping=0.1, memory_gib=32 * 60 * 40 / 2**30)
    assert found.projection_error == pytest.approx((2 / 40) ** 0.5)
    with pytest.raises(ConfigError, match="memory_gib must be larger"):
        blame(model, given[:50], given[50:], memory_gib=1e-9)
