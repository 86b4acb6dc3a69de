"""Saved members of an ensemble, loaded on use and kept within a memory budget; shared weights are kept once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.model.shared_backbone import SharedBackbone, adapter_key
from rm_optimizer.records.locations import SourceKind, resolve_source


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
        self._places: dict[str, tuple[SharedBackbone, int]] = {}
        self._of_key: dict[str, SharedBackbone] = {}

    def model(self, source: str) -> BradleyTerryRM:
        """The member with this path or hub id.

        Raises:
            CheckpointError: if it cannot be loaded.
        """
        if source not in self._places:
            backbone, number = self._places[source] = self._placed(source)
            # a backbone that is new or has grown is kept, if it fits the budget
            others = [other for other in self._kept if other is not backbone]
            total = sum(each.num_bytes for each in [*others, backbone])
            if self._memory_bytes is None or total <= self._memory_bytes:
                self._kept = [*others, backbone]
                self._passing = None if self._passing is backbone else self._passing
            else:
                self._kept, self._passing = others, backbone
        backbone, number = self._places[source]
        return backbone.use(number)

    def release(self) -> None:
        """Free the weights that exceed the memory budget."""
        passing, self._passing = self._passing, None
        self._places = {source: place for source, place in self._places.items() if place[0] is not passing}
        self._of_key = {key: backbone for key, backbone in self._of_key.items() if backbone is not passing}

    def _placed(self, source: str) -> tuple[SharedBackbone, int]:
        """The member's backbone, and the member's number on it."""
        found = resolve_source(source)
        folder = Path(found.location) if found.kind is SourceKind.ADAPTER else None
        key = None if folder is None else adapter_key(folder)
        if folder is not None and key in self._of_key:
            return self._of_key[key], self._of_key[key].add_adapter(folder)
        self.release()
        model = self._load(source)
        for backbone in self._kept:
            if (number := backbone.add(model)) is not None:
                return backbone, number
        backbone = SharedBackbone(model)
        if key is not None:
            self._of_key[key] = backbone
        return backbone, 0
