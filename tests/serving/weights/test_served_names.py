from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.engine import StagedWeights, new_revision
from rm_optimizer.serving.update_protocol import TensorSpec
from rm_optimizer.serving.weights.receiver import KEPT_NAMES, ServedNames

FULL, HEAD = RewardModelTrainingMode.full, RewardModelTrainingMode.head_only


def update(version: str, mode=HEAD, **digits: str | None) -> StagedWeights:
    """An update whose tensors have these digests."""
    specs = tuple(
        TensorSpec(name=name, shape=[1], dtype="float32", sha256=digit and digit * 64) for name, digit in digits.items()
    )
    return StagedWeights(version, new_revision(), mode, Path("none"), specs)


class Served:
    """Names of a server, and the updates that it has taken."""

    def __init__(self, *committed: StagedWeights) -> None:
        description = SimpleNamespace(version="checkpoint")
        self.engine = SimpleNamespace(description=description, version="checkpoint", committed=[])
        self.names = ServedNames(self.engine)
        for weights in committed:
            self.add(weights)

    def add(self, weights: StagedWeights) -> None:
        self.engine.committed.append(weights)
        self.engine.version = weights.version
        self.names.note()

    def may_be(self, weights: StagedWeights) -> bool:
        return self.names.may_be(weights)


def test_a_name_may_come_again_for_the_same_weights_and_for_no_others():
    names = Served()
    names.add(update("a", FULL, body="1", head="1"))
    assert names.may_be(update("a", FULL, body="1", head="1"))
    assert not names.may_be(update("a", FULL, body="1", head="2"))
    assert not names.may_be(update("checkpoint", FULL, body="1", head="1"))
    assert names.may_be(update("b", FULL, body="2", head="2"))


def test_one_head_over_another_backbone_is_another_model():
    names = Served()
    names.add(update("a", FULL, body="1", head="1"))
    names.add(update("b", HEAD, head="2"))
    assert names.may_be(update("b", HEAD, head="2"))
    assert names.may_be(update("b", FULL, body="1", head="2"))
    names.add(update("c", FULL, body="3", head="3"))
    assert not names.may_be(update("b", HEAD, head="2"))


def test_a_sender_without_digests_may_use_a_name_once():
    names = Served()
    names.add(update("a", FULL, body=None, head="1"))
    assert not names.may_be(update("a", FULL, body=None, head="1"))
    assert names.may_be(update("b", FULL, body=None, head="1"))


def test_a_restarted_server_knows_the_names_of_what_it_serves_again():
    names = Served(update("a", FULL, body="1", head="1"), update("b", HEAD, head="2"))
    names.names = ServedNames(names.engine)
    assert names.may_be(update("b", HEAD, head="2"))
    assert not names.may_be(update("b", HEAD, head="3"))


def test_names_are_not_kept_for_ever():
    names = Served()
    for number in range(KEPT_NAMES + 5):
        names.engine.version = f"v{number}"
        names.names.note()
    assert len(names.names._contents) == KEPT_NAMES


def test_revisions_rise_whatever_the_clock_says():
    ahead = new_revision() + 10**9
    assert new_revision(ahead) == ahead + 1
    assert new_revision(new_revision()) > new_revision() - 1000
