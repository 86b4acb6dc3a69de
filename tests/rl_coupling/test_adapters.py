"""Each trainer's call, in the form its source makes it, gets the rewards of `rm-opt score`."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rm_optimizer.errors import CheckpointError, ConfigError
from rm_optimizer.rl_coupling import (
    ScaledScorer,
    openrlhf_reward_func,
    trl_reward_async,
    verl_compute_score,
    verl_compute_score_async,
    verl_compute_scores,
)
from rm_optimizer.serving import trl_reward
from rm_optimizer.serving.client.client import AsyncRewardClient
from tests.builders import decoder_tokenizer, tiny_reward_model
from tests.rl_coupling.policies import save_policy
from tests.serving.engines import InProcessEngine, options_of
from tests.serving.running import engine_running, serve_process

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
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


@pytest.fixture(scope="module", params=["one", pytest.param("fleet", marks=pytest.mark.slow)])
def url(request, model, tmp_path_factory):
    """A server in this process, or the front of two replicas."""
    folder = tmp_path_factory.mktemp("served")
    model.save_pretrained(folder / "model")
    if request.param == "fleet":
        with serve_process(folder / "model", "--replicas", "2", "--served-model-name", "rm") as server:
            yield server.url
        return
    with engine_running(lambda: InProcessEngine(options_of(folder / "model", folder / "scratch"))) as server:
        yield server.url


def openrlhf_queries(model) -> list[str]:
    """Prompt and response as OpenRLHF decodes its samples: special tokens kept, padding on either side."""
    texts = [model.renderer.text(*pair) for pair in zip(PROMPTS, RESPONSES, strict=True)]
    return [f"<pad><pad><s>{texts[0]}</s>", f"<s>{texts[1]}</s><pad>", f"<s>{texts[2]}</s>"]


def answer_to(url: str, path: str, agent: str, body: str) -> Any:
    """JSON answer to a request written byte for byte as aiohttp's `session.post(url, json=…)` writes it."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
        f"User-Agent: {agent}\r\nContent-Length: {len(body.encode())}\r\nContent-Type: application/json\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + body.encode())
        found = http.client.HTTPResponse(connection)
        found.begin()
        assert found.status == 200
        return json.loads(found.read())


def test_openrlhfs_request_and_its_python_function_get_the_rewards(model, expected, url):
    queries, labels = openrlhf_queries(model), ["", "", ""]
    # Bytes of SingleTurnAgentExecutor._fetch_rewards_via_http (openrlhf/utils/agent.py, 0.11.2), recorded from its run.
    for one, prompt, reward in zip(queries, PROMPTS, expected, strict=True):
        body = f'{{"query": {json.dumps([one])}, "prompts": {json.dumps([prompt])}, "labels": [""]}}'
        answer = answer_to(url, "/get_reward", "Python/3.11 aiohttp/3.14.5", body)
        assert set(answer) == {"rewards", "scores", "extra_logs"}
        assert answer["rewards"] == answer["scores"] == pytest.approx([reward], abs=1e-4)
    found = openrlhf_reward_func(model)(queries, PROMPTS, labels)
    assert set(found) == {"rewards", "scores", "extra_logs"}
    assert found["rewards"].tolist() == found["scores"].tolist() == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match=r"queries\[1\] holds no text"):
        openrlhf_reward_func(model)([queries[0], "<s></s>"], PROMPTS[:2], labels[:2])


def test_verls_reward_loop_gets_the_rewards_from_a_server(model, expected, url):
    # RewardLoopWorker.compute_score_disrm (verl/experimental/reward_loop/reward_loop.py, 0.9.1): the chat template
    # without the first <s>, and the last probability of the last row.
    if model.renderer.kind == "plain":
        pytest.skip("verl renders by a chat template")
    for prompt, response, reward in zip(PROMPTS, RESPONSES, expected, strict=True):
        chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        text = model.tokenizer.apply_chat_template(chat, tokenize=False).removeprefix("<s>")
        body = f'{{"model": "rm", "input": {json.dumps(text)}, "use_activation": false}}'
        answer = answer_to(url, "/classify", "Python/3.11 aiohttp/3.14.5", body)
        assert answer["data"][-1]["probs"][-1] == pytest.approx(reward, abs=1e-4)


