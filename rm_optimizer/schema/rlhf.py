"""The options of `rm-opt rlhf`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from omegaconf import MISSING

from rm_optimizer.schema.checks import Options, require, within
from rm_optimizer.schema.config import Resume, TrainConfig

WORLD = "world"
"""Name of the quick start's synthetic world, in place of a model."""


class PolicyAlgorithm(StrEnum):
    """TRL's trainers that optimize a policy by reinforcement learning."""

    grpo = "grpo"
    rloo = "rloo"


@dataclass(kw_only=True)
class RLHFConfig(Options, group="rlhf"):
    """The policy, the reward that it is optimized against, and the loop; `rlhf=PRESET` sets the numbers."""

    policy: str = WORLD
    """Causal language model (hub id or folder), or world: a small model fitted to the quick start's responses."""
    prompts: str | None = None
    """File with a column `prompt`; null takes the prompts of the pairs, or all of the world's."""
    reward_models: list[str] = field(default_factory=list)
    """Trained reward models; an empty list trains `members` of them on `data`, with the options of `rm-opt train`."""
    members: int = within("[1, inf)", 2)
    """Reward models to train, with the seeds from `seed` on; two or more are an ensemble."""
    aggregation: str = "mean"
    """Reward of an ensemble: mean, min or uwo."""
    penalty: float = within("[0, inf)", 1.0)
    """Factor of the members' standard deviation in uwo."""
    server: str | None = None
    """Reward server that scores with the weights of the single reward model."""
    gold: str | None = None
    """Judge of the responses: a reward model, or world; null takes the world for its own policy, and else no judge."""
    algorithm: PolicyAlgorithm = PolicyAlgorithm.grpo
    """grpo (rewards standardized within each prompt's group) or rloo (less the mean of the others)."""
    steps: int = within("[1, inf)", MISSING)
    """Optimizer steps."""
    learning_rate: float = within("(0, inf)", MISSING)
    """Constant learning rate of AdamW."""
    kl_coefficient: float = within("[0, inf)", 0.0)
    """TRL's `beta`: weight of the divergence from the start policy, in units of the reward; 0 has no penalty."""
    prompts_per_step: int = within("[1, inf)", 8)
    """Prompts of an optimizer step."""
    num_generations: int = within("[2, inf)", 8)
    """Responses to each prompt."""
    micro_batch: int | None = within("[1, inf)", None)
    """Responses of a forward and backward pass, a divisor of those of a step; null takes all. Limits memory."""
    max_new_tokens: int = within("[1, inf)", MISSING)
    """Most tokens of a response."""
    temperature: float = within("(0, inf)", 1.0)
    """Divisor of the policy's logits, in training and in measurements."""
    measure_every: int = within("[1, inf)", MISSING)
    """Optimizer steps between checkpoints; every checkpoint is measured."""
    measured_prompts: int = within("[4, inf)", 256)
    """Held-out prompts that every checkpoint answers."""
    measured_samples: int = within("[2, inf)", 2)
    """New responses of each checkpoint to each held-out prompt."""
    stop_disagreement: float | None = within("(1, inf)", None)
    """Stop if the members' mean disagreement exceeds this multiple of the start policy's; null never stops."""

    def _check(self) -> None:
        num_models = len(self.reward_models) or self.members
        one = self.server is None or len(self.reward_models) == 1
        require(one, "rlhf.reward_models", "name the one model that rlhf.server serves", self.reward_models)
        several = self.stop_disagreement is None or num_models > 1
        require(several, "rlhf.stop_disagreement", "be null for a single reward model", self.stop_disagreement)
        if self.micro_batch is not None:
            responses = self.prompts_per_step * self.num_generations
            divides = responses % self.micro_batch == 0
            require(divides, "rlhf.micro_batch", f"divide the {responses} responses of a step", self.micro_batch)


@dataclass(kw_only=True)
class RLHFRunConfig(TrainConfig):
    """All options of `rm-opt rlhf`: a reward model's run, and the policy."""

    rlhf: RLHFConfig = MISSING

    def member(self, number: int, folder: str) -> TrainConfig:
        """Options of the run that trains one of the reward models.

        Args:
            number: its number, from 0; added to the seed.
            folder: its run folder.
        """
        own = {item.name: getattr(self, item.name) for item in fields(TrainConfig)}
        return replace(TrainConfig(**own), seed=self.seed + number, output_dir=folder, resume=Resume.auto)
