"""Every field of every scoring answer, from the exported folder by plain transformers."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rm_optimizer import __version__
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from tests.serving.engines import InProcessEngine, client_of, exported, options_of, served

TURNS = [("How do I boil an egg?", ["In water.", "In water, for seven minutes."]), ("one two", ["three"])]


class Plain:
    """The exported folder as plain transformers read it."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def ids(self, prompt: str, response: str, limit: int = 128) -> list[int]:
        """Tokens of a conversation as in training: a long one loses the left of its prompt, then of the response."""
        before = f"Prompt: {prompt}\n\nResponse: "
        alone, whole = (self.tokenizer(t, add_special_tokens=False).input_ids for t in (before, before + response))
        start = next((i for i, (x, y) in enumerate(zip(alone, whole, strict=False)) if x != y), len(alone))
        is_encoder = self.tokenizer.cls_token_id is not None
        first = [self.tokenizer.cls_token_id] if is_encoder else []
        last = self.tokenizer.sep_token_id if is_encoder else self.tokenizer.eos_token_id
        room = limit - len(first) - 1
        return [*first, *whole[min(start, max(0, len(whole) - room)) :][:room], last]

    def reward(self, ids: list[int]) -> float:
        with torch.no_grad():
            return float(self.model(input_ids=torch.tensor([ids])).logits[0, 0])


def answers(folder: Path, scratch: Path, requests: list[tuple[str, Any]]) -> list[Any]:
    """Answers of a server to posted bodies, or to a GET where there is none, in order."""

    async def ask() -> list[Any]:
        app = await served(InProcessEngine(options_of(folder, scratch)))
        async with client_of(app) as client:
            found = []
            for path, body in requests:
                response = await (client.get(path) if body is None else client.post(path, json=body))
                assert response.status_code == 200, response.text
                found.append((response.json(), dict(response.headers)))
            return found

    return asyncio.run(ask())


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_every_field_of_every_answer(family: str, tmp_path: Path):
    folder = tmp_path / "model"
    exported(family, folder)
    plain = Plain(folder)
    rows = [[plain.ids(prompt, response) for response in responses] for prompt, responses in TURNS]
    rewards = [[plain.reward(ids) for ids in each] for each in rows]
    flat, tokens = [r for each in rewards for r in each], sum(len(ids) for each in rows for ids in each)
    texts = [f"Prompt: {p}\n\nResponse: {r}" for p, responses in TURNS for r in responses]
    messages = [{"role": "user", "content": TURNS[1][0]}, {"role": "assistant", "content": TURNS[1][1][0]}]
    items = [{"prompt": prompt, "responses": responses} for prompt, responses in TURNS]
    all_ids = [ids for each in rows for ids in each]
    bare = [plain.tokenizer(text).input_ids for text in texts]  # a text is read as plain transformers reads it
    of_texts, bare_tokens = [plain.reward(ids) for ids in bare], sum(map(len, bare))
    before = time.time()
    found = answers(
        folder,
        tmp_path / "scratch",
        [
            ("/classify", {"input": texts}),
            ("/classify", {"input": texts, "use_activation": True}),
            ("/classify", {"input": all_ids}),
            ("/classify", {"input": all_ids[1], "model": "rm"}),
            ("/classify", {"messages": messages}),
            ("/rm/score", {"items": items}),
            ("/rm/score", {"items": items, "use_activation": True}),
            ("/get_reward", {"query": texts}),
            ("/rm/info", None),
            ("/version", None),
            ("/v1/models", None),
        ],
    )
    (info, _), (version, _), (models, _) = found[8:]
    squashed = [1 / (1 + math.exp(-r)) for r in of_texts]
    of_classify = [of_texts, squashed, flat, [flat[1]], [flat[2]]]
    of_tokens = [bare_tokens, bare_tokens, tokens, len(all_ids[1]), len(all_ids[2])]
    for (answer, headers), expected, count in zip(found[:5], of_classify, of_tokens, strict=True):
        assert [each["probs"] for each in answer["data"]] == [[pytest.approx(r, abs=2e-4)] for r in expected]
        assert [each["index"] for each in answer["data"]] == list(range(len(expected)))
        assert {(each["label"], each["num_classes"]) for each in answer["data"]} == {("reward", 1)}
        assert (answer["object"], answer["model"]) == ("list", "rm")
        assert int(before) <= answer["created"] <= time.time()
        assert answer["usage"] == {
            "prompt_tokens": count,
            "total_tokens": count,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        }
        assert (answer["rm_version"], answer["rm_revision"]) == (info["version"], info["revision"])
        assert headers["x-rm-version"] == info["version"]
        assert headers["x-rm-revision"] == str(info["revision"])
    assert len({answer["id"] for answer, _ in found[:5]}) == 5
    for (answer, _), convert in zip(found[5:7], (lambda r: r, lambda r: 1 / (1 + math.exp(-r))), strict=True):
        expected = [[pytest.approx(convert(r), abs=2e-4) for r in each] for each in rewards]
        assert (answer["rewards"], answer["model"]) == (expected, "rm")
        assert (answer["rm_version"], answer["rm_revision"]) == (info["version"], info["revision"])
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == tokens
    openrlhf = found[7][0]
    assert openrlhf["rewards"] == openrlhf["scores"] == [pytest.approx(r, abs=2e-4) for r in flat]
    record = json.loads((folder / "export.json").read_text())
    expected_info = {
        "model": "rm",
        "architecture": type(plain.model).__name__,
        "dtype": "float32",
        "max_length": 128,
        "vocab_size": plain.model.config.vocab_size,
        "pad_token_id": plain.tokenizer.pad_token_id,
        "token_budget": 256,
        "protocol": 1,
    }
    assert {name: info[name] for name in expected_info} == expected_info
    assert info["rendering"]["template_hash"] in json.dumps(record)
    assert (version["version"], version["revision"]) == (info["version"], info["revision"])
    assert version["package"] == __version__
    assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("rm", 128)]


def test_a_long_conversation_is_scored_by_what_training_keeps_of_it(tmp_path: Path):
    folder = tmp_path / "model"
    exported("llama", folder, max_length=32)
    plain, model = Plain(folder), BradleyTerryRM.from_pretrained(str(folder))
    turns = [("egg " * 40, "Put it in boiling water."), ("egg", "seven minutes " * 30)]
    for prompt, response in turns:
        ids = plain.ids(prompt, response, limit=32)
        assert len(ids) == 32
        assert float(model.score([prompt], [response])[0]) == pytest.approx(plain.reward(ids), abs=1e-4)
