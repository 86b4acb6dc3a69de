"""TRL optimizes a tiny policy for real, every checkpoint is measured, and a stopped run goes on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.synthetic import Gold, PreferenceWorld
from rm_optimizer.errors import CheckpointError, ConfigError, DataError, Interrupted, RewardServerUnavailable
from rm_optimizer.interfaces.cli import app
from rm_optimizer.rl_coupling import rlhf
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.rl_coupling.language_policies import TransformersPolicy
from rm_optimizer.rl_coupling.policy_training import TrainedPolicy
from rm_optimizer.rl_coupling.rlhf import MeasuredCheckpoint, RLHFResult, curve_of, optimize_policy
from rm_optimizer.rl_coupling.world_policy import save_world_policy
from rm_optimizer.schema.rlhf import PolicyAlgorithm, RLHFConfig
from rm_optimizer.serving.client.client import RewardClient
from tests.builders import decoder_tokenizer, tiny_reward_model
from tests.rl_coupling.policies import save_policy
from tests.serving.engines import InProcessEngine, options_of
from tests.serving.running import engine_running

PROMPTS = [f"Say {word}." for word in ("one", "two", "three", "four", "five", "six", "seven", "eight")]
CONFIG = RLHFConfig(
    steps=3,
    learning_rate=2e-2,
    max_new_tokens=6,
    measure_every=1,
    prompts_per_step=2,
    num_generations=4,
)


class Vowels(Scorer):
    """The share of vowels, and what a test makes of the n-th call."""

    def __init__(self, at_call=None, then=None):
        self.calls, self._at_call, self._then = 0, at_call, then

    def score(self, prompts, responses):
        self.calls += 1
        if self.calls == self._at_call:
            return self._then(responses)
        return torch.tensor([sum(text.count(v) for v in "aeiou") / (1 + len(text)) for text in responses])


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reward") / "model"
    tiny_reward_model("llama", max_length=256).save_pretrained(folder)
    return folder


def run(policy, folder, reward=None, config=CONFIG, **more) -> RLHFResult:
    return optimize_policy(policy, reward or Vowels(), PROMPTS[4:], PROMPTS[:4], folder, config, gold=Vowels(), **more)


ALGORITHMS = [pytest.param(each, marks=pytest.mark.slow if each == "rloo" else ()) for each in PolicyAlgorithm]


@pytest.fixture(scope="module", params=ALGORITHMS)
def whole(request, policy, tmp_path_factory) -> RLHFResult:
    config = replace(CONFIG, algorithm=request.param)
    return run(policy, tmp_path_factory.mktemp("whole"), config=config, num_bootstrap=100)


def test_the_policy_moves_and_every_checkpoint_is_measured(whole, policy):
    assert [each.step for each in whole.checkpoints] == [0, 1, 2, 3]
    divergence = [each.divergence.value for each in whole.checkpoints]
    assert divergence[0] == 0.0
    assert min(divergence[1:]) > 0.0
    first = whole.checkpoints[0]
    assert first.gold_gain.value == first.proxy_gain.value == 0.0
    assert all(each.gold == each.proxy for each in whole.checkpoints)
    assert whole.curve is None or whole.curve.points[-1].distance == pytest.approx(math.sqrt(max(divergence)))
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).lm_head.weight for folder in (policy, Path(whole.policy))
    )
    assert not torch.equal(before, after)
    assert RLHFResult.from_json(whole.to_json()).checkpoints == whole.checkpoints


def test_a_repeated_call_trains_nothing_and_another_is_refused(whole, policy, monkeypatch):
    folder = Path(whole.policy).parent
    monkeypatch.setattr(rlhf, "train_policy", None)
    again = run(policy, folder, config=whole.config, num_bootstrap=100)
    assert again.checkpoints == whole.checkpoints
    with pytest.raises(DataError, match="holds another optimization"):
        run(policy, folder, config=replace(whole.config, temperature=0.5))
    record = (folder / "rlhf.json").read_text()
    with pytest.raises(ConfigError, match=r"holds an optimization of 3 steps, which is longer than rlhf\.steps=2"):
        run(policy, folder, config=replace(whole.config, steps=2))
    assert (folder / "rlhf.json").read_text() == record


def died(responses):
    raise RewardServerUnavailable("the server is gone")


def stopped(responses):
    raise KeyboardInterrupt


def test_a_run_whose_reward_dies_goes_on_as_if_it_had_not(policy, tmp_path, whole):
    is_grpo = whole.config.algorithm == PolicyAlgorithm.grpo
    then, error = (died, RewardServerUnavailable) if is_grpo else (stopped, Interrupted)
    reward = Vowels(at_call=6, then=then)  # probe, start, step 1, measured, step 2, measured
    with pytest.raises(error, match="goes on from step 1"):
        run(policy, tmp_path, reward, whole.config)
    (tmp_path / "checkpoints" / "checkpoint-2" / "model.safetensors").write_bytes(b"torn")
    assert run(policy, tmp_path, config=replace(whole.config, steps=2)).step == 2
    went_on = run(policy, tmp_path, config=whole.config, num_bootstrap=100)
    assert went_on.checkpoints == whole.checkpoints


@pytest.mark.parametrize("call", [2, 3], ids=["measured", "trained"])
def test_a_reward_that_is_not_finite_is_named(policy, tmp_path, call):
    reward = Vowels(at_call=call, then=lambda texts: torch.full((len(texts),), math.nan))
    with pytest.raises(CheckpointError, match="8 of 8 rewards are not finite, the first is nan for the response"):
        run(policy, tmp_path, reward)


def test_members_that_disagree_stop_it_and_the_policy_before_is_kept(policy, tmp_path):
    class Drifting(Vowels):
        def score(self, prompts, responses):
            return super().score(prompts, responses) * (1.0 + self.calls)

    reward = RewardModelEnsemble([Vowels(), Drifting()])
    result = run(policy, tmp_path, reward, replace(CONFIG, stop_disagreement=1.5))
    assert (result.stop_reason, result.step) == ("disagreement", 0)
    assert [each.step for each in result.checkpoints] == [0, 1]
    start, kept = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (policy, result.policy))
    assert all(torch.equal(start[name], kept[name]) for name in start)


def test_a_server_gives_the_rewards_of_its_model(policy, reward_model, tmp_path, caplog):
    local = run(policy, tmp_path / "local", BradleyTerryRM.from_pretrained(reward_model))
    assert "the reward model cut" not in caplog.text
    short = BradleyTerryRM.from_pretrained(reward_model, max_length=8)
    run(policy, tmp_path / "short", short, replace(CONFIG, steps=1))
    assert "step 1: the reward model cut 8 of 8 prompts or responses" in caplog.text
    with engine_running(lambda: InProcessEngine(options_of(reward_model, tmp_path / "scratch"))) as server:
        model = BradleyTerryRM.from_pretrained(reward_model)
        with RewardClient(server.url, renderer=model.renderer) as client:
            served = run(policy, tmp_path / "served", client)
    for one, other in zip(local.checkpoints, served.checkpoints, strict=True):
        assert other.proxy.value == pytest.approx(one.proxy.value, abs=1e-3)
        assert other.divergence.value == pytest.approx(one.divergence.value, rel=1e-2)


def test_the_divergence_of_one_token_is_exact_and_of_more_is_unbiased(policy):
    moved = TrainedPolicy(policy, max_new_tokens=1, temperature=0.7)
    unmoved = moved.respond(PROMPTS, 2, 0).divergence
    assert unmoved.abs().max() < 1e-5  # some processors round the logits of two equal models differently
    with torch.no_grad():
        moved.model.lm_head.weight.add_(torch.randn(moved.model.lm_head.weight.shape) * 0.1)
        encoded = moved._encoded(PROMPTS[:1])
        own, other = (
            (model(**encoded).logits[0, -1] / 0.7).log_softmax(-1) for model in (moved.model, moved.reference)
        )
    found = moved.respond(PROMPTS, 3, 0).divergence
    assert found[0].tolist() == pytest.approx([float((own.exp() * (own - other)).sum())] * 3, rel=1e-4)
    moved.max_new_tokens = 3
    sums = [_log_ratio(moved, drawn) for drawn in range(8)]
    log_ratio, divergence = (torch.cat([one[k] for one in sums]) for k in (0, 1))
    error = float((log_ratio - divergence).std()) / math.sqrt(len(log_ratio))
    assert abs(float((log_ratio - divergence).mean())) < 4 * error
    assert divergence.std() < log_ratio.std()
    assert divergence.mean() > found.mean()


def _log_ratio(policy: TrainedPolicy, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-ratio of fresh responses to one prompt, by tokens drawn one at a time, and their divergence estimates."""
    drawn = []
    original = policy._divergence

    def spy(sequences, mask, start):
        with torch.no_grad():
            own, other = (
                (model(sequences, attention_mask=mask.long()).logits[:, start - 1 : -1] / 0.7)
                .log_softmax(-1)
                .gather(-1, sequences[:, start:, None])[..., 0]
                for model in (policy.model, policy.reference)
            )
        drawn.append(((own - other) * mask[:, start:]).sum(dim=1).double())
        return original(sequences, mask, start)

    policy._divergence = spy
    found = policy.respond(PROMPTS[:1], 256, seed).divergence[0]
    policy._divergence = original
    return torch.cat(drawn), found


