"""A compiled backbone gives the same rewards and gradients, is compiled a few times, and leaves no trace in files."""

from __future__ import annotations

import copy
import csv
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rm_optimizer.core.classifier.building import COMPILERS, compile_backbone
from rm_optimizer.core.classifier.pooling import packed_logits
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.loading import checkpoint_payload
from rm_optimizer.core.tokens.padding import pack_trees
from rm_optimizer.core.tokens.prefix_trees import prefix_tree
from rm_optimizer.errors import ConfigError
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.callbacks import checkpoints
from tests.builders import tiny_reward_model

Build = Callable[..., TrainConfig]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    before = torch._dynamo.config.optimize_ddp
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = before


def reward_model(family: str, **fields: Any) -> BradleyTerryRM:
    return tiny_reward_model(family, max_length=64, **fields)


def sequences(rng: np.random.Generator, count: int) -> list[NDArray[np.int32]]:
    return [rng.integers(5, 250, rng.integers(2, 40)).astype(np.int32) for _ in range(count)]


def padded(model: BradleyTerryRM, rng: np.random.Generator, count: int) -> Tensor:
    rows = sequences(rng, count)
    ids = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row).long() for row in rows], batch_first=True)
    rewards: Tensor = model(ids, torch.stack([torch.arange(ids.shape[1]) < len(row) for row in rows]).long())
    return rewards


def shared(model: BradleyTerryRM, rng: np.random.Generator, count: int) -> Tensor:
    prompts = sequences(rng, count)
    trees = [prefix_tree([np.concatenate([p, *sequences(rng, 1)]) for _ in range(2)]) for p in prompts]
    return packed_logits(model.model, pack_trees(trees, pad_token_id=2)).squeeze(-1)


def gradients(model: BradleyTerryRM, rewards: Tensor) -> list[Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(rewards.tanh().sum(), parameters, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def assert_alike(plain: BradleyTerryRM, compiled: BradleyTerryRM, passes: Callable[..., Tensor], seed: int) -> None:
    """To rounding: sums of 32 and 64 products in float32, in layers of order one, as in `test_prefix`."""
    count = (4, 7, 2, 5)[seed % 4]
    expected, found = (passes(model, np.random.default_rng(seed), count) for model in (plain, compiled))
    assert expected.std() > 1e-2
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)
    for ours, theirs in zip(gradients(compiled, found), gradients(plain, expected), strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "passes", "checkpointing"),
    [("llama", shared, False), pytest.param("qwen2", padded, True, marks=pytest.mark.slow), ("bert", padded, False)],
    ids=["shared prompts", "checkpointed layers", "encoder"],
)
def test_many_sizes_share_two_compilations(family: str, passes: Callable[..., Tensor], checkpointing: bool):
    """A second one may follow the first, whose sizes can coincide by chance: symbols equal at first are kept equal."""
    plain = reward_model(family).train(checkpointing)  # layers are checkpointed in training alone
    compiled = copy.deepcopy(plain)
    if checkpointing:
        compiled.model.gradient_checkpointing_enable({"use_reentrant": False})
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compile_backbone(compiled.model, backend=backend)
    for seed in range(8):
        assert_alike(plain, compiled, passes, seed)
    assert 1 <= len(graphs) <= 2


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_the_kernels_of_inductor_agree():
    plain = reward_model("llama", num_hidden_layers=1).train()
    compiled = copy.deepcopy(plain)
    compile_backbone(compiled.model)
    for seed in range(4):
        assert_alike(plain, compiled, padded, seed)


def test_weights_keep_their_names_in_checkpoints_and_exports(tmp_path: Path):
    model = reward_model("llama", num_hidden_layers=1)
    names, description = list(model.state_dict()), checkpoint_payload(model)
    compile_backbone(model.model, backend="eager")
    assert list(model.state_dict()) == names
    assert checkpoint_payload(model) == description
    assert model.save_pretrained(tmp_path / "export").is_passed
    reloaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export")
    assert list(reloaded.state_dict()) == list(model.model.state_dict())


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"hardware\.compile=true needs a C\+\+ compiler.*hardware\.compile=false"):
        compile_backbone(reward_model("llama").model)


def losses(run_dir: Path) -> list[float]:
    with (run_dir / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    return [float(row[column]) for row in rows for column in row if "loss" in column and row[column]]


@pytest.mark.slow
def test_a_run_resumes_with_and_without_compilation(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Four of six steps compiled, the rest not: the losses are those of a run that never was, to float32's rounding."""
    common = ["training.max_steps=6", "training.checkpoint_every=2", "training.evals_per_epoch=1"]
    train_reward_model(small_config(tmp_path / "plain", *common))

    def dies(run_dir: Path, keep: int) -> None:
        if (run_dir / "checkpoints" / "step-00000004.ckpt").exists():
            raise MemoryError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "prune", dies)
        patch.setattr(
            "rm_optimizer.training.preparation.compile_backbone", lambda model: compile_backbone(model, backend="eager")
        )
        with pytest.raises(MemoryError):
            train_reward_model(small_config(tmp_path / "cut", *common, "hardware.compile=true"))
    train_reward_model(small_config(tmp_path / "cut", *common, "resume=auto"))
    expected = losses(tmp_path / "plain")
    assert len(expected) >= 8
    assert losses(tmp_path / "cut") == pytest.approx(expected, rel=1e-4)
