"""One prompt, one response, one reward: through training's tokens, evaluate, score, the Python API and the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.rows.messages import Message
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.interfaces.cli import app
from rm_optimizer.landscape.hessian import HessianAnalyzer
from tests.builders import narrow_reward_model

TEMPLATES = {
    "plain": None,
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama-3": (
        "{{ bos_token }}{% for m in messages %}<|h|>{{ m['role'] }}<|/h|>\n\n{{ m['content'] | trim }}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|h|>assistant<|/h|>\n\n{% endif %}"
    ),
}
TURNS = (("user", "Hi"), ("assistant", "Hello!"), ("user", "Why?"))
PROMPTS: dict[str, Any] = {
    "text": "Why is it so?",
    "transcript": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: Why?\n\nAssistant:",
    "messages": [{"role": role, "content": text} for role, text in TURNS],
    "json": json.dumps([{"from": {"user": "human"}.get(role, "gpt"), "value": text} for role, text in TURNS]),
}
CHOSEN, REJECTED = "Because it is.", "No."


@pytest.fixture(scope="module", params=TEMPLATES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "best"
    texts = ["Human: Hi Assistant: Hello! Why is it so? Because it is. No."]
    model = narrow_reward_model(texts, chat_template=TEMPLATES[request.param], max_length=128, initializer_range=0.5)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(checkpoint: str) -> BradleyTerryRM:
    return BradleyTerryRM.from_pretrained(checkpoint)


def rm_opt(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.stderr + repr(result.exception)
    return result.stdout


def test_a_prompt_has_the_same_reward_through_every_entrance(checkpoint: str, model: BradleyTerryRM, tmp_path: Path):
    pairs, responses = tmp_path / "pairs.jsonl", tmp_path / "responses.jsonl"
    rows = ({"prompt": prompt, "chosen": CHOSEN, "rejected": REJECTED} for prompt in PROMPTS.values())
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = ({"prompt": prompt, "responses": [CHOSEN, REJECTED]} for prompt in PROMPTS.values())
    responses.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [
        tuple(Message(**turn) for turn in prompt) if isinstance(prompt, list) else prompt for prompt in PROMPTS.values()
    ]
    expected = model.score(prompts, [CHOSEN] * len(PROMPTS))

    data = PreferenceDataset(pairs)
    trained = tokenize_pairs(data.pairs, model.renderer, tmp_path / "cache")
    as_trained = [trained.chosen(i).tolist() for i in range(len(trained))]
    assert as_trained == [list(model.renderer.encode(prompt, CHOSEN).ids) for prompt in prompts]
    batches, _ = HessianAnalyzer(model, token_budget=4096).batches_of(data)
    analyzed = torch.cat([batch.split(model.rewards_of(batch))[0].detach() for batch in batches])

    rm_opt("evaluate", checkpoint, "--data", str(pairs), "--bootstrap", "2", "--output", str(tmp_path / "found"))
    lines = (tmp_path / "found" / "pair_rewards.jsonl").read_text().splitlines()
    rm_opt("score", checkpoint, str(responses), str(tmp_path / "scored.jsonl"))
    scored = (tmp_path / "scored.jsonl").read_text().splitlines()
    texts = [prompt for prompt in PROMPTS.values() if isinstance(prompt, str)]
    printed = [float(rm_opt("score", checkpoint, "--prompt", text, "--response", CHOSEN)) for text in texts]
    of_texts = model.score(texts, [CHOSEN] * len(texts))

    for found in (
        sorted(analyzed.tolist()),
        sorted(json.loads(line)["chosen"] for line in lines),
        sorted(json.loads(line)["reward"][0] for line in scored),
    ):
        assert found == pytest.approx(sorted(expected.tolist()), abs=1e-5)
    assert printed == pytest.approx(of_texts.tolist(), abs=1e-5)
    assert expected[1] == expected[2] != expected[0]
    assert expected[3] not in expected[:3]