def test_a_policy_that_comes_nearer_again_shows_no_fall():
    def measured(step: int, nats: float, gold: float) -> MeasuredCheckpoint:
        rewards = tuple(gold + 0.01 * prompt for prompt in range(8))
        return MeasuredCheckpoint(step, (nats,) * 8, rewards, rewards, None, (5.0,) * 8, (1.0, 1.0), "")

    steps = zip((0.0, 1.0, 4.0, 9.0, 8.0), (0.0, 1.0, 2.0, 3.0, 4.0), strict=True)
    checkpoints = [measured(step, nats, gold) for step, (nats, gold) in enumerate(steps)]
    curve = curve_of(checkpoints, num_bootstrap=20, seed=0)
    assert [point.distance for point in curve.points] == [0.0, 1.0, 2.0, 3.0]
    assert curve.turning_point is None


def test_a_fall_near_a_divergence_reached_before_is_shown():
    noise = np.random.default_rng(0).normal(0, 0.1, size=(7, 64))
    steps = zip((0, 1, 2, 3, 2.99, 2.98, 2.9), (0, 1, 2, 3, 1, 0, -2), noise, strict=True)
    checkpoints = [
        MeasuredCheckpoint(step, (nats,) * 64, own, own, None, (5.0,) * 64, (1.0, 1.0), "")
        for step, (nats, gold, error) in enumerate(steps)
        for own in [tuple(gold + error)]
    ]
    curve = curve_of(checkpoints, num_bootstrap=20, seed=0)
    assert len(curve.points) == 4
    assert curve.turning_point == pytest.approx(3**0.5)
    assert curve.fall.value == pytest.approx(5.0, abs=0.1)


