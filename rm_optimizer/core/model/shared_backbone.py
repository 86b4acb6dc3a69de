"""Reward models that differ in few tensors, such as adapters or heads, with one copy of all others in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rm_optimizer.core.model.identity import reading_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.core.storage.adapter_files import adapter_tensors
from rm_optimizer.core.storage.certificate import ParityCertificate
from rm_optimizer.core.storage.model_files import read_record, require_exported_weights
from rm_optimizer.errors import CheckpointError
from rm_optimizer.records.codec import from_values
from rm_optimizer.records.locations import ADAPTER_FILE

MOST_OWN_SHARE = 0.5
"""Largest share of a model's bytes that a further model may not share; above it, sharing saves nothing."""


class SharedBackbone:
    """Model in memory that becomes any one of several by exchanging the tensors that differ between them.

    Args:
        model: the first model, whose tensors are exchanged in place.
    """

    def __init__(self, model: BradleyTerryRM) -> None:
        self._model = model
        self._first: dict[str, Tensor] = {}
        self._own: list[dict[str, Tensor]] = [{}]

    @property
    def num_bytes(self) -> int:
        """Bytes of the model and of the other models' own tensors."""
        beside = (tensors.values() for tensors in (self._first, *self._own))
        return sum(tensor.nbytes for tensor in chain(self._model.parameters(), *beside))

    def use(self, number: int) -> BradleyTerryRM:
        """Make the model the one of this number, from 0, and return it; earlier results of `use` change with it."""
        wanted, state = self._first | self._own[number], self._model.model.state_dict()
        with torch.no_grad():
            for name, value in wanted.items():
                state[name].copy_(value)
        return self._model

    def add(self, model: BradleyTerryRM) -> int | None:
        """Add a further model and return its number; None if its rendering or too many weights differ.

        The memory of the added model may be freed afterwards.
        """
        if reading_digest(model) != reading_digest(self._model):
            return None
        state, other = self.use(0).model.state_dict(), model.model.state_dict()
        if {name: value.shape for name, value in state.items()} != {name: v.shape for name, v in other.items()}:
            return None
        own = {name: value for name, value in other.items() if not torch.equal(value, state[name])}
        if sum(value.nbytes for value in own.values()) > MOST_OWN_SHARE * sum(value.nbytes for value in state.values()):
            return None
        return self._add({name: value.detach().clone() for name, value in own.items()})

    def add_adapter(self, folder: Path) -> int:
        """Number of a further adapter on the same base, read from its folder; see `adapter_key`.

        Raises:
            CheckpointError: if it does not fit the base, or changed since it was exported.
        """
        record = read_record(folder)
        require_exported_weights(folder, record)
        certificate = from_values(ParityCertificate, record["certificate"])
        number = self._add(adapter_tensors(self._model.model, folder))
        try:
            self.use(number).require_certified(certificate, folder)
        except CheckpointError:
            self._own.pop()
            raise
        return number

    def _add(self, own: Mapping[str, Tensor]) -> int:
        state = self.use(0).model.state_dict()
        self._first |= {name: state[name].detach().clone() for name in own.keys() - self._first.keys()}
        self._own.append({name: value.to(state[name].device) for name, value in own.items()})
        return len(self._own) - 1


def adapter_key(folder: Path) -> str | None:
    """Digest of an adapter's base, configuration and rendering; adapters with the same digest can share a base.

    None if the folder has no `export.json` that records them.
    """
    record = read_record(folder)
    if "base" not in record:
        return None
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{folder / ADAPTER_FILE} is damaged; export the adapter again") from error
    for name, value in config.items():
        config[name] = sorted(value) if isinstance(value, list) and all(isinstance(v, str) for v in value) else value
    identity = record["identity"]
    return digest([config, record["base"], record.get("dtype"), identity["template"], identity["pad_token"]])
