"""The curriculum: bins, exact counts, coverage, and training with it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rm_optimizer.data_efficiency import CurriculumSampler
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.training.data.curriculum import exact_counts

MARGINS = np.linspace(0, 1, 1001)


def shares(sampler: CurriculumSampler, positions: np.ndarray) -> list[float]:
    return [float(np.isin(positions, members).mean()) for members in sampler.bins]


@pytest.mark.parametrize("epoch", [0, 3])
def test_an_epoch_that_covers_is_a_permutation_with_easy_pairs_first(epoch):
    sampler = CurriculumSampler(MARGINS, num_epochs=4)
    positions = sampler.positions(epoch)
    assert sorted(positions) == list(range(1001))
    if epoch == 0:
        assert MARGINS[positions[:200]].mean() > MARGINS[positions[-200:]].mean() + 0.1


def test_the_seed_and_the_epoch_decide_and_nothing_else():
    sampler = CurriculumSampler(MARGINS, num_epochs=2)
    first = list(sampler)
    assert first == list(sampler) == CurriculumSampler(MARGINS, num_epochs=2).positions(0).tolist()
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert CurriculumSampler(MARGINS, num_epochs=2, seed=1).positions(0).tolist() != first


def test_a_missing_bin_leaves_its_share_to_the_others():
    sampler = CurriculumSampler([0.9] * 50 + [0.1] * 50, num_samples=600, segments=1, covers=False)
    assert shares(sampler, sampler.positions(0)) == pytest.approx([5 / 6, 0, 1 / 6])


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    room=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    data=st.data(),
)
def test_counts_are_whole_and_sum(weights, room, data):
    num = data.draw(st.integers(0, sum(room)))
    counts = exact_counts(weights, num, room)
    assert sum(counts) == num
    assert all(0 <= count <= most for count, most in zip(counts, room, strict=True))


@pytest.mark.parametrize(
    ("margins", "options", "error"),
    [
        ([], {}, DataError),
        ([0.1, float("nan")], {}, DataError),
        ([0.1], {"easy_above": 0.1, "hard_below": 0.2}, ConfigError),
        ([0.1], {"easy_above": 1.5, "quantiles": True}, ConfigError),
        ([0.1], {"num_epochs": 0}, ConfigError),
        ([0.1, 0.2], {"num_samples": 1}, ConfigError),
    ],
)
def test_what_makes_no_curriculum_is_refused(margins, options, error):
    with pytest.raises(error, match=r"margins must be|hard_below|must be positive|covers=True"):
        CurriculumSampler(margins, **options)
