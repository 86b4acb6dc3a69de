"""Weights published to several servers at once: all of them get them with one number, or none."""

from __future__ import annotations

from contextlib import ExitStack

import httpx
import pytest
import torch

from rm_optimizer.errors import ConfigError, PublishFailed, WeightsRefused
from rm_optimizer.serving.client.client import RewardClient
from rm_optimizer.serving.weights.publisher import create_rm_publisher
from tests.serving.engines import InProcessEngine, exported, options_of
from tests.serving.running import engine_running
from tests.serving.test_weight_sync import PROMPTS, RESPONSES
from tests.serving.trained import moved


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """The addresses of two servers, their engines, and a model like the one they serve."""
    folder = tmp_path_factory.mktemp("several")
    model = exported("llama", folder / "export")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                engine_running(lambda place=place: InProcessEngine(options_of(folder / "export", folder / str(place))))
            )
            for place in range(2)
        ]
        yield servers, model


def served(server) -> tuple[str, int]:
    answer = httpx.get(f"{server.url}/version").json()
    return answer["version"], answer["revision"]


def test_two_servers_of_one_checkpoint_have_one_revision_and_swap_together(fleet):
    servers, model = fleet
    urls = ",".join(server.url for server in servers)
    assert served(servers[0]) == served(servers[1])
    new = moved(model, 1)
    with create_rm_publisher(urls) as publisher, RewardClient(urls) as client:
        outcome = publisher.publish(new, "both")
        assert served(servers[0]) == served(servers[1]) == (outcome.version, outcome.revision)
        scored = client.score_versioned(PROMPTS * 8, RESPONSES * 8)
        assert scored.weights == (outcome.version, outcome.revision)
        torch.testing.assert_close(
            torch.tensor(scored.rewards), new.score(PROMPTS, RESPONSES).repeat(8), atol=1e-4, rtol=0
        )


def test_what_one_server_refuses_none_serves(fleet):
    servers, model = fleet
    before = served(servers[0])
    with create_rm_publisher(",".join(server.url for server in servers), timeout_seconds=20.0) as publisher:
        publisher.publish(moved(model, 2), "sound")
        now = served(servers[0])
        assert now != before
        real, servers[1].engine.stage = servers[1].engine.stage, refusing
        with pytest.raises(PublishFailed, match=f"weights half do not serve at {servers[1].url}: no room"):
            publisher.publish(moved(model, 3), "half")
        servers[1].engine.stage = real
        assert served(servers[0]) == served(servers[1]) == now
        assert publisher.publish(moved(model, 3), "half").version == "half"


async def refusing(weights) -> None:
    raise WeightsRefused("no room")


def test_an_address_among_several_that_is_none_is_refused_by_name():
    with pytest.raises(ConfigError, match="got 'ftp://b'"):
        create_rm_publisher("http://a,ftp://b")
