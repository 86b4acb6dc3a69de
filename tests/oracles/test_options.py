"""Each option of a training run reaches what it names: with another value that file, number or call is another one.

`CHANGES` gives, for an option, another value, what both runs need for it to be read, and what must differ between them.
`CALLS` names the call that must get an option's value, and `ELSEWHERE` the test file of each remaining option. Together
they are all options of the schema.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rm_optimizer.core.pairs.synthetic import PreferenceWorld
from rm_optimizer.schema import compose, typed
from rm_optimizer.schema.config import TrainConfig
from rm_optimizer.train import option_callbacks
from rm_optimizer.training import train_reward_model

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "model": "tiny",
    "hardware": "cpu",
    "model.architecture.hidden_size": "32",
    "model.vocab_size": "300",
    "data.synthetic.num_train": "48",
    "data.synthetic.num_val": "16",
    "batching.batch_size": "8",
    "training.evals_per_epoch": "2",
    "training.num_bootstrap": "100",
    "training.progress": "false",
    "logger.tensorboard": "false",
}


@dataclass(frozen=True)
class Change:
    """Another value of an option.

    Args:
        value: the value.
        seen: column of `metrics.csv`, path in `run.json`, or pattern of files, that must differ.
        needs: options of both runs; None as a value leaves one of `SMALL` out.
    """

    value: str
    seen: str
    needs: tuple[tuple[str, str | None], ...] = ()


def change(value: Any, seen: str, **needs: str | None) -> Change:
    return Change(str(value), seen, tuple((name.replace("__", "."), needed) for name, needed in needs.items()))


NO_WORLD = {"data__synthetic__num_train": None, "data__synthetic__num_val": None}
FILE = {"data__train": "{folder}/train.jsonl", **NO_WORLD}
MARGINS = {**FILE, "data__val": "{folder}/val.jsonl"}
WSD = {"schedule": "wsd"}
LORA = {"adapter": "lora"}
HESSIAN = {"training__hessian__enabled": "true"}
CALIBRATION = {"training__calibration__enabled": "true"}
CHANGES: Mapping[str, Change] = {
    "seed": change(1, "train_loss"),
    "model.name": change("other", "model"),
    "model.vocab_size": change(320, "parameters"),
    "model.max_length": change(16, "data.truncation"),
    "model.architecture.hidden_size": change(64, "parameters"),
    "model.architecture.intermediate_size": change(64, "parameters"),
    "model.architecture.num_hidden_layers": change(1, "parameters"),
    "model.architecture.num_attention_heads": change(8, "train_loss"),
    "model.architecture.num_key_value_heads": change(2, "parameters"),
    "model.architecture.initializer_range": change(0.05, "train_loss"),
    "model.adamw_lr": change(2e-3, "lr"),
    "model.lora_lr": change(2e-3, "lr", **LORA),
    "model.batch_size": change(4, "train_pairs", batching__batch_size=None),
    "model.freeze": change("backbone", "parameters"),
    "model.dropout": change("true", "train_loss", **{"+model__architecture__attention_dropout": "0.5"}),
    "adapter.kind": change("none", "parameters", **LORA),
    "adapter.rank": change(2, "train_loss", **LORA),
    "adapter.alpha": change(2, "train_loss", **LORA),
    "adapter.dropout": change(0.5, "train_loss", **LORA),
    "adapter.targets": change("[q_proj]", "train_loss", **LORA),
    "data.val_fraction": change(0.5, "data.train_pairs", **FILE),
    "data.split_seed": change(1, "data.val_fingerprint", **FILE),
    "data.max_pairs": change(24, "data.train_pairs", **FILE),
    "data.kwise_rule": change("best_worst", "data.train_pairs", **{**FILE, "data__train": "{folder}/kwise.jsonl"}),
    "data.cache_dir": change("{folder}/cache", "/cache/*"),
    "data.curriculum": change("margin", "data.order", **MARGINS),
    "data.curriculum_easy": change(0.2, "train_loss", data__curriculum="margin", **MARGINS),
    "data.curriculum_hard": change(0.1, "train_loss", data__curriculum="margin", **MARGINS),
    "data.curriculum_quantiles": change("true", "train_loss", data__curriculum="margin", **MARGINS),
    "data.curriculum_covers": change("false", "train_loss", data__curriculum="margin", **MARGINS),
    "data.synthetic.num_train": change(40, "data.train_pairs"),
    "data.synthetic.num_val": change(12, "data.val_pairs"),
    "data.synthetic.noise": change(9.0, "data.ceiling"),
    "data.synthetic.seed": change(1, "data.train_fingerprint"),
    "batching.batch_size": change(4, "train_pairs"),
    "loss.beta": change(0.5, "train_loss"),
    "loss.label_smoothing": change(0.1, "train_loss"),
    "loss.margin_scale": change(1.0, "train_loss", **MARGINS),
    "loss.center_rewards": change(0.5, "train_loss"),
    "loss.reward_l2": change(0.5, "train_loss"),
    "optimizer.name": change("adamw", "optimizer", optimizer="adam"),
    "optimizer.lr": change(1e-2, "lr"),
    "optimizer.weight_decay": change(5.0, "eval_nll"),
    "optimizer.head_lr_factor": change(3.0, "eval_nll"),
    "optimizer.layer_lr_decay": change(0.3, "eval_nll"),
    "optimizer.beta1": change(0.5, "eval_nll"),
    "optimizer.beta2": change(0.5, "eval_nll"),
    "optimizer.eps": change(0.1, "eval_nll"),
    "schedule.name": change("linear", "lr"),
    "schedule.warmup_steps": change(3, "lr"),
    "schedule.warmup_ratio": change(0.5, "lr"),
    "schedule.min_lr_ratio": change(0.5, "lr"),
    "schedule.decay_ratio": change(0.5, "lr", **WSD),
    "training.epochs": change(2, "steps"),
    "training.max_steps": change(3, "steps"),
    "training.gradient_clip_norm": change(1e-4, "eval_nll", optimizer="sgd", optimizer__lr="0.1"),
    "training.evals_per_epoch": change(3, "evaluations.every"),
    "training.eval_at_start": change("false", "/evaluations/step-00000000/*"),
    "training.checkpoint_every": change(1, "/checkpoints/*"),
    "training.keep_checkpoints": change(1, "/checkpoints/*"),
    "training.monitor": change("val/accuracy", "monitor"),
    "training.calibration.enabled": change("true", "calibration_temperature"),
    "training.calibration.every": change(2, "calibration_temperature", **CALIBRATION),
    "training.hessian.enabled": change("true", "curvature_trace"),
    "training.hessian.every": change(2, "curvature_trace", **HESSIAN),
    "training.hessian.num_pairs": change(8, "curvature_trace", **HESSIAN),
    "training.hessian.num_products": change(1, "curvature_num_products", **HESSIAN),
    "training.num_bootstrap": change(200, "metrics.nll.low", data__synthetic__num_val="80"),
    "hardware.precision": change("bf16-mixed", "train_loss"),
    "profile_memory": change("true", "/profile.csv"),
    "logger.tensorboard": change("true", "/tensorboard/*"),
}
BASE_MODEL = "rm_optimizer.training.preparation.BradleyTerryRM.from_pretrained"
PUBLISHER = "rm_optimizer.serving.weights.publisher.RMPublisherAdapter"
LOADERS = "rm_optimizer.training.data.in_memory"
STREAM = "rm_optimizer.core.streaming.dataset.RayPreferenceDataset.macro_batches"
STREAMED = {
    "data.train": "{folder}/train.jsonl",
    "data.val": "{folder}/val.jsonl",
    "data.synthetic.num_train": "",
    "data.synthetic.num_val": "",
}
WANDB = "rm_optimizer.training.loggers.WandbLogger"
FROM_PATH = {
    "model": "custom",
    "model.architecture.hidden_size": "",
    "model.vocab_size": "",
    "model.path": "{folder}/model",
    "model.max_length": "32",
}
SERVER = {"publish.url": "http://127.0.0.1:9"}
ON = {"logger.wandb": "true"}
CALLS: Mapping[str, tuple[str, str, str, Any, Mapping[str, str]]] = {
    "model.revision": (BASE_MODEL, "revision", "main", "main", FROM_PATH),
    "model.trust_remote_code": (BASE_MODEL, "trust_remote_code", "true", True, FROM_PATH),
    "model.attn_implementation": (BASE_MODEL, "attn_implementation", "eager", "eager", FROM_PATH),
    "model.gradient_checkpointing": (BASE_MODEL, "gradient_checkpointing", "true", True, FROM_PATH),
    "publish.url": (PUBLISHER, "0", "http://127.0.0.1:7", "http://127.0.0.1:7", {}),
    "publish.mode": (PUBLISHER, "mode", "head_only", "head_only", SERVER),
    "publish.transport": (PUBLISHER, "transport", "path", "path", SERVER),
    "publish.host": (PUBLISHER, "host", "10.0.0.7", "10.0.0.7", SERVER | {"publish.transport": "gloo"}),
    "publish.timeout_seconds": (PUBLISHER, "timeout_seconds", "7", 7.0, SERVER),
    "logger.project": (WANDB, "project", "mine", "mine", ON),
    "logger.name": (WANDB, "name", "mine", "mine", ON),
    "logger.group": (WANDB, "group", "mine", "mine", ON),
    "logger.tags": (WANDB, "tags", "[a,b]", ["a", "b"], ON),
    "logger.wandb_mode": (WANDB, "mode", "online", "online", ON),
    "logger.log_model": ("rm_optimizer.training.run.log_outcome", "log_model", "false", False, {}),
    "hardware.num_threads": ("rm_optimizer.training.run.torch.set_num_threads", "0", "1", 1, {}),
    "hardware.pass_tokens": (f"{LOADERS}.BatchShape", "1", "777", 777, {}),
    "hardware.eval_pass_tokens": (f"{LOADERS}.score_pairs", "token_budget", "777", 777, {}),
    "data.streaming_store_mb": (
        STREAM,
        "store_mb",
        "99",
        99,
        {"data.streaming": "ray", "training.max_steps": "2"} | STREAMED,
    ),
    "hardware.num_workers": (f"{LOADERS}.MacroBatchLoader", "num_workers", "1", 1, {}),
}
"""For an option: the call, its argument, the value as it is typed and as it must arrive, and what else is set."""
ELSEWHERE: Mapping[str, str] = {
    "resume": "training/folder/test_resume.py",
    "output_dir": "training/conftest.py",
    "plugins": "schema/test_registry.py",
    "publish.every_n_steps": "serving/test_publishing.py",
    "publish.api_key_env": "serving/test_publishing.py",
    "publish.on_failure": "serving/test_publishing.py",
    "model.path": "training/test_from_python.py",
    "model.architecture.model_type": "core/model/test_reward_model.py",
    "model.gpu_tokens": "schema/test_hardware.py",
    "model.router_aux_loss_coef": "training/test_router_loss.py",
    "model.dtype": "training/test_large_bases.py",
    "model.pooling_head": "tutorial/test_plug_ins.py",
    "training.suites": "training/test_suites.py",
    "training.suites_every": "training/test_suites.py",
    "data.train": "training/test_step_numbers.py",
    "data.val": "training/test_step_numbers.py",
    "data.format": "core/pairs/test_sources.py",
    "data.columns": "core/pairs/test_unread_columns.py",
    "data.winner": "core/pairs/test_sources.py",
    "data.layout": "core/pairs/test_published_layouts.py",
    "data.on_bad_row": "training/test_refused_rows.py",
    "data.over_long": "training/test_over_long.py",
    "data.thinking": "training/test_refused_rows.py",
    "data.special_tokens": "training/test_refused_rows.py",
    "data.max_bad_share": "core/pairs/test_sources.py",
    "data.allow_prompt_overlap": "training/data/test_streamed.py",
    "data.num_workers": "schema/test_hardware.py",
    "data.fetch_timeout": "core/tokens/test_batching.py",
    "data.streaming": "training/data/test_streamed.py",
    "batching.micro_token_budget": "training/test_lightning_module.py",
    "batching.eval_token_budget": "training/test_step_numbers.py",
    "batching.prefix_sharing": "training/test_lightning_module.py",
    "loss.name": "training/test_named_losses.py",
    "loss.score_range": "training/test_scores.py",
    "loss.score_share": "training/test_scores.py",
    "training.mode": "training/callbacks/test_best.py",
    "training.early_stopping.enabled": "training/test_run.py",
    "training.early_stopping.patience": "training/test_run.py",
    "training.early_stopping.min_delta": "training/test_run.py",
    "training.progress": "training/callbacks/test_progress.py",
    "hardware.accelerator": "schema/test_compose.py",
    "hardware.devices": "training/test_processes.py",
    "hardware.num_nodes": "training/test_processes.py",
    "hardware.strategy": "training/test_fsdp.py",
    "hardware.pin_memory": "training/data/test_in_memory.py",
    "hardware.compile": "training/test_compiling.py",
    "hardware.on_out_of_memory": "test_simulated_device.py",
    "logger.wandb": "training/test_loggers.py",
}
"""For each other option, the test file that shows what it does."""
Seen = dict[str, Any]


def options_of_a_run() -> set[str]:
    """Every option of a training run with the default optimizer."""

    def names(value: Any, name: str) -> Iterator[str]:
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                yield from names(item, f"{name}.{key}")
        else:
            yield name[1:]

    composed = OmegaConf.to_container(compose(["model=tiny", "output_dir=x"]))
    assert isinstance(composed, dict)
    return set(names(composed, ""))


def write_pairs(folder: Path, num_train: int, num_val: int) -> None:
    """Write pairs with margins of the synthetic world to `train.jsonl` and `val.jsonl`."""
    world = PreferenceWorld(seed=3).pairs(num_train, num_val)
    for name, pairs in (("train", world.train), ("val", world.val)):
        rows = [
            {"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected}
            | {"margin": float(pair.metadata["gold_margin"]) / 10}
            for pair in pairs
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def seen_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Mapping[str, str | None]], Seen]:
    """What a run with the given options leaves: columns, `run.json` by path, and names with texts of files."""
    folder = tmp_path_factory.mktemp("options")
    write_pairs(folder, 48, 16)
    ranked = [{"prompt": f"Say {n}.", "responses": ["one", "two", "three"], "scores": [1, 2, 3]} for n in range(20)]
    (folder / "kwise.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ranked))

    @cache
    def run(overrides: tuple[str, ...]) -> Seen:
        number = sum(1 for _ in folder.glob("run-*"))
        at = folder / f"run-{number}"
        words = [word.replace("{folder}", str(folder)) for word in overrides]
        config = typed(compose([*words, f"output_dir={at}"]), TrainConfig)
        train_reward_model(config, callbacks=option_callbacks(config))
        with open(at / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        files = sorted(path for path in at.rglob("*") if path.is_file())
        files += sorted(path for path in (folder / "cache").rglob("*") if path.is_file())
        return columns | _by_path(json.loads((at / "run.json").read_text())) | {"files": (at, files)}

    def seen(options: Mapping[str, str | None]) -> Seen:
        return run(tuple(f"{name}={value}" for name, value in options.items() if value is not None))

    return seen


def _by_path(value: Any, name: str = "") -> Seen:
    found = {name: value} if name else {}
    if isinstance(value, Mapping):
        for key, item in value.items():
            found |= _by_path(item, f"{name}.{key}" if name else str(key))
    return found


def _files(seen: Seen, pattern: str) -> list[tuple[str, bytes]]:
    at, files = seen["files"]
    return [
        (path.name, path.read_bytes() if path.suffix in (".json", ".jsonl", ".csv") else b"")
        for path in files
        if path.is_relative_to(at.parent) and re.search(pattern.replace("*", ".*"), f"/{path.relative_to(at.parent)}")
    ]


def test_every_option_is_held_here_or_elsewhere():
    tables = [set(CHANGES), set(CALLS), set(ELSEWHERE)]
    assert set.union(*tables) == options_of_a_run()
    assert sum(map(len, tables)) == len(set.union(*tables))


@pytest.mark.parametrize("option", ELSEWHERE)
def test_the_test_of_an_option_names_it(option: str):
    assert option.rpartition(".")[2] in (ROOT / "tests" / ELSEWHERE[option]).read_text(encoding="utf-8")


class Arrived(Exception):
    """The call was made."""


@pytest.mark.parametrize("option", CALLS)
def test_a_value_arrives_at_the_call_that_it_is_for(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target, argument, typed_value, expected, needs = CALLS[option]
    write_pairs(tmp_path, 8, 4)
    (tmp_path / "model").mkdir()
    got: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> None:
        got.append(args[int(argument)] if argument.isdigit() else kwargs[argument])
        raise Arrived

    monkeypatch.setattr(target, call)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    values = SMALL | dict(needs) | {option: typed_value, "output_dir": str(tmp_path / "run")}
    words = [f"{name}={value}".replace("{folder}", str(tmp_path)) for name, value in values.items() if value]
    config = typed(compose(words), TrainConfig)
    with pytest.raises(Arrived):
        train_reward_model(config, callbacks=option_callbacks(config))
    assert got == [expected] * len(got)  # the memory that a run logs is counted by the same calls


@pytest.mark.slow
@pytest.mark.parametrize("option", CHANGES)
def test_another_value_changes_what_the_option_names(option: str, seen_of: Callable[[Mapping[str, str | None]], Seen]):
    changed = CHANGES[option]
    base = SMALL | dict(changed.needs)
    name = {"schedule.name": "schedule", "optimizer.name": "optimizer", "adapter.kind": "adapter"}.get(option, option)
    first, second = (seen_of(options) for options in (base, base | {name: changed.value}))
    if changed.seen.startswith("/"):
        assert _files(first, changed.seen) != _files(second, changed.seen)
    else:
        assert first.get(changed.seen) != second[changed.seen]
