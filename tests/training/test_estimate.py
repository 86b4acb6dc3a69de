"""An estimate of a run against the run: its model, its files, what its forward pass keeps, and its memory."""

from __future__ import annotations

import csv
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerFast

from rm_optimizer.core.classifier.attention import keeping_padding
from rm_optimizer.errors import ConfigError
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training.callbacks.run_callback import require_callbacks
from rm_optimizer.training.data.run_data import data_module, load_data
from rm_optimizer.training.estimate import RunEstimate, estimate_run, kept_bytes
from rm_optimizer.training.preparation import trainable_model
from rm_optimizer.training.run import measured, quiet, run_training
from tests.builders import tiny_model, tiny_tokenizer

LARGER = (
    "model.architecture.hidden_size=128",
    "model.architecture.intermediate_size=256",
    "data.synthetic.num_train=64",
    "data.synthetic.num_val=8",
)


@pytest.mark.parametrize("options", [(), ("hardware.precision=bf16-mixed",), ("adapter=lora",), ("optimizer=muon",)])
def test_the_estimate_is_the_run(small_config, tmp_path, caplog, options):
    config = small_config(tmp_path / "run", *LARGER, *options, "training.max_steps=2")
    found = estimate_run(small_config(tmp_path / "run", *LARGER, *options, "training.max_steps=2"))
    data = load_data(config)
    model = trainable_model(config, data.train)
    parameters = list(model.parameters())
    assert found.parameters == sum(each.numel() for each in parameters)
    assert found.trainable == sum(each.numel() for each in parameters if each.requires_grad)
    batches = data_module(data, config, model)
    assert found.steps == batches.num_steps
    micro = [batch for step in batches.train_dataloader() for batch in step.micro]
    largest = max(micro, key=lambda batch: batch.num_padded_tokens)
    assert found.tokens == largest.num_padded_tokens
    with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in config.hardware.precision):
        with keeping_padding(model.model):
            kept = kept_bytes(model, largest)
        assert found.activations == pytest.approx(kept, rel=0.1)
        assert kept_bytes(model, largest) < kept
    with caplog.at_level(logging.INFO, "rm_optimizer"):
        run_training(config)
    told = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("memory: "))
    assert told.splitlines() == list(found.sentences()[:2])
    last = max(RunFolder(tmp_path / "run").checkpoints.items())[1]
    assert last.stat().st_size == pytest.approx(found.checkpoint, rel=0.02, abs=2e5)


