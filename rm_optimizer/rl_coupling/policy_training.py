"""A language model as a policy that TRL's GRPO or RLOO trains (extra `rl`), its fresh responses and its divergence."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import (
    BatchEncoding,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.classifier.scoring import in_mode
from rm_optimizer.core.metrics.estimate import require_finite
from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.core.rows.messages import Turns
from rm_optimizer.core.rows.natural import Prompts, Texts, paired
from rm_optimizer.core.storage.loading import quiet_transformers
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import CheckpointError, MissingExtra
from rm_optimizer.records.accelerator import accelerators, fastest_device
from rm_optimizer.records.randomness import keeping_random_state
from rm_optimizer.rl_coupling.language_policies import end_ids, load_language_model, plain_turns, require_room
from rm_optimizer.schema.rlhf import PolicyAlgorithm, RLHFConfig
from rm_optimizer.serving.client.reward_function import trl_reward

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
        self.model.to(fastest_device())
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
        with in_mode(self.model, training=False), keeping_random_state(seed=seed):
            found = [self._drawn(rows[start : start + _ROWS_AT_ONCE]) for start in range(0, len(rows), _ROWS_AT_ONCE)]
        parts, divergence, tokens = zip(*found, strict=True)
        texts = [text for part in parts for text in part]
        grouped = [texts[start : start + num_samples] for start in range(0, len(texts), num_samples)]
        shape = len(prompts), num_samples
        return FreshResponses(grouped, torch.cat(divergence).reshape(shape), torch.cat(tokens).reshape(shape))

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
            [plain_turns(prompt) for prompt in rows],
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


KEPT_CHECKPOINTS = 2
"""Number of checkpoints kept on disk: the last, and the one before it, to which an early stop returns."""


def finite_rewards(scorer: Scorer, prompts: Sequence[Prompt], texts: Sequence[str]) -> Float[Tensor, " sequences"]:
    """Rewards of the responses, float32 on the CPU.

    Raises:
        CheckpointError: if one is not finite; the message quotes the response.
    """
    rewards = scorer.score(prompts, texts)
    require_finite_rewards(rewards.tolist(), texts)
    return rewards


def require_finite_rewards(rewards: Sequence[float], texts: Sequence[str]) -> None:
    """Refuse rewards that are not finite; the message quotes the response.

    Raises:
        CheckpointError: if one is not finite.
    """
    require_finite(rewards, lambda index: f"the response {texts[index][:60]!r}")


class _StrippedScorer(Scorer):
    """A scorer that strips surrounding whitespace from responses and requires finite rewards.

    Raises:
        CheckpointError: by `score`, if a reward is not finite.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def score(self, prompts: Prompts, responses: Texts) -> Float[Tensor, " sequences"]:
        each, texts = paired(prompts, responses)
        return finite_rewards(self._scorer, each, [text if isinstance(text, Turns) else text.strip() for text in texts])


class _AtCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Callback that calls a function after each saved checkpoint, and stops the training if it returns False."""

    def __init__(self, reached: Callable[[int], bool]) -> None:
        self._reached = reached

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **ignored: Any
    ) -> TrainerControl:
        """Report the step."""
        goes_on = self._reached(state.global_step)
        control.should_training_stop = control.should_training_stop or not goes_on
        return control


def require_trl() -> None:
    """Raise unless TRL is installed.

    Raises:
        MissingExtra: if it is not installed.
    """
    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise MissingExtra("TRL", "rl") from error


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Folder of TRL's checkpoint at a step, which `transformers` loads as a policy."""
    return folder / f"checkpoint-{step}"


def train_policy(
    policy: TrainedPolicy,
    reward: Scorer,
    prompts: Sequence[Prompt],
    folder: Path,
    config: RLHFConfig,
    *,
    seed: int,
    resume_step: int,
    reached: Callable[[int], bool],
) -> None:
    """Train a policy in place.

    Args:
        policy: the policy, with its starting weights.
        reward: scorer of the responses.
        prompts: prompts to train on.
        folder: folder of the checkpoints; all but the one of `resume_step` are removed.
        config: algorithm and numbers.
        seed: seed of prompts and responses.
        resume_step: step of the checkpoint to continue from; 0 starts from the beginning.
        reached: function called with the step of each saved checkpoint; False stops the training.

    Raises:
        CheckpointError: if a reward is not finite.
    """
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    is_grpo, on_gpu = config.algorithm == PolicyAlgorithm.grpo, bool(accelerators())
    trainer_kind, arguments = (GRPOTrainer, GRPOConfig) if is_grpo else (RLOOTrainer, RLOOConfig)
    responses = config.prompts_per_step * config.num_generations
    micro = config.micro_batch or responses
    resumed = checkpoint_folder(folder, resume_step) if resume_step else None
    for other in folder.glob("checkpoint-*"):
        if other != resumed:
            shutil.rmtree(other)
    asked = in_order(prompts, config.steps * config.prompts_per_step, seed)
    rows = Dataset.from_list([{"prompt": plain_turns(prompt)} for prompt in asked])
    with quiet_transformers():
        trainer: Trainer = trainer_kind(
            model=policy.model,
            reward_funcs=trl_reward(_StrippedScorer(reward)),
            args=arguments(
                output_dir=str(folder),
                seed=seed,
                max_steps=config.steps,
                learning_rate=config.learning_rate,
                lr_scheduler_type="constant",
                beta=config.kl_coefficient,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=responses // micro,
                num_generations=config.num_generations,
                shuffle_dataset=False,
                max_completion_length=config.max_new_tokens,
                temperature=config.temperature,
                save_strategy="steps",
                save_steps=config.measure_every,
                save_total_limit=KEPT_CHECKPOINTS,
                bf16=False,
                use_cpu=not on_gpu,
                dataloader_pin_memory=on_gpu,
                gradient_checkpointing=False,
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=rows,
            processing_class=policy.tokenizer,
            callbacks=[_AtCheckpoint(reached)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))


def in_order(prompts: Sequence[Prompt], count: int, seed: int) -> list[Prompt]:
    """The first `count` prompts of repeated shuffled passes; a larger count only adds prompts at the end.

    The trainer gets them as one pass in this order. If it resumed in a later pass, it would repeat the order of the
    first.

    Example:
        >>> in_order(["a", "b"], 3, 0)[:2] == in_order(["a", "b"], 2, 0)
        True
    """
    generator = torch.Generator().manual_seed(seed)
    passes = [torch.randperm(len(prompts), generator=generator) for _ in range(-(-count // len(prompts)))]
    return [prompts[index] for index in torch.cat(passes)[:count].tolist()]
