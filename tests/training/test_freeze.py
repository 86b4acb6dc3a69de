"""Weights that are kept out of training stay to the bit, and all others are trained."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.training.preparation import starting_weights
from rm_optimizer.training.run import run_training

FEW = (
    "data.synthetic.num_train=16",
    "data.synthetic.num_val=8",
    "batching.batch_size=8",
    "training.eval_at_start=false",
)


@pytest.mark.parametrize(
    ("optimizer", "freeze", "trained"),
    [
        ("adamw", "backbone", {"score"}),
        ("adamw", "1", {"score", "model.norm", "model.layers.1"}),
        ("muon", "0", {"score", "model.norm", "model.layers"}),
    ],
)
def test_only_the_other_weights_are_trained(small_config, tmp_path, optimizer, freeze, trained):
    config = small_config(tmp_path, *FEW, f"optimizer={optimizer}", f"model.freeze={freeze}")
    result = run_training(config)
    before = starting_weights(RunFolder(tmp_path).options, config.data)
    after = load_file(f"{result.export}/model.safetensors")
    changed = {name for name, weight in after.items() if not weight.equal(before[name])}
    assert changed == {name for name in after if name.startswith(tuple(trained))}
    assert result.parameters == sum(after[name].numel() for name in changed)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["model.freeze=2"], "model.freeze must be less than the 2 layers of .*, or backbone, got 2"),
        (["model.freeze=head"], "model.freeze must be backbone, a number of layers or null, got head"),
        (["model.freeze=backbone", "optimizer=muon"], "optimizer=muon found no trainable hidden matrix"),
        (["model.freeze=backbone", "adapter=lora"], "adapter=lora trains no weight of the backbone"),
    ],
)
def test_what_would_freeze_nothing_or_everything_is_refused(small_config, tmp_path, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run_training(small_config(tmp_path, *FEW, *options))
