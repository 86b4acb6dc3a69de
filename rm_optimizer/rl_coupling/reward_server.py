"""Client of a reward server after a check that the server has a model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import ConfigError
from rm_optimizer.serving.client.client import RewardClient

CONTACT_SECONDS = 3.0
"""Seconds in which a reward server must answer before the first prompt."""
PROBE_TOLERANCE = 0.02
"""Largest difference of a served reward from the model's own that counts as rounding, relative to rewards above 1."""


@contextmanager
def serving(server: str, model: BradleyTerryRM, checkpoint: str, *, option: str) -> Iterator[RewardClient]:
    """Open a client of a server, after a check of one reward that it serves the model.

    Args:
        server: address, such as http://127.0.0.1:8000.
        model: the model in this process.
        checkpoint: path or name of the model, for error messages.
        option: name of the server's option, for error messages.

    Raises:
        ConfigError: if the server has other weights.
        RewardServerUnavailable: if it does not answer.
    """
    RewardClient(server, renderer=model.renderer, timeout_seconds=CONTACT_SECONDS).close()
    with RewardClient(server, renderer=model.renderer) as client:
        served, own = (float(scorer.score(["Hi."], ["Hello."])[0]) for scorer in (client, model))
        if not abs(served - own) <= PROBE_TOLERANCE * max(1.0, abs(own)):
            raise ConfigError(
                f"{option} {server} has other weights than {checkpoint}: it gives {served:.4f} where that gives "
                f"{own:.4f}; serve {checkpoint}, or name the model that is served"
            )
        yield client