def test_a_run_with_moments_in_eight_bits_is_counted_and_trains(small_config, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    options = ("model.architecture.hidden_size=64", "optimizer=adamw_8bit", "training.max_steps=2")
    found = estimate_run(small_config(tmp_path / "run", *options))
    assert found.optimizer < 8 * found.trainable  # bytes of whole moments
    run_training(small_config(tmp_path / "run", *options))
    last = torch.load(max(RunFolder(tmp_path / "run").checkpoints.items())[1], weights_only=True)
    tensors = filter(torch.is_tensor, tree_leaves(last["optimizer_states"][0]["state"]))
    assert torch.uint8 in {each.dtype for each in tensors}


def of_configuration(
    family: str, tokenizer: PreTrainedTokenizerFast, overrides: Sequence[str], folder: Path
) -> RunEstimate:
    """Estimate of a run on a folder with the configuration of a tiny model, and no weights."""
    tiny_model(family, tokenizer).config.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    others = [line for line in overrides if not line.startswith("model.")]
    own = ["model=custom", f"model.path={folder / 'base'}", "model.max_length=64", f"output_dir={folder}"]
    return estimate_run(typed(compose([*others, *own]), TrainConfig))


def test_an_encoder_is_estimated_from_its_configuration_alone(small_overrides, tmp_path):
    tokenizer = tiny_tokenizer("bert")
    found = of_configuration("bert", tokenizer, small_overrides, tmp_path)
    with torch.device("meta"):
        expected = sum(each.numel() for each in tiny_model("bert", tokenizer).parameters())
    assert found.parameters == found.trainable == expected
    memory, disk, time = found.sentences("H100")
    assert (memory[:8], disk[:6]) == ("memory: ", "disk: ")
    assert "on one H100 if it reaches 35% of its bfloat16 peak" in time
    with pytest.raises(ConfigError, match=r"--chip must be one of A10, A100, .*, got 'Z1'"):
        found.sentences("Z1")


@pytest.mark.parametrize("model", [("qwen", 494_033_664), ("llama", 7_504_928_768), ("minilm", 22_713_601)])
def test_a_preset_is_counted_without_the_hub(model, tmp_path, caplog):
    name, size = model
    few = ("data.synthetic.num_train=32", "data.synthetic.num_val=8")
    found = estimate_run(typed(compose([f"model={name}", *few, f"output_dir={tmp_path}"]), TrainConfig))
    assert found.parameters == size
    assert "counted by its published configuration" in caplog.text


def test_a_model_whose_pass_reads_values_is_estimated_without_it(small_overrides, tmp_path):
    found = of_configuration("opt", tiny_tokenizer("llama"), small_overrides, tmp_path)
    assert found.memory == found.weights + found.gradients + found.optimizer
    assert "without the backward pass of" in found.sentences()[0]


def test_a_disk_without_space_for_the_run_is_warned_of(small_config, tmp_path, caplog, monkeypatch):
    options = ("training.max_steps=1", "training.eval_at_start=false")
    run_training(small_config(tmp_path / "a", *options))
    assert "are free in" not in caplog.text
    nearly_full = SimpleNamespace(free=3 * 2**20 - 1)
    monkeypatch.setattr("rm_optimizer.training.run.shutil.disk_usage", lambda _: nearly_full)
    monkeypatch.setattr(RunEstimate, "disk", 3 * 2**20)
    run_training(small_config(tmp_path / "b", *options))
    assert f"only 3 MiB are free in {tmp_path / 'b'}, so a later checkpoint" in caplog.text


def test_a_model_that_fails_without_data_is_trained(small_config, tmp_path, caplog, monkeypatch):
    def fail(*_: object) -> None:
        raise TypeError("expected an array")

    with monkeypatch.context() as patched, caplog.at_level(logging.INFO, "rm_optimizer"):
        patched.setattr("rm_optimizer.training.estimate.ModelFlops.of_model", fail)
        run_training(small_config(tmp_path, "training.max_steps=1", "training.eval_at_start=false"))
    assert "memory and disk are not estimated (TypeError: expected an array)" in caplog.text
    monkeypatch.setattr("rm_optimizer.training.estimate.kept_bytes", fail)
    assert estimate_run(small_config(tmp_path / "other")).activations is None


def test_a_quiet_run_needs_no_callback_server_or_file(small_config, tmp_path):
    loud = ("training.calibration.enabled=true", "training.hessian.every=2", "publish.url=http://127.0.0.1:1")
    config = small_config(
        tmp_path, *loud, "training.suites=rewardbench", "data.max_pairs=20", "logger.tensorboard=true"
    )
    require_callbacks(quiet(config), [])
    assert quiet(config).training.suites is None
    assert not quiet(config).logger.tensorboard
    assert (quiet(config).data.max_pairs, quiet(config, in_memory=True).data.max_pairs) == (20, None)
    with pytest.raises(ConfigError, match=r"training\.calibration\.enabled needs a callback"):
        require_callbacks(config, [])


@pytest.mark.slow
def test_memory_is_that_of_the_run(tmp_path):
    wide = [
        *("model.architecture.hidden_size=768", "model.architecture.intermediate_size=2048"),
        *("model.architecture.num_hidden_layers=6", "model.architecture.num_attention_heads=12"),
        *("model.architecture.num_key_value_heads=12", "batching.micro_token_budget=4096", "training.max_steps=3"),
    ]
    peaks, estimates = [], []
    for number, options in enumerate((wide, ["training.max_steps=3"])):
        folder = tmp_path / str(number)
        common = ["hardware=cpu", "data.synthetic.num_train=64", "data.synthetic.num_val=8", "profile_memory=true"]
        overrides = [*common, *options, f"output_dir={folder}", "logger.tensorboard=false"]
        subprocess.run([sys.executable, "-m", "rm_optimizer.train", *overrides], check=True, capture_output=True)
        with (folder / "profile.csv").open(encoding="utf-8") as file:
            peaks.append(max(int(row["rss_peak_bytes"]) for row in csv.DictReader(file)))
        estimates.append(estimate_run(typed(compose(overrides), TrainConfig)).memory)
    assert estimates[0] - estimates[1] == pytest.approx(peaks[0] - peaks[1], rel=0.15)


@pytest.mark.slow
def test_measured_steps_tell_the_time_of_a_run(small_config, tmp_path):
    """To 30 % in the best of three tries, since other work on the machine lengthens some steps and not others."""
    wide = ("model.architecture.hidden_size=256", "model.architecture.intermediate_size=512", "training.max_steps=16")
    errors = []
    for number in range(3):
        found = measured(small_config(tmp_path / "measured", *wide, "schedule.warmup_steps=5"), 7200)
        told = re.fullmatch(r"measured: (\S+) s a step on cpu, \S+ (minutes|hours|seconds) for all .*", found)
        assert told is not None
        assert not list(tmp_path.glob("measured"))
        folder = tmp_path / str(number)
        run_training(small_config(folder, *wide, "profile_memory=true"))
        with (folder / "profile.csv").open(encoding="utf-8") as file:
            seconds = sum(float(row["step_seconds"]) for row in csv.DictReader(file))
        errors.append(abs(16 * float(told[1]) / seconds - 1))
        if errors[-1] <= 0.3:
            return
    pytest.fail(f"relative errors {errors}")
