"""Pairs in memory, orders and callbacks of a user: exact numbers, exact resumes, and refusals where they clash."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from rich.console import Console

from rm_optimizer.core.data_loader import PreferenceDataset, TrainVal
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.tokens.batching import MacroBatch
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.records.orders import PairOrder
from rm_optimizer.records.recall import recalled
from rm_optimizer.records.run_folder import RunFolder, read_rows
from rm_optimizer.reporting.run_report import print_run
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training import RunResult
from rm_optimizer.training.callbacks.run_callback import RunCallback
from rm_optimizer.training.folder.record import RunStatus
from rm_optimizer.training.preparation import seen_by_base
from rm_optimizer.training.run import run_training
from tests.training.folder.test_resume import assert_same_outcome, stopped_after

Build = Callable[..., TrainConfig]
FEW = ["training.max_steps=4", "training.checkpoint_every=2", "training.evals_per_epoch=1", "batching.batch_size=6"]


def some(name: str, count: int, rejected: str = "no") -> PreferenceDataset:
    return PreferenceDataset(PreferencePair(f"{name} {i}", f"{i} it is", rejected) for i in range(count))


DATA = TrainVal(some("Say", 24), some("Tell", 12))
REVERSED = PairOrder("reversed", lambda epoch: range(24)[::-1])


class Steps(RunCallback):
    """Keeps the steps it has seen, also over a resume, and logs their number."""

    columns: ClassVar = {"mine/seen": "seen_pairs"}

    def __init__(self, last: int = 1_000) -> None:
        self.last = last
        self.seen: list[int] = []
        self.pairs: list[list[int]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: MacroBatch, index: int) -> None:
        self.seen.append(trainer.global_step)
        self.pairs.append(batch.pair_index.tolist())
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.last
        for logger in trainer.loggers:
            logger.log_metrics({"mine/seen": len(self.seen)}, step=trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


@pytest.fixture(scope="module")
def in_memory(small_config: Build, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run_training(small_config(tmp_path_factory.mktemp("memory") / "run", *FEW), data=DATA)


def test_pairs_in_memory_give_the_bytes_of_a_run_from_their_files(
    in_memory: RunResult, small_config: Build, tmp_path: Path
):
    paths = {"train": tmp_path / "train.jsonl", "val": tmp_path / "val.jsonl"}
    for name, path in paths.items():
        path.write_text("".join(json.dumps(pair.to_dict()) + "\n" for pair in getattr(DATA, name)))
    options = [f"data.{name}={path}" for name, path in paths.items()]
    run_training(small_config(tmp_path / "run", *FEW, *options))
    here, there = Path(in_memory.run_dir), tmp_path / "run"
    for name in ("metrics.csv", "best/model.safetensors", "trained_pairs.npz"):
        assert (here / name).read_bytes() == (there / name).read_bytes(), name
    left, right = RunFolder(here).identity, RunFolder(there).identity
    assert left is not None
    assert right is not None
    assert (left.train_fingerprint, left.val_fingerprint) == (right.train_fingerprint, right.val_fingerprint)
    assert in_memory.data.val_origin == "pairs in memory"
    cards = [(folder / "best" / "README.md").read_text(encoding="utf-8") for folder in (here, there)]
    assert ["(pairs in memory)" in card for card in cards] == [True, False]
    assert ["(train.jsonl)" in card for card in cards] == [False, True]
    with pytest.raises(ConfigError, match=r"trained on pairs in memory, .*--data PAIRS"):
        recalled([f"checkpoint={here}"])


def test_a_callback_sees_each_step_and_resumes_with_the_run(
    in_memory: RunResult, small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stopped_after(2, small_config(tmp_path, *FEW), monkeypatch, data=DATA, callbacks=[Steps()])
    again = Steps()
    run_training(small_config(tmp_path, *FEW, "resume=auto"), data=DATA, callbacks=[again])
    assert again.seen == [1, 2, 3, 4]
    rows = read_rows(tmp_path / "metrics.csv")
    assert [row.pop("seen_pairs") for row in rows] == ["", "1", "2", "3", "4"]
    assert rows == read_rows(Path(in_memory.run_dir) / "metrics.csv")


def test_a_callback_may_end_the_run(small_config: Build, tmp_path: Path):
    result = run_training(small_config(tmp_path, *FEW), data=DATA, callbacks=[Steps(last=3)])
    assert (result.status, result.steps) == (RunStatus.early_stopped, 3)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.csv") if row["eval_nll"]] == ["0", "3"]


def test_a_run_in_an_order_trains_and_resumes_in_it(
    small_config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    steps = Steps()
    result = run_training(small_config(whole, *FEW), data=DATA, order=REVERSED, callbacks=[steps])
    assert steps.pairs == [list(range(end, end - 6, -1)) for end in (23, 17, 11, 5)]
    assert result.data.order == REVERSED.identity
    stopped_after(2, small_config(cut, *FEW), monkeypatch, data=DATA, order=REVERSED, callbacks=[Steps()])
    auto = small_config(cut, *FEW, "resume=auto")
    for other in (None, PairOrder("reversed", lambda epoch: range(24))):
        with pytest.raises(ConfigError, match=r"order was reversed-.*, is (shuffled|reversed-)"):
            run_training(auto, data=DATA, order=other)
    run_training(auto, data=DATA, order=REVERSED, callbacks=[Steps()])
    assert_same_outcome(whole, cut)
    with pytest.raises(ConfigError, match="is shuffled"):
        run_training(auto, data=DATA)


@pytest.mark.parametrize("more", [[], ["training.max_steps=6"]])
def test_a_run_in_memory_does_not_go_on_with_other_pairs(in_memory: RunResult, small_config: Build, more: list[str]):
    config = small_config(Path(in_memory.run_dir), *FEW, *more, "resume=auto")
    for changed, option in (
        (TrainVal(some("Say", 24, "never"), DATA.val), "train"),
        (TrainVal(DATA.train, some("Tell", 11)), "val"),
    ):
        with pytest.raises(ConfigError, match=rf"the pairs of data\.{option} have changed"):
            run_training(config, data=changed)
    if not more:
        assert run_training(config, data=DATA).run_id == in_memory.run_id


@pytest.mark.parametrize(
    ("options", "given", "error", "message"),
    [
        (
            ["data.train=a.jsonl"],
            {},
            ConfigError,
            r"the run's pairs are in memory already, so data\.train must not be set",
        ),
        (["data.max_pairs=4"], {}, ConfigError, r"so data\.max_pairs must not be set"),
        ([], {"data": DATA.train}, TypeError, "must be a TrainVal of two PreferenceDatasets"),
        ([], {"data": TrainVal(DATA.train, DATA.val[:0])}, DataError, "needs validation pairs, got none"),
        ([], {"data": TrainVal(DATA.train, DATA.train[:3])}, DataError, "3 of 3 validation prompts are also in"),
        (
            [],
            {"order": PairOrder("few", lambda epoch: range(8))},
            ValueError,
            "'few' must visit 24 pairs an epoch",
        ),
        ([], {"callbacks": [print]}, TypeError, "must be Lightning callbacks, got <built-in function print>"),
        ([], {"callbacks": [ModelCheckpoint()]}, ConfigError, "of ModelCheckpoint itself; set training.checkpoint"),
        ([], {"callbacks": [EarlyStopping("val/nll")]}, ConfigError, "set training.early_stopping"),
    ],
)
def test_what_clashes_is_named(
    small_config: Build,
    tmp_path: Path,
    options: list[str],
    given: dict[str, Any],
    error: type[Exception],
    message: str,
):
    with pytest.raises(error, match=message):
        run_training(small_config(tmp_path, *options), **{"data": DATA, **given})
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock" and path.name != ".lock"]


def test_validation_pairs_that_the_base_was_trained_on_are_named(small_config: Build, tmp_path: Path):
    base = run_training(small_config(tmp_path / "base", *FEW), data=DATA)
    overrides = [*FEW, "model=custom", f"model.path={base.export}", "model.max_length=96", "hardware=cpu"]
    config = typed(compose([*overrides, f"output_dir={tmp_path / 'more'}", "logger.tensorboard=false"]), TrainConfig)
    seen = TrainVal(some("Ask", 24), PreferenceDataset([*DATA.train.pairs[:5], *DATA.val.pairs[:7]]))
    result = run_training(config, data=seen)
    (note,) = (note for note in result.data.notes if "base model" in note)
    assert "was trained on 5 of the 12 validation pairs and on the prompts of 5" in note
    console = Console(record=True, width=200)
    print_run(result, console)
    assert note in console.export_text()
    assert seen_by_base(base.export, DATA.val.pairs) == ()


def test_an_export_of_untrained_weights_is_called_one(small_config: Build, tmp_path: Path):
    result = run_training(small_config(tmp_path / "run", *FEW), data=DATA)
    untrained = replace(result, best_step=0)
    for each, expected in ((untrained, True), (replace(result, best_step=4), False)):
        console = Console(record=True, width=300)
        print_run(each, console)
        assert ("no step improved val/nll" in console.export_text()) == expected


def test_the_validation_loss_has_the_terms_of_the_training_loss(small_config: Build, tmp_path: Path):
    pairs = [replace(pair, margin=0.3, label=0.8, weight=1.0 + i % 2) for i, pair in enumerate(DATA.val.pairs)]
    data = TrainVal(
        PreferenceDataset(replace(pair, margin=1.0) for pair in DATA.train.pairs),
        PreferenceDataset(pairs),
    )
    options = ["loss.reward_l2=10", "loss.margin_scale=0.5", "loss.label_smoothing=0.1", "loss.beta=2"]
    result = run_training(small_config(tmp_path / "run", *FEW, *options), data=data)
    rows = [row for row in RunFolder(Path(result.run_dir)).metrics() if row.get("eval_loss")]
    rewards = (
        BradleyTerryRM.from_pretrained(result.export)
        .score([*(p.prompt for p in pairs)] * 2, [*(p.chosen for p in pairs), *(p.rejected for p in pairs)])
        .double()
    )
    chosen, rejected = rewards[: len(pairs)], rewards[len(pairs) :]
    logit = 2 * (chosen - rejected - 0.5 * 0.3)
    label = 0.8 * 0.9 + 0.2 * 0.1
    loss = -label * torch.nn.functional.logsigmoid(logit) - (1 - label) * torch.nn.functional.logsigmoid(-logit)
    weight = torch.tensor([pair.weight for pair in pairs], dtype=torch.float64)
    loss = loss + 5 * (chosen**2 + rejected**2)
    expected = float((weight * loss).sum() / weight.sum())
    at_best = next(row for row in rows if int(row["step"]) == result.best_step)
    assert float(at_best["eval_loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(at_best["eval_nll"]) != pytest.approx(expected, rel=1e-2)


def test_a_factor_on_margins_that_no_pair_has_is_refused(small_config: Build, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"loss\.margin_scale has an effect only on pairs with a margin"):
        run_training(small_config(tmp_path / "run", *FEW, "loss.margin_scale=1"), data=DATA)
