"""Continue a run where its newest whole checkpoint left it, to the same bytes as if it had never stopped."""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import distributed

from rm_optimizer.records.randomness import random_state, set_random_state
from rm_optimizer.records.run_folder import RunFolder

log = logging.getLogger("rm_optimizer")


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest periodic checkpoint that is whole; a torn one is skipped with a warning for the one before."""
    for step, path in reversed(RunFolder(run_dir).checkpoints.items()):
        if damage := _damage(path):
            log.warning("skipping the damaged checkpoint %s (%s)", path, damage)
            continue
        log.info("resuming after step %d from %s", step, path)
        return path
    return None


def _damage(path: Path) -> str | None:
    """Defect of a checkpoint file, by the checksums of its zip archive; None if there is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        return str(error)
    return f"checksum of {broken} does not match" if broken else None


def random_states() -> list[dict[str, Any]]:
    """Return the `random_state` of each rank, in their order; every rank must take part."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return [random_state()]
    states: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(states, random_state())
    return states


def set_random_states(states: Sequence[Mapping[str, Any]]) -> None:
    """Put this rank's generators back to the state that `random_states` gave for it."""
    is_alone = not (distributed.is_available() and distributed.is_initialized())
    set_random_state(states[0 if is_alone else distributed.get_rank()])
