"""Models on suites in one command, against one model at a time and against scoring sequence by sequence.

    python benchmarks/suite.py --models 5 --rows 200

Tiny models are drawn and saved. A suite of ten sets is generated: pairs, lists and graphs over prompts of different
lengths, of which each response is in up to three pairs. `rm-opt evaluate MODEL… --suite` scores all models in one
process; the same command is then started once for each model. Last, one model scores every response of every pair,
one sequence at a time with plain `forward`. Times include the start of the processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
import yaml  # type: ignore[import-untyped]

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.tokenizer import train_tokenizer
from rm_optimizer.evaluation.suite import Suite, SuiteItems, read_suite
from rm_optimizer.schema.data import DataConfig

NUM_SETS = 10
WORDS = [f"word{i}" for i in range(400)]
WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
"""Sizes of the models."""


def write_suite(folder: Path, num_rows: int, seed: int) -> Path:
    """Write ten sets of lists of two chosen and three rejected responses, and the suite's file."""
    rng, sets = Random(seed), {}

    def text() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(5, 80)))

    for number in range(NUM_SETS):
        file = folder / f"set{number}.jsonl"
        rows = (
            {"prompt": text(), "chosen": [text(), text()], "rejected": [text(), text(), text()]}
            for _ in range(num_rows)
        )
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        rule = ("pairs", "best_of", "graph")[number % 3]
        sets[f"set{number}"] = {"path": str(file), "layout": {"format": "lists"}, "rule": rule}
    groups = [f"set{number}" + "/tau" * (number % 3 == 2) for number in range(NUM_SETS)]
    path = folder / "ten.yaml"
    suite = {"source": "generated", "sets": sets, "score": "mean", "average": {"mean": {"mean": groups}}}
    path.write_text(yaml.safe_dump(suite), encoding="utf-8")
    return path


def write_models(folder: Path, num_models: int) -> list[str]:
    """Save reward models at different random starts, with one tokenizer."""
    tokenizer = train_tokenizer((" ".join(WORDS[i::7]) for i in range(7)), vocab_size=600)
    found = []
    for seed in range(num_models):
        model = BradleyTerryRM.from_config({"model_type": "llama", **WIDTHS}, tokenizer, max_length=256, seed=seed)
        model.save_pretrained(folder / f"model{seed}")
        found.append(str(folder / f"model{seed}"))
    return found


def evaluate(models: list[str], suite: Path, output: Path) -> float:
    """Seconds of the command in a process of its own."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "rm_optimizer.interfaces.cli", "evaluate", *models, "--suite", str(suite)]
    subprocess.run([*command, "--output", str(output)], check=True, capture_output=True)
    return time.perf_counter() - started


def one_by_one(model: str, items: SuiteItems, seconds: float) -> tuple[int, float]:
    """Number of responses that passes of one sequence score within some seconds, and these seconds."""
    scorer = BradleyTerryRM.from_pretrained(model).eval()
    sides = ((item, place) for item in items.items for edge in item.edges for place in edge)
    started, num = time.perf_counter(), 0
    with torch.inference_mode():
        for item, place in sides:
            ids = torch.tensor([scorer.renderer.encode(item.prompt, item.responses[place]).ids])
            scorer(ids, torch.ones_like(ids))
            num += 1
            if time.perf_counter() - started > seconds:
                break
    return num, time.perf_counter() - started


def main() -> None:
    """Print responses a second of the three ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=5)
    parser.add_argument("--rows", type=int, default=200, help="rows of each of the ten sets")
    parser.add_argument("--seconds", type=float, default=20.0, help="most seconds of scoring sequence by sequence")
    options = parser.parse_args()
    with TemporaryDirectory() as name:
        folder = Path(name)
        suite, models = write_suite(folder, options.rows, 0), write_models(folder, options.models)
        items = read_suite(Suite.of(str(suite)), [], DataConfig())
        of_pairs = 2 * sum(len(item.edges) for item in items.items)
        distinct = len(items.responses)
        together = evaluate(models, suite, folder / "together")
        apart = sum(evaluate([model], suite, folder / f"apart{place}") for place, model in enumerate(models))
        num, seconds = one_by_one(models[0], items, options.seconds)
    print(f"{len(models)} models, {NUM_SETS} sets, {len(items.items):,} rows, {distinct:,} different responses,")
    print(f"{of_pairs:,} responses counted once for each pair")
    total, whole = len(models) * distinct, len(models) * of_pairs * seconds / num
    print(f"{num:,} of these were scored sequence by sequence")
    print(f"responses_per_second: {total / together:.0f}")
    print(f"responses_per_second_one_model_at_a_time: {total / apart:.0f}")
    print(f"responses_per_second_sequence_by_sequence: {total / whole:.0f}")
    print(f"times_one_model_at_a_time: {apart / together:.2f}")
    print(f"times_sequence_by_sequence: {whole / together:.2f}")


if __name__ == "__main__":
    main()