@pytest.mark.parametrize("adapter", ["openrlhf", "verl"])
def test_threads_of_a_trainer_get_the_rewards(model, expected, adapter):
    if adapter == "openrlhf":  # asyncio.to_thread for each sample
        function, queries = openrlhf_reward_func(model), openrlhf_queries(model)
        calls = [lambda k=k: float(function([queries[k]], [PROMPTS[k]], [""])["rewards"]) for k in range(3)]
    else:  # run_in_executor for each sample
        single = verl_compute_score(model)
        calls = [lambda k=k: single("d", RESPONSES[k], None, {"prompt": PROMPTS[k]}) for k in range(3)]
    with ThreadPoolExecutor(8) as pool:
        found = [future.result() for future in [pool.submit(calls[k % 3]) for k in range(48)]]
    assert found == pytest.approx(expected * 16, abs=1e-4)


def test_verls_managers_get_the_rewards(model, expected):
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
    parquet = {"prompt": np.array([{"role": "user", "content": PROMPTS[0]}], dtype=object)}
    assert single("d", RESPONSES[0], None, parquet) == pytest.approx(found[0], abs=1e-5)
    assert verl_compute_score(model, prompt_key="question")("d", RESPONSES[0], None, {"question": "Hi"}) == found[0]


def test_verls_reward_loop_awaits_the_rewards(expected, url):
    async def call() -> list[float]:
        async with AsyncRewardClient(url) as client:
            score = verl_compute_score_async(client)
            assert inspect.iscoroutinefunction(score)  # how verl's naive manager tells it from a blocking one
            with pytest.raises(ValueError, match="extra_info of response 1 has no 'prompt'"):
                await score("d", "x", None, {})
            calls = [
                score(
                    data_source="d",
                    solution_str=text,
                    ground_truth=None,
                    extra_info={"prompt": prompt},
                    reward_router=1,
                )
                for prompt, text in zip(PROMPTS, RESPONSES, strict=True)
            ]
            return list(await asyncio.gather(*calls))

    found = asyncio.run(call())
    assert found == pytest.approx(expected, abs=1e-4)
    assert {type(value) for value in found} == {float}


def test_trl_awaits_the_rewards(expected, url):
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


@pytest.mark.parametrize("conversational", [False, True])
def test_trls_own_call_gets_the_rewards_blocking_and_awaited(model, expected, url, tmp_path, conversational):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    if conversational:
        prompts = [[{"role": "user", "content": text}] for text in PROMPTS]
        completions = [[{"role": "assistant", "content": text}] for text in RESPONSES]
    else:
        prompts, completions = list(PROMPTS), list(RESPONSES)
    tokenizer = decoder_tokenizer(chat_template=TEMPLATE)
    client = AsyncRewardClient(url)
    trainer = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(save_policy(tmp_path / "policy", tokenizer)),
        reward_funcs=[trl_reward(model, name="here"), trl_reward_async(client, name="served")],
        args=trl.GRPOConfig(
            str(tmp_path), per_device_train_batch_size=2, num_generations=2, report_to=[], use_cpu=True
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts, "topic": ["a", "b", "c"]}),
        processing_class=tokenizer,
    )
    inputs = [{"prompt": prompt, "topic": "a"} for prompt in prompts]
    found = trainer._calculate_rewards(inputs, prompts, completions, [[1], [2], [3]])
    asyncio.run_coroutine_threadsafe(client.close(), trainer.async_loop).result()
    assert trainer.reward_func_names == ["here", "served"]
    assert found.T.tolist() == [pytest.approx(expected, abs=1e-4)] * 2


def test_a_saved_scale_is_applied_by_name(model, expected, tmp_path):
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
