"""The synthetic world as a policy, as a judge, and as a small language model that can be trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.pairs.pair import Prompt, as_messages, digest, prompt_id
from rm_optimizer.core.pairs.synthetic import PreferenceWorld
from rm_optimizer.core.rows.natural import Prompts, Texts, paired
from rm_optimizer.core.storage.loading import quiet_transformers
from rm_optimizer.core.tokens.conversation_text import plain_prompt
from rm_optimizer.core.tokens.tokenizer import train_tokenizer
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import DataError
from rm_optimizer.records.files import replacing_folder
from rm_optimizer.records.randomness import keeping_random_state
from rm_optimizer.rl_coupling.language_policies import prompt_ids


class WorldPolicy:
    """The policy that makes the pairs of a synthetic world.

    Args:
        world: the world.
    """

    def __init__(self, world: PreferenceWorld) -> None:
        self._world = world

    @property
    def identity(self) -> str:
        """Digest of the policy, which is the same for all worlds."""
        return digest(["the policy of the synthetic worlds"])

    def respond(self, prompt: Prompt, num_samples: int, seed: int) -> list[str]:
        """Draw responses to a prompt of the world.

        Raises:
            DataError: if the prompt does not come from a synthetic world.
        """
        generator = np.random.default_rng([seed, int(prompt_id(prompt), 16)])
        try:
            return [self._world.sample_response(_text(prompt), generator) for _ in range(num_samples)]
        except ValueError as error:
            raise DataError(str(error)) from error


class WorldGold(Scorer):
    """The gold reward of a synthetic world.

    Args:
        world: the world.
    """

    def __init__(self, world: PreferenceWorld) -> None:
        self._world = world

    def score(self, prompts: Prompts, responses: Texts) -> Float[Tensor, "*sequences"]:
        """Gold rewards of the responses; one number for a text.

        Raises:
            DataError: if a prompt does not come from a synthetic world.
        """
        rows = zip(*paired(prompts, responses), strict=True)
        try:
            rewards = [self._world.gold(_text(prompt), text) for prompt, text in rows]
        except ValueError as error:
            raise DataError(str(error)) from error
        return torch.tensor(rewards[0] if isinstance(responses, str) else rewards, dtype=torch.float32)


def _text(prompt: Prompt) -> str:
    return as_messages(prompt)[-1].content


NUM_RESPONSES = 6400
VOCABULARY = 1024
BATCH = 64
PEAK_LR = 4e-3
WARMUP_STEPS = 20
_IGNORED = -100
"""Label of a position that transformers' loss ignores."""


def save_world_policy(
    world: PreferenceWorld, folder: Path, *, num_responses: int = NUM_RESPONSES, seed: int = 0
) -> Path:
    """Fit a two-layer Llama to responses of the world's policy, and save it with its tokenizer.

    The world's policy is a program, which cannot be optimized. This language model of the same prompts and responses
    can. An existing folder is kept.

    Args:
        world: the world.
        folder: folder of the model.
        num_responses: number of responses to fit, each used once, at least one batch of 64.
        seed: seed of responses and weights, not negative.
    """
    if (folder / "config.json").is_file():
        return folder
    generator = np.random.default_rng([seed, 17])
    prompts = world.prompts()
    asked = [prompts[index] for index in generator.integers(len(prompts), size=num_responses)]
    answers = [world.sample_response(prompt, generator) for prompt in asked]
    rendered = [plain_prompt(as_messages(prompt)) for prompt in asked]
    texts = (text for both in zip(rendered, answers, strict=True) for text in both)
    tokenizer = train_tokenizer(texts, VOCABULARY)
    TemplateWriter(tokenizer).write_for_training()
    ids = [[*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for answer in answers]
    rows = [(prompt_ids(tokenizer, prompt), own) for prompt, own in zip(asked, ids, strict=True)]
    with keeping_random_state(seed=seed):
        model = _fitted(tokenizer, rows, generator)
    with replacing_folder(folder) as aside, quiet_transformers():
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
    return folder


def _fitted(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[list[int], list[int]]], generator: np.random.Generator
) -> LlamaForCausalLM:
    """The model after one pass over the rows with AdamW and a learning rate that falls to 0."""
    hidden, pad = 64, tokenizer.pad_token_id
    architecture = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=1.0 / math.sqrt(hidden),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad,
    )
    model = LlamaForCausalLM(architecture).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.0)
    by_length = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    order = generator.permutation(len(rows) // BATCH).tolist()  # batches of similar lengths
    for step, number in enumerate(order):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min(1.0, (step + 1) / WARMUP_STEPS) * (1.0 - step / len(order))
        batch = by_length[number * BATCH : (number + 1) * BATCH]
        # padding is on the right, so a causal model needs no mask; only responses have labels
        tokens = pad_sequence([torch.tensor([*prompt, *own]) for prompt, own in batch], True, pad)
        labels = pad_sequence(
            [torch.tensor([*[_IGNORED] * len(prompt), *own]) for prompt, own in batch], True, _IGNORED
        )
        model(input_ids=tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
