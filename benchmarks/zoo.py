"""Every text-classification family of transformers, built tiny and held to one contract.

Each family is built from its configuration with random weights. Its rewards are compared alone and beside others, with
more padding, with shared prompts, and reloaded by plain transformers; AdamW, Muon and LoRA each take one step.

    python benchmarks/zoo.py [FAMILY …]
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers

from tests.zoo.contract import Outcome, examine
from tests.zoo.families import family_names


def main() -> None:
    """Print a line a family, then the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("families", nargs="*", help="model types; all unless given")
    names = parser.parse_args().families or family_names()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    started, outcomes = time.perf_counter(), []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(_examined(name, Path(folder) / "export"))
        print(described(outcomes[-1]), flush=True)
    print_counts(outcomes, time.perf_counter() - started)


def _examined(name: str, folder: Path) -> Outcome:
    """The outcome of a family; one that ends in an exception of another library broke the contract."""
    try:
        return examine(name, folder)
    except Exception as error:
        return Outcome(name, failures=[f"{type(error).__name__}: {error}"[:150]])


def described(outcome: Outcome) -> str:
    """A family in one line."""
    if outcome.refusal:
        return f"{outcome.family}: refused: {outcome.refusal[:150]}"
    parts = [f"trained with {', '.join(outcome.trained) or 'nothing'}"]
    parts += [f"{name} refused: {reason[:150]}" for name, reason in outcome.refused.items()]
    parts += ["DEPENDS ON ITS BATCH"] * outcome.depends_on_batch + [
        f"FAILED: {failure}" for failure in outcome.failures
    ]
    return f"{outcome.family}: {'; '.join(parts)}"


def print_counts(outcomes: list[Outcome], seconds: float) -> None:
    """The figures, one a line."""
    built = [outcome for outcome in outcomes if not outcome.refusal]
    counts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": f"{seconds:.0f}",
        "families": len(outcomes),
        "families_built": len(built),
        "families_trained": sum("adamw" in outcome.trained for outcome in built),
        "families_trained_with_muon": sum("muon" in outcome.trained for outcome in built),
        "families_trained_with_lora": sum("lora" in outcome.trained for outcome in built),
        "families_refused_with_reason": len(outcomes) - len(built),
        "parity_failures": sum(len(outcome.failures) for outcome in built),
        "silent_batch_dependence": sum(outcome.depends_on_batch for outcome in built),
    }
    for name, value in counts.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
