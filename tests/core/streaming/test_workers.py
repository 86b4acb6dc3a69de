"""Chunks on Ray Data: read as needed, in order, after the death of a worker, and with errors in their place."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rm_optimizer.core.streaming import workers
from rm_optimizer.core.streaming.workers import TokenizerPool, connected_ray, load_ray, map_chunks
from rm_optimizer.errors import CheckpointError, ConfigError, DataError, MissingExtra, RMOptimizerError

BYTES = 8 * 2**20
NUM_CHUNKS = 40


@dataclass(frozen=True)
class Numbers:
    """Large chunks with a number each; the reader notes every chunk that it begins."""

    folder: Path

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for number in range(NUM_CHUNKS):
            (self.folder / f"read-{number}").touch()
            yield number, bytes(BYTES)


def computed(folder: Path, chunk: tuple[int, bytes]) -> int:
    number, content = chunk
    died = folder / "died"
    if number == 15 and not died.exists():
        died.touch()
        os._exit(1)
    if number == -1:
        os._exit(1)
    if number == -2:
        raise ValueError("chunk -2 is no chunk")
    if number == 30:
        raise CheckpointError("chunk 30 is bad")
    time.sleep(0.1 if number % 3 else 0.3)  # later chunks end before earlier ones
    return number + len(content)


@dataclass(frozen=True)
class BadRow:
    """Chunks of a file with a bad row."""

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        yield 1, b""
        raise DataError("row 2 is bad; repair it")


def num_actors() -> int:
    names = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            names.append(child.name())
    return sum(name.startswith("ray::MapWorker") for name in names)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # options that Ray Data itself sets
def test_chunks_are_read_as_needed_and_return_in_order_although_a_worker_dies(tmp_path, capfd):
    ray = connected_ray(object_store_memory=160 * 2**20, num_cpus=1)
    found = []
    try:
        results = map_chunks(computed, tmp_path, Numbers(tmp_path), 2)
        found.append(next(results))
        num_read, printed = len([*tmp_path.glob("read-*")]), "".join(capfd.readouterr())
        with pytest.raises(CheckpointError, match="chunk 30 is bad"):
            found.extend(results)
        early = map_chunks(computed, tmp_path, [(1, b""), (2, b"")] * 20, 1)
        assert next(early) == 1
        assert num_actors() >= 1
        early.close()
        deadline = time.monotonic() + 20
        while num_actors() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not num_actors()
        assert [*map_chunks(computed, tmp_path, [], 1)] == []
        before = map_chunks(computed, tmp_path, BadRow(), 1)
        assert next(before) == 1, "what was read before the bad row is used"
        with pytest.raises(DataError, match=r"^row 2 is bad; repair it$"):
            next(before)
        with pytest.raises(ValueError, match=r"^chunk -2 is no chunk$"):
            [*map_chunks(computed, tmp_path, [(-2, b"")], 1)]
        with pytest.raises(RMOptimizerError, match="3 workers died on one chunk"):
            [*map_chunks(computed, tmp_path, [(-1, b"")], 1)]
    finally:
        ray.shutdown()
    assert found == [number + BYTES for number in range(30)]
    assert num_read < NUM_CHUNKS / 2
    assert printed == "", "Ray Data writes to its own logs"
    assert (tmp_path / "died").exists()


def test_more_workers_than_cores_or_gpus_are_refused_by_the_option(monkeypatch):
    cores = SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: {"CPU": 2.0})
    gpus = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0, "GPU": 2.0})
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for ray, unit in ((cores, "cores"), (gpus, "GPUs")):
        monkeypatch.setattr(workers, "connected_ray", lambda ray=ray, **options: ray)
        with pytest.raises(ConfigError, match=rf"--ray .* must be at most 2, the {unit} that Ray has, got 3"):
            next(map_chunks(computed, 10, [1], 3))
    monkeypatch.setattr(workers, "load_ray", lambda: cores)
    with pytest.raises(ConfigError, match=r"data\.num_workers must be at most 2, the cores that Ray has, got 3"):
        TokenizerPool(SimpleNamespace(), num_workers=3, store_mb=100, fetch_timeout=1.0)


def test_the_pandas_of_ray_data_is_named_with_its_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray.data", raising=False)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"pandas is not installed; pip install 'rm-optimizer\[ray\]'") as missing:
        load_ray("ray.data")
    assert str(pickle.loads(pickle.dumps(missing.value))) == str(missing.value), "it may come from a worker"
