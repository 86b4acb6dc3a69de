"""Every family keeps the contract; a sample of them here, all with ZOO=1 (`make zoo`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.zoo.contract import examine
from tests.zoo.families import family_names

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
SAMPLE = (
    "convbert",
    "eurobert",  # its head reads every token
    "gpt2",
    "gpt_oss",
    "ibert",
    "jamba",
    "modernvbert",  # a vision tower, whose pooling is called a head
    "mpt",
    "qwen2_moe",
    "qwen3_5",
)
REFUSED = ("convbert",)
NAMES = family_names() if os.environ.get("ZOO") else SAMPLE


@pytest.mark.parametrize("family", NAMES)
def test_a_family_keeps_the_contract_or_is_refused(family: str, tmp_path: Path):
    outcome = examine(family, tmp_path / "export")
    assert not outcome.depends_on_batch
    assert outcome.failures == []
    assert bool(outcome.refusal) != ("adamw" in outcome.trained)
    if family in SAMPLE:
        assert bool(outcome.refusal) == (family in REFUSED)
