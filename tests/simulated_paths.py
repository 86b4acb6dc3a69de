"""What is computed on the simulated device and on the CPU, as functions of a folder that return numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import numpy as np
import torch

from rm_optimizer import analyze as entry
from rm_optimizer import evaluate_checkpoint, train_reward_model
from rm_optimizer.core.model.features import features
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.data_efficiency.margin_analysis import fixed_differences
from rm_optimizer.doctor.doctor import diagnose
from rm_optimizer.explanation.explain import explain_difference
from rm_optimizer.interfaces.command_line import checked
from rm_optimizer.records.accelerator import accelerators, fastest_device
from rm_optimizer.rl_coupling import BestOfNSampler, RewardModelEnsemble
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.landscape import AnalysisType, AnalyzeConfig
from rm_optimizer.serving.client.client import RewardClient
from rm_optimizer.serving.weights.publisher import create_rm_publisher
from rm_optimizer.training.fitting import build_trainer
from rm_optimizer.training.lightning_module import RunModule
from rm_optimizer.training.preparation import Run
from tests.builders import prepared_run, stored_certificate
from tests.rl_coupling.policies import save_policy
from tests.serving.engines import InProcessEngine, options_of
from tests.serving.running import engine_running

Numbers = dict[str, Any]
TIMED = ("seconds", "product_reason", "gradients_per_product")
"""Parts of the names of results that depend on the time that something took."""
SMALL = [
    "hardware.num_threads=1",
    *(f"model.architecture.{name}" for name in ("hidden_size=16", "intermediate_size=32", "num_hidden_layers=1")),
    *(f"model.architecture.{name}" for name in ("num_attention_heads=2", "num_key_value_heads=2")),
    *("model.vocab_size=300", "model.max_length=64", "model.attn_implementation=eager"),
    *("data.synthetic.num_train=32", "data.synthetic.num_val=16"),
    *("batching.batch_size=8", "batching.micro_token_budget=400", "batching.eval_token_budget=800"),
    *("training.evals_per_epoch=1", "training.num_bootstrap=100", "training.progress=false"),
    *("training.checkpoint_every=1", "training.keep_checkpoints=9", "logger.tensorboard=false"),
]
PROMPT = "How do I boil an egg? Put it in boiling water, and wait. " * 3
RESPONSES = ["Seven minutes.", "Put it in boiling water for seven minutes.", "Paris.", "one two three four five six"]
ADAPTER = ("none", "lora_r8")


def config(folder: Path, *overrides: str) -> TrainConfig:
    return typed(compose([*SMALL, f"output_dir={folder}", *overrides]), TrainConfig)


@cache
def prepared(family: str, adapter: str, *overrides: str) -> Run:
    """The parts of a run that tests train copies of."""
    options = config(Path(mkdtemp()) / "run", f"adapter={adapter}", "training.eval_at_start=false", *overrides)
    if family == "bert":
        options.model.architecture = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1} | {
            name: options.model.architecture[name] for name in ("intermediate_size", "num_attention_heads")
        }
    return prepared_run(options)


def fitted(run: Run, optimizer: str = "adamw", *overrides: str, steps: int = 2) -> RunModule:
    """A copy of a run's module after some steps on the fastest device."""
    own = config(Path(run.config.output_dir), f"optimizer={optimizer}", "schedule=constant", *overrides)
    options = replace(run.config, optimizer=own.optimizer, schedule=own.schedule, hardware=own.hardware)
    module = RunModule(deepcopy(run.module.model), options, run.datamodule)
    module.num_steps = steps
    build_trainer(options.hardware, [], [], steps).fit(module, datamodule=run.datamodule)
    return module


def trained(run: Run, optimizer: str = "adamw", *overrides: str) -> Numbers:
    """Weights and numbers after two steps."""
    module = fitted(run, optimizer, *overrides)
    return {"weights": dict(module.model.named_parameters()), "metrics": module.step_metrics}


