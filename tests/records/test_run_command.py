"""The command of a run composes to the options of that run."""

import shlex

import pytest

from rm_optimizer.records.quoting import in_quotes
from rm_optimizer.records.run_command import run_command
from rm_optimizer.records.run_options import FREE, flat, is_among, options_of
from rm_optimizer.schema import TrainConfig, compose, typed

ODD = "it's a, file.jsonl"


@pytest.mark.parametrize(
    "given",
    [
        ["model=tiny", "hardware=cpu"],
        ["model=qwen", "optimizer=muon", "experiment=lora_r16", "hardware=h100", f"data.train={in_quotes(ODD)}"],
        ["model.path=org/name", "schedule=wsd", "schedule.decay_ratio=0.3", "data.train=[a.jsonl,b.jsonl]"],
        ["model=minilm", "data.train=[{path: a.jsonl, source: hh}]", "training.early_stopping.enabled=true"],
        ["experiment=ablation_a2", "model=tiny", "loss.label_smoothing=0.1", "training.max_steps=7"],
    ],
)
def test_the_command_gives_the_same_options(given: list[str]):
    options = options_of(typed(compose([*given, "output_dir=a"]), TrainConfig))
    words = shlex.split(run_command(options))
    assert words[:2] == ["rm-opt", "train"]
    again = options_of(typed(compose([*words[2:], "output_dir=b"]), TrainConfig))

    def used(values: dict) -> dict:
        return {name: value for name, value in flat(values) if not is_among(name, (*FREE, "output_dir"))}

    assert used(again) == used(options)
