"""A run leaves everything it promises, twice the same, and its export scores as it did in memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rm_optimizer import RunResult, evaluate_checkpoint, train_reward_model
from rm_optimizer.core import BradleyTerryRM
from rm_optimizer.core.data_loader import load_training_data
from rm_optimizer.core.storage.model_files import TrainedPairs
from rm_optimizer.errors import ConfigError, TrainingDiverged
from rm_optimizer.records.run_folder import read_rows
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training.folder.record import RunStatus

Build = Callable[..., TrainConfig]


def test_the_run_folder_holds_what_the_manual_lists(finished_run: RunResult):
    folder = Path(finished_run.run_dir)
    present = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    expected = {
        "options.json",
        "metrics.csv",
        "run.json",
        "pair_rewards.jsonl",
        "best/export.json",
        "checkpoints/best.ckpt",
    }
    assert expected <= present
    assert {"evaluations/step-00000000/reward_distributions.json", "evaluations/best/metrics.json"} <= present
    assert not [name for name in present if "tmp" in name]


def test_the_result_survives_its_file(finished_run: RunResult):
    text = (Path(finished_run.run_dir) / "run.json").read_text()
    assert RunResult.from_json(text).to_json() == finished_run.to_json()
    assert finished_run.status == RunStatus.finished
    assert finished_run.data.val_pairs == 33


def test_metrics_csv_has_every_step_and_the_whole_validation_set(finished_run: RunResult):
    rows = read_rows(Path(finished_run.run_dir) / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(range(finished_run.steps + 1))
    evaluated = [row for row in rows if row["eval_acc"]]
    assert {row["eval_pairs"] for row in evaluated} == {"33"}
    assert [int(row["step"]) for row in evaluated] == [0, 3, 6]


def test_the_first_loss_is_chance(finished_run: RunResult):
    first = read_rows(Path(finished_run.run_dir) / "metrics.csv")[0]
    assert float(first["eval_loss"]) == pytest.approx(0.6931, rel=0.05)


def test_plain_transformers_scores_the_export_as_training_did(
    finished_run: RunResult, small_config: Build, tmp_path: Path
):
    export = Path(finished_run.run_dir) / "best"
    model = AutoModelForSequenceClassification.from_pretrained(export).eval()
    tokenizer = AutoTokenizer.from_pretrained(export)
    renderer = BradleyTerryRM.from_pretrained(str(export)).renderer
    pairs = {pair.pair_id: pair for pair in load_training_data(small_config(tmp_path).data).val.pairs}
    lines = (Path(finished_run.run_dir) / "pair_rewards.jsonl").read_text().splitlines()
    for line in lines[:8]:
        row = json.loads(line)
        pair = pairs[row["pair_id"]]
        ids = [renderer.encode(pair.prompt, text).ids for text in (pair.chosen, pair.rejected)]
        batch = tokenizer.pad({"input_ids": [list(x) for x in ids]}, return_tensors="pt")
        with torch.inference_mode():
            rewards = model(**{key: batch[key] for key in ("input_ids", "attention_mask")}).logits[:, 0]
        assert rewards.tolist() == pytest.approx([row["chosen"], row["rejected"]], abs=1e-5)


def test_the_same_seed_gives_the_same_bytes(finished_run: RunResult, small_config: Build, tmp_path: Path):
    again = train_reward_model(small_config(tmp_path))
    before = Path(finished_run.run_dir)
    assert (tmp_path / "metrics.csv").read_bytes() == (before / "metrics.csv").read_bytes()
    assert (tmp_path / "best/model.safetensors").read_bytes() == (before / "best/model.safetensors").read_bytes()
    assert again.metrics.to_json() == finished_run.metrics.to_json()


def test_the_trajectory_does_not_depend_on_the_token_budget(
    finished_run: RunResult, small_config: Build, tmp_path: Path
):
    train_reward_model(small_config(tmp_path, "batching.micro_token_budget=200"))
    before = read_rows(Path(finished_run.run_dir) / "metrics.csv")
    after = read_rows(tmp_path / "metrics.csv")
    for column in ("train_loss", "grad_norm", "eval_loss"):
        for left, right in zip(before, after, strict=True):
            if left[column]:
                assert float(left[column]) == pytest.approx(float(right[column]), abs=2e-5)


def test_the_learning_rate_ends_at_the_schedule_s_end(finished_run: RunResult):
    rates = [float(row["lr"]) for row in read_rows(Path(finished_run.run_dir) / "metrics.csv") if row["lr"]]
    assert max(rates) == pytest.approx(finished_run.config["optimizer"]["lr"], rel=0.15)
    assert rates[-1] < 0.3 * max(rates)


def test_a_loss_that_is_not_finite_names_step_pairs_and_checkpoint(small_config: Build, tmp_path: Path):
    config = small_config(tmp_path, "optimizer.lr=1e30", "training.gradient_clip_norm=0", "training.max_steps=40")
    with pytest.raises(TrainingDiverged, match=r"at step \d+ on pairs [0-9a-f]{16}, .*checkpoint.*optimizer\.lr"):
        train_reward_model(config)


def test_early_stopping_ends_after_its_patience_and_exports_the_best(small_config: Build, tmp_path: Path):
    config = small_config(
        tmp_path,
        "optimizer.lr=1e-12",
        "training.max_steps=60",
        "training.early_stopping.enabled=true",
        "training.early_stopping.patience=2",
        "training.early_stopping.min_delta=0.01",
    )
    result = train_reward_model(config)
    assert result.status == RunStatus.early_stopped
    assert result.steps == 6
    assert (tmp_path / "best" / "model.safetensors").exists()


def test_an_unknown_metric_to_monitor_gets_a_suggestion(small_config: Build, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"unknown training\.monitor 'val/acuracy'; did you mean 'val/accuracy'"):
        train_reward_model(small_config(tmp_path, "training.monitor=val/acuracy"))


def test_only_the_newest_periodic_checkpoints_are_kept_and_load_alone(finished_run: RunResult, tmp_path: Path):
    checkpoints = sorted((Path(finished_run.run_dir) / "checkpoints").glob("step-*.ckpt"))
    assert [path.name for path in checkpoints] == ["step-00000003.ckpt", "step-00000006.ckpt"]
    moved = tmp_path / "moved.ckpt"
    moved.write_bytes(checkpoints[-1].read_bytes())
    last = BradleyTerryRM.from_pretrained(str(moved))
    assert torch.isfinite(last.score(["Hi"], ["Hello there"])).all()


def test_dropped_rows_are_counted_and_listed(small_config: Build, tmp_path: Path):
    rows = [{"prompt": f"Say {i}", "chosen": f"{i} it is", "rejected": "no"} for i in range(12)]
    rows[4]["chosen"] = ""
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [f"data.train={tmp_path}/pairs.jsonl", "data.on_bad_row=drop", "data.val_fraction=0.4"]
    result = train_reward_model(small_config(tmp_path / "run", *options))
    assert result.data.skipped_rows == 1
    assert "pairs.jsonl, line 5: chosen must not be empty" in (tmp_path / "run" / "skipped_rows.txt").read_text()


def test_evaluation_uses_the_beta_a_model_was_trained_with(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result = train_reward_model(small_config(tmp_path / "run", "loss.beta=2.5"))
    data = load_training_data(small_config(tmp_path).data).val
    options = {"token_budget": 4096, "num_bootstrap": 100, "seed": 0}
    again = evaluate_checkpoint(str(tmp_path / "run"), data, output_dir=tmp_path / "eval", **options)
    again = again.metrics
    assert again.beta == result.metrics.beta == 2.5
    train = load_training_data(small_config(tmp_path).data).train
    for source in ("run", "run/best", "run/checkpoints/best.ckpt"):
        trained = TrainedPairs.recorded(tmp_path / source)
        assert trained is not None
        assert trained.count(train.pairs).num_pairs == len(train)
        assert trained.count(data.pairs).num_prompts == 0
    (tmp_path / "moved.ckpt").write_bytes((tmp_path / "run" / "checkpoints" / "best.ckpt").read_bytes())
    (tmp_path / "link").symlink_to(tmp_path / "run" / "best")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "run")
    for source in ("best/", ".", "~/run", "~/link", "../link/", "checkpoints/best.ckpt", "../moved.ckpt"):
        assert BradleyTerryRM.from_pretrained(source).beta == 2.5, source
    assert again.nll.value == pytest.approx(result.metrics.nll.value, abs=1e-5)
