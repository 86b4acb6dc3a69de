"""The switch gives each pass the kernel it needs, and whichever it takes, the rewards are the same."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention
from transformers import AutoModelForSequenceClassification, BertConfig, Gemma2Config, LlamaConfig, PreTrainedModel
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import flex_attention as flex_integration

from rm_optimizer.core.classifier import attention, tree_masks
from rm_optimizer.core.classifier.attention import SWITCHES, AttentionSwitch, choose_attention
from rm_optimizer.core.classifier.building import compile_backbone
from rm_optimizer.core.classifier.pooling import decoder_logits, packed_logits
from rm_optimizer.core.classifier.tree_masks import tree_block_mask, tree_mask
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.padding import PackedTrees, pack_trees, pad_sequences
from rm_optimizer.core.tokens.prefix_trees import prefix_tree
from tests.builders import encoder_tokenizer, fresh_reward_model, tiny_architecture, tiny_model

PAD = 2
WINDOWS = {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
DECODERS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": ("qwen2", WINDOWS),
    "mistral with a window": ("mistral", {"sliding_window": 5}),
}


def trees(seed: int = 0, prompts: int = 5, most: int = 40) -> PackedTrees:
    rng = np.random.default_rng(seed)

    def tokens() -> NDArray[np.int32]:
        return rng.integers(3, 250, rng.integers(1, most)).astype(np.int32)

    shared = [tokens() for _ in range(prompts)]
    return pack_trees(
        [prefix_tree([np.concatenate([p, tokens()]) for _ in range(1 + k)]) for k, p in enumerate(shared)],
        pad_token_id=PAD,
    )


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run FlexAttention's own definition rather than the kernel that inductor would make of it."""
    monkeypatch.setattr(flex_integration, "compile_friendly_flex_attention", eagerly)
    with torch.no_grad():
        yield


def eagerly(*tensors: Tensor, training: bool, **options: Any) -> Tensor:
    out: Tensor = flex_attention(*tensors, **options)
    return out


@pytest.fixture
def masks_seen(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Kinds of masks that FlexAttention is given."""
    seen: list[type] = []
    flex = attention.flex_attention_forward

    def watched(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        seen.append(type(mask))
        return flex(module, query, key, value, mask, **options)

    monkeypatch.setattr(attention, "flex_attention_forward", watched)
    return seen


@settings(max_examples=25)
@given(seed=st.integers(0, 2**16), prompts=st.integers(1, 6), window=st.sampled_from([None, 1, 3, 50]))
def test_the_rule_of_block_masks_is_the_dense_mask(seed: int, prompts: int, window: int | None):
    packed = trees(seed, prompts)
    rows, width = packed.input_ids.shape
    blocks = tree_block_mask(packed, window)
    assert torch.equal(create_mask(blocks.mask_mod, rows, None, width, width, "cpu"), tree_mask(packed, window))


def test_a_block_mask_skips_the_blocks_where_two_trees_do_not_meet():
    """Three trees of 256 tokens in a row of six blocks: each needs 3 of its 4, so 9 of 36 are computed."""
    long = [prefix_tree([np.arange(3, 259, dtype=np.int32) + k]) for k in range(3)]
    widest = prefix_tree([np.arange(3, 771, dtype=np.int32)])
    packed = pack_trees([widest, *long], pad_token_id=PAD)
    blocks = tree_block_mask(packed)
    counts = blocks.kv_num_blocks.sum(dim=-1).flatten() + blocks.full_kv_num_blocks.sum(dim=-1).flatten()
    assert counts.tolist() == [21, 9]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", DECODERS)
def test_rewards_through_flex_attention_equal_those_of_a_dense_mask(
    case: str, eager_flex: None, masks_seen: list[type], monkeypatch: pytest.MonkeyPatch
):
    """Float32 throughout: a sum of 40 products rounds to about 40 x 2^-24, rewards being of order one."""
    family, fields = DECODERS[case]
    model = tiny_model(family, **fields)
    packed = trees()
    expected = packed_logits(model, packed)
    assert expected.std() > 1e-2
    model.set_attn_implementation("sdpa_or_flex")
    torch.testing.assert_close(packed_logits(model, packed), expected)
    assert not masks_seen  # on a CPU the switch is SDPA
    monkeypatch.setattr(tree_masks, "takes_blocks", lambda kernel, device: True)
    torch.testing.assert_close(packed_logits(model, packed), expected, rtol=2e-5, atol=2e-5)
    assert masks_seen == [BlockMask, BlockMask]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gets_one_type_where_norms_leave_autocasts(eager_flex: None):
    query, key, value = torch.randn(3, 1, 2, 8, 16)
    packed = trees(prompts=1, most=5)
    width = packed.input_ids.shape[1]
    query, key, value = (tensor[:, :, :1].expand(-1, -1, width, -1) for tensor in (query, key, value.bfloat16()))
    switch, layer = SWITCHES["sdpa_or_flex"], torch.nn.Identity()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = switch(layer, query, key, value, tree_block_mask(packed))
    assert out.dtype == torch.bfloat16


def padded_rows(*lengths: int) -> tuple[Tensor, Tensor]:
    return pad_sequences([np.arange(3, 3 + length, dtype=np.int32) for length in lengths], PAD)


def padded(model: PreTrainedModel) -> Tensor:
    return decoder_logits(model, *padded_rows(9, 4, 12))


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("case", DECODERS)
def test_on_a_cpu_every_switch_is_sdpa_bit_for_bit(case: str, name: str):
    family, fields = DECODERS[case]
    model = tiny_model(family, **fields)
    expected = padded(model)
    model.set_attn_implementation(name)
    assert torch.equal(padded(model), expected)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, causal: bool, window: tuple[int, int]
) -> Tensor:
    """Attention of one sequence by its formula, in the tensors' own type; tokens first, grouped keys repeated."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    left, right = (len(k) if each < 0 else each for each in window)
    allowed = (distance <= left) & (distance >= -right) & ((distance >= 0) | (not causal))
    weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)


