"""Rollouts get the reward of the conversation that they are, by a local model and by a server alike."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.pairs.pair import Message
from rm_optimizer.errors import CheckpointError, ConfigError, RewardServerUnavailable
from rm_optimizer.rl_coupling import RewardModelScorer
from rm_optimizer.serving.client.client import AsyncRewardClient
from tests.builders import decoder_tokenizer, tiny_reward_model
from tests.rl_coupling.rollouts import Episode, episode
from tests.serving.engines import InProcessEngine, options_of
from tests.serving.running import engine_running

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
ROLLOUTS = [episode(f"r{k}", ("Hi", "Yes?"), (f"Question {k}", f"Answer {k}.")) for k in range(9)]
CONVERSATION = (Message("user", "Hi"), Message("assistant", "Yes?"))


@pytest.fixture(scope="module")
def chat_model():
    return tiny_reward_model("llama", decoder_tokenizer(chat_template=TEMPLATE))


def score(scorer: RewardModelScorer, rollouts: list[Episode]) -> list[float]:
    return asyncio.run(scorer.score(rollouts))


def expected(model) -> list[float]:
    prompts = [(*CONVERSATION, Message("user", f"Question {k}")) for k in range(9)]
    return model.score(prompts, [f"Answer {k}." for k in range(9)]).tolist()


def test_a_model_with_a_chat_template_reads_messages(chat_model):
    found = score(RewardModelScorer(chat_model, batch_size=4), ROLLOUTS)
    assert found == pytest.approx(expected(chat_model), abs=1e-4)
    assert [rollout.meta["rm_score"] for rollout in ROLLOUTS] == found


def test_a_model_without_one_reads_the_steps_in_a_row():
    model = tiny_reward_model("llama")
    found = score(RewardModelScorer(model), ROLLOUTS[:1])
    assert found == pytest.approx(model.score(["Hi\nYes?\nQuestion 0"], ["Answer 0."]).tolist(), abs=1e-5)


def test_a_render_function_comes_first(chat_model):
    scorer = RewardModelScorer(chat_model, render_fn=lambda rollout: (f"<{rollout.id}>", "same"), score_key="helpful")
    found = score(scorer, ROLLOUTS[:2])
    assert found == pytest.approx(chat_model.score(["<r0>", "<r1>"], ["same"] * 2).tolist(), abs=1e-5)
    assert ROLLOUTS[1].meta["helpful"] == found[1]


def test_a_server_gives_the_same_scores(chat_model, tmp_path):
    chat_model.save_pretrained(tmp_path / "model")

    async def through(url: str) -> list[float]:
        async with AsyncRewardClient(url) as client:
            return await RewardModelScorer(client, batch_size=2).score(ROLLOUTS)

    with engine_running(lambda: InProcessEngine(options_of(tmp_path / "model", tmp_path / "scratch"))) as server:
        assert asyncio.run(through(server.url)) == pytest.approx(expected(chat_model), abs=1e-4)


class Slow(Scorer):
    """Counts the calls that are open at once."""

    def __init__(self) -> None:
        self.lock, self.open, self.most = threading.Lock(), 0, 0

    def score(self, prompts, responses):
        with self.lock:
            self.open += 1
            self.most = max(self.most, self.open)
        time.sleep(0.02)
        with self.lock:
            self.open -= 1
        return torch.tensor([float(text.split()[1].rstrip(".")) for text in responses])


def test_calls_run_together_up_to_the_bound_and_keep_their_order():
    slow = Slow()
    assert score(RewardModelScorer(slow, batch_size=1, max_concurrency=3), ROLLOUTS) == [float(k) for k in range(9)]
    assert slow.most == 3


def test_a_model_in_this_process_scores_one_call_at_a_time(chat_model):
    assert RewardModelScorer(chat_model, max_concurrency=3).max_concurrency == 1


def test_no_rollouts_have_no_scores(chat_model):
    assert score(RewardModelScorer(chat_model), []) == []


def test_a_failure_stores_no_score():
    class Dying(Scorer):
        def score(self, prompts, responses):
            if "3" in responses[0]:
                raise RewardServerUnavailable("gone")
            return torch.zeros(len(responses))

    rollouts = [episode(f"r{k}", ("Hi", f"Answer {k}.")) for k in range(5)]
    with pytest.raises(RewardServerUnavailable):
        score(RewardModelScorer(Dying(), batch_size=1), rollouts)
    assert [rollout.meta for rollout in rollouts] == [{}] * 5


def test_wrong_rollouts_and_options_are_refused(chat_model):
    class Broken(Scorer):
        def score(self, prompts, responses):
            return torch.tensor([1.0, float("nan")])

    with pytest.raises(CheckpointError, match="nan for rollout r1"):
        score(RewardModelScorer(Broken()), ROLLOUTS[:2])
    with pytest.raises(ValueError, match="rollout empty has no step"):
        score(RewardModelScorer(chat_model), [episode("empty")])
    bare = episode("bare", ("a", "b"))
    bare.meta = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match="rollout bare has no metadata"):
        score(RewardModelScorer(chat_model), [bare])
    with pytest.raises(ConfigError, match="batch_size must be positive"):
        RewardModelScorer(chat_model, batch_size=0)
    with pytest.raises(ConfigError, match="max_concurrency must be positive"):
        RewardModelScorer(chat_model, max_concurrency=0)
