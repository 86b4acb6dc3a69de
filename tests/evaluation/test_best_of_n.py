"""Best-of-n selection needs lists of responses; `tests/oracles/test_policies.py` counts them."""

from __future__ import annotations

import numpy as np

from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.evaluation.list_rules import best_of_n


def test_pairs_alone_are_no_lists():
    assert best_of_n([PreferencePair("p", "a", "b")], np.ones(1), np.zeros(1), num_bootstrap=0, seed=0) is None
    pair = PreferencePair("p", "a", "b", metadata={"group": "p", "source": "s"})
    assert best_of_n([pair], np.ones(1), np.zeros(1), num_bootstrap=0, seed=0) is None
