"""Shared test set-up: one thread, no network, shapes checked at run time."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
# Each HTTP client reads all certificates of a file at its start; of a folder it reads those that it is shown.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.path.dirname(__file__)

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import composed_once, fork_server, runtime_types

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on two busy cores
settings.load_profile("busy")
runtime_types.install()
composed_once.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with most slow tests first, so that none of them is left to one worker at the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_sessionfinish() -> None:
    fork_server.running.close()


@pytest.fixture(scope="session")
def python() -> Path:
    """A `python` with an `rm-opt` beside it; on Linux they start with torch and Lightning imported."""
    return fork_server.forking_python()


@pytest.fixture
def forked_workers(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that `multiprocessing` spawns are forked with their imports done."""
    monkeypatch.setattr("multiprocessing.spawn._python_exe", os.fsencode(python))
