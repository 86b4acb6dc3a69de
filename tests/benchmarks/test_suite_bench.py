"""The benchmark of suites writes a suite that can be read, and counts responses of pairs and different ones."""

from __future__ import annotations

from pathlib import Path

from benchmarks.suite import NUM_SETS, write_suite
from rm_optimizer.evaluation.suite import Suite, read_suite
from rm_optimizer.schema.data import DataConfig


def test_its_ten_sets_are_read_and_each_response_is_in_several_pairs(tmp_path: Path):
    suite = Suite.of(str(write_suite(tmp_path, 3, 0)))
    items = read_suite(suite, [], DataConfig())
    assert len(suite.sets) == NUM_SETS
    assert len(items.items) == 3 * NUM_SETS
    assert len(items.responses) == 5 * 3 * NUM_SETS
    assert sum(len(item.edges) for item in items.items) == 6 * 3 * NUM_SETS
    assert not items.notes
