"""The profile counts tokens, memory and operations as they are, and changes nothing of the run."""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.classifier.attention import drops_padding
from rm_optimizer.core.classifier.tree_masks import tree_mask
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.batching import MacroBatch, PackedPairBatch, PairBatch
from rm_optimizer.core.tokens.padding import pack_trees
from rm_optimizer.core.tokens.prefix_trees import PrefixTree
from rm_optimizer.records.run_folder import read_rows
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.training import RunResult, train_reward_model
from rm_optimizer.training.callbacks.memory_profile import ModelFlops, peak_bf16_flops, step_rates
from tests.builders import fresh_reward_model, tiny_model

Build = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def profiled(small_config: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("profiled")
    train_reward_model(small_config(run_dir, "profile_memory=true"))
    return run_dir


def test_a_profiled_run_has_the_same_bytes(profiled: Path, finished_run: RunResult):
    for name in ("metrics.csv", "best/model.safetensors"):
        assert (profiled / name).read_bytes() == (Path(finished_run.run_dir) / name).read_bytes()


def test_every_step_has_a_row_and_the_summary_its_medians(profiled: Path):
    rows = read_rows(profiled / "profile.csv")
    assert [row["step"] for row in rows] == [row["step"] for row in read_rows(profiled / "metrics.csv")][1:]
    summary = json.loads((profiled / "profile.json").read_text())
    assert summary["num_steps"] == len(rows)
    for name, median in summary["median"].items():
        assert median == statistics.median(float(row[name]) for row in rows), name
    assert all(int(row["rss_peak_bytes"]) >= int(row["rss_bytes"]) > 10**8 for row in rows)
    assert "mfu" not in summary["median"]
    assert {row["memory_allocated_peak_bytes"] for row in rows} == {""}


def padded(lengths: list[int], shared: int) -> PairBatch:
    """Sequences of these lengths, two a pair, of which each pair shares its first tokens."""
    width = max(lengths)
    ids = torch.arange(len(lengths))[:, None] * 1000 + torch.arange(width)
    ids[:, :shared] = 7
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ones = torch.ones(len(lengths) // 2)
    return PairBatch(ids * mask, mask, 0 * ones, ones, ones, torch.arange(len(ones)), torch.zeros(len(ones), 2))


def packed(lengths: list[int], shared: int) -> PackedPairBatch:
    branches = [np.arange(length - shared, dtype=np.int32) for length in lengths]
    prefix = np.zeros(shared, dtype=np.int32)
    trees = [PrefixTree(prefix, tuple(branches[i : i + 2])) for i in range(0, len(lengths), 2)]
    ones = torch.ones(len(trees))
    return PackedPairBatch(
        pack_trees(trees, pad_token_id=0), 0 * ones, ones, ones, torch.arange(len(trees)), torch.zeros(len(trees), 2)
    )


def macro(*micro: PairBatch | PackedPairBatch) -> MacroBatch:
    return MacroBatch(step=0, micro=micro, total_weight=1.0, pair_index=np.arange(1))


def test_prompts_count_once_among_unique_tokens_and_padding_only_among_moved_ones():
    rates = step_rates(macro(padded([6, 8, 5, 5], shared=4)), 0.5, tiny_model("llama"))
    assert rates == {
        "tokens_per_second": 4 * 8 / 0.5,
        "real_tokens_per_second": 24 / 0.5,
        "unique_tokens_per_second": (24 - 2 * 4) / 0.5,
        "pairs_per_second": 2 / 0.5,
        "padding_share": 8 / 32,
    }


def test_padding_that_a_model_drops_is_not_moved():
    encoder, decoder = (fresh_reward_model(family).model for family in ("bert", "llama"))
    for model, batch, tokens in (
        (encoder, padded([6, 8, 5, 5], shared=4), 24),
        (decoder, padded([6, 8, 5, 5], shared=4), 32),
        (decoder, packed([6, 8, 5, 5], shared=4), 16),
    ):
        assert drops_padding(model)
        rates = step_rates(macro(batch), 0.5, model)
        assert rates["tokens_per_second"] == tokens / 0.5
        assert rates["padding_share"] == (0.25 if tokens == 32 else 0)


def test_a_packed_batch_moves_shared_prompts_once():
    rates = step_rates(macro(packed([6, 8, 5, 5], shared=4)), 1.0, tiny_model("llama"))
    assert rates["real_tokens_per_second"] == 24
    assert rates["unique_tokens_per_second"] == 16
    assert rates["tokens_per_second"] == 20
    assert rates["padding_share"] == pytest.approx(4 / 20)


def test_a_rank_without_pairs_has_no_rates():
    assert set(step_rates(macro(), 1.0, tiny_model("llama")).values()) == {0}


MEASURED = """
from rm_optimizer.training.callbacks.memory_profile import restart_rss_peak, rss_bytes

before, _ = rss_bytes()
block = b"x" * 320_000_000
del block
_, after = rss_bytes()
print(before, after, restart_rss_peak(), rss_bytes()[1])
"""


@pytest.mark.slow
def test_the_peak_holds_memory_that_was_returned_until_it_is_restarted():
    # in a small process of its own: what a large one holds and does not use may be taken from it at any time
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True)
    before, after, can_restart, restarted = done.stdout.split()
    assert int(after) >= int(before) + 250_000_000
    assert can_restart == "False" or int(restarted) < int(after) - 150_000_000


def reward_model() -> BradleyTerryRM:
    return fresh_reward_model("llama", fields={"num_hidden_layers": 6}, attn_implementation="eager")


def counted(model: BradleyTerryRM, batch: PairBatch) -> float:
    """Operations of the matrix products that torch really runs, forwards and backwards; masked keys included."""
    counter = FlopCounterMode(display=False)
    with counter:
        model.rewards_of(batch).sum().backward()
    return float(counter.get_total_flops())


def formula(model: BradleyTerryRM, batch: PairBatch) -> float:
    flops = ModelFlops.of_model(model)
    assert flops is not None
    assert flops.is_causal
    return replace(flops, is_causal=False).of_batch(batch)


def test_the_formula_counts_what_torch_runs_when_everything_trains():
    model, batch = reward_model(), padded([48] * 4, shared=0)
    batch = replace(batch, input_ids=batch.input_ids % 200 + 3)
    # the head reads one token of each sequence, the formula gives it all: 32 of 55,328 weights
    assert formula(model, batch) == pytest.approx(counted(model, batch), rel=2e-3)


def test_matrices_of_other_layers_than_linear_ones_count():
    model = fresh_reward_model("gpt2")
    blocks = sum(value.numel() for name, value in model.named_parameters() if ".h." in name and value.ndim == 2)
    flops = ModelFlops.of_model(model)
    assert flops is not None
    assert flops.forward == blocks + 32  # and the head


def test_the_formula_counts_what_torch_runs_with_an_adapter():
    model, batch = reward_model(), padded([48] * 4, shared=0)
    batch = replace(batch, input_ids=batch.input_ids % 200 + 3)
    add_adapter(model.model, AdapterConfig(kind=AdapterKind.lora, rank=4, alpha=8, dropout=0.0), seed=0)
    # torch spares the gradient of the first layer's input: q, k and v are 2048 of each layer's 9216 weights
    assert formula(model, batch) == pytest.approx(counted(model, batch), rel=0.03)
    flops, whole = ModelFlops.of_model(model), ModelFlops.of_model(reward_model())
    assert flops is not None
    assert whole is not None
    assert flops.trained == flops.forward - whole.forward + model.reward_head.weight.numel()
    assert flops.backward == flops.forward - 32 * 32  # all but the first matrix, which stands before the first factor


def test_a_frozen_backbone_counts_its_forward_pass_alone():
    model, batch = reward_model(), padded([48] * 4, shared=0)
    batch = replace(batch, input_ids=batch.input_ids % 200 + 3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name in model.head_parameter_names()
    assert formula(model, batch) == pytest.approx(counted(model, batch), rel=5e-3)


def test_keys_are_those_that_the_masks_show():
    keys = ModelFlops(forward=0, backward=0, trained=0, attention=1, is_causal=True)
    tree = packed([6, 9], shared=4)
    assert keys.of_batch(tree) == 4 * int(tree_mask(tree.trees).sum())
    assert keys.of_batch(padded([6, 9], shared=4)) == 4 * (21 + 45)
    assert replace(keys, is_causal=False).of_batch(padded([6, 9], shared=4)) == 4 * (36 + 81)


@pytest.mark.parametrize("fields", [{"sliding_window": 16}, {"num_local_experts": 4}, {"layer_types": ["mamba"] * 6}])
def test_models_that_the_formula_does_not_fit_have_no_count(fields: dict[str, object]):
    model = reward_model()
    for name, value in fields.items():
        setattr(model.model.config, name, value)
    assert ModelFlops.of_model(model) is None


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA L40", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_chips_are_known_by_the_words_of_their_name(name: str, teraflops: float | None):
    peak = peak_bf16_flops(name)
    assert (peak is None) if teraflops is None else (peak == pytest.approx(teraflops * 1e12))


def test_a_resumed_profile_goes_on_in_the_same_file(small_config: Build, tmp_path: Path):
    train_reward_model(small_config(tmp_path, "training.checkpoint_every=2"))
    (tmp_path / "checkpoints" / "step-00000006.ckpt").unlink()
    (tmp_path / "run.json").unlink()
    train_reward_model(small_config(tmp_path, "training.checkpoint_every=2", "resume=auto", "profile_memory=true"))
    with (tmp_path / "profile.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["5", "6"]
