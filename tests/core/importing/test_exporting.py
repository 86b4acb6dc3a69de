"""Exports in other types and with normalized rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rm_optimizer import BradleyTerryRM, ConfigError, PreferencePair, export_reward_model
from rm_optimizer.interfaces.cli import app
from tests.builders import tiny_reward_model
from tests.core.importing.published import CONVERSATIONS

PAIRS = [PreferencePair(prompt, response, f"{response[:2]}?") for prompt, response in CONVERSATIONS]


def rewards(source: object) -> torch.Tensor:
    model = BradleyTerryRM.from_pretrained(source)
    prompts = [pair.prompt for pair in PAIRS]
    return torch.stack(
        [model.score(prompts, [getattr(pair, side) for pair in PAIRS]) for side in ("chosen", "rejected")]
    )


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_normalized_rewards_have_mean_zero_and_deviation_one(family: str, tmp_path: Path):
    tiny_reward_model(family).save_pretrained(tmp_path / "model")
    before = rewards(tmp_path / "model").double()
    made = export_reward_model(tmp_path / "model", tmp_path / "out", pairs=PAIRS, normalize=True)
    after = rewards(tmp_path / "out").double()
    assert made.mean == pytest.approx(float(before.mean()), rel=1e-5)
    assert made.deviation == pytest.approx(float(before.std()), rel=1e-5)
    torch.testing.assert_close(after, (before - before.mean()) / before.std(), rtol=1e-4, atol=1e-5)
    assert (made.num_pairs, made.num_turned) == (len(PAIRS), 0)
    assert (tmp_path / "out" / "modeling_reward.py").exists() == (family == "llama")


def test_a_half_type_counts_the_pairs_that_turn(tmp_path: Path):
    model = tiny_reward_model("llama")
    model.save_pretrained(tmp_path / "model")
    made = export_reward_model(tmp_path / "model", tmp_path / "out", dtype="bfloat16", pairs=PAIRS)
    half = BradleyTerryRM.from_pretrained(tmp_path / "out", dtype="bfloat16")
    prompts, exact = [pair.prompt for pair in PAIRS], rewards(tmp_path / "model")
    rounded = torch.stack(
        [half.score(prompts, [getattr(pair, side) for pair in PAIRS]) for side in ("chosen", "rejected")]
    )
    assert made.dtype == "bfloat16"
    assert made.num_turned == int(((exact[0] > exact[1]) != (rounded[0] > rounded[1])).sum())
    assert made.largest_change == pytest.approx(float((rounded - exact).abs().max()), rel=1e-4)
    assert made.largest_change > 0


def test_normalizing_needs_pairs(tmp_path: Path):
    tiny_reward_model("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="--data"):
        export_reward_model(tmp_path / "model", tmp_path / "out", normalize=True)
    result = CliRunner().invoke(app, ["export", str(tmp_path / "model"), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert result.exit_code == 0, result.output
    assert "exported in bfloat16" in result.output