def whole_run(folder: Path, *overrides: str) -> Path:
    """The folder of a run from its pairs to its certified export."""
    train_reward_model(config(folder / "run", *overrides))
    return folder / "run"


def results(folder: Path, *names: str) -> Numbers:
    """The numbers in JSON files of a folder."""
    return {name: json.loads((folder / name).read_text()) for name in names}


def run_numbers(run: Path) -> Numbers:
    rows = (run / "metrics.csv").read_text().splitlines()
    columns = [place for place, name in enumerate(rows[0].split(",")) if "second" not in name]
    table = [[row.split(",")[place] for place in columns] for row in rows[1:]]
    found = json.loads((run / "run.json").read_text())
    weights = BradleyTerryRM.from_pretrained(run / "best").state_dict()
    return {"rows": table, "metrics": found["metrics"], "weights": weights}


def pairs(count: int = 12) -> PreferenceDataset:
    rows = [
        {"prompt": f"What is {i} and {i % 3}?", "chosen": f"It is {'so ' * (i % 5)}{i}.", "rejected": f"No, {i * 7}."}
        for i in range(count)
    ]
    return PreferenceDataset(rows)


def moved(run: Path) -> BradleyTerryRM:
    return BradleyTerryRM.from_pretrained(run / "best").to(fastest_device())


def run(folder: Path, source: Path) -> Numbers:
    """A run with loading processes, and with page-locked memory on the device."""
    return run_numbers(whole_run(folder, f"hardware.pin_memory={bool(accelerators())}", "hardware.num_workers=2"))


def evaluation(folder: Path, source: Path) -> Numbers:
    found = evaluate_checkpoint(source / "best", pairs(), output_dir=folder / "out", num_bootstrap=100, by=())
    return json.loads(found.to_json())


def scoring(folder: Path, source: Path) -> Numbers:
    """Padded, shared and cached starts: one pass holds all, the prompt, or a part of its responses."""
    model = moved(source)
    prompts = [PROMPT] * len(RESPONSES) + [*RESPONSES]
    return {
        f"{sharing} {budget}": model.score(prompts, RESPONSES * 2, token_budget=budget)
        for sharing, budget in (("one pass", 4096), ("several", 70), ("cached", 48))
    }


def feature_vectors(folder: Path, source: Path) -> Numbers:
    model = moved(source)
    return {"features": features(model, [each.ids for each in model.encode(RESPONSES, RESPONSES)])}


def diagnosis(folder: Path, source: Path) -> Numbers:
    found = diagnose(moved(source), {"train": pairs(24)}, seed=0)
    return {check.name: str(check.status) for check in found.checks}


def certificate(folder: Path, source: Path) -> Numbers:
    moved(source).save_pretrained(folder / "again")
    return {"rewards": [(each.reward, each.reloaded) for each in stored_certificate(folder / "again").scores]}


def analysis(kind: AnalysisType) -> Callable[[Path, Path], Numbers]:
    options = {
        AnalysisType.hessian: ("landscape.top_k=2", "landscape.num_probes=2"),
        AnalysisType.gauss_newton: ("landscape.top_k=2",),
        AnalysisType.fisher: ("landscape.top_k=2", "landscape.method=lanczos"),
        AnalysisType.density: ("landscape.num_probes=2", "landscape.top_k=2"),
        AnalysisType.slices: ("landscape.num_points=3", "landscape.num_directions=2"),
        AnalysisType.surface: ("landscape.num_points=3",),
        AnalysisType.trajectory: ("landscape.num_points=3",),
        AnalysisType.evolution: ("landscape.top_k=1", "landscape.num_probes=2"),
        AnalysisType.between: ("landscape.num_points=3", "landscape.top_k=1", "landscape.num_probes=2"),
    }.get(kind, ())

    def analyzed(folder: Path, source: Path) -> Numbers:
        run = Path(shutil.copytree(source, folder / "run"))
        chosen = ["landscape.num_pairs=6", "landscape.params=head", "progress=false", *options]
        if kind == AnalysisType.between:
            other = moved(source)
            with torch.no_grad():
                other.reward_head.weight.mul_(-0.5)
            other.save_pretrained(folder / "other")
            chosen.append(f"landscape.others=[{folder / 'other'}]")
        line = entry.read([f"checkpoint={run}", f"landscape={kind}", f"output_dir={folder / 'out'}", *chosen])
        with mock.patch("rm_optimizer.reporting.landscape.results.draw_result", return_value=[]):
            entry.analyze(checked(line.overrides, AnalyzeConfig, name="analyze"))
        return results(folder / "out", f"{kind}.json")

    return analyzed


