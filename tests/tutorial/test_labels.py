"""Curriculum and active learning as the tutorial calls them, on small models."""

from __future__ import annotations

import numpy as np
import pytest

from rm_optimizer.data_efficiency.margin_analysis import CurriculumSampler
from rm_optimizer.errors import ConfigError

MARGINS = np.linspace(0.0, 1.0, 101)


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
