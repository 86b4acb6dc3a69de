from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.schema.data import SyntheticConfig
from tests.serving.engines import exported

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))  # it imports its neighbors
        yield importlib.import_module("serving_training")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Options that name training and held-out pairs, half of them of the kind `a`."""
    world = synthetic_world(SyntheticConfig(num_train=160, num_val=40))
    for name, pairs in (("pairs", world.train), ("val", world.val)):
        rows = (pair.to_dict() | {"kind": "ab"[number % 2]} for number, pair in enumerate(pairs))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--pairs", str(tmp_path / "pairs.jsonl"), "--val", str(tmp_path / "val.jsonl")]


def test_pairs_of_one_kind_are_taken_and_moved_ones_leave_no_prompt_behind(
    bench: ModuleType, files: list[str], tmp_path: Path
):
    args = bench.options([*files, "--model", "unused", "--only", "kind=a", "--move", "30"])
    train, val = bench.split(args, tmp_path)
    assert {pair.metadata["kind"] for pair in (*train.pairs, *val.pairs)} == {"a"}
    assert 40 <= len(val) <= 20 + 30
    assert len(train) + len(val) <= 80 + 20
    assert not {pair.prompt_id for pair in train.pairs} & {pair.prompt_id for pair in val.pairs}


@pytest.mark.slow
def test_what_the_server_answers_at_every_version_is_what_the_trainer_evaluated(
    bench: ModuleType,
    files: list[str],
    tmp_path: Path,
    python: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    server = bench.server
    monkeypatch.setattr(bench, "server", lambda engine, _, *folders: server(engine, str(python), *folders))
    exported("bert", tmp_path / "model")
    sizes = ["--epochs", "2", "--versions", "1", "--batch-size", "8", "--max-length", "64", "--lr", "0.001"]
    bench.main([*files, "--model", str(tmp_path / "model"), *sizes])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.strip()[:1].isdigit()][1:] == ["0", "20", "40"]
    found = {name: float(value) for name, _, value in (line.partition(": ") for line in lines[-11:])}
    assert found["largest_accuracy_gap"] == 0
    assert 0 <= found["largest_reward_gap"] < 1e-4
    assert found["accuracy_rise"] == pytest.approx(found["accuracy_last"] - found["accuracy_first"], abs=2e-4)
    assert found["accuracy_rise_low"] <= found["accuracy_rise"] <= found["accuracy_rise_high"]
