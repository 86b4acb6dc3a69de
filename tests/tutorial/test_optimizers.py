"""Chapters 6 and 11 of the tutorial: an optimizer of one's own, and the comparison of optimizers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from rm_optimizer import OptimizerComparison
from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.command_line import CommandLine
from rm_optimizer.landscape import optimizer_comparison
from rm_optimizer.optim import OPTIMIZERS, register_optimizer
from rm_optimizer.schema import compose, registry, typed
from rm_optimizer.schema.config import TrainConfig
from rm_optimizer.schema.optimizers import OptimizerConfig
from rm_optimizer.training import train_reward_model
from tests.tutorial.test_training import ROWS, SMALL

SIGN = """
from dataclasses import dataclass

import torch

from rm_optimizer.optim import register_optimizer
from rm_optimizer.schema.checks import within
from rm_optimizer.schema.optimizers import OptimizerConfig


@dataclass(kw_only=True)
class SignOptions(OptimizerConfig):
    scale: float = within("(0, inf)", 1.0)


class SignDescent(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])
        return loss


@register_optimizer("sign", SignOptions)
def build_sign(params, config, num_steps):
    return SignDescent(params.groups(config), {"lr": config.lr * config.scale})
"""


@pytest.fixture
def sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of a plug-in module that registers `optimizer=sign`."""
    (tmp_path / "sign_plugin.py").write_text(SIGN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("sign_plugin", None)
    OPTIMIZERS._entries.pop("sign", None)  # type: ignore[attr-defined]


def test_an_optimizer_of_ones_own_trains_by_its_name(sign: Path):
    options = SMALL | {"plugins": ["sign_plugin"], "training.max_steps": 2, "optimizer.scale": 0.5}
    trained = train_reward_model("tiny", "sign", ROWS, learning_rate=1e-3, output_dir=sign / "run", options=options)
    assert (trained.optimizer, trained.steps) == ("sign", 2)
    assert trained.config["plugins"] == ["sign_plugin"]
    config = typed(compose(["optimizer=sign", "output_dir=x"]), TrainConfig)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (config.model.adamw_lr, 0.01)
    with pytest.raises(ConfigError, match=r"optimizer\.scale must be positive, got 0"):
        typed(compose(["optimizer=sign", "optimizer.scale=0", "output_dir=x"]), TrainConfig)
    with pytest.raises(ConfigError, match=r"unknown option 'optimizer\.scael'"):
        compose(["optimizer=sign", "optimizer.scael=1"])


def test_an_installed_plug_in_is_found_by_its_name(sign: Path, monkeypatch: pytest.MonkeyPatch):
    point = metadata.EntryPoint("sign", "sign_plugin", "rm_optimizer.optimizer")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == point.group else [])
    registry.load_entry_points.cache_clear()
    assert compose(["optimizer=sign"]).optimizer.name == "sign"
    registry.load_entry_points.cache_clear()


@pytest.mark.slow
def test_the_command_line_takes_plug_ins(sign: Path):
    words = ["optimizer=sign", "plugins=[sign_plugin]", "hardware=cpu", "--cfg", "job"]
    run = [sys.executable, "-m", "rm_optimizer.train", *words]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env={"PYTHONPATH": f"{Path.cwd()}:{sign}"})
    assert done.returncode == 0, done.stderr
    assert "name: sign" in done.stdout
    done = subprocess.run(
        [*run, "plugins=[absent]"], capture_output=True, text=True, check=False, env={"PYTHONPATH": str(Path.cwd())}
    )
    assert done.returncode == 2
    assert "plugins" in done.stderr


@dataclass(kw_only=True)
class NoDefault(OptimizerConfig):
    beta: float = "???"  # type: ignore[assignment]


def wrong(rate: float = 1.0, some: slice = slice(None)) -> Any:
    def build(params: Any, config: Any, num_steps: int | None) -> torch.optim.Optimizer:
        return torch.optim.SGD(params.groups(config)[some], lr=config.lr * rate, maximize=rate < 0)

    return build


def ascending(params: Any, config: Any, num_steps: int | None) -> torch.optim.Optimizer:
    return torch.optim.SGD(params.groups(config), lr=config.lr, maximize=True)


def forgetful(params: Any, config: Any, num_steps: int | None) -> torch.optim.Optimizer:
    class Forgetful(torch.optim.SGD):
        count = 0

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            for group in self.param_groups:
                group["lr"] = 1e-3 / self.count
            return super().step(closure)  # type: ignore[no-untyped-call]

    return Forgetful(params.groups(config), lr=config.lr)


