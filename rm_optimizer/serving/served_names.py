"""Names that weights of a server have had: one that is used twice must mean the same weights."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from rm_optimizer.serving.engine import StagedWeights
from rm_optimizer.serving.protocol import Begin, RewardModelTrainingMode, TensorSpec

KEPT_NAMES = 10_000
"""Names that are remembered; answers are told apart by their revision, however old a name is."""


class ServedNames:
    """The contents of the served model, tensor by tensor, and the names that contents had.

    Args:
        checkpoint: version of the checkpoint's own weights.
        committed: updates on top of it, oldest first.
    """

    def __init__(self, checkpoint: str, committed: Sequence[StagedWeights]) -> None:
        self._digests: dict[str, str | None] = {"": checkpoint}  # of what no update has replaced
        self._contents: OrderedDict[str, str | None] = OrderedDict({checkpoint: _content(self._digests)})
        for weights in committed:
            self.add(weights)

    def may_be(self, update: Begin | StagedWeights) -> bool:
        """Whether the update's name is new, or stood for just what the update would make of the model."""
        if update.version not in self._contents:
            return True
        content = _content(self._after(update))
        return content is not None and content == self._contents[update.version]

    def add(self, update: Begin | StagedWeights) -> None:
        """Record an update that serves now."""
        self._digests = self._after(update)
        self._contents[update.version] = _content(self._digests)
        while len(self._contents) > KEPT_NAMES:
            self._contents.popitem(last=False)

    def _after(self, update: Begin | StagedWeights) -> dict[str, str | None]:
        kept = {} if update.mode is RewardModelTrainingMode.full else self._digests
        return {**kept, **_tensor_digests(update.tensors)}


def _tensor_digests(specs: Sequence[TensorSpec]) -> dict[str, str | None]:
    return {spec.name: spec.sha256 and f"{spec.dtype}{spec.shape}{spec.sha256}" for spec in specs}


def _content(digests: Mapping[str, str | None]) -> str | None:
    """One digest of all; None where a sender gave none of a tensor, so that nothing can be said to equal it."""
    if None in digests.values():
        return None
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
