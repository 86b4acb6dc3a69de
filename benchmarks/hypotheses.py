"""Five hypotheses about training reward models, tested with the presets of `configs/experiment` on real pairs.

`rm_optimizer.experiments.hypotheses` states them, with what confirms and what refutes each.

    python benchmarks/hypotheses.py --model-path MINILM --train train.parquet --val val.parquet --output outputs/trials

Finished trials are kept in --output; the same command continues.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from rm_optimizer.experiments.hypothesis_study import HypothesisOptions, HypothesisReport, HypothesisStudy
from rm_optimizer.interfaces.exits import one_exit


def options(argv: Sequence[str] | None = None) -> HypothesisOptions:
    """The command line: one flag for each field of `HypothesisOptions`, where their meanings stand."""
    parser = argparse.ArgumentParser(description="Test five hypotheses about training reward models.")
    for item in fields(HypothesisOptions):
        flag, default = f"--{item.name.replace('_', '-')}", item.default
        if default is MISSING:
            parser.add_argument(flag, required=True, type=Path if item.name == "output" else str)
        elif isinstance(default, tuple):
            parser.add_argument(flag, type=int, nargs="+", default=default)
        else:
            parser.add_argument(flag, type=str if default is None else type(default), default=default)
    given = vars(parser.parse_args(argv))
    return HypothesisOptions(**given | {"seeds": tuple(given["seeds"])})


def print_report(report: HypothesisReport) -> None:
    """Print both tables, then `name: value` lines."""
    print(f"{'arm':14} {'accuracy':22} {'nll':22} {'ece':22} {'step':>6} {'parameters':>11} {'CPU s':>6}")
    for name, arm in report.arms.items():
        cells = " ".join(f"{score!s:22}" for score in (arm.accuracy, arm.nll, arm.ece))
        print(f"{name:14} {cells} {arm.scored_step:6.0f} {arm.parameters:11,d} {arm.cpu_seconds:6.0f}")
    for found in report.findings:
        print(f"{found.name:30} {found.effect:+.4f}  margin {found.margin:.3f}  {found.verdict}")
    for found in report.findings:
        print(f"{found.name}: {found.effect.value:.5f}")
        for end, value in (("low", found.effect.low), ("high", found.effect.high)):
            print(f"{found.name}_{end}: {'n/a' if value is None else format(value, '.5f')}")
        for key, also in found.also.items():
            print(f"{found.name[:2]}_{key}: {format(also, '.4g') if isinstance(also, float) else also}")
        print(f"{found.name[:2]}_verdict: {found.verdict}")
    print(f"length_baseline: {report.length_baseline:.4f}")


def main(argv: Sequence[str] | None = None) -> None:
    chosen = options(argv)
    torch.set_num_threads(chosen.threads)
    with one_exit():
        print_report(HypothesisStudy(chosen).run())


if __name__ == "__main__":
    main()