@pytest.mark.parametrize(
    ("name", "options", "build", "sentence"),
    [
        ("adamw", OptimizerConfig, wrong(), "the optimizer 'adamw' is registered already; choose another name"),
        ("odd", dict, wrong(), "must be a dataclass that extends OptimizerConfig"),
        ("odd", NoDefault, wrong(), "the options of optimizer 'odd' need a default for beta"),
        ("odd", OptimizerConfig, wrong(some=slice(1, None)), r"step every parameter once; give it params\.groups"),
        ("odd", OptimizerConfig, ascending, "'odd' must descend, but 20 steps on a quadratic took its loss from"),
        ("odd", OptimizerConfig, forgetful, "'odd' must continue from its saved state"),
    ],
)
def test_what_breaks_the_contract_is_refused(name: str, options: Any, build: Any, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        register_optimizer(name, options)(build)
    assert "odd" not in OPTIMIZERS


def by_one_norm(params: Any, config: Any, num_steps: int | None) -> torch.optim.Optimizer:
    class ByOneNorm(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else closure()
            torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e-2)
            super().step()
            return loss

    return ByOneNorm(params.groups(config), lr=config.lr)


def by_itself(params: Any, config: Any, num_steps: int | None) -> torch.optim.Optimizer:
    return torch.optim.Adam(params.groups(config), lr=config.lr)


@pytest.mark.parametrize(("build", "refused"), [(by_one_norm, True), (by_itself, False)])
def test_an_optimizer_that_steps_weights_together_refuses_weights_in_bfloat16(build: Any, refused: bool):
    try:
        register_optimizer("odd", OptimizerConfig)(build)
        assert ("bfloat16" in OPTIMIZERS["odd"].refuses) == refused
    finally:
        OPTIMIZERS._entries.pop("odd", None)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_comparison_is_typed_as_in_the_tutorial(tmp_path: Path):
    rows = tmp_path / "preferences.parquet"
    pd.DataFrame([row | {"prompt": f"Say {i}"} for i, row in enumerate(ROWS)]).to_parquet(rows)
    comparison = OptimizerComparison(
        model_name="tiny",
        data_path=rows,
        optimizers=["adamw", "sgd"],
        num_seeds=2,
        epochs=0.25,
        batch_size=8,
        rates=3,
        options=SMALL | {"training.progress": False},
        curvature_pairs=0,
        executor="inline",
        output_dir=tmp_path / "outputs",
    )
    found = comparison.run_experiment()
    report = comparison.generate_report()
    assert [arm.name for arm in found.arms] == ["adamw", "sgd"]
    assert (report.name, "sgd" in report.read_text(encoding="utf-8")) == ("report.md", True)
    config = comparison.options.config("sgd")
    assert (config.training.epochs, config.batching.batch_size) == (0.25, 8)


def test_the_comparison_has_the_tutorials_address_and_defaults():
    assert optimizer_comparison.OptimizerComparison is OptimizerComparison
    assert OptimizerComparison("tiny", "a.parquet").options.optimizers == ("adam", "adamw", "sgd", "muon", "lion")


def test_wrong_arguments_of_a_comparison_are_one_sentence():
    with pytest.raises(TypeError, match=r"OptimizerComparison 'epoch'; did you mean 'epochs'\?.*options=\{"):
        OptimizerComparison("tiny", "a.jsonl", epoch=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="data_path must be a file, folder or hub name, got DataFrame; write the pairs"):
        OptimizerComparison("tiny", pd.DataFrame(ROWS))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown optimizer 'moun'; did you mean 'muon'"):
        OptimizerComparison("tiny", "a.jsonl", ["moun", "adamw"]).options.require_fair()
    with pytest.raises(ConfigError, match="--seeds must be at most 1000, where the tuning seeds begin, got 1001"):
        OptimizerComparison("tiny", "a.jsonl", num_seeds=1001)


def test_the_presets_that_the_tutorial_names_compose():
    assert compose(["data=preference"]).data == compose(["data=default"]).data
    planned = CommandLine.parse(["experiment=optimizer_comparison"], TrainConfig).sweep
    assert len(planned.jobs) == 15
    assert planned.jobs[-1][:2] == ["optimizer=lion", "seed=2"]
