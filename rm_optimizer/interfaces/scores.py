"""`rm-opt score`: rewards on the terminal, or as a column of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from rm_optimizer.core.base import Prompt
from rm_optimizer.core.reward_model import BradleyTerryRM
from rm_optimizer.core.scoring import require_finite, score_file
from rm_optimizer.errors import ConfigError

USAGE = "give either --prompt TEXT and --response TEXT, or an input and an output file"


class LocalScorer:
    """A saved reward model on this machine's accelerator, with a bound on the memory of a pass.

    Args:
        checkpoint: anything `BradleyTerryRM.from_pretrained` loads.
        token_budget: tokens, padding included, of one pass.
    """

    def __init__(self, checkpoint: str, token_budget: int) -> None:
        self.token_budget = token_budget
        self.model = BradleyTerryRM.from_pretrained(checkpoint)
        if torch.cuda.is_available():
            self.model.to("cuda")

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Float[Tensor, " sequences"]:
        """Rewards of the responses, in the order given."""
        return self.model.score(prompts, responses, token_budget=self.token_budget)


def print_scores(checkpoint: str, prompt: str, responses: Sequence[str], files: Sequence[object], budget: int) -> None:
    """Print one reward a line, in the order of the responses.

    Raises:
        ConfigError: if there is no response, or files were named as well.
        CheckpointError: if the model cannot be loaded, or a reward is not finite.
    """
    if not responses or any(file is not None for file in files):
        raise ConfigError(USAGE)
    if not prompt.strip():
        raise ConfigError("--prompt must not be empty")
    rewards = LocalScorer(checkpoint, budget).score([prompt] * len(responses), responses).tolist()
    require_finite(rewards, lambda index: f"response {index + 1}")
    for reward in rewards:
        print(f"{reward:.6f}")


def score_to_file(
    checkpoint: str, source: Path | None, target: Path | None, responses: Sequence[str], token_budget: int
) -> None:
    """Write `source` with a `reward` column to `target`, continuing an earlier call that was stopped.

    Raises:
        ConfigError: unless both files are named, and nothing else.
        DataError: if a file or row is unusable.
    """
    if source is None or target is None or responses:
        raise ConfigError(USAGE)
    columns = (SpinnerColumn(), TextColumn("{task.completed} rows scored"), TimeElapsedColumn())
    scorer = LocalScorer(checkpoint, token_budget)
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("scoring", total=None)
        num_rows = score_file(
            scorer,
            source,
            target,
            scorer_name=checkpoint,
            on_progress=lambda rows: progress.update(task, completed=rows),
        )
    print(f"{num_rows} rows scored: {target}")
