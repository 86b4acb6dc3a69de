"""The study of ensembles runs at a small size, and its measure of separation is what it is called."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ensemble_selection.py"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import ensemble_selection  # type: ignore[import-not-found]

    return ensemble_selection


def test_it_prints_gains_and_paired_differences(study: ModuleType, capsys: pytest.CaptureFixture[str]):
    study.main(["--worlds", "2", "--pairs", "60", "--prompts", "4", "--samples", "16"])
    lines = capsys.readouterr().out.splitlines()[1:]
    found = {name: float(value.split()[0]) for name, value in (line.split(": ") for line in lines)}
    assert found["gold_best"] >= max(found[f"gold_{name}"] for name in ("single", "mean", "min", "uwo"))
    assert found["uwo_less_single"] == pytest.approx(found["gold_uwo"] - found["gold_single"], abs=2e-3)
    assert 0 <= found["auroc_mahalanobis"] <= 1


def test_separation_is_the_probability_of_the_right_order(study: ModuleType):
    assert study.auroc(np.array([3.0, 2.0]), np.array([1.0, 2.0])) == 0.875


def test_a_policy_of_sentences_reads_what_it_writes_and_starts_without_divergence(study: ModuleType):
    import ensemble_rl  # type: ignore[import-not-found]

    torch.manual_seed(0)
    policy = ensemble_rl.SentencePolicy([*ensemble_rl.TOPIC_OF, "Good tools help."])
    prompts = ["I do chess at home. Explain chess. Keep it brief.", "I do baking for fun. Plan my baking."] * 20
    tokens = policy.sample(prompts, torch.Generator().manual_seed(1))
    texts = policy.texts(tokens, seed=2)
    assert torch.equal(policy.tokens(texts), tokens)
    assert policy.texts(tokens, seed=3) != texts
    assert policy.surprise(prompts, texts) == pytest.approx(-policy.log_probs(prompts, tokens).detach().numpy())
    assert ensemble_rl.drawn(policy, policy, prompts, seed=1) == (policy.texts(tokens, seed=1), 0.0)
