from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rm_optimizer.core.tokens.prefix_trees import LEAST_SHARED, common_runs, common_starts, prefix_tree

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
@given(SEQUENCES, st.integers(1, 150))
def test_runs_hold_every_sequence_once_in_trees_of_at_most_the_tokens_that_are_counted(sequences, most_tokens):
    runs = common_runs(sequences, most_tokens)
    assert sorted(index for run, _ in runs for index in run) == list(range(len(sequences)))
    for run, tokens in runs:
        assert tokens == prefix_tree([sequences[index] for index in run]).num_tokens
        assert tokens <= most_tokens or len(run) == 1


def test_another_prompt_under_the_same_system_message_does_not_shorten_a_group():
    system, first, second = [1] * 40, [2] * 100, [3] * 100
    rows = [[*system, *first, 7], [*system, *first, 8], [*system, *second, 7], [*system, *second, 8]]
    assert common_starts([np.array(row, np.int32) for row in rows]) == [[0, 1], [2, 3]]