def flash_attn_varlen_func(  # the signature of flash-attn 2.8
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert q.dtype in attention.HALF
    assert (q.dtype, cu_seqlens_q.dtype, cu_seqlens_k.dtype) == (k.dtype, torch.int32, torch.int32)
    assert dropout_p == 0
    lengths = cu_seqlens_q.diff().tolist()
    assert (max(lengths), lengths) == (max_seqlen_q, cu_seqlens_k.diff().tolist())
    parts = zip(*(each.split(lengths) for each in (q, k, v)), strict=True)
    options = {"scale": softmax_scale, "causal": causal, "window": window_size}
    return torch.cat([plain_attention(*each, **options) for each in parts])


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    assert q.dtype in attention.HALF
    options = {"scale": softmax_scale, "causal": causal, "window": window_size}
    return torch.stack([plain_attention(*each, **options) for each in zip(q, k, v, strict=True)])


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls of flash-attn by `transformers`, which plain formulas with its signatures answer; it is not installed."""
    called: list[str] = []

    def noted(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Tensor:
            called.append(function.__name__)
            out: Tensor = function(*args, **options)
            return out

        return call

    names = {
        "_loaded_implementation": "flash_attention_2",
        "_flash_fn": noted(flash_attn_func),
        "_flash_varlen_fn": noted(flash_attn_varlen_func),
        "_pad_fn": flash_utils._pad_input,
        "_unpad_fn": flash_utils._unpad_input,
        "_process_flash_kwargs_fn": flash_utils._lazy_define_process_function(flash_attn_varlen_func),
    }
    for name, value in names.items():
        monkeypatch.setattr(flash_utils, name, value)
    monkeypatch.setattr(
        AttentionSwitch, "unpads", lambda self, device, dtype: self.has_varlen and dtype in attention.HALF
    )
    return called


FLASH = {**DECODERS, "bert": ("bert", {})}


@pytest.mark.parametrize("case", FLASH)
def test_padded_passes_in_a_half_type_go_to_flash_attention_and_others_to_sdpa(case: str, flash: list[str]):
    family, fields = FLASH[case]
    model = tiny_model(family, **fields)
    rows = {"varlen": padded_rows(9, 4, 12), "plain": padded_rows(12, 12)}

    def rewards(name: str) -> Tensor:
        ids, mask = rows[name]
        return decoder_logits(model, ids, mask) if family != "bert" else model(ids, attention_mask=mask).logits

    expected = rewards("varlen")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected_half = {name: rewards(name) for name in rows}
    model.set_attn_implementation("sdpa_or_flex_or_fa2")
    assert torch.equal(rewards("varlen"), expected)
    assert not flash
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for name in rows:
            torch.testing.assert_close(rewards(name), expected_half[name], rtol=2e-2, atol=2e-2)
    assert flash == 2 * ["flash_attn_varlen_func"] + 2 * ["flash_attn_func"]
    if family != "bert":
        shared = packed_logits(model, trees())
        assert len(flash) == 4
        assert torch.isfinite(shared).all()


@pytest.fixture
def cuda_machine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """A machine that says it has CUDA, without FlashAttention."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    attention.say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="rm_optimizer")
    return caplog


def llama(**fields: Any) -> LlamaConfig:
    return LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, **fields)


