"""Serving and credit as the documents call them: client, wire types, publisher and rollouts, on a model from config."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import torch
from pydantic import ValidationError

from rm_optimizer import (
    AsyncRewardClient,
    RewardClient,
    RewardModelCreditAssigner,
    RewardModelScorer,
    RewardModelTrainingMode,
    RMPublisherAdapter,
    create_rm_publisher,
    trl_reward,
)
from rm_optimizer.errors import ConfigError
from rm_optimizer.serving import ScoringRequest, ScoringResponse
from rm_optimizer.serving.protocol import sigmoid
from tests.rl_coupling.rollouts import episode
from tests.serving.engines import InProcessEngine, exported, options_of
from tests.serving.running import engine_running
from tests.serving.trained import moved

PROMPT, GOOD, BAD = "Explain chess.", "Start with the pawns.", "No."


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model = exported("llama", folder / "export")
    engine = lambda: InProcessEngine(options_of(folder / "export", folder / "tokenizer"))  # noqa: E731
    with engine_running(engine) as server:
        server.model = model
        yield server


@pytest.fixture
def client(served):
    with RewardClient(served.url) as opened:
        yield opened


def test_one_text_has_one_reward_and_lists_have_lists(served, client):
    expected = served.model.score([PROMPT, PROMPT], [GOOD, BAD])
    one = client.score(PROMPT, GOOD)
    assert one.shape == ()
    assert float(one) == pytest.approx(float(expected[0]), abs=1e-4)
    for prompts, responses in (
        (PROMPT, [GOOD, BAD]),
        ([PROMPT, PROMPT], (GOOD, BAD)),
        (PROMPT, (text for text in (GOOD, BAD))),
        ([{"role": "user", "content": PROMPT}], [GOOD, BAD]),
    ):
        assert client.score(prompts, responses).tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert client.score([PROMPT], [GOOD]).shape == (1,)
    assert client.score_pair(PROMPT, GOOD, BAD) == pytest.approx(float(expected[0] - expected[1]), abs=1e-4)
    assert client.score_versioned(PROMPT, GOOD).rewards == pytest.approx([float(one)], abs=1e-5)  # with a kept start
    groups = client.score_groups([PROMPT, "Hi"], [[GOOD, BAD], ["Hello!"]])
    assert [len(group) for group in groups] == [2, 1]


@pytest.mark.parametrize("responses", [b"No.", {"a": "b"}, 3, [GOOD, 3]])
def test_what_is_no_text_is_one_sentence_with_the_arguments_name(client, responses):
    with pytest.raises(TypeError, match="responses"):
        client.score(PROMPT, responses)


@pytest.mark.parametrize("make", [RewardClient, AsyncRewardClient, create_rm_publisher])
@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "http://[::1", 8000])
def test_an_address_of_another_form_is_one_sentence(make, url):
    with pytest.raises(ConfigError, match=r"url must be like http://127\.0\.0\.1:8000, got"):
        make(url)


def test_a_client_shows_its_address_and_never_its_key(served):
    assert repr(AsyncRewardClient(served.url, api_key="secret")) == f"AsyncRewardClient('{served.url}')"


def test_trls_reward_function_takes_lists_alone(client):
    reward = trl_reward(client)
    assert reward(prompts=[PROMPT], completions=[GOOD]) == pytest.approx([float(client.score(PROMPT, GOOD))], abs=1e-5)
    with pytest.raises(TypeError, match="completions must be a list"):
        reward(prompts=[PROMPT], completions=GOOD)


def test_an_asynchronous_client_scores_many_texts_over_one_session(served):
    async def main() -> list[torch.Tensor]:
        async with AsyncRewardClient(served.url) as asynchronous:
            rewards = await asyncio.gather(*(asynchronous.score(PROMPT, text) for text in (GOOD, BAD)))
            assert len(asynchronous._sessions) == 1
            return rewards

    rewards = asyncio.run(main())
    assert torch.stack(rewards).tolist() == pytest.approx(
        served.model.score([PROMPT, PROMPT], [GOOD, BAD]).tolist(), abs=1e-4
    )


def test_the_wire_types_are_the_servers_and_a_request_cannot_be_changed(served):
    request = ScoringRequest.model_validate({"items": [{"prompt": PROMPT, "responses": [GOOD, BAD]}]})
    with pytest.raises(ValidationError, match="frozen"):
        request.use_activation = True
    answer = httpx.post(f"{served.url}/rm/score", json=request.model_dump())
    found = ScoringResponse.model_validate(answer.json())
    assert found.rewards[0] == pytest.approx(served.model.score([PROMPT] * 2, [GOOD, BAD]).tolist(), abs=1e-4)
    assert found.rm_version == served.engine.version


def test_an_activation_is_one_sigmoid_and_only_where_it_is_asked_for(served):
    items = [{"prompt": PROMPT, "responses": [GOOD]}]
    raw, squashed = (
        httpx.post(f"{served.url}/rm/score", json={"items": items, "use_activation": wanted}).json()["rewards"][0][0]
        for wanted in (False, True)
    )
    assert squashed == pytest.approx(1 / (1 + pow(2.718281828459045, -raw)))
    assert sigmoid(2.0) == pytest.approx(0.88, abs=1e-3)


def test_a_publisher_of_each_mode_sends_the_tensors_of_that_mode_and_waits_for_no_fixed_time(served):
    assert [mode.value for mode in RewardModelTrainingMode] == ["full", "head_only", "lora"]
    with create_rm_publisher(served.url, mode="head_only") as publisher:
        assert isinstance(publisher, RMPublisherAdapter)
        head = moved(served.model, 3, head_only=True)
        assert publisher.publish(head, "head").version == "head"
    with RewardClient(served.url) as client:
        assert client.version == "head"
        assert float(client.score(PROMPT, GOOD)) == pytest.approx(float(head.score([PROMPT], [GOOD])[0]), abs=1e-4)
    with RMPublisherAdapter(served.url, mode=RewardModelTrainingMode.full) as publisher:
        assert publisher.publish(served.model, "back").version == "back"
    for options, message in (({"mode": "ful"}, "did you mean 'full'"), ({"transport": "glo"}, "did you mean 'gloo'")):
        with pytest.raises(ConfigError, match=message):
            RMPublisherAdapter(served.url, **options)


@pytest.mark.parametrize(
    ("mode", "weight", "combined"),
    [("replace", 0.5, 2.0), ("add", 0.5, 3.0), ("multiply", 0.5, 2.0), ("weighted", 0.25, 1.25), ("bonus", 0.1, 1.2)],
)
def test_credit_combines_the_models_score_with_the_reward_of_a_rollout(mode, weight, combined):
    rollout = episode("r0", (PROMPT, GOOD), rewards=[1.0])
    rollout.meta["rm_score"] = 2.0
    credit = RewardModelCreditAssigner(mode, weight=weight).compute([rollout])
    assert list(credit.values()) == pytest.approx([combined])


def test_a_rollout_without_a_score_is_an_error_and_one_scored_by_a_client_has_credit(served, client):
    rollout = episode("r0", (PROMPT, GOOD))
    with pytest.raises(ValueError, match="rollout r0 has no score under 'rm_score'"):
        RewardModelCreditAssigner().compute([rollout])
    scores = asyncio.run(RewardModelScorer(client).score([rollout]))
    assert rollout.meta["rm_score"] == scores[0]
    assert list(RewardModelCreditAssigner().compute([rollout]).values()) == pytest.approx(scores)


def test_a_rendering_a_key_and_batches_of_ones_own(served, client):
    rollouts = [episode(f"r{number}", (PROMPT, text)) for number, text in enumerate((GOOD, BAD, GOOD))]
    scorer = RewardModelScorer(client, render_fn=lambda rollout: ("Q", rollout.id), score_key="helpful", batch_size=2)
    scores = asyncio.run(scorer.score(rollouts))
    assert scores == pytest.approx(client.score("Q", ["r0", "r1", "r2"]).tolist(), abs=1e-5)
    assert [rollout.meta["helpful"] for rollout in rollouts] == scores
