from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rm_optimizer.core.tokens.prefix_trees import LEAST_SHARED, common_starts, unique_tokens

SEQUENCES = st.lists(
    st.tuples(st.sampled_from([0, 20, 40, 64]), st.lists(st.integers(0, 2), min_size=1, max_size=6)), max_size=12
).map(lambda rows: [np.array([9] * depth + tail, np.int32) for depth, tail in rows])


@settings(max_examples=60)
@given(SEQUENCES)
def test_groups_hold_every_sequence_once_and_share_their_start(sequences):
    groups = common_starts(sequences)
    assert sorted(index for group in groups for index in group) == list(range(len(sequences)))
    for group in groups:
        starts = {sequences[index][:LEAST_SHARED].tobytes() for index in group}
        assert len(starts) == 1


@settings(max_examples=60)
@given(SEQUENCES)
def test_unique_tokens_are_at_most_all_of_them(sequences):
    assert unique_tokens(sequences) <= sum(map(len, sequences))


def test_another_prompt_under_the_same_system_message_does_not_shorten_a_group():
    system, first, second = [1] * 40, [2] * 100, [3] * 100
    rows = [[*system, *first, 7], [*system, *first, 8], [*system, *second, 7], [*system, *second, 8]]
    assert common_starts([np.array(row, np.int32) for row in rows]) == [[0, 1], [2, 3]]
