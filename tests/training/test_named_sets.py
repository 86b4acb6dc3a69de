"""Validation sets with names of their own: metrics of each, any of which may be monitored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rm_optimizer.core.pairs.sources import parse_sources
from rm_optimizer.errors import ConfigError
from rm_optimizer.schema import DataConfig, TrainConfig
from rm_optimizer.training import train_reward_model

Build = Callable[..., TrainConfig]


def written(path: Path, numbers: range) -> Path:
    texts = [{"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": f"No {n}"} for n in numbers]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row | {"source": f"web {numbers.start}"}) + "\n" for row in texts))
    return path


def test_each_named_set_has_all_metrics_and_one_of_them_selects_the_weights(small_config: Build, tmp_path: Path):
    train = written(tmp_path / "train.jsonl", range(40))
    chats, code = written(tmp_path / "a/val.jsonl", range(40, 52)), written(tmp_path / "b/val.jsonl", range(52, 61))
    config = small_config(
        tmp_path / "run",
        f"data.train={train}",
        f"data.val={{chats: {chats}, code: {{path: {code}, label: 0.9}}}}",
        "training.monitor=val/source/code/nll",
    )
    result = train_reward_model(config)
    groups = result.metrics.groups
    assert {name: found.num_pairs for name, found in groups["source"].items()} == {"chats": 12, "code": 9}
    assert set(groups["subset"]) == {"chats / web 40", "code / web 52"}
    nll = {}
    for file in (tmp_path / "run/evaluations").glob("step-*/metrics.json"):
        found = json.loads(file.read_text())
        nll[int(file.parent.name[5:])] = found["groups"]["source"]["code"]["nll"]["value"]
    assert len(nll) > 2
    assert result.best_step == min(nll, key=lambda step: (nll[step], step))
    assert (
        groups["source"]["code"].flat().items()
        <= {name.removeprefix("source/code/"): value for name, value in result.metrics.flat().items()}.items()
    )


def test_names_are_those_of_the_sources():
    named = DataConfig(train={"a": "x.csv", 7: {"path": "y.csv", "weight": 2}}).train
    assert named == [{"path": "x.csv", "name": "a"}, {"path": "y.csv", "weight": 2, "name": "7"}]
    assert DataConfig(train=named).train == named
    assert [source.name for source in parse_sources(named, DataConfig())] == ["a", "7"]
    assert DataConfig(train={"path": "x.csv"}).train == {"path": "x.csv"}


@pytest.mark.parametrize("sets", [{"a": None}, {"a": {"weight": 2}}, {"pth": "x.csv", "weight": 2}])
def test_a_set_without_a_path_is_refused(sets: dict[str, object]):
    with pytest.raises(ConfigError, match="a data source must be a path"):
        parse_sources(DataConfig(val=sets).val, DataConfig())
