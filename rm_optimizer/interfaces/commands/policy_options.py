"""Flags of the commands that sample a policy's responses, and the loading of their judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Context, Option

from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.interfaces.field_flags import refuse_unread
from rm_optimizer.interfaces.inputs import SavedModel
from rm_optimizer.schema.rlhf import WORLD

if TYPE_CHECKING:
    from rm_optimizer.core.base import Scorer
    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.pairs.pair import Prompt
    from rm_optimizer.rl_coupling.policy_simulation import Policy


@dataclass(frozen=True)
class PolicyOptions:
    """Options of a policy or its saved responses, each with its flag and help."""

    policy: Annotated[
        str | None, Option("--policy", help="Causal language model to sample, or `world` for the quick start's.")
    ] = None
    prompts: Annotated[Path | None, Option("--prompts", help="File with a column `prompt`; for --policy.")] = None
    completions: Annotated[
        Path | None, Option("--completions", help="File of saved responses, in place of --policy.")
    ] = None
    num_prompts: Annotated[
        int | None, Option("--num-prompts", min=1, help="Use only this many prompts, from the first on.")
    ] = None
    backend: Annotated[
        Literal["transformers", "vllm"], Option("--backend", help="Generation library; vllm needs its extra.")
    ] = "transformers"
    max_new_tokens: Annotated[int, Option("--max-new-tokens", min=1, help="Most tokens of a response.")] = 128
    temperature: Annotated[float, Option("--temperature", help="Divisor of the policy's logits.")] = 1.0
    top_p: Annotated[float, Option("--top-p", help="Probability mass that tokens are sampled from.")] = 1.0

    def check(self, context: Context, *of_samples: str) -> None:
        """Refuse options that do not go together or that nothing reads, and completions of several numbers.

        Args:
            context: the command line.
            of_samples: the command's own parameters that are read only where responses are sampled.

        Raises:
            ConfigError: naming them.
            DataError: if the completions cannot be read, or prompts differ in their number of responses.
        """
        generation = ("backend", "max_new_tokens", "temperature", "top_p")
        sampling = (*generation, "prompts", "num_prompts", *of_samples)
        if self.completions is not None:
            if self.policy is not None:
                raise ConfigError("give either --policy MODEL, or --completions FILE of saved responses")
            refuse_unread(context, "with --completions, which holds prompts and responses", *sampling)
            from rm_optimizer.rl_coupling.policy_simulation import require_equal_counts, responses_by_prompt

            groups = responses_by_prompt(self.completions).values()
            require_equal_counts(self.completions, [len(texts) for _, texts in groups])
        elif self.policy is None:
            refuse_unread(context, "without --policy", *sampling)
        elif self.policy == WORLD:
            refuse_unread(context, "with --policy world", *generation)

    def load(self) -> Policy:
        """Load the named policy.

        Raises:
            CheckpointError: if it cannot be loaded.
            ConfigError: if an option of generation is out of range.
        """
        from rm_optimizer.rl_coupling.language_policies import TransformersPolicy, VLLMPolicy

        assert self.policy is not None, "callers ask for a policy that is named"
        if self.policy == WORLD:
            from rm_optimizer.core.pairs.synthetic import Gold, PreferenceWorld
            from rm_optimizer.rl_coupling.world_policy import WorldPolicy

            return WorldPolicy(PreferenceWorld(0, gold=Gold()))
        kind = VLLMPolicy if self.backend == "vllm" else TransformersPolicy
        try:
            return kind(self.policy, max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p)
        except ConfigError as error:
            raise ConfigError(f"--{str(error).replace('_', '-', 2)}") from error

    def read_prompts(self, most: int) -> list[Prompt]:
        """Read the first `most` prompts of the file, or of the synthetic world's that training does not use.

        Raises:
            DataError: if there are none.
        """
        if self.prompts is None:
            from rm_optimizer.core.pairs.synthetic import PreferenceWorld

            return list(PreferenceWorld(0).prompts()[:most])
        from rm_optimizer.evaluation.response_files import read_prompts

        found = [prompt for _, prompt in zip(range(most), read_prompts(self.prompts), strict=False)]
        if not found:
            raise DataError(f"{self.prompts}: there are no prompts")
        return found


def require_other(judge: Scorer, model: BradleyTerryRM) -> None:
    """Refuse a model as the judge of its own choices.

    Raises:
        ConfigError: if it is.
    """
    from rm_optimizer.core.model.identity import scorer_digest
    from rm_optimizer.core.model.reward_model import BradleyTerryRM

    if isinstance(judge, BradleyTerryRM) and scorer_digest(judge) == scorer_digest(model):
        raise ConfigError("--gold is the model in question, which always agrees with itself; name another one")


def load_judge(name: str, prompts: Sequence[Prompt]) -> Scorer:
    """Load the scorer that judges responses; the world's gold reward needs all prompts in advance."""
    if name == WORLD:
        from rm_optimizer.core.pairs.synthetic import Gold, PreferenceWorld
        from rm_optimizer.rl_coupling.world_policy import WorldGold

        judge = WorldGold(PreferenceWorld(0, gold=Gold()))
        judge.score(prompts, ["."] * len(prompts))
        return judge
    return SavedModel(name).load()
