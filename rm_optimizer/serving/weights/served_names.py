"""Version names used on a server: a repeated name must denote the same weights."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict

from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.engine import Engine, StagedWeights
from rm_optimizer.serving.update_protocol import Begin

KEPT_NAMES = 10_000
"""Most names kept; answers of older names are still distinguished by their revision."""


class ServedNames:
    """Digests of the served weights by version name."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._contents: OrderedDict[str, str | None] = OrderedDict()

    def may_be(self, update: Begin | StagedWeights) -> bool:
        """True if the update's name is new, or was used for the same resulting weights."""
        self.note()
        if update.version not in self._contents:
            return True
        content = _content(self._engine, update)
        return content is not None and content == self._contents[update.version]

    def note(self) -> None:
        """Record the names of the served weights and of the checkpoint's own."""
        self._contents.setdefault(self._engine.description.version, self._engine.description.version)
        self._contents.setdefault(self._engine.version, _content(self._engine))
        while len(self._contents) > KEPT_NAMES:
            self._contents.popitem(last=False)


def _content(engine: Engine, *updates: Begin | StagedWeights) -> str | None:
    """Digest of the model with further updates; None if a sender omitted a tensor's digest."""
    digests: dict[str, str | None] = {"": engine.description.version}  # digest of the tensors that no update replaces
    for update in (*engine.committed, *updates):
        kept = {} if update.mode is RewardModelTrainingMode.full else digests
        digests = kept | {spec.name: spec.sha256 and f"{spec.dtype} {spec.sha256}" for spec in update.tensors}
    if None in digests.values():
        return None
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
