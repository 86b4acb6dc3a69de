"""A run that publishes: the server then answers with what the trainer evaluated, and the run is as without it."""

from __future__ import annotations

import itertools
import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.synthetic import COURTEOUS, NEUTRAL, RUDE, synthetic_world
from rm_optimizer.errors import ConfigError, PublishFailed, RMOptimizerError
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.data import SyntheticConfig
from rm_optimizer.schema.publish import OnFailure, PublishConfig
from rm_optimizer.serving.client.client import RewardClient
from rm_optimizer.serving.weights.publisher import RMPublisherAdapter, open_publisher
from rm_optimizer.train import option_callbacks
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.callbacks.publishing import PublishWeights, run_name
from rm_optimizer.training.data.run_data import load_data
from rm_optimizer.training.folder.record import RunRecord
from tests.builders import beside_world
from tests.serving.running import serve_process

SMALL = [
    *("hardware=cpu", "hardware.num_threads=1", "model.max_length=96", "data.synthetic.num_train=96"),
    *("data.synthetic.num_val=33", "batching.batch_size=16", "batching.micro_token_budget=1024"),
    *("training.evals_per_epoch=2", "training.num_bootstrap=100", "training.progress=false"),
    *("logger.tensorboard=false", "optimizer.lr=0.01"),
]
BUILT = [
    *("model.architecture.hidden_size=32", "model.architecture.intermediate_size=64", "model.vocab_size=400"),
    *("model.architecture.num_attention_heads=2", "model.architecture.num_key_value_heads=2", "training.max_steps=1"),
]
PARITY = 1e-4


def options(output_dir: Path, *overrides: str) -> TrainConfig:
    return typed(compose(beside_world(SMALL, [f"output_dir={output_dir}", *overrides])), TrainConfig)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """An exported model to serve and to train on."""
    return Path(train_reward_model(options(tmp_path_factory.mktemp("base") / "run", *BUILT)).export)


class Recorder:
    """A publisher that asks a scorer after each version, and fails when told to."""

    def __init__(self, inner: Callable[[], RMPublisherAdapter] | None = None, score: object | None = None) -> None:
        self.inner, self.score = inner, score
        self.margins: dict[str, np.ndarray] = {}
        self.failure: RMOptimizerError | None = None
        self.closed = 0

    def publish(self, weights: BradleyTerryRM, version: str) -> None:
        if self.failure is not None:
            raise self.failure
        if self.inner is not None:
            with self.inner() as publisher:
                publisher.publish(weights, version)
        scorer = weights if self.score is None else self.score
        self.margins[version] = margins(scorer, self.pairs)

    def close(self) -> None:
        self.closed += 1


def margins(scorer, pairs: PreferenceDataset) -> np.ndarray:
    chosen = scorer.score([pair.prompt for pair in pairs], [pair.chosen for pair in pairs])
    return (chosen - scorer.score([pair.prompt for pair in pairs], [pair.rejected for pair in pairs])).numpy()


def step_of(version: str) -> int:
    run, step = version.split("-step-")
    assert len(run) == 8
    return int(step)


def evaluated_accuracy(run_dir: Path, version: str) -> float:
    """What the trainer found at that step itself."""
    folder = run_dir / "evaluations" / f"step-{step_of(version):08d}"
    return float(json.loads((folder / "metrics.json").read_text())["accuracy"]["value"])


def run_publishing(config: TrainConfig, recorder: Recorder) -> Path:
    recorder.pairs = load_data(config).val.pairs
    train_reward_model(config, callbacks=[PublishWeights(config.publish, lambda options: recorder)])
    return Path(config.output_dir)