def ensemble(folder: Path, source: Path) -> Numbers:
    other = moved(source)
    with torch.no_grad():
        other.reward_head.weight.mul_(-0.5)
    members = RewardModelEnsemble([moved(source), other], uncertainty_threshold=0.1)
    found = members.predict_batch([PROMPT] * len(RESPONSES), RESPONSES)
    return {"rewards": [each.individual_rewards for each in found]}


def best_of_n(folder: Path, source: Path) -> Numbers:
    policy = save_policy(folder / "policy")
    sampler = BestOfNSampler(policy, moved(source), n_samples=3, seed=1, max_new_tokens=4)
    return {"rows": [[each.responses, each.rewards] for each in sampler.sample([PROMPT, "Hi"])]}


def server(folder: Path, source: Path) -> Numbers:
    """Rewards over HTTP before and after an update of the weights by the trainer's publisher."""
    model, found = moved(source), {}
    with torch.no_grad():
        model.reward_head.weight.mul_(2)
    engine = lambda: InProcessEngine(options_of(source / "best", folder / "scratch"))  # noqa: E731
    with engine_running(engine) as service, RewardClient(service.url) as client:
        found["before"] = client.score(RESPONSES[:1] * len(RESPONSES), RESPONSES)
        for mode in ("full", "head_only"):
            with create_rm_publisher(service.url, mode=mode) as publisher:
                publisher.publish(model, mode)
            found[mode] = client.score(RESPONSES[:1] * len(RESPONSES), RESPONSES)
    return found


def differences(folder: Path, source: Path) -> Numbers:
    return {"differences": fixed_differences(pairs(), moved(source))}


def why(folder: Path, source: Path) -> Numbers:
    other = moved(source)
    with torch.no_grad():
        other.reward_head.weight.mul_(1.5)
    found = explain_difference(moved(source), other, texts=[(PROMPT, each) for each in RESPONSES])
    return {"causes": [cause.kind for cause in found.causes]}


PATHS: dict[str, Callable[[Path, Path], Numbers]] = {
    "run": run,
    "evaluation": evaluation,
    "scoring": scoring,
    "features": feature_vectors,
    "doctor": diagnosis,
    "certificate": certificate,
    **{f"analyze {kind}": analysis(kind) for kind in AnalysisType},
    "ensemble": ensemble,
    "best-of-n": best_of_n,
    "server": server,
    "differences": differences,
    "why": why,
}


def largest_difference(one: Any, other: Any) -> float:
    """Largest difference of two results, relative to the largest number of a tensor or to 1; inf for other shapes."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return float("inf")
        names = [name for name in one if not any(word in str(name) for word in TIMED)]
        return max((largest_difference(one[name], other[name]) for name in names), default=0.0)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return float("inf")
        return max(map(largest_difference, one, other), default=0.0)
    if isinstance(one, str | bool) or one is None:
        try:
            return largest_difference(float(one), float(other))  # a cell of a table
        except (TypeError, ValueError):
            return 0.0 if one == other or "/" in str(one) else float("inf")  # each has its own folder
    first, second = (np.asarray(torch.as_tensor(each).detach().cpu().double()) for each in (one, other))
    if first.shape != second.shape or (np.isfinite(first) != np.isfinite(second)).any():
        return float("inf")
    kept = np.isfinite(first)
    return float(np.abs(first - second)[kept].max(initial=0) / max(1.0, np.abs(first)[kept].max(initial=0)))