def test_auto_switches_on_a_cuda_machine(cuda_machine: pytest.LogCaptureFixture):
    assert choose_attention(llama(), "auto", torch.float32) == "sdpa_or_flex"
    assert cuda_machine.messages == [
        "padded sequences use sdpa: flash_attention_2: flash-attn is not installed; pip install 'rm-optimizer[flash]'"
    ]


@pytest.mark.parametrize("word", ["sdpa", "eager"])
def test_a_kernel_asked_for_by_name_is_the_kernel(word: str, cuda_machine: pytest.LogCaptureFixture):
    assert choose_attention(llama(), word, torch.float32) == word
    assert not cuda_machine.messages


def test_flash_attention_is_part_of_the_switch_where_it_is_installed(
    cuda_machine: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """`transformers` checks the package itself, which this machine lacks: what it would let pass is set here."""
    obstacle = attention._obstacle
    monkeypatch.setattr(
        attention,
        "_obstacle",
        lambda config, kernel, *rest: None if kernel.startswith("flash") else obstacle(config, kernel, *rest),
    )
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_attention(llama(), "auto", dtype) == "sdpa_or_flex_or_fa2"
    assert choose_attention(llama(), "flash_attention_2", torch.bfloat16) == "flash_attention_2"
    assert choose_attention(llama(), "flash_attention_2", torch.float32) == "sdpa_or_flex_or_fa2"
    assert not cuda_machine.messages


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (llama(head_dim=8), "needs heads of at least 16 channels, these have 8"),
        (llama(attention_dropout=0.1), "has no dropout, set model.dropout to false"),
    ],
)
def test_a_model_that_flex_attention_cannot_serve_keeps_the_dense_mask_and_it_is_said(
    config: LlamaConfig, words: str, cuda_machine: pytest.LogCaptureFixture
):
    for _ in range(2):
        assert choose_attention(config, "auto", torch.float32) == "sdpa"
    assert cuda_machine.messages[0] == f"shared prompts use sdpa with a dense mask: flex_attention: {words}"
    assert len(cuda_machine.messages) == 2


def test_a_soft_cap_that_sdpa_would_leave_out_forbids_the_switch(cuda_machine: pytest.LogCaptureFixture):
    config = Gemma2Config(num_hidden_layers=1, hidden_size=64, num_attention_heads=4, head_dim=16)
    assert choose_attention(config, "auto", torch.float32) not in SWITCHES


def test_encoders_switch_too(cuda_machine: pytest.LogCaptureFixture):
    config = BertConfig(num_hidden_layers=1)
    config.attention_probs_dropout_prob = 0.0
    assert choose_attention(config, "auto", torch.float32) in SWITCHES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", DECODERS)
def test_on_a_gpu_the_switch_gives_the_rewards_and_gradients_of_sdpa(case: str, autocast: bool):
    """Float32 to its rounding; bfloat16 has 8 bits, so two kernels agree to a few times 2^-8."""
    family, fields = DECODERS[case]
    wide = fields | {"hidden_size": 64, "head_dim": 16}
    model = tiny_model(family, **wide).cuda().train()
    packed = trees(prompts=30).to("cuda")
    results = []
    for kernel in ("sdpa", choose_attention(model.config, "auto", torch.float32)):
        model.set_attn_implementation(kernel)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            rewards = packed_logits(model, packed)
        rewards.float().tanh().sum().backward()
        results.append((rewards.float(), model.base_model.layers[0].self_attn.q_proj.weight.grad.clone()))
    tolerance = 5e-2 if autocast else 1e-4
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


