"""Saved members of an ensemble, loaded on use and kept within a memory budget; shared weights are kept once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.model.shared_backbone import SharedBackbone, adapter_key
from rm_optimizer.records.locations import SourceKind, resolve_source


@dataclass(frozen=True)
class _Place:
    """A member's backbone, and the member's number on it."""

    backbone: SharedBackbone
    number: int


class SavedMembers:
    """Models by their paths. A returned model is valid until the next one is requested.

    Adapters on the same base load the base once. Other models are compared when they are loaded. If they differ in few
    tensors, such as their heads, only these tensors are kept for each.

    Args:
        load: loader of a saved model.
        memory_bytes: bytes of weights to keep in memory; None keeps all.
    """

    def __init__(self, load: Callable[[str], BradleyTerryRM], memory_bytes: int | None) -> None:
        self._load = load
        self._memory_bytes = memory_bytes
        self._kept: list[SharedBackbone] = []
        self._passing: SharedBackbone | None = None
        self._places: dict[str, _Place] = {}
        self._of_key: dict[str, SharedBackbone] = {}

    def model(self, source: str) -> BradleyTerryRM:
        """The member with this path or hub id.

        Raises:
            CheckpointError: if it cannot be loaded.
        """
        if source not in self._places:
            self._places[source] = place = self._placed(source)
            self._settle(place.backbone)
        place = self._places[source]
        return place.backbone.use(place.number)

    def release(self) -> None:
        """Free the weights that exceed the memory budget."""
        passing, self._passing = self._passing, None
        self._places = {source: place for source, place in self._places.items() if place.backbone is not passing}
        self._of_key = {key: backbone for key, backbone in self._of_key.items() if backbone is not passing}

    def _placed(self, source: str) -> _Place:
        found = resolve_source(source)
        folder = Path(found.location) if found.kind is SourceKind.ADAPTER else None
        key = None if folder is None else adapter_key(folder)
        if folder is not None and key in self._of_key:
            return _Place(self._of_key[key], self._of_key[key].add_adapter(folder))
        self.release()
        model = self._load(source)
        for backbone in self._kept:
            if (number := backbone.add(model)) is not None:
                return _Place(backbone, number)
        backbone = SharedBackbone(model)
        if key is not None:
            self._of_key[key] = backbone
        return _Place(backbone, 0)

    def _settle(self, grown: SharedBackbone) -> None:
        """Keep a backbone that is new or has grown, if it fits the budget."""
        others = [backbone for backbone in self._kept if backbone is not grown]
        total = sum(backbone.num_bytes for backbone in [*others, grown])
        fits = self._memory_bytes is None or total <= self._memory_bytes
        self._kept, self._passing = ([*others, grown], self._passing) if fits else (others, grown)
        if self._passing is grown and fits:
            self._passing = None
