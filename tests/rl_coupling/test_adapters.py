"""Each trainer's call, in the form its source makes it, gets the rewards of `rm-opt score`."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import requests
import torch

from rm_optimizer.errors import CheckpointError, ConfigError
from rm_optimizer.rl_coupling import (
    ScaledScorer,
    openrlhf_reward_func,
    trl_reward_async,
    verl_compute_score,
    verl_compute_scores,
)
from rm_optimizer.serving.client.async_client import AsyncRewardClient
from tests.builders import decoder_tokenizer, tiny_reward_model
from tests.serving.engines import InProcessEngine, options_of
from tests.serving.running import engine_running

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PROMPTS, RESPONSES = ["Hi", "What is 2 + 2?", "Hi"], ["Hello.", "4", "No."]


@pytest.fixture(scope="module", params=["plain", "chat"])
def model(request):
    tokenizer = decoder_tokenizer(chat_template=None if request.param == "plain" else TEMPLATE)
    return tiny_reward_model("llama", tokenizer)


@pytest.fixture(scope="module")
def expected(model) -> list[float]:
    return model.score(PROMPTS, RESPONSES).tolist()


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model.save_pretrained(folder / "model")
    with engine_running(lambda: InProcessEngine(options_of(folder / "model", folder / "scratch"))) as server:
        yield server.url


def openrlhf_queries(model) -> list[str]:
    """Prompt and response as OpenRLHF decodes its samples: special tokens kept, padding on either side."""
    texts = [model.renderer.text(*pair) for pair in zip(PROMPTS, RESPONSES, strict=True)]
    return [f"<pad><pad><s>{texts[0]}</s>", f"<s>{texts[1]}</s><pad>", f"<s>{texts[2]}</s>"]


def test_openrlhfs_request_and_its_python_function_get_the_rewards(model, expected, url) -> None:
    queries, labels = openrlhf_queries(model), ["", "", ""]
    # openrlhf/utils/remote_rm_utils.py, request_api_wrapper: POST of this JSON, `rewards` of the answer
    data = {"query": queries, "prompts": PROMPTS, "labels": labels}
    headers = {"Content-Type": "application/json"}
    answer = requests.post(url=f"{url}/get_reward", json=data, headers=headers, timeout=180)
    answer.raise_for_status()
    assert answer.json()["rewards"] == pytest.approx(expected, abs=1e-4)
    found = openrlhf_reward_func(model)(queries, PROMPTS, labels)
    assert set(found) == set(answer.json()) == {"rewards", "scores", "extra_logs"}
    assert found["rewards"].tolist() == found["scores"].tolist() == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match=r"queries\[1\] holds no text"):
        openrlhf_reward_func(model)([queries[0], "<s></s>"], PROMPTS[:2], labels[:2])


def test_verls_managers_get_the_rewards(model, expected) -> None:
    infos = [{"prompt": PROMPTS[0]}, {"prompt": [{"role": "user", "content": PROMPTS[1]}]}, {"prompt": PROMPTS[2]}]
    single = verl_compute_score(model)
    # verl/workers/reward_manager/naive.py calls once a response, batch.py once a batch and keeps int and float only
    found = [
        single(data_source="d", solution_str=text, ground_truth=None, extra_info=info)
        for text, info in zip(RESPONSES, infos, strict=True)
    ]
    batch = verl_compute_scores(model)(
        data_sources=["d"] * 3, solution_strs=RESPONSES, ground_truths=[None] * 3, extra_infos=infos
    )
    assert found == pytest.approx(expected, abs=1e-4)
    assert batch == pytest.approx(expected, abs=1e-4)
    assert {type(value) for value in [*found, *batch]} == {float}
    for info in (None, {}, {"question": "Hi"}):
        with pytest.raises(ValueError, match="extra_info of response 1 has no 'prompt'"):
            single("d", "x", None, info)
    assert verl_compute_score(model, prompt_key="question")("d", RESPONSES[0], None, {"question": "Hi"}) == found[0]


def test_trl_awaits_the_rewards(expected, url) -> None:
    async def call() -> list[float]:
        async with AsyncRewardClient(url) as client:
            reward = trl_reward_async(client, name="helpful")
            assert inspect.iscoroutinefunction(reward)  # how TRL tells it from a blocking one
            assert reward.__name__ == "helpful"
            messages = [[{"role": "user", "content": text}] for text in PROMPTS]
            replies = [[{"role": "assistant", "content": text}] for text in RESPONSES]
            first = await reward(prompts=messages, completions=replies, completion_ids=[[1]] * 3, step=1)
            assert first == await reward(prompts=PROMPTS, completions=RESPONSES)
            return first

    assert asyncio.run(call()) == pytest.approx(expected, abs=1e-4)


def test_a_saved_scale_is_applied_by_name(model, expected, tmp_path) -> None:
    model.beta = 2.5
    model.save_pretrained(tmp_path / "model", statistics={"mean": 3.0, "std": 0.5, "num": 8})
    model.beta = 1.0
    raw = torch.tensor(expected)
    for name, scaled in (("raw", raw), ("logit", 2.5 * raw), ("standard", (raw - 3.0) / 0.5)):
        found = ScaledScorer(model, name, tmp_path / "model")
        assert found.score(PROMPTS, RESPONSES).tolist() == pytest.approx(scaled.tolist(), abs=1e-4)
        groups = found.score_groups(PROMPTS[:1], [RESPONSES[:1]])
        assert groups[0].tolist() == pytest.approx(scaled[:1].tolist(), abs=1e-4)
    with pytest.raises(ConfigError, match="unknown scale 'standart'; did you mean 'standard'"):
        ScaledScorer(model, "standart", tmp_path / "model")
    with pytest.raises(CheckpointError, match="records no numbers for scale=standard"):
        ScaledScorer(model, "standard", tmp_path)
