"""TRL's GRPO and RLOO trainers, which save and resume at every measured checkpoint (extra `rl`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from jaxtyping import Float
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from rm_optimizer.core.pairs.pair import Prompt, Scorer, as_messages, paired
from rm_optimizer.core.storage.loading import quiet_transformers
from rm_optimizer.errors import MissingExtra
from rm_optimizer.rl_coupling.rlhf.generation import TrainedPolicy
from rm_optimizer.rl_coupling.rlhf.measurement import finite_rewards
from rm_optimizer.schema.rlhf import PolicyAlgorithm, RLHFConfig
from rm_optimizer.serving.client.reward_function import trl_reward

KEPT_CHECKPOINTS = 2
"""Number of checkpoints kept on disk: the last, and the one before it, to which an early stop returns."""


class _StrippedScorer(Scorer):
    """A scorer that strips surrounding whitespace from responses and requires finite rewards.

    Raises:
        CheckpointError: by `score`, if a reward is not finite.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Float[Tensor, " sequences"]:
        each, texts = paired(prompts, responses)
        return finite_rewards(self._scorer, each, [text.strip() for text in texts])


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
        MissingExtra: if TRL is not installed.
        CheckpointError: if a reward is not finite.
    """
    require_trl()
    resumed = checkpoint_folder(folder, resume_step) if resume_step else None
    for other in folder.glob("checkpoint-*"):
        if other != resumed:
            shutil.rmtree(other)
    asked = in_order(prompts, config.steps * config.prompts_per_step, seed)
    rows = Dataset.from_list([{"prompt": [message.to_dict() for message in as_messages(prompt)]} for prompt in asked])
    trainer_kind, arguments = _kind_and_arguments(folder, config, seed)
    with quiet_transformers():
        trainer: Trainer = trainer_kind(
            model=policy.model,
            reward_funcs=trl_reward(_StrippedScorer(reward)),
            args=arguments,
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


def _kind_and_arguments(folder: Path, config: RLHFConfig, seed: int) -> tuple[type[Trainer], Any]:
    """TRL's trainer of the algorithm, and its arguments."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    is_grpo = config.algorithm == PolicyAlgorithm.grpo
    trainer, arguments = (GRPOTrainer, GRPOConfig) if is_grpo else (RLOOTrainer, RLOOConfig)
    responses = config.prompts_per_step * config.num_generations
    micro = config.micro_batch or responses
    on_gpu = torch.cuda.is_available()
    return trainer, arguments(
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
    )