def soft_capped(cap: float | None = 5.0) -> BradleyTerryRM:
    capped = {"model_type": "gemma2", "attn_logit_softcapping": cap, "head_dim": 8}
    large = {"initializer_range": 0.5, "query_pre_attn_scalar": 1}
    return fresh_reward_model("llama", fields=capped | large)


def test_a_soft_cap_is_applied_in_memory_in_the_export_and_in_plain_transformers(tmp_path: Path):
    model = soft_capped()
    assert model.model.config._attn_implementation == "eager"
    prompts, responses = ["How do I boil an egg?"] * 2, ["In boiling water for seven minutes.", "No."]
    rewards = model.score(prompts, responses)
    uncapped = soft_capped(cap=None)
    assert uncapped.model.config._attn_implementation == attention.UNPADDED
    assert (uncapped.score(prompts, responses) - rewards).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert plain.config._attn_implementation == "eager"
    with torch.no_grad():
        theirs = plain(**model.tokenize(prompts, responses)).logits[:, 0]
    torch.testing.assert_close(theirs, rewards)
    torch.testing.assert_close(BradleyTerryRM.from_pretrained(tmp_path).score(prompts, responses), rewards)


def test_sdpa_by_name_is_not_given_to_a_model_with_a_soft_cap(caplog: pytest.LogCaptureFixture):
    attention.say_once.cache_clear()
    config = Gemma2Config(attn_logit_softcapping=50.0, hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING, logger="rm_optimizer"):
        assert choose_attention(config, "sdpa", torch.float32) == "eager"
    assert "sdpa: leaves out the model's soft cap (attn_logit_softcapping=50)" in caplog.text


ROTARY = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
UNPADDED: dict[str, dict[str, Any]] = {
    **{family: tiny_architecture(family) for family in ("bert", "distilbert", "roberta")},
    "electra": {"model_type": "electra", **ROTARY, "num_hidden_layers": 2, "embedding_size": 24},
    "modernbert with windows": tiny_architecture("modernbert", num_hidden_layers=4, local_attention=6),
    "modernbert, mean": tiny_architecture("modernbert", classifier_pooling="mean"),
    "eurobert": {"model_type": "eurobert", **ROTARY, "num_hidden_layers": 2, "classifier_pooling": "mean"},
    "nomic_bert": {"model_type": "nomic_bert", **ROTARY, "num_hidden_layers": 2},
}
LENGTHS = (23, 7, 1, 40, 12, 12)


def encoder(case: str, *, dropout: bool = False) -> BradleyTerryRM:
    fields = UNPADDED[case] | {"initializer_range": 0.3}
    model = BradleyTerryRM.from_config(fields, encoder_tokenizer(), max_length=64, seed=0, dropout=dropout)
    with torch.no_grad():
        model.reward_head.weight.mul_(30)  # a fresh head's rewards are near zero
    return model


def padded_batch(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    draws = np.random.default_rng(0)
    return pad_sequences([draws.integers(5, 300, length).tolist() for length in lengths], 0)


def rewards_and_gradient(model: BradleyTerryRM, kernel: str) -> tuple[Tensor, Tensor]:
    model.model.set_attn_implementation(kernel)
    rewards = model(*padded_batch())
    gradient = torch.autograd.grad(rewards.square().sum(), list(model.parameters()), materialize_grads=True)
    return rewards.detach(), torch.cat([each.flatten() for each in gradient])


def assert_unpadded_equals_padded(model: BradleyTerryRM) -> None:
    """In float32 both sums of 32 to 64 products round to 1e-6 of the whole; the aim is 1e-5."""
    padded, unpadded = (rewards_and_gradient(model, kernel) for kernel in ("sdpa", attention.UNPADDED))
    assert padded[0].std() > 1e-2
    for ours, theirs in zip(unpadded, padded, strict=True):
        assert float((ours - theirs).norm()) <= 1e-5 * float(theirs.norm())


@pytest.mark.parametrize("case", UNPADDED)
def test_an_encoder_without_padding_has_the_rewards_and_gradient_of_the_padded_pass(case: str):
    model = encoder(case)
    assert attention.drops_padding(model.model)
    assert_unpadded_equals_padded(model)


def test_layers_compute_the_tokens_alone_and_other_batches_as_before():
    model, seen = encoder("bert"), list[tuple[int, ...]]()
    layer = model.model.base_model.encoder.layer[1].output.dense
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[:2])))
    model(*padded_batch())
    model(*padded_batch((9, 9)))  # without padding
    with attention.keeping_padding(model.model):
        model(*padded_batch())
    assert seen == [(1, sum(LENGTHS)), (2, 9), (len(LENGTHS), max(LENGTHS))]


