"""A language model as a trained policy: tokens of prompts, fresh responses, and their divergence."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel

from rm_optimizer.core.pairs.pair import Prompt, as_messages
from rm_optimizer.core.storage.loading import quiet_transformers
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import CheckpointError
from rm_optimizer.records.randomness import keeping_random_state
from rm_optimizer.rl_coupling.language_policies import end_ids, load_language_model, require_room

_ROWS_AT_ONCE = 256
"""Responses that are generated together."""
_LOGITS_AT_ONCE = 2**26
"""Most logits of one policy in memory while the divergence is computed: 256 MiB."""


@dataclass(frozen=True)
class FreshResponses:
    """Responses of a policy to prompts, one prompt after the other.

    Args:
        texts: responses to each prompt, without special tokens and surrounding whitespace.
        divergence: estimate of the divergence from the reference by each response, in nats.
        num_tokens: number of tokens in each response, including its end.
    """

    texts: list[list[str]]
    divergence: Float[Tensor, "prompts samples"]
    num_tokens: Int[Tensor, "prompts samples"]


class TrainedPolicy:
    """A causal language model and a frozen copy of it as the reference.

    A tokenizer without a chat template gets one that writes `Prompt: …`, `Response:`. A tokenizer without a pad token
    pads with its end of text.

    Args:
        source: hub id or folder of a model with a language head.
        max_new_tokens: most tokens of a response.
        temperature: divisor of the logits.

    Raises:
        CheckpointError: if there is no such model, it is a reward model, or its responses would never end.
    """

    def __init__(self, source: str | Path, *, max_new_tokens: int, temperature: float) -> None:
        self.tokenizer, self.model = load_language_model(source)
        self._ends = end_ids(self.tokenizer, self.model.generation_config.eos_token_id, source)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.convert_ids_to_tokens(min(self._ends))
        if self.tokenizer.eos_token is None:
            self.tokenizer.eos_token = self.tokenizer.convert_ids_to_tokens(min(self._ends))
        if self.tokenizer.chat_template is None:
            TemplateWriter(self.tokenizer).write_for_training()
        if self.tokenizer.chat_template is None:
            raise CheckpointError(f"{source} has no chat template; set chat_template in its tokenizer")
        self.tokenizer.padding_side = "left"
        self.model.generation_config.top_k = None
        self.model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.reference = deepcopy(self.model).eval().requires_grad_(False)
        self.max_new_tokens, self.temperature = max_new_tokens, temperature

    def require_room(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that leave no room for a response.

        Raises:
            DataError: if a prompt is too long; the text names its length.
        """
        longest = max(int(self._encoded([prompt])["input_ids"].shape[1]) for prompt in prompts)
        require_room(self.model, longest, self.max_new_tokens)

    @torch.no_grad()
    def respond(self, prompts: Sequence[Prompt], num_samples: int, seed: int) -> FreshResponses:
        """Draw responses of the model in its current state, and estimate its divergence from the reference.

        The global random state and the model's mode do not change.

        Args:
            prompts: text or messages.
            num_samples: number of responses for each prompt, positive.
            seed: seed of the draw, not negative.
        """
        rows = [prompt for prompt in prompts for _ in range(num_samples)]
        was_training = self.model.training
        self.model.eval()
        try:
            with keeping_random_state(seed=seed):
                found = [
                    self._drawn(rows[start : start + _ROWS_AT_ONCE]) for start in range(0, len(rows), _ROWS_AT_ONCE)
                ]
        finally:
            self.model.train(was_training)
        texts = [text for part, _, _ in found for text in part]
        grouped = [texts[start : start + num_samples] for start in range(0, len(texts), num_samples)]
        divergence = torch.cat([part for _, part, _ in found]).reshape(len(prompts), -1)
        tokens = torch.cat([part for _, _, part in found]).reshape(len(prompts), -1)
        return FreshResponses(grouped, divergence, tokens)

    def _drawn(self, rows: Sequence[Prompt]) -> tuple[list[str], Float[Tensor, " rows"], Int[Tensor, " rows"]]:
        """Texts, divergence and lengths of one response to each row."""
        encoded = self._encoded(rows)
        start = encoded["input_ids"].shape[1]
        sequences = self.model.generate(
            **encoded,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=sorted(self._ends),
            pad_token_id=self.tokenizer.pad_token_id,
        )
        written = up_to_end(sequences[:, start:], self._ends)
        mask = torch.cat([encoded["attention_mask"].bool(), written], dim=1)
        kept = [ids[own].tolist() for ids, own in zip(sequences[:, start:], written, strict=True)]
        texts = [text.strip() for text in self.tokenizer.batch_decode(kept, skip_special_tokens=True)]
        size = max(1, _LOGITS_AT_ONCE // (written.shape[1] * int(self.model.config.vocab_size)))
        parts = [
            self._divergence(sequences[at : at + size], mask[at : at + size], start) for at in range(0, len(rows), size)
        ]
        return texts, torch.cat(parts).cpu(), written.sum(dim=1).cpu()

    def _divergence(
        self, sequences: Int[Tensor, "rows tokens"], mask: Bool[Tensor, "rows tokens"], start: int
    ) -> Float[Tensor, " rows"]:
        """Sum over a response's tokens of the exact divergence of the next token's distribution.

        By the chain rule, its mean over responses of the policy is an unbiased estimate of the divergence from the
        reference (Amini, Vieira & Cotterell, 2025, https://arxiv.org/abs/2504.10637). It is never negative and has less
        variance than the mean log-ratio.
        """
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
        keep = sequences.shape[1] - start + 1
        inputs = {"input_ids": sequences, "attention_mask": mask.long(), "position_ids": positions}
        logits = (
            model(**inputs, logits_to_keep=keep, use_cache=False).logits[:, -keep:-1]
            for model in (self.model, self.reference)
        )
        own, other = (each.float().div(self.temperature).log_softmax(dim=-1) for each in logits)
        each: Tensor = (own.exp() * (own - other)).sum(dim=-1)
        return (each * mask[:, start:]).sum(dim=1).double()

    def _encoded(self, rows: Sequence[Prompt]) -> BatchEncoding:
        """Prompts encoded as in TRL, padded on the left."""
        found = self.tokenizer.apply_chat_template(
            [[message.to_dict() for message in as_messages(prompt)] for prompt in rows],
            add_generation_prompt=True,
            tokenize=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        return BatchEncoding({name: found[name] for name in ("input_ids", "attention_mask")}).to(self.model.device)

    def save(self, folder: Path, model: PreTrainedModel | None = None) -> None:
        """Save the model, or another of its kind, with the tokenizer."""
        with quiet_transformers():
            (model or self.model).save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


def up_to_end(ids: Int[Tensor, "rows tokens"], ends: set[int]) -> Bool[Tensor, "rows tokens"]:
    """True for a response's tokens up to and including its first end.

    Example:
        >>> up_to_end(torch.tensor([[5, 2, 2], [5, 6, 7]]), {2}).tolist()
        [[True, True, False], [True, True, True]]
    """
    is_end = torch.isin(ids, torch.tensor(sorted(ends), device=ids.device)).long()
    return (is_end.cumsum(dim=1) - is_end) == 0
