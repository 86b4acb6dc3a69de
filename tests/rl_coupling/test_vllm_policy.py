"""A policy through a real vLLM on the CPU writes what transformers writes, and its responses are ranked.

Run in an environment of its own: `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rm_optimizer.core.base import Scorer
from rm_optimizer.rl_coupling import BestOfNSampler, TransformersPolicy, VLLMPolicy
from tests.builders import decoder_tokenizer, tiny_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("default"),
]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
"""Heads of 32: vLLM's attention on a CPU knows no smaller ones."""
ENGINE = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True, "max_num_seqs": 16}


class Length(Scorer):
    def score(self, prompts, responses):
        return torch.tensor([float(len(text)) for text in responses])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = decoder_tokenizer()
    torch.manual_seed(0)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = AutoModelForCausalLM.from_config(tiny_config("llama", **SIZES, **ids))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sampler(folder: Path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield BestOfNSampler(folder, Length(), 8, use_vllm=True, max_new_tokens=12, **ENGINE)


def test_nearly_greedy_texts_are_those_of_transformers(sampler: BestOfNSampler, folder: Path):
    assert isinstance(sampler.policy, VLLMPolicy)
    options = {"max_new_tokens": 12, "temperature": 1e-2}
    expected = TransformersPolicy(folder, **options).respond("Hi", 1, 0)
    sampler.policy._options["temperature"] = 1e-2
    try:
        assert sampler.policy.respond("Hi", 1, 0) == expected
    finally:
        sampler.policy._options["temperature"] = 1.0


def test_samples_differ_repeat_by_their_seed_and_are_ranked(sampler: BestOfNSampler):
    first, again = (sampler.policy.respond("Hi", 8, 0) for _ in range(2))
    assert first == again
    assert len(set(first)) > 1
    assert sampler.policy.respond("Hi", 8, 1) != first
    (found,) = sampler.sample(["Hi"])
    assert sorted(found.responses) == sorted(first)
    assert list(found.rewards) == sorted((float(len(text)) for text in first), reverse=True)
