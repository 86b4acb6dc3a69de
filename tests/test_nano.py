"""`examples/nano_reward_model.py`, plain torch without the package, takes the package's steps: an independent check."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rm_optimizer.core.pairs.synthetic import WorldPairs, synthetic_world
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.preparation import starting_weights

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "nano_reward_model.py"
NAMES = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "input_layernorm": "norm_in",
    "post_attention_layernorm": "norm_out",
    "model.layers.": "blocks.",
    "model.embed_tokens": "embed",
    "model.norm": "norm",
}
"""Names of weights in `transformers` and in the script."""


@pytest.fixture(scope="module")
def nano() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nano_reward_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def renamed(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def test_the_script_imports_nothing_of_the_package():
    lines = SCRIPT.read_text(encoding="utf-8").split('"""', 2)[2].splitlines()
    assert not [line for line in lines if "rm_optimizer" in line]


def test_forty_steps_and_the_accuracy_are_the_packages(nano: ModuleType, tmp_path: Path):
    steps = 40
    overrides = ["model=tiny", "hardware=cpu", "hardware.num_threads=1", f"training.max_steps={steps}"]
    overrides += ["data.synthetic.num_train=640", "data.synthetic.num_val=200", "training.progress=false"]
    overrides += ["logger.tensorboard=false", f"output_dir={tmp_path / 'run'}"]
    config = typed(compose(overrides), TrainConfig)
    result = train_reward_model(config)
    options = json.loads((tmp_path / "run" / "options.json").read_text())
    world: WorldPairs = synthetic_world(config.data.synthetic)
    train, val = ([pair.to_dict() for pair in part] for part in (world.train, world.val))

    tokenizer = nano.trained_tokenizer(train)
    rows = [tuple(nano.encode(tokenizer, pair, side) for side in ("chosen", "rejected")) for pair in train]
    val_rows = [tuple(nano.encode(tokenizer, pair, side) for side in ("chosen", "rejected")) for pair in val]
    model = nano.RewardModel()
    start = {renamed(name): weight for name, weight in starting_weights(options, config.data).items()}
    model.embed = torch.nn.Embedding.from_pretrained(start.pop("embed.weight"), freeze=False)
    model.load_state_dict(start | {"embed.weight": model.embed.weight})
    losses = list(nano.train(model, rows, steps))

    with (tmp_path / "run" / "metrics.csv").open() as file:
        theirs = [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]
    assert len(theirs) == steps
    assert losses == pytest.approx(theirs, abs=1e-6)
    share, half = nano.accuracy(model, val, val_rows)
    found = result.metrics.accuracy
    assert share == pytest.approx(found.value, abs=1e-9)
    assert (share - half, share + half) == pytest.approx((found.low, found.high), abs=0.02)
