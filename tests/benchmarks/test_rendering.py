"""Generated conversations by published templates: tokens of plain transformers, or a refusal, and nothing lost."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec

import pytest

from benchmarks.rendering import FAMILIES, KINDS, outcomes


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL, whose chat templates this reads, is not installed")
def test_what_a_template_accepts_has_the_tokens_of_plain_transformers_and_loses_nothing():
    found = Counter[tuple[str, str, str]]()
    for name, kind, outcome in outcomes(60, seed=1):
        found[name, kind, outcome.split()[0].rstrip(":")] += 1
        assert outcome == "equal" or outcome.startswith("refused: the tokenizer's chat template"), (name, kind, outcome)
    names = {name for name, _, _ in found}
    assert len(names & {*FAMILIES}) >= 6
    assert all(found[name, "plain", "equal"] == 12 for name in names)
    for kind in KINDS:
        assert sum(found[name, kind, "equal"] for name in names) >= 12
