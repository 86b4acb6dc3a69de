"""Rewards and gradients with each prompt computed once equal those of the sequences apart."""

from __future__ import annotations

import gzip
import json
import re
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, flex_attention
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from rm_optimizer.core.classifier.attention import UNPADDED
from rm_optimizer.core.classifier.pooling import decoder_logits, drop_tree_padding, packed_logits
from rm_optimizer.core.classifier.tree_masks import attention_masks, sharing_obstacle, tree_block_mask, tree_mask
from rm_optimizer.core.tokens.padding import PackedTrees, pack_trees, pad_sequences
from rm_optimizer.core.tokens.plan import assign_rows, row_batches
from rm_optimizer.core.tokens.prefix_trees import prefix_tree, tree_runs
from tests.builders import tiny_model

HH = Path(__file__).parents[4] / "shared" / "data" / "hh_train.jsonl.gz"
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = ["full_attention", "sliding_attention"]
WINDOWS = {"sliding_window": 5, "use_sliding_window": True, "layer_types": LAYERS}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": ("qwen2", WINDOWS),
    "qwen3": ("qwen3", SHAPE | {"head_dim": 8, "num_hidden_layers": 2}),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
    "gpt2": ("gpt2", {}),
}
PAD = 2


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


def random_pairs(seed: int = 0, count: int = 6) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    rng = np.random.default_rng(seed)

    def tokens(most: int) -> NDArray[np.int32]:
        return rng.integers(3, 250, rng.integers(1, most)).astype(np.int32)

    shared = [tokens(14) for _ in range(count)]
    return [(np.concatenate([p, tokens(9)]), np.concatenate([p, tokens(9)])) for p in shared]


EDGES = [
    (ids(5, 6, 7), ids(8, 9)),  # nothing shared
    (ids(5, 6, 7), ids(5, 6, 7, 8, 9)),  # one starts the other
    (ids(5, 6, 7), ids(5, 6, 8)),  # branches of one token
    (ids(5), ids(6)),
    (ids(5, PAD, PAD), ids(5, PAD)),  # the pad id is an ordinary token: pad == eos
]
PAIRS = random_pairs() + EDGES


def architecture(case: str) -> PreTrainedModel:
    family, fields = CASES[case]
    names = {"model_type": family, **fields}
    if family == "qwen3":
        return tiny_model("llama", **names).double()
    return tiny_model(family, **fields).double()


def packed(pairs: list[Any] = PAIRS) -> PackedTrees:
    return pack_trees([prefix_tree(pair) for pair in pairs], pad_token_id=PAD)


def apart(model: PreTrainedModel, pairs: list[Any] = PAIRS) -> Tensor:
    return decoder_logits(model, *pad_sequences([side for pair in pairs for side in pair], PAD)).squeeze(-1)


def gradients(model: PreTrainedModel, rewards: Tensor) -> list[Tensor]:
    losses = -torch.nn.functional.logsigmoid(rewards[0::2] - rewards[1::2])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(losses.sum() + 0.1 * rewards.pow(2).sum(), parameters))


def assert_same(model: PreTrainedModel, shared: Tensor, expected: Tensor, tolerance: float) -> None:
    assert expected.std() > 1e-2
    torch.testing.assert_close(shared, expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(gradients(model, shared), gradients(model, expected), strict=True):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours / scale, theirs / scale, rtol=tolerance, atol=tolerance)