@pytest.mark.parametrize("case", ["bert", "modernbert with windows"])
def test_hidden_states_are_padded_for_the_caller(case: str):
    model, (ids, mask) = encoder(case).model, padded_batch()
    found = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    with attention.keeping_padding(model):
        expected = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) > 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", ["bert", "modernbert with windows"])
def test_a_copy_without_the_hooks_computes_padding(case: str):
    model, (ids, mask) = encoder(case).model, padded_batch()
    plain = type(model)(copy.deepcopy(model.config)).eval()
    plain.load_state_dict(model.state_dict())
    assert plain.config._attn_implementation == attention.UNPADDED
    expected = model.eval()(ids, attention_mask=mask).logits
    torch.testing.assert_close(plain(ids, attention_mask=mask).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["bert", "modernbert with windows"])
def test_tokens_masked_inside_a_sequence_are_left_out(case: str):
    model = encoder(case)
    ids, mask = padded_batch((6, 9))
    mask[0, 2] = 0
    found = model(ids, mask)
    model.model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, model(ids, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["bert", "modernbert with windows"])
def test_layers_computed_again_have_no_padding_either(case: str):
    model = encoder(case).train()
    expected = rewards_and_gradient(model, attention.UNPADDED)
    model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for ours, theirs in zip(rewards_and_gradient(model, attention.UNPADDED), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_dropout_is_drawn_without_padding_too():
    model = encoder("distilbert", dropout=True).train()
    first, second = model(*padded_batch()), model(*padded_batch())
    assert attention.drops_padding(model.model)
    assert not torch.allclose(first, second)


def test_an_encoder_whose_layers_read_neighbors_is_padded():
    """Each token reads the one before it, which in one row is another sequence's last one."""
    model, batch = tiny_model("bert"), padded_batch()
    for layer in model.base_model.encoder.layer:
        shift = torch.nn.ZeroPad2d((0, 0, 1, -1))
        layer.intermediate.register_forward_pre_hook(lambda _, inputs, shift=shift: inputs[0] + shift(inputs[0]))

    def read() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(*batch).logits
        return logits

    expected = read()
    assert not attention.drop_padding(model, read, 1e-4)
    assert model.config._attn_implementation == "sdpa"
    hooked = (model.base_model, *model.base_model.encoder.layer)
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in hooked)
    assert torch.equal(read(), expected)


@pytest.mark.parametrize("family", ["xmod", "albert", "mpnet"])
def test_encoders_that_cannot_leave_padding_out_keep_it(family: str):
    """Adapters chosen by row; layers shared under another name; attention by relative positions."""
    fields = {"languages": ["en_XX"], "default_language": "en_XX"} if family == "xmod" else {}
    fields |= {"model_type": family, **ROTARY, "num_hidden_layers": 2, "max_position_embeddings": 130}
    model = BradleyTerryRM.from_config(fields, encoder_tokenizer(), max_length=64, seed=0)
    assert not attention.drops_padding(model.model)
    assert model(*padded_batch()).isfinite().all()


def test_compiled_models_keep_padding():
    for model in (fresh_reward_model("llama").model, encoder("bert").model):
        assert attention.drops_padding(model)
        compile_backbone(model, backend="eager")
        assert not attention.drops_padding(model)
