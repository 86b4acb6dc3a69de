"""Sampled responses are the policy's, ranked by the reward model, and the same after a stop as without one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.pairs.pair import Message
from rm_optimizer.core.pairs.synthetic import PreferenceWorld
from rm_optimizer.core.rows.prompts import with_context
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import (
    CheckpointError,
    ConfigError,
    ConversationRefused,
    DataError,
    MissingExtra,
    RewardServerUnavailable,
)
from rm_optimizer.rl_coupling import BestOfNSampler, TransformersPolicy, VLLMPolicy
from rm_optimizer.rl_coupling.language_policies import prompt_ids
from rm_optimizer.rl_coupling.policy_simulation import rank, rank_file, read_ranked
from rm_optimizer.rl_coupling.world_policy import WorldGold, WorldPolicy
from tests.builders import decoder_tokenizer, tiny_reward_model
from tests.rl_coupling.policies import save_policy
from tests.serving.test_agent_rows import AGENTS, BESIDE, ROWS, TOOLS

WORLD = PreferenceWorld(3)
PROMPTS = WORLD.prompts()[:5]


class Length(Scorer):
    def score(self, prompts, responses):
        return torch.tensor([float(len(text)) for text in responses])


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def model():
    return tiny_reward_model("llama", max_length=256)


def test_responses_come_best_first_and_equal_rewards_in_the_order_of_the_draw():
    (found,) = rank(Length(), ["p"], [["aa", "bbb", "cc", "d", "eee"]]).rows
    assert found.responses == ("bbb", "eee", "aa", "cc", "d")
    assert (found.rewards, found.draws, found.best) == ((3.0, 3.0, 2.0, 2.0, 1.0), (1, 4, 0, 2, 3), "bbb")


def test_samples_depend_on_prompt_and_seed_alone(policy: Path):
    source = TransformersPolicy(policy, max_new_tokens=8)
    before = torch.get_rng_state()
    first = source.respond("Hi", 5, 0)
    assert torch.equal(torch.get_rng_state(), before)
    source.respond("Other", 3, 0)
    assert source.respond("Hi", 5, 0) == first
    assert source.respond("Hi", 5, 1) != first
    assert len(set(first)) > 1


def test_samples_follow_the_model_s_distribution(policy: Path):
    texts = TransformersPolicy(policy, max_new_tokens=1, temperature=0.7, samples_at_once=2000).respond("Hi", 2000, 0)
    tokenizer, lm = AutoTokenizer.from_pretrained(policy), AutoModelForCausalLM.from_pretrained(policy)
    ids = torch.tensor(
        [[tokenizer.bos_token_id, *tokenizer("Prompt: Hi\n\nResponse: ", add_special_tokens=False).input_ids]]
    )
    with torch.no_grad():
        probabilities = (lm(ids).logits[0, -1] / 0.7).softmax(dim=-1).double().numpy()
    expected: dict[str, float] = {}
    for token, probability in enumerate(probabilities):
        text = "" if token == tokenizer.eos_token_id else tokenizer.decode([token], skip_special_tokens=True).strip()
        expected[text] = expected.get(text, 0.0) + float(probability)
    likely = [text for text, probability in expected.items() if probability * 2000 > 10]
    assert len(likely) > 5
    z = [(texts.count(t) - 2000 * expected[t]) / np.sqrt(2000 * expected[t] * (1 - expected[t])) for t in likely]
    assert np.abs(z).max() < 4.5


def test_a_file_holds_what_sample_returns_and_goes_on_after_a_stop(policy: Path, model, tmp_path: Path):
    messages = (Message("user", "Hi"), Message("assistant", "Yes?"), Message("user", "Tell me."))
    prompts = [*(f"Question {k}" for k in range(40)), messages]
    sampler = BestOfNSampler(policy, model, 16, max_new_tokens=3)
    calls = 0

    def stop(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sampler.sample_to_file(prompts, tmp_path / "out.jsonl", on_progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl.partial"]
    seen: list[int] = []
    sampler.sample_to_file(prompts, tmp_path / "out.jsonl", on_progress=lambda done, total: seen.append(done))
    assert seen == [32, 41]
    found, rewards = read_ranked(tmp_path / "out.jsonl")
    assert rewards.shape == (41, 16)
    assert found[-1].prompt == messages
    expected = BestOfNSampler(policy, model, 16, max_new_tokens=3).sample(prompts[-1:])
    assert found[-1].responses == expected[0].responses
    assert np.abs(np.array(found[-1].rewards) - np.array(expected[0].rewards)).max() < 1e-4
    sampler.sample_to_file(prompts, tmp_path / "whole.jsonl")
    assert (tmp_path / "whole.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_a_server_that_dies_midway_loses_nothing(model, tmp_path: Path, monkeypatch):
    whole = model.score_encoded
    asked = 0

    def dying(encodings, **options):
        nonlocal asked
        asked += 1
        if asked == 2:
            raise RewardServerUnavailable("gone")
        return whole(encodings, **options)

    sampler = BestOfNSampler(WorldPolicy(WORLD), model, 256)
    with monkeypatch.context() as patch:
        patch.setattr(model, "score_encoded", dying)
        with pytest.raises(RewardServerUnavailable):
            sampler.sample_to_file(PROMPTS[:2], tmp_path / "a.jsonl")
    seen: list[int] = []
    sampler.sample_to_file(PROMPTS[:2], tmp_path / "a.jsonl", on_progress=lambda done, total: seen.append(done))
    assert seen == [1, 2]
    with pytest.raises(DataError, match="is there already"):
        sampler.sample_to_file(PROMPTS[:2], tmp_path / "a.jsonl")


def test_saved_completions_are_ranked_by_prompt_in_either_layout(model, tmp_path: Path):
    lists = [{"prompt": p, "responses": ["One.", "Two of them.", "No"]} for p in PROMPTS]
    rows = [{"prompt": row["prompt"], "response": text} for row in lists for text in row["responses"]]
    for name, content in (("lists", lists), ("rows", rows)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        rank_file(model, tmp_path / f"{name}.jsonl", tmp_path / f"{name}_out.jsonl")
    assert (tmp_path / "lists_out.jsonl").read_bytes() == (tmp_path / "rows_out.jsonl").read_bytes()
    found, rewards = read_ranked(tmp_path / "lists_out.jsonl")
    assert [str(row.prompt) for row in found] == PROMPTS
    assert (np.diff(rewards) <= 0).all()
    for row in found:
        direct = model.score([row.prompt] * 3, row.responses)
        assert torch.allclose(direct, torch.tensor(row.rewards), atol=1e-4)


def test_saved_trajectories_keep_their_messages_and_tools_and_the_rewards_of_the_model(tmp_path: Path):
    tokenizer = decoder_tokenizer(chat_template=AGENTS)
    TemplateWriter(tokenizer).write_for_training()
    model = tiny_reward_model("llama", tokenizer, max_length=512)
    agents = [ROWS[0], *ROWS[2:]]  # the two sides of the other row share more than its prompt
    data = PreferenceDataset(agents)
    source, ranked = tmp_path / "answers.jsonl", tmp_path / "ranked.jsonl"
    beside = [{name: row[name] for name in BESIDE if name in row} for row in agents]
    rows = [
        {"prompt": row["prompt"], "responses": [row["chosen"], row["rejected"]], **more}
        for row, more in zip(agents, beside, strict=True)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rank_file(model, source, ranked)
    for found, pair in zip(read_ranked(ranked)[0], data, strict=True):
        assert found.prompt == pair.prompt
        assert {*found.responses} == {pair.chosen, pair.rejected}
        expected = model.score([found.prompt] * 2, found.responses)
        torch.testing.assert_close(torch.tensor(found.rewards), expected, atol=1e-6, rtol=0)


def test_a_policy_gets_tools_as_its_template_writes_them_or_refuses_them():
    row = ROWS[0]
    prompt = with_context((Message("user", "2 + 2?"),), {"tools": TOOLS})
    tokenizer = decoder_tokenizer(chat_template=AGENTS)
    own = tokenizer.apply_chat_template(row["prompt"], tools=TOOLS, add_generation_prompt=True, return_dict=True)
    assert prompt_ids(tokenizer, prompt) == own["input_ids"]
    for template in (None, "{% for m in messages %}{{ m.content }}{% endfor %}"):
        with pytest.raises(ConversationRefused, match="reads no tools"):
            prompt_ids(decoder_tokenizer(chat_template=template), prompt)


def test_the_world_answers_its_prompts_and_judges_them():
    sampler = BestOfNSampler(WorldPolicy(WORLD), WorldGold(WORLD), 32, seed=1)
    found = sampler.sample(PROMPTS)
    assert found == BestOfNSampler(WorldPolicy(WORLD), WorldGold(WORLD), 32, seed=1).sample(PROMPTS)
    assert all(row.rewards[0] == pytest.approx(WORLD.gold(str(row.prompt), row.best), abs=1e-5) for row in found)
    gold = WorldGold(WORLD)
    assert gold.score(PROMPTS[0], found[0].best) == gold.score(PROMPTS[:1], [found[0].best])[0]
    for part in (gold.score, lambda p, r: WorldPolicy(WORLD).respond(p[0], 1, 0)):
        with pytest.raises(DataError, match="topics"):
            part(["Hello"], ["x"])


def test_wrong_policies_are_refused(policy: Path, model, tmp_path: Path):
    model.save_pretrained(tmp_path / "rm")
    with pytest.raises(CheckpointError, match=r"rm is a reward model \(LlamaForSequenceClassification\)"):
        BestOfNSampler(tmp_path / "rm", model)
    tokenizer = decoder_tokenizer(pad=None)
    tokenizer.eos_token = None
    endless = save_policy(tmp_path / "endless", tokenizer)
    (endless / "generation_config.json").unlink()
    with pytest.raises(CheckpointError, match="neither an end-of-text nor a pad token"):
        BestOfNSampler(endless, model)
    with pytest.raises(CheckpointError, match="cannot be loaded as a policy"):
        BestOfNSampler(tmp_path / "nowhere", model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no config.json"):
        BestOfNSampler(tmp_path / "empty", model)
    with pytest.raises(DataError, match="exceed the policy's"):
        TransformersPolicy(policy, max_new_tokens=4000).respond("Hi", 1, 0)


def test_a_policy_without_a_pad_token_writes_the_same_texts(policy: Path, tmp_path: Path):
    same = save_policy(tmp_path / "padless", decoder_tokenizer(pad=None))
    texts = TransformersPolicy(same, max_new_tokens=12).respond("Hi", 40, 0)
    assert len(texts) == 40
    assert not any("</s>" in text or "<pad>" in text for text in texts)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n_samples": 0}, "n_samples must be positive"),
        ({"seed": -1}, "seed must not be negative"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\]"),
        ({"max_new_tokens": 0}, "max_new_tokens must be positive"),
        ({"samples_at_once": 0}, "samples_at_once must be positive"),
    ],
)
def test_a_wrong_option_is_refused(policy: Path, options, says):
    with pytest.raises(ConfigError, match=says):
        BestOfNSampler(policy, Length(), **options)


def test_options_of_a_policy_that_is_given_whole_are_refused():
    with pytest.raises(ConfigError, match="use_vllm, top_p is for a policy given by name, got a WorldPolicy"):
        BestOfNSampler(WorldPolicy(WORLD), Length(), use_vllm=True, top_p=0.5)
    with pytest.raises(ConfigError, match="rewards of a Length cannot be recognized"):
        BestOfNSampler(WorldPolicy(WORLD), Length()).sample_to_file(PROMPTS, Path("x.jsonl"))


def test_vllm_names_its_extra_where_it_is_missing(policy: Path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r"rm-optimizer\[vllm\]"):
        VLLMPolicy(policy)


def test_a_curve_needs_equally_many_responses(tmp_path: Path):
    rows = [{"prompt": "p", "responses": ["a"] * n, "rewards": [0.0] * n, "draws": list(range(n))} for n in (2, 3)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="got 2 to 3"):
        read_ranked(tmp_path / "x.jsonl")