def exact(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """Let what families compute in float32 whatever the weights' type (norms, rotary angles) be float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    return model


@pytest.mark.parametrize("kernel", ["sdpa", "eager", UNPADDED])
@pytest.mark.parametrize("case", CASES)
def test_rewards_and_gradients_equal_those_of_the_sequences_apart(
    case: str, kernel: str, monkeypatch: pytest.MonkeyPatch
):
    model = architecture(case)
    model.set_attn_implementation(kernel)
    assert sharing_obstacle(model) is None
    exact(model, monkeypatch)
    assert_same(model, packed_logits(model, packed()).squeeze(-1), apart(model), 1e-10)


def test_trees_in_one_row_move_each_token_once_in_training():
    model, trees, seen = architecture("llama").float(), packed(), list[tuple[int, ...]]()
    drop_tree_padding(model)
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[:2])))
    packed_logits(model, trees)
    with torch.no_grad():
        packed_logits(model, trees)
    assert seen == [(1, trees.num_tokens), tuple(trees.input_ids.shape)]


def test_a_decoder_that_reads_neighbors_keeps_its_rows():
    """Each token reads the one before it, which at the start of a tree is another tree's last one."""
    model, shift = architecture("llama").float(), torch.nn.ZeroPad2d((0, 0, 1, -1))
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, inputs: inputs[0] + shift(inputs[0]))
    drop_tree_padding(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("case", ["llama", "mistral with a window"])
def test_in_float32_they_agree_to_its_rounding(case: str):
    """2e-5 is about 200 roundings of 2^-24 a sum of 32 x 2 layers takes, rewards being of order one."""
    model = architecture(case).float()
    assert_same(model, packed_logits(model, packed()).squeeze(-1), apart(model), 2e-5)


def test_a_window_left_out_of_the_mask_would_be_seen():
    model = architecture("mistral with a window")
    expected = apart(model)
    model.config.sliding_window = None
    assert (packed_logits(model, packed()).squeeze(-1) - expected).abs().max() > 1e-3


def test_gradient_checkpointing_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    model = exact(architecture("llama"), monkeypatch).train()
    expected = apart(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(model, packed_logits(model, packed()).squeeze(-1), expected, 1e-10)


def test_a_lora_adapter_gets_the_same_gradients(monkeypatch: pytest.MonkeyPatch):
    peft = pytest.importorskip("peft")
    model = architecture("llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).double()  # the layers are put into `model` itself
    exact(model, monkeypatch)
    assert sum(parameter.requires_grad for parameter in adapted.parameters()) == 12
    assert_same(model, packed_logits(model, packed()).squeeze(-1), apart(model), 1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_torch_compile_changes_no_reward_and_no_gradient():
    """In float32: inductor fuses, so sums round in another order; tolerance as without it.

    The backbone is compiled, with the masks as its inputs: the tests' checks of shapes around it cannot be traced.
    """
    model, compiled = architecture("llama").float(), architecture("llama").float()
    compiled.base_model.compile(dynamic=True)
    for seed in (1, 2):
        pairs = random_pairs(seed, count=3 + seed)
        shared, expected = packed_logits(compiled, packed(pairs)).squeeze(-1), apart(model, pairs)
        torch.testing.assert_close(shared, expected, rtol=2e-5, atol=2e-5)
        for ours, theirs in zip(gradients(compiled, shared), gradients(model, expected), strict=True):
            scale = max(1.0, float(theirs.abs().max()))
            torch.testing.assert_close(ours / scale, theirs / scale, rtol=2e-5, atol=2e-5)


def test_every_branch_of_a_tree_of_many_has_its_own_reward(monkeypatch: pytest.MonkeyPatch):
    model = exact(architecture("qwen2 with windows"), monkeypatch)
    prompt = ids(*range(10, 22))
    responses = [np.concatenate([prompt, ids(*range(30 + k, 31 + 2 * k))]) for k in range(5)]
    shared = packed_logits(model, packed([responses, [responses[2]]])).squeeze(-1)
    torch.testing.assert_close(shared, apart(model, [[*responses, responses[2]]]), rtol=1e-10, atol=1e-10)


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(lambda row: ids(*row))
GROUPS = st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=6)


@settings(max_examples=60)
@given(groups=GROUPS, window=st.sampled_from([None, 1, 3]))
def test_each_sequence_can_be_read_back_along_its_mask(groups: list[list[NDArray[np.int32]]], window: int | None):
    """What a sequence's last token sees, through every token that sees it in turn, is the sequence itself."""
    trees = packed(groups)
    mask, near = tree_mask(trees)[:, 0], tree_mask(trees, window)[:, 0]
    width = trees.input_ids.shape[1]
    sequences = [sequence for group in groups for sequence in group]
    assert trees.num_sequence_tokens == sum(map(len, sequences))
    assert trees.num_tokens <= trees.num_padded_tokens
    for sequence, last in zip(sequences, trees.last.tolist(), strict=True):
        row, column = divmod(last, width)
        seen = mask[row, column]
        assert trees.input_ids[row][seen].tolist() == sequence.tolist()
        assert trees.position_ids[row][seen].tolist() == list(range(len(sequence)))
        for position, query in enumerate(seen.nonzero().flatten().tolist()):
            path = seen & (torch.arange(width) <= query)
            assert torch.equal(mask[row, query], path)
            first = 0 if window is None else max(0, position - window + 1)
            assert trees.position_ids[row][near[row, query]].tolist() == list(range(first, position + 1))


def test_no_token_sees_nothing():
    for window in (None, 1, 3):
        assert bool(tree_mask(packed(), window).any(dim=-1).all())


@settings(max_examples=60)
@given(sizes=st.lists(st.integers(1, 50), max_size=60), budget=st.integers(1, 300))
def test_batches_take_each_item_once_in_rows_within_the_budget(sizes: list[int], budget: int):
    batches = row_batches(sizes, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    for batch in batches:
        inside = [sizes[i] for i in batch]
        rows = assign_rows(inside)
        assert all(sum(inside[i] for i in row) <= max(inside) for row in rows)
        assert len(rows) == 1 or len(rows) * max(inside) <= budget
    widths = [max(sizes[i] for i in batch) for batch in batches]
    assert widths == sorted(widths, reverse=True)


def test_a_budget_below_one_is_refused():
    with pytest.raises(ValueError, match="token_budget must be at least 1, got 0"):
        row_batches([1], 0)


def test_groups_are_cut_where_their_tree_would_be_too_large():
    rows = [ids(1, 2, 3, 4, 10 + k, 11) for k in range(5)]
    assert tree_runs(rows, [0, 1, 2, 3], most_tokens=8) == [[0, 1], [2, 3]]
    assert tree_runs(rows, [0, 1, 2, 3], most_tokens=1) == [[0], [1], [2], [3]]
    assert tree_runs(rows, [0, 1, 2, 3], most_tokens=100) == [[0, 1, 2, 3]]


def moved_over_unique(sizes: NDArray[np.int64], batch_size: int, budget: int) -> float:
    moved = unique = 0
    for start in range(0, len(sizes) - batch_size + 1, batch_size):
        macro = sizes[start : start + batch_size]
        unique += int(macro.sum())
        for batch in row_batches(macro, budget):
            moved += len(assign_rows(macro[batch])) * int(macro[batch].max())
    return moved / unique


@pytest.mark.parametrize(("batch_size", "budget"), [(32, 4096), (32, 8192), (64, 8192), (128, 16384)])
def test_at_most_a_tenth_of_the_tokens_moved_is_padding_on_dialogues(batch_size: int, budget: int):
    """Trees as in HH-RLHF: log-normal with median 210 and mean 256 tokens; the real ones where they are at hand."""
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(np.log(210), 0.68, 2560)).astype(np.int64).clip(20, 1800)
    assert moved_over_unique(sizes, batch_size, budget) <= 1.10
    if HH.exists():
        with gzip.open(HH, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in islice(lines, 1280)]
        words = [(row["chosen"].split(), row["rejected"].split()) for row in rows]
        real = np.array([len(a) + len(b) - _common(a, b) for a, b in words])
        assert moved_over_unique(real, batch_size, budget) <= 1.10


def _common(a: list[str], b: list[str]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_three_thousand_pairs_are_packed_in_seconds():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4000, 600).astype(np.int32)
    pairs = [(tokens[:n], np.append(tokens[: n // 2], tokens[:9])) for n in rng.integers(20, 600, 3000)]
    began = time.process_time()
    trees = [prefix_tree(pair) for pair in pairs]
    for batch in row_batches([tree.num_tokens for tree in trees], 8192):
        pack_trees([trees[i] for i in batch], pad_token_id=PAD)
    assert time.process_time() - began < 20  # a 12M-parameter model takes minutes for them


@pytest.mark.parametrize("window", [None, 3])
def test_a_block_mask_is_the_mask(window: int | None):
    trees = packed()
    blocks = tree_block_mask(trees, window)
    rows, width = trees.input_ids.shape
    assert torch.equal(create_mask(blocks.mask_mod, rows, None, width, width, "cpu"), tree_mask(trees, window))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_agrees_with_a_masked_softmax():
    trees = packed(EDGES)
    rows, width = trees.input_ids.shape
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, rows, 2, width, 16, generator=generator, dtype=torch.float64)
    mask = tree_mask(trees, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=tree_block_mask(trees, 4)), expected)


def test_layers_of_two_kinds_get_a_mask_each():
    model = architecture("qwen2 with windows")
    masks = attention_masks(packed(), model.config, torch.float64)
    assert set(masks) == set(LAYERS)
    assert masks["full_attention"].sum() > masks["sliding_attention"].sum()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("case", ["llama", "qwen2 with windows", "mistral with a window"])
def test_flex_attention_on_a_gpu_gives_the_rewards_and_gradients_of_a_dense_mask(case: str):
    """Float32 with matrix products in TF32 inside the kernel, of 10 bits: 2^-10 times a few."""
    family, fields = CASES[case]
    wide = fields | {"hidden_size": 64, "head_dim": 16}
    model = tiny_model(family, **wide).cuda()
    trees = pack_trees([prefix_tree(pair) for pair in random_pairs(0, 40)], pad_token_id=PAD).to("cuda")
    expected = packed_logits(model, trees).squeeze(-1)
    model.set_attn_implementation("flex_attention")
    assert sharing_obstacle(model) is None
    assert_same(model, packed_logits(model, trees).squeeze(-1), expected, 5e-3)


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("bloom", {"hidden_size": 32, "n_head": 4, "n_layer": 2}, "positions from the order of the tokens"),
        ("falcon", SHAPE | {"alibi": True, "num_hidden_layers": 2}, "ALiBi"),
        ("qwen3_next", SHAPE | {"num_hidden_layers": 2}, "linear_attention layers"),
        ("openai-gpt", {"n_embd": 32, "n_head": 4, "n_layer": 2}, "positions|masks"),
    ],
)
def test_models_whose_tokens_depend_on_more_than_mask_and_position_are_named(
    family: str, fields: dict[str, Any], words: str
):
    config = AutoConfig.for_model(family, vocab_size=100, num_labels=1, pad_token_id=0, **fields)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    assert (obstacle := sharing_obstacle(model)) is not None
    assert re.search(words, obstacle)


def test_a_kernel_without_masks_is_named():
    model = architecture("llama")
    model.config._attn_implementation = "flash_attention_2"
    assert sharing_obstacle(model) == "flash_attention_2 takes no mask; set model.attn_implementation to sdpa"