@pytest.mark.parametrize("template", [None, "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"])
def test_a_policy_without_pad_token_pads_with_its_end(tmp_path, template):
    tokenizer = decoder_tokenizer(chat_template=template)
    tokenizer.pad_token = None
    folder = save_policy(tmp_path, tokenizer)
    assert run(folder, tmp_path / "run", config=replace(CONFIG, steps=1)).step == 1


def test_sampling_settings_of_the_models_files_are_dropped_and_named(tmp_path, caplog):
    folder = save_policy(tmp_path, decoder_tokenizer())
    GenerationConfig(do_sample=True, repetition_penalty=1.3, min_p=0.3, no_repeat_ngram_size=2).save_pretrained(folder)
    for kept in (TrainedPolicy(folder, max_new_tokens=4, temperature=1.0), TransformersPolicy(folder)):
        assert kept.model.generation_config.to_diff_dict().keys() <= {"eos_token_id", "top_k", "transformers_version"}
        assert "min_p, no_repeat_ngram_size, repetition_penalty" in caplog.text


def test_bad_prompts_are_refused(policy, tmp_path):
    with pytest.raises(ConfigError, match="at least 4 to measure, got 4 and 3"):
        optimize_policy(policy, Vowels(), PROMPTS[4:], PROMPTS[:3], tmp_path, CONFIG)
    with pytest.raises(DataError, match="exceed the policy's"):
        optimize_policy(policy, Vowels(), ["word " * 9999], PROMPTS[:4], tmp_path, CONFIG)


def test_the_worlds_policy_answers_as_the_world_does(tmp_path):
    world = PreferenceWorld(0, gold=Gold())
    folder = save_world_policy(world, tmp_path / "start", num_responses=1280)
    assert save_world_policy(world, folder, num_responses=0) == folder
    drawn = TrainedPolicy(folder, max_new_tokens=40, temperature=1.0).respond(world.prompts()[:8], 2, 0)
    words = {word for text in drawn.texts for one in text for word in one.lower().strip(".").split()}
    assert {"the", "start", "with"} <= words


def test_the_command_optimizes_a_policy_and_draws_it(policy, reward_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    few = ["rlhf.max_new_tokens=6", "rlhf.prompts_per_step=2", "rlhf.measured_prompts=4", "rlhf.measure_every=1"]
    given = ["--policy", str(policy), "--prompts", "prompts.jsonl", "--reward-model", str(reward_model)]
    done = CliRunner().invoke(app, ["rlhf", "out", *given, "--steps", "1", *few])
    assert done.exit_code == 0, done.stderr
    assert f"policy after 1 steps: {tmp_path / 'out' / 'policy'}" in done.stdout
    assert {"rlhf.json", "rlhf.png", "measurements.jsonl"} <= {path.name for path in Path("out").iterdir()}
