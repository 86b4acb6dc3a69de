"""Ten times the capacity over HTTP: a bounded queue and memory, and every request answered one way or the other."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.fork_server import forked_by

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECONDS = 4.0
PLAUSIBLE_GROWTH = 32 * 2**20
"""Bytes; some 200 open connections of a tenth of a megabyte, and the allocator's steps."""


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_ten_times_the_capacity_is_refused_in_words_and_what_is_accepted_is_answered(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import serving_overload as bench  # type: ignore[import-not-found]

    monkeypatch.setattr(bench.psutil, "Process", lambda number, process=psutil.Process: process(forked_by(number)))
    tally = bench.measure(SECONDS, factor=10.0)
    capacity = SECONDS * bench.TOKENS_PER_SECOND / len(bench.ROW)
    assert tally.unanswered == []
    assert tally.health_failures == 0
    assert tally.most_queued_tokens <= bench.QUEUED_TOKENS
    assert tally.most_queued_tokens >= 0.9 * bench.QUEUED_TOKENS  # it was full
    assert tally.accepted + tally.refused >= 9 * capacity
    assert tally.refused > 5 * capacity
    assert tally.accepted >= bench.QUEUED_TOKENS / len(bench.ROW)
    assert tally.peak_growth(2.0) < PLAUSIBLE_GROWTH
