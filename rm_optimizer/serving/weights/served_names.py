"""Names that weights of a server have had: one that is used twice must mean the same weights."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict

from rm_optimizer.serving.engine import Engine, StagedWeights
from rm_optimizer.serving.protocol import Begin, RewardModelTrainingMode

KEPT_NAMES = 10_000
"""Names that are remembered; answers are told apart by their revision, however old a name is."""


class ServedNames:
    """Contents of the served model, as digests, by the name under which each served.

    Args:
        engine: serves the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._contents: OrderedDict[str, str | None] = OrderedDict()

    def may_be(self, update: Begin | StagedWeights) -> bool:
        """Whether the update's name is new, or stood for just what the update would make of the model."""
        self.note()
        if update.version not in self._contents:
            return True
        content = _content(self._engine, update)
        return content is not None and content == self._contents[update.version]

    def note(self) -> None:
        """Record the name of what serves now, and the checkpoint's own."""
        self._contents.setdefault(self._engine.description.version, self._engine.description.version)
        self._contents.setdefault(self._engine.version, _content(self._engine))
        while len(self._contents) > KEPT_NAMES:
            self._contents.popitem(last=False)


def _content(engine: Engine, *updates: Begin | StagedWeights) -> str | None:
    """One digest of the model with further updates; None where a sender gave none of a tensor."""
    digests: dict[str, str | None] = {"": engine.description.version}  # of all that no update replaces
    for update in (*engine.committed, *updates):
        kept = {} if update.mode is RewardModelTrainingMode.full else digests
        digests = kept | {spec.name: spec.sha256 and f"{spec.dtype} {spec.sha256}" for spec in update.tensors}
    if None in digests.values():
        return None
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
