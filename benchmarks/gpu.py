"""The product on a GPU beside the same on the CPU: losses of short runs, and every number that commands write.

`training` compares the losses and gradient norms of each step: every optimizer, full training and LoRA, a decoder and
an encoder, float32 and bfloat16, compiled, with gradient checkpointing, pinned memory and small passes, and runs that
stop on one device and go on on the other. `commands` compares the numbers in the files of `rm-opt evaluate`, `score`,
`doctor`, `bon`, `select` and `readiness` and of each analysis, for one saved model. A difference is relative to the
CPU's value, or to 1e-3 of the largest of its kind. Each side of a case is a separate process, forked after the imports.
Without a GPU both sides are the CPU: that shows only that everything runs.

    python benchmarks/gpu.py OUT

Finished cases are kept in OUT and not run again. Speed has its own scripts, which use a GPU where there is one:

    python benchmarks/train_throughput.py --pairs hh_train.jsonl.gz --models qwen
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import platform
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU must not start CUDA before the forks

import torch
import transformers

import rm_optimizer.interfaces.cli
import rm_optimizer.landscape.analysis
import rm_optimizer.training.run
from rm_optimizer import PreferenceWorld
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS

SIDES = ("gpu", "cpu")
FORK = multiprocessing.get_context("fork")
FEW = ["landscape.top_k=5"]
ANALYSES = {
    "hessian": FEW,
    "gauss_newton": FEW,
    "fisher": FEW,
    "density": [],
    "slices": [],
    "surface": [],
    "layers": [],
}
SHORT = ["data.synthetic.num_train=480", "data.synthetic.num_val=120", "schedule.warmup_ratio=0"]
QUIET = ["training.progress=false", "logger.tensorboard=false", "training.num_bootstrap=100", "hardware.num_threads=1"]
ENCODER = ["model.architecture.model_type=bert", "~model.architecture.num_key_value_heads"]
COLUMNS = ("train_loss", "grad_norm", "eval_nll")
NOT_COMPARED = ("seconds", "time", "memory", "device", "version", "bytes", "progress")
"""Parts of the names of numbers that differ between any two runs."""
FINE = (0, 4)
"""Exit codes of commands that worked; 4 reports a failed check of the model."""


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a JSON value, with its path."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if not any(word in str(key) for word in NOT_COMPARED):
            yield from numbers(item, f"{name}.{key}")
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        yield name, float(value)


def difference(ours: Any, theirs: Any) -> tuple[float, str]:
    """Largest relative difference between the numbers of two JSON values, and where it is."""
    first, second = dict(numbers(ours)), dict(numbers(theirs))
    if first.keys() != second.keys() or not first:
        return float("inf"), f"numbers on one side only: {sorted(first.keys() ^ second.keys())[:3]}"
    kinds = {name: "".join(letter for letter in name if not letter.isdigit()) for name in first}
    largest: dict[str, float] = {}
    for name, kind in kinds.items():
        largest[kind] = max(largest.get(kind, 1e-12), abs(second[name]))
    return max((abs(first[n] - second[n]) / max(abs(second[n]), 1e-3 * largest[kinds[n]]), n) for n in first)


@dataclass
class Case:
    """A command to run on both sides.

    Args:
        name: printed name.
        module: `train` or `analyze`, which are modules of the package; None for `rm-opt`.
        words: arguments; `{at}` stands for the side's folder.
        options: options of one side only.
        first: other side, which runs until it has logged two steps and is stopped; the case then resumes on this side.
    """

    name: str
    module: str | None
    words: list[str]
    options: Mapping[str, list[str]] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)

    def folder(self, out: Path, side: str) -> Path:
        """Folder of one side."""
        return out / self.name.replace(" ", "_") / side

    def start(self, out: Path, side: str, device: str, *more: str) -> BaseProcess:
        """A running process of one side on a device."""
        at = self.folder(out, side)
        at.mkdir(parents=True, exist_ok=True)
        words = [word.replace("{at}", str(at)) for word in [*self.words, *self.options.get(side, []), *more]]
        process = FORK.Process(target=_work, args=(self.module, words, device, at / "log"))
        process.start()
        return process

    def result(self, out: Path, side: str) -> Any:
        """The numbers that one side wrote."""
        at = self.folder(out, side)
        if self.module == "train":
            with open(at / "run" / "metrics.csv", newline="") as file:
                rows = list(csv.DictReader(file))
            return {name: [float(row[name]) for row in rows if row[name]] for name in COLUMNS}
        files = [path for path in sorted(at.rglob("*")) if path.suffix in (".json", ".jsonl")]
        return {str(path.relative_to(at)): _read(path) for path in files if path.name != "analysis.json"}


def _read(path: Path) -> Any:
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def _work(module: str | None, words: list[str], device: str, log: Path) -> None:
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv = ["rm-opt", *words]
    if module is None:
        rm_optimizer.interfaces.cli.app()
    else:
        runpy.run_module(f"rm_optimizer.{module}", run_name="__main__")


def both_sides(case: Case, out: Path) -> None:
    """Run what is missing of a case, each side after the other."""
    for side in SIDES:
        done = case.folder(out, side) / "done"
        if done.exists():
            continue
        if other := case.first.get(side):
            _stop_after_two_steps(case.start(out, side, other), case.folder(out, side) / "run" / "metrics.csv")
        process = case.start(out, side, side, *(["resume=auto"] if case.first.get(side) else []))
        process.join()
        if process.exitcode in FINE:
            done.touch()


def _stop_after_two_steps(process: BaseProcess, metrics: Path) -> None:
    while process.is_alive() and (not metrics.exists() or len(metrics.read_text().splitlines()) < 3):
        time.sleep(0.02)
    assert process.pid is not None, "it has started"
    os.kill(process.pid, signal.SIGTERM)
    process.join()


def training_cases() -> list[Case]:
    """Short runs."""

    def case(name: str, *options: str, steps: int = 6, **more: Any) -> Case:
        words = ["model=tiny", "output_dir={at}/run", f"training.max_steps={steps}", *SHORT, *QUIET, *options]
        return Case(name, "train", words, **more)

    cases = [case(name, f"optimizer={name}") for name in OPTIMIZER_OPTIONS]
    for optimizer in ("adamw", "muon"):
        for kind, model in (("decoder", []), ("encoder", ENCODER)):
            for adapter in ("none", "lora"):
                for precision in ("32-true", "bf16-mixed"):
                    options = [
                        f"optimizer={optimizer}",
                        f"adapter={adapter}",
                        f"hardware.precision={precision}",
                        *model,
                    ]
                    cases.append(case(f"{optimizer} {kind} {adapter} {precision}", *options))
    cases += [
        case("no shared prompts", "batching.prefix_sharing=off"),
        case("small passes", "batching.micro_token_budget=512"),
        case("pinned memory and workers", "hardware.pin_memory=true", "hardware.num_workers=2"),
        case("gradient checkpointing", "model.gradient_checkpointing=true"),
        case("clipped", "training.gradient_clip_norm=0.1"),
        case("compiled", options={"gpu": ["hardware.compile=true"]}),
        case("compiled encoder", *ENCODER, options={"gpu": ["hardware.compile=true"]}),
        case("preset h100", options={"gpu": ["hardware=h100"]}),
    ]
    slow = {"steps": 40}
    cases += [
        case("cpu then gpu", **slow, first={"gpu": "cpu"}),
        case("gpu then cpu", **slow, first={"gpu": "gpu", "cpu": "gpu"}),
    ]
    return cases


def command_cases(out: Path) -> list[Case]:
    """Commands on one saved model, which is trained here on the CPU."""
    out.mkdir(parents=True, exist_ok=True)
    model = Case("model", "train", ["model=tiny", "output_dir={at}/run", "training.max_steps=30", *SHORT, *QUIET])
    run = model.folder(out, "cpu") / "run"
    if not (run / "best").exists():
        model.start(out, "cpu", "cpu").join()
    world = PreferenceWorld(seed=5).pairs(60, 60)
    rows = [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in world.val]
    files = {
        "val": rows,
        "rows": [{"prompt": row["prompt"], "response": row["chosen"]} for row in rows],
        "pool": [{"prompt": r["prompt"], "response_a": r["chosen"], "response_b": r["rejected"]} for r in rows],
    }
    for name, content in files.items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    best, val = str(run), str(out / "val.jsonl")
    world_words = ["--policy", "world", "--num-prompts", "16"]
    commands = {
        "evaluate": [best, "--data", val, "--output", "{at}/out"],
        "score": [best, str(out / "rows.jsonl"), "{at}/scored.jsonl"],
        "doctor": [best, "--data", val, "--json", "{at}/doctor.json"],
        "bon": [best, "{at}/bon.jsonl", "--n", "4", *world_words],
        "select": [str(out / "pool.jsonl"), "--k", "10", "--out", "{at}/chosen.jsonl", "--model", best],
        "readiness": [best, "--gold", "world", "--data", val, "--output", "{at}/out", *world_words],
    }
    analyses = [f"checkpoint={run}", "output_dir={at}/out", f"data.train={val}", "landscape.num_pairs=24"]
    return [
        *(Case(name, None, [name, *words]) for name, words in commands.items()),
        *(Case(f"analyze {kind}", "analyze", [f"landscape={kind}", *few, *analyses]) for kind, few in ANALYSES.items()),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", nargs="+", help="names of cases; all unless given")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="cases at once")
    args = parser.parse_args(argv)
    started, out = time.perf_counter(), args.out.absolute()
    cases = [*training_cases(), *command_cases(out / "commands")]
    homes = {case.name: out / ("training" if case.module == "train" else "commands") for case in cases}
    chosen = [case for case in cases if not args.cases or case.name in args.cases]
    _at_once(args.workers, [(case, homes[case.name]) for case in chosen])
    found, failed = {}, []
    for case in chosen:
        try:
            found[case.name] = difference(*(case.result(homes[case.name], side) for side in SIDES))
            print(f"{case.name}: {found[case.name][0]:.2g} at {found[case.name][1]}")
        except (OSError, ValueError, KeyError) as error:
            failed.append(case.name)
            logs = [case.folder(homes[case.name], side) / "log" for side in SIDES]
            tail = " | ".join(log.read_text()[-600:] for log in logs if log.exists())
            print(f"{case.name}: FAILED, {error}: {tail}")
    (out / "differences.json").write_text(json.dumps(found, indent=1))
    print(f"machine: {platform.processor() or platform.machine()}, {device_name()}")
    print(f"versions: torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"cases: {len(chosen)}")
    print(f"failed: {len(failed)}")
    for kind, holds in (("bf16", True), ("float32", False)):
        values = [v for name, (v, _) in found.items() if ("bf16" in name or "h100" in name) is holds]
        print(f"largest_difference_{kind}: {max(values, default=float('nan')):.2g}")
    print(f"wall_seconds: {time.perf_counter() - started:.0f}")


def _at_once(workers: int, tasks: list[tuple[Case, Path]]) -> None:
    """Each task in a process that forks its sides, so that no thread runs while a process forks."""
    waiting, running = list(tasks), list[BaseProcess]()
    while waiting or running:
        while waiting and len(running) < workers:
            process = FORK.Process(target=both_sides, args=waiting.pop(0))
            process.start()
            running.append(process)
        time.sleep(0.05)
        running = [process for process in running if process.is_alive()]


def device_name() -> str:
    """Name of the GPU, or `no GPU`."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    main()
