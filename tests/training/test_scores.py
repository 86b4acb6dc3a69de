"""Rewards fitted to the scores of single responses: the loss, its batches, its curvature, its metrics and a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.model.losses import bradley_terry_pair_losses, configured_pair_losses, score_pair_losses
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.batching import PairBatch
from rm_optimizer.core.tokens.splits import TrainVal
from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation.pair_rewards import PairRewards
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.records.run_folder import RunFolder, read_rows
from rm_optimizer.schema import LossConfig, TrainConfig
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.callbacks.evaluation import score_metrics
from tests.builders import tiny_reward_model

SCORES = torch.tensor([[5.0, 1.0], [3.0, 2.0]], dtype=torch.float64)
CHOSEN, REJECTED = torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=torch.float64)


def losses(config: LossConfig) -> torch.Tensor:
    ones = torch.ones(2, dtype=torch.float64)
    return configured_pair_losses(CHOSEN, REJECTED, config, margin=0 * ones, label=ones, scores=SCORES)


def test_the_loss_is_its_closed_form():
    expected = torch.tensor([(0.5 - 1) ** 2 + (2.0 + 1) ** 2, (-1.0 - 0) ** 2 + (0.25 + 0.5) ** 2]) / 2
    torch.testing.assert_close(losses(LossConfig(score_range=[1, 5])), expected.double())
    both = losses(LossConfig(score_range=[1, 5], score_share=0.25))
    of_pairs = bradley_terry_pair_losses(CHOSEN, REJECTED)
    torch.testing.assert_close(both, 0.25 * expected + 0.75 * of_pairs)


def test_its_gradient_and_its_curvature_are_those_of_a_square():
    rewards = [side.clone().requires_grad_() for side in (CHOSEN, REJECTED)]
    assert torch.autograd.gradcheck(lambda c, r: score_pair_losses(c, r, SCORES, score_range=[1, 5]), rewards)
    # With rewards w.h, a pair's loss ((w.h_c - t)^2 + (w.h_r - t)^2) / 2 has the Hessian h_c h_c' + h_r h_r'.
    model = tiny_reward_model("llama")
    texts = [(f"q{i}", f"good {i}", "bad") for i in range(4)]
    pairs = [PreferencePair(*text, metadata={"chosen_score": 4, "rejected_score": 1}) for text in texts]
    analyzer = HessianAnalyzer(model, loss=LossConfig(score_range=[1, 5]), params="head", seed=0)
    found = analyzer.compute_spectrum(pairs, top_k=1, progress=False).eigenvalues[0]
    hidden = []
    hook = model.reward_head.register_forward_hook(lambda module, given, out: hidden.append(given[0].detach()))
    for question, good, bad in texts:
        model.score(question, [good, bad])
    hook.remove()
    rows = torch.cat([each.reshape(-1, each.shape[-1]) for each in hidden]).double()
    assert rows.shape[0] == 8
    assert found == pytest.approx(float(torch.linalg.eigvalsh(rows.T @ rows / 4)[-1]), rel=1e-4)


def test_scores_are_read_from_rows_of_every_form(tmp_path: Path):
    listed = [{"prompt": "p?", "responses": ["a", "b", "c"], "scores": [3, 5, 1]}]
    single = [{"prompt": "p?", "response": text, "score": score} for text, score in zip("abc", (3, 5, 1), strict=True)]
    for rows in (listed, single):
        found = {(pair.chosen, pair.rejected): pair.scores for pair in PreferenceDataset(rows)}
        assert found == {("b", "a"): (5.0, 3.0), ("a", "c"): (3.0, 1.0), ("b", "c"): (5.0, 1.0)}
    explicit = {"prompt": "p?", "chosen": "a", "rejected": "b", "score_chosen": 8.5, "score_rejected": 7}
    assert PreferenceDataset([explicit])[0].scores == (8.5, 7.0)
    assert PreferencePair("p?", "a", "b").scores is None
    other = PreferenceDataset([{**explicit, "score_chosen": 9.5, "score_rejected": 8}])
    assert other.fingerprint != PreferenceDataset([explicit]).fingerprint


def test_equal_scores_make_ties_where_the_rule_says_so():
    rows = [{"prompt": "p?", "responses": ["a", "b", "c"], "scores": [3, 3, 1]}]
    assert len(PreferenceDataset(rows)) == 2
    found = {(pair.chosen, pair.rejected): pair for pair in PreferenceDataset(rows, kwise_rule="all_and_ties")}
    assert {sides: (pair.label, pair.margin) for sides, pair in found.items()} == {
        ("a", "b"): (0.5, 0.0),
        ("a", "c"): (1.0, 2.0),
        ("b", "c"): (1.0, 2.0),
    }
    assert found["a", "b"].scores == (3.0, 3.0)


def test_a_batch_of_tensors_keeps_them():
    ids = torch.ones(2, 3, dtype=torch.long)
    sides = {f"{side}_{name}": ids for side in ("chosen", "rejected") for name in ("input_ids", "attention_mask")}
    torch.testing.assert_close(PairBatch.of({**sides, "scores": SCORES.float()}).scores, SCORES.float())
    assert PairBatch.of(sides).scores.isnan().all()


def test_metrics_count_each_response_once():
    scores = {"a": 5, "b": 3, "c": 1}
    pairs = [
        PreferencePair("p?", x, y, metadata={"chosen_score": scores[x], "rejected_score": scores[y]})
        for x, y in ("ab", "ac", "bc")
    ]
    rewards = {"a": 0.5, "b": 1.0, "c": -1.0}
    sides = (np.array([rewards[text] for text in side]) for side in ("aab", "bcc"))
    found = score_metrics(PairRewards(*sides, np.arange(3)), PreferenceDataset(pairs), [1, 5])
    assert found["score_mse"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert found["score_spearman"] == pytest.approx(spearmanr([5, 3, 1], [0.5, 1.0, -1.0]).statistic)


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    """Rows with one response and a score, more of it for a longer response."""
    path = tmp_path / "scored.jsonl"
    rows = [
        {"prompt": f"Question {i}?", "response": "yes " * (score + 1) + str(i % 3), "score": score}
        for i in range(40)
        for score in (i % 2, 2 + i % 3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_learns_scores_of_single_responses(
    scored: Path, small_config: Callable[..., TrainConfig], tmp_path: Path
):
    options = [f"data.train={scored}", "data.val_fraction=0.25", "loss.score_range=[0,4]", "training.epochs=12"]
    options += ["training.monitor=val/score_mse", "optimizer.lr=3e-3", "training.evals_per_epoch=1"]
    result = train_reward_model(small_config(tmp_path / "run", *options))
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.csv") if row["eval_score_mse"]]
    assert float(rows[-1]["eval_score_mse"]) < 0.3 * float(rows[0]["eval_score_mse"])
    assert result.own_metrics["score_spearman"] > 0.8
    assert result.metrics.accuracy.value > 0.9
    # Each validation prompt has one pair here, so the loss is the squared error over its responses.
    assert float(rows[-1]["eval_loss"]) == pytest.approx(float(rows[-1]["eval_score_mse"]), rel=1e-6)
    assert RunFolder(tmp_path / "run").options["loss"]["score_range"] == [0, 4]


def test_pairs_without_scores_or_with_others_are_refused(
    scored: Path, small_config: Callable[..., TrainConfig], tmp_path: Path
):
    with pytest.raises(ConfigError, match="96 of 96 training pairs lack"):
        train_reward_model(small_config(tmp_path / "a", "loss.score_range=[0,4]"))
    options = [f"data.train={scored}", "training.max_steps=1"]
    with pytest.raises(ConfigError, match=r"loss\.score_range=.* must hold every score.*such as"):
        train_reward_model(small_config(tmp_path / "b", *options, "loss.score_range=[1,4]"))
    with pytest.raises(ConfigError, match=r"training\.monitor=val/score_mse needs loss\.score_range"):
        train_reward_model(small_config(tmp_path / "c", *options, "training.monitor=val/score_mse"))
    with pytest.raises(ConfigError, match=r"loss\.score_range must be the lowest and the highest score"):
        LossConfig(score_range=[5, 1])
    with pytest.raises(ConfigError, match=r"loss\.label_smoothing is part of the loss of pairs"):
        LossConfig(score_range=[1, 5], label_smoothing=0.1)
    given = TrainVal(*PreferenceDataset(scored).split_by_prompt(0.3, seed=0))
    config = small_config(tmp_path / "d", "training.max_steps=1", "loss.score_range=[0,4]", "loss.score_share=0.5")
    assert train_reward_model(config, data_path=given).own_metrics.keys() == {"score_mse", "score_spearman"}
