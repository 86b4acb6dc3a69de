"""Curvature of groups and pairs adds up to that of all pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rm_optimizer.landscape.estimates.by_pair import DescribedPair, PairCurvatures, curvature_by_pair
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.landscape.operators.base import HessianOperator, OutputOperator
from rm_optimizer.landscape.operators.objective import measuring
from rm_optimizer.schema.landscape import SpectrumOptions
from tests.landscape.worlds import EVERYTHING, FOUR_PROMPTS, INNER, micro_batches, reward_model

GROUPS = ("a", "b", "a", "a", "b", "b", "c", "a")
DESCRIBED = {
    index: DescribedPair(pair.pair_id, pair.prompt, {"source": GROUPS[index]})  # type: ignore[arg-type]
    for index, pair in enumerate(FOUR_PROMPTS)
}


@pytest.mark.parametrize("method", ["lanczos", "gauss_newton_exact"])
def test_groups_have_the_curvature_of_their_own_loss_and_shares_add_up(method: str):
    model = reward_model("llama")
    analyzer = HessianAnalyzer(model, loss=EVERYTHING, params=INNER, dtype=torch.float64)
    options = SpectrumOptions(num_sampled=2, tolerance=1e-6, product="reverse")
    found = analyzer.compute_spectrum(FOUR_PROMPTS, method, top_k=2, options=options)
    assert found.pair_curvatures is not None
    assert found.eigenvectors is not None
    origin = curvature_by_pair(found.pair_curvatures, DESCRIBED)
    assert [group.name for group in origin.groups] == ["a", "b", "c"]
    assert sum(group.share for group in origin.groups) == pytest.approx(1)
    assert sum(each.share for each in origin.heaviest) == pytest.approx(1)  # eight pairs, all named
    assert [abs(each.share) for each in origin.heaviest] == sorted([abs(e.share) for e in origin.heaviest])[::-1]
    for group in origin.groups:
        own = [pair for pair, name in zip(FOUR_PROMPTS, GROUPS, strict=True) if name == group.name]
        batches = micro_batches(model, data=own)
        with measuring(model, batches, EVERYTHING, params=INNER, dtype=torch.float64) as objective:
            is_hessian = method == "lanczos"
            operator = (
                HessianOperator(objective, product="reverse")
                if is_hessian
                else OutputOperator(objective, "gauss_newton")
            )
            images = operator.apply(found.eigenvectors[:2])
        expected = (images * found.eigenvectors[:2].to(images)).sum(dim=1).tolist()
        assert group.along == pytest.approx(expected, rel=1e-3, abs=1e-4 * found.eigenvalues[0])
        assert (group.eigenvalues == ()) == is_hessian


def test_the_heaviest_pairs_come_first():
    along = np.array([[1.0], [5.0], [-9.0], [2.0]])
    found = PairCurvatures(along, np.array([1.0, 1.0, 1.0, 3.0]), (3, 1, 0, 2))
    origin = curvature_by_pair(found, DESCRIBED)
    assert [each.pair.pair_id for each in origin.heaviest] == [DESCRIBED[i].pair_id for i in (0, 2, 1, 3)]
    assert [each.share for each in origin.heaviest] == pytest.approx([-9 / 3, 6 / 3, 5 / 3, 1 / 3])