@pytest.mark.slow
def test_accuracy_through_the_server_is_the_trainers_own_and_the_run_is_unchanged(base, tmp_path):
    renderer = BradleyTerryRM.from_pretrained(base).renderer  # which cuts what is too long as training does
    with serve_process(base) as server, RewardClient(server.url, renderer=renderer) as client:
        publish = [f"model.path={base}", f"publish.url={server.url}", "publish.every_n_steps=3"]
        config = options(tmp_path / "published", *publish)
        recorder = Recorder(lambda: open_publisher(config.publish), client)
        run_dir = run_publishing(config, recorder)
        assert client.version == list(recorder.margins)[-1]
    assert [step_of(version) for version in recorder.margins] == [3, 6]
    for version, found in recorder.margins.items():
        assert float((found > 0).mean()) == pytest.approx(evaluated_accuracy(run_dir, version), abs=1e-9)
    plain = train_reward_model(options(tmp_path / "plain", f"model.path={base}"))
    weights, same = load_file(Path(plain.export) / "model.safetensors"), load_file(run_dir / "best/model.safetensors")
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def courtesy(folder: Path) -> list[str]:
    """Options of data that a small model learns in a few steps: the courteous answer, never the rude one."""
    world = synthetic_world(SyntheticConfig(num_train=480, num_val=200))  # no prompt stands in both
    for name, pairs in (("train", world.train), ("val", world.val)):
        rows = (
            {
                "prompt": pair.prompt,
                "chosen": f"{COURTEOUS[number % len(COURTEOUS)]} {NEUTRAL[number % 2]}",
                "rejected": f"{RUDE[number % len(RUDE)]} {NEUTRAL[number % 2]}",
            }
            for number, pair in enumerate(pairs)
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.train={folder}/train.jsonl", f"data.val={folder}/val.jsonl"]


@pytest.mark.slow
def test_accuracy_through_the_server_rises_with_the_steps(base, tmp_path):
    renderer = BradleyTerryRM.from_pretrained(base).renderer
    with serve_process(base) as server, RewardClient(server.url, renderer=renderer) as client:
        publish = [f"publish.url={server.url}", "publish.every_n_steps=5", "training.evals_per_epoch=6"]
        config = options(tmp_path / "run", f"model.path={base}", *courtesy(tmp_path), *publish, "optimizer.lr=0.0005")
        recorder = Recorder(lambda: open_publisher(config.publish), client)
        run_dir = run_publishing(config, recorder)
    correct = {version: (found > 0).astype(float) for version, found in recorder.margins.items()}
    assert [step_of(version) for version in correct] == list(range(5, 31, 5))
    for version, found in correct.items():
        assert found.mean() == pytest.approx(evaluated_accuracy(run_dir, version), abs=1e-9)
    for earlier, later in itertools.pairwise(correct.values()):
        assert rise(earlier, later) > -3  # never falls by more than chance
    assert rise(next(iter(correct.values())), list(correct.values())[-1]) > 5


def rise(earlier: np.ndarray, later: np.ndarray) -> float:
    """How far the accuracy rose, in standard errors of the mean paired difference; 0 where no pair changed."""
    gained = later - earlier
    error = gained.std(ddof=1) / np.sqrt(len(gained))
    return float(gained.mean() / error) if error > 0 else 0.0


def test_what_is_published_is_what_is_evaluated_where_training_has_other_weights(base, tmp_path):
    recorder = Recorder()
    overrides = [f"model.path={base}", "optimizer=schedulefree", "publish.url=http://unused", "publish.every_n_steps=3"]
    run_dir = run_publishing(options(tmp_path / "run", *overrides, "schedule=constant"), recorder)
    for version, found in recorder.margins.items():
        assert float((found > 0).mean()) == pytest.approx(evaluated_accuracy(run_dir, version), abs=1e-9)
    assert recorder.closed == 2  # once before the run, once after it


def test_a_failure_ends_the_run_or_is_warned_of(base, tmp_path, caplog):
    recorder = Recorder()
    recorder.failure = PublishFailed("weights step-2 do not serve: the server's reason")
    overrides = [f"model.path={base}", "publish.url=http://unused", "publish.every_n_steps=2", "training.max_steps=2"]
    with pytest.raises(PublishFailed, match="the server's reason"):
        run_publishing(options(tmp_path / "error", *overrides), recorder)
    with caplog.at_level(logging.WARNING, logger="rm_optimizer"):
        run_publishing(options(tmp_path / "warn", *overrides, "publish.on_failure=warn"), recorder)
    assert "the server's reason; training continues" in caplog.text


def test_only_the_first_rank_connects():
    opened = []
    callback = PublishWeights(PublishConfig(url="http://server"), lambda options: opened.append(options))
    record = RunRecord(run_id="0" * 16, train_fingerprint="", val_fingerprint="", num_steps=1, options={})
    for is_first in (False, True):
        trainer = SimpleNamespace(is_global_zero=is_first, global_step=0)
        callback.on_train_start(trainer, SimpleNamespace(record=record))
        assert len(opened) == int(is_first)


def test_a_run_publishes_under_its_own_name_and_under_another_once_it_was_resumed():
    assert run_name("0123456789abcdef", 0) == "01234567"
    resumed = {run_name("0123456789abcdef", 50) for _ in range(8)}
    assert all(re.fullmatch(r"01234567-[0-9a-f]{4}", name) for name in resumed)
    assert len(resumed) > 1


def test_the_command_wires_the_publisher_where_it_is_asked_for(tmp_path):
    config = options(tmp_path, *BUILT)
    assert option_callbacks(config) == []
    config = replace(config, publish=PublishConfig(url="http://127.0.0.1:9"))
    [callback] = option_callbacks(config)
    assert isinstance(callback, PublishWeights)
    assert callback.open_publisher is open_publisher
    with pytest.raises(ConfigError, match=r"publish\.url needs a callback"):
        train_reward_model(config)


def test_a_server_that_is_not_there_is_known_before_training(monkeypatch):
    config = PublishConfig(url="http://127.0.0.1:9")
    monkeypatch.setattr("rm_optimizer.serving.weights.publisher.STARTING_SECONDS", 0.5)
    started = time.monotonic()
    with pytest.raises(PublishFailed, match=r"publish\.url: no server answers at http://127\.0\.0\.1:9"):
        open_publisher(config)
    assert time.monotonic() - started < 60
    with pytest.raises(ConfigError, match=r"publish\.url must be like"):
        open_publisher(replace(config, url="http://[::1"))
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY, which is not set"):
        open_publisher(replace(config, api_key_env="NO_SUCH_KEY"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["publish.mode=lora"], "but adapter=none"),
        (["publish.mode=head_only", "adapter=lora"], "omits adapter=lora"),
        (["publish.mode=head_only", "hardware.strategy=fsdp2"], "fsdp2 can publish only with"),
    ],
)
def test_a_mode_that_does_not_send_what_is_trained_is_refused(tmp_path, overrides, message):
    config = options(tmp_path, *BUILT, "publish.url=http://server", *overrides)
    with pytest.raises(ConfigError, match=message):
        train_reward_model(config, callbacks=option_callbacks(config))


def test_options_out_of_range_are_named():
    for values, option in (
        ({"url": "localhost:8000"}, "publish.url"),
        ({"every_n_steps": 0}, "publish.every_n_steps"),
        ({"timeout_seconds": 0.0}, "publish.timeout_seconds"),
    ):
        with pytest.raises(ConfigError, match=option):
            PublishConfig(**values)
    assert PublishConfig().on_failure is OnFailure.error
