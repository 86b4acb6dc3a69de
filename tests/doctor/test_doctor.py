"""A healthy model passes every check; each way of breaking it makes the check for it fail, and no unrelated one."""

from __future__ import annotations

import copy
import io
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers.processors import TemplateProcessing
from typer import Exit

from rm_optimizer.core.classifier import scoring
from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.classifier.pooling import RewardHead
from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair, pair_fingerprints
from rm_optimizer.core.storage.model_files import TrainedPairs
from rm_optimizer.core.tokens.padding import PadChoice, set_pad_token_id
from rm_optimizer.core.tokens.tokenizer import train_tokenizer
from rm_optimizer.doctor import data as doctor_data
from rm_optimizer.doctor import model as doctor_model
from rm_optimizer.doctor import rewards as doctor_rewards
from rm_optimizer.doctor import text as doctor_text
from rm_optimizer.doctor.diagnosis import Diagnosis, Status
from rm_optimizer.doctor.doctor import CHECKS, Examination, diagnose
from rm_optimizer.doctor.probe_conversations import probe_ids
from rm_optimizer.errors import CheckpointError, DataError
from rm_optimizer.interfaces.commands.evaluate import doctor
from rm_optimizer.interfaces.inputs import PairOptions, SavedModel
from rm_optimizer.reporting.run_report import print_diagnosis
from rm_optimizer.rl_coupling import openrlhf_reward_func
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.serving.client.reward_function import trl_reward
from tests.builders import (
    FAMILIES,
    decoder_tokenizer,
    fresh_reward_model,
    tiny_model,
    tiny_reward_model,
)

GOOD = ("splendid", "correct", "helpful", "gracious")
BAD = ("mistaken", "useless", "dreadful", "horrible")
FILLER = ("the answer", "for now", "as asked", "in short", "to be sure", "once more", "step by step", "at last")
DATED = (
    "{{ 'Today is ' + strftime_now('%d %b %Y') + '. ' }}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + ' ' }}{% endfor %}"
)


def made_pairs(num_pairs: int, first: int = 0) -> PreferenceDataset:
    """Pairs of distinct prompts whose better response says so with one of a few words; lengths say nothing."""
    words = random.Random(first)
    rows = []
    for i in range(first, first + num_pairs):
        start = " ".join(words.sample(FILLER, 3))
        good, bad = f"{start} {i} {words.choice(GOOD)}", f"{start} {i} {words.choice(BAD)}"
        rows.append(PreferencePair(f"Question number {i}: what is it?", good, bad))
    return PreferenceDataset(rows)


def swapped(pair: PreferencePair) -> PreferencePair:
    return replace(pair, chosen=pair.rejected, rejected=pair.chosen)


@pytest.fixture(scope="module")
def data() -> dict[str, PreferenceDataset]:
    return {"train": made_pairs(60), "val": made_pairs(60, first=1000)}


@pytest.fixture(scope="module")
def trained(data: dict[str, PreferenceDataset]) -> BradleyTerryRM:
    """A tiny decoder whose head is the least-squares fit to the training pairs."""
    model = tiny_reward_model("llama", max_length=256)
    scored = doctor_rewards.score_sample(model, {"train": data["train"]}, max_pairs=60, token_budget=4096, seed=0)
    X = scored.features[:, 0] - scored.features[:, 1]
    weight = np.linalg.solve(X.T @ X + 0.1 * np.eye(X.shape[1]), X.sum(axis=0))
    with torch.no_grad():
        model.reward_head.weight.copy_(torch.from_numpy(weight)[None])
    return model


@pytest.fixture
def model(trained: BradleyTerryRM) -> BradleyTerryRM:
    return copy.deepcopy(trained)


def failed(diagnosis: Diagnosis) -> set[str]:
    return set(diagnosis.names(Status.fail))


def warned(diagnosis: Diagnosis) -> set[str]:
    return set(diagnosis.names(Status.warn))


def test_a_healthy_model_passes_every_check_and_stays_as_it_was(model, data):
    before = copy.deepcopy(model.state_dict())
    model.train()
    torch.manual_seed(3)
    random_state = torch.get_rng_state()
    stages: list[tuple[int, int]] = []
    diagnosis = diagnose(model, data, seed=0, on_stage=lambda _, done, total: stages.append((done, total)))
    assert (diagnosis.verdict, diagnosis.exit_code) == (Status.ok, 0), failed(diagnosis) | warned(diagnosis)
    not_asked = [
        "tokenizer_file",
        "template_date",
        "plain_rendering",
        "adapter_trained",
        "unseen_pairs",
        "label_groups",
    ]
    assert diagnosis.names(Status.skipped) == not_asked
    page = (Path(__file__).parents[2] / "docs/evaluation.md").read_text(encoding="utf-8")
    assert [check.name for check in diagnosis.checks if f"`{check.name}`" not in page] == []
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.model.config._attn_implementation == "sdpa"
    assert stages == [(i, len(stages)) for i in range(len(stages))]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_model_with_a_fresh_head_passes_and_skips_what_needs_training(family, data):
    model = fresh_reward_model(family, max_length=128)
    diagnosis = diagnose(model, data, seed=0, max_pairs=60)
    assert not failed(diagnosis)
    assert diagnosis.check("head_init").details["fresh"] == "True"
    skipped = {
        "adapter_trained",
        "tokenizer_file",
        "unseen_pairs",
        "label_agreement",
        "calibration",
        "label_groups",
        "beats_length",
        "reward_length",
    }
    skipped |= {"prefix_sharing"} if family == "bert" else set()
    assert set(diagnosis.names(Status.skipped)) == skipped


def test_a_stored_model_is_fresh_until_its_head_moves(tmp_path):
    model = fresh_reward_model("llama", max_length=128, seed=5)
    model.save_pretrained(tmp_path / "model")
    again = BradleyTerryRM.from_pretrained(tmp_path / "model")
    assert doctor_model.is_head_fresh(again)
    with torch.no_grad():
        again.reward_head.weight[0, 0] += 1e-4
    assert not doctor_model.is_head_fresh(again)


def test_pairs_that_were_trained_on_are_told(data):
    record = TrainedPairs.of(pair_fingerprints(data["train"].pairs))
    check = doctor_data.unseen_pairs(data, record)
    assert (check.status, check.measured, check.details) == (Status.warn, 0.5, {"train": 1.0, "val": 0.0})
    assert "60 of 120 pairs were trained on" in check.explanation
    assert doctor_data.unseen_pairs({"val": data["val"]}, record).status is Status.ok
    assert doctor_data.unseen_pairs(data, None).status is Status.skipped


def test_without_pairs_their_checks_are_skipped_with_the_reason(model):
    diagnosis = diagnose(model, seed=0)
    assert not failed(diagnosis) | warned(diagnosis)
    assert "--data" in diagnosis.check("split_leakage").explanation


def read_at_the_end(model, input_ids, attention_mask):
    hidden = model.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    return model.score(hidden[:, -1])


def test_pooling_the_last_column_is_found(model, monkeypatch):
    monkeypatch.setattr(scoring, "decoder_logits", read_at_the_end)
    assert failed(diagnose(model, seed=0)) == {"padding", "plain_forward", "prefix_sharing", "save_reload"}


def test_rewards_that_depend_on_the_row_are_found(model, monkeypatch):
    right = scoring.decoder_logits

    def by_row(*inputs):
        logits = right(*inputs)
        return logits + torch.arange(len(logits))[:, None]

    monkeypatch.setattr(scoring, "decoder_logits", by_row)
    probe = probe_ids(model)
    assert doctor_model.batch(model, probe).status is Status.fail
    assert doctor_model.padding(model, probe).status is Status.fail


def test_padding_on_the_left_alone_is_found(model, monkeypatch):
    right = scoring.decoder_logits
    monkeypatch.setattr(
        scoring, "decoder_logits", lambda one, ids, mask: right(one, ids, mask) + 1 - mask[:, :1].float()
    )
    found = doctor_model.padding(model, probe_ids(model))
    assert found.status is Status.fail
    assert found.details["left"] > 0.1 > found.details["right"]


def test_a_single_prompt_gives_the_whole_interval():
    assert doctor_rewards.interval_of(Estimate(0.5, None, 1)) == (0.0, 1.0)


def test_dropout_inside_attention_is_found():
    model = tiny_reward_model("llama", max_length=256, attention_dropout=0.5)
    assert failed(diagnose(model, seed=0)) == {"dropout"}


def test_dropout_that_an_adapter_asks_for_warns(model):
    model.model.score.lora_dropout = torch.nn.Dropout(0.1)
    model.model.score.register_forward_pre_hook(lambda head, inputs: (head.lora_dropout(inputs[0]),))
    assert doctor_model.dropout(model, probe_ids(model)).status is Status.warn


def test_an_adapter_of_zeros_beside_a_trained_head_warns(model):
    config = AdapterConfig(kind=AdapterKind.lora, rank=2, alpha=4.0, dropout=0.0)
    add_adapter(model.model, config, seed=0)
    assert "adapter_trained" in warned(diagnose(model, seed=0))
    for name, value in model.model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(value)
            break
    assert diagnose(model, seed=0).check("adapter_trained").status is Status.ok
    fresh = fresh_reward_model("llama", max_length=128)
    add_adapter(fresh.model, config, seed=0)
    assert diagnose(fresh, seed=0).check("adapter_trained").status is Status.ok


def test_slower_attention_than_there_is_warns(model):
    model.model.set_attn_implementation("eager")
    diagnosis = diagnose(model, seed=0)
    assert (failed(diagnosis), warned(diagnosis)) == (set(), {"attention_kernel"})
    assert diagnosis.exit_code == 0


def two_labels(model: BradleyTerryRM) -> None:
    model.model.config.num_labels = 2


def an_activation(model: BradleyTerryRM) -> None:
    model.model.config.problem_type = "multi_label_classification"


def an_activation_that_transformers_refuses(model: BradleyTerryRM) -> None:
    model.model.config.problem_type = "single_label_classification"


def a_pad_that_ends_sequences(model: BradleyTerryRM) -> None:
    model.tokenizer.pad_token = model.tokenizer.eos_token
    model.pad_choice = PadChoice("</s>", model.tokenizer.eos_token_id, "for a test")
    set_pad_token_id(model.model, model.tokenizer.eos_token_id)


def a_template_with_todays_date(model: BradleyTerryRM) -> None:
    model.tokenizer.chat_template = DATED


def a_frozen_head(model: BradleyTerryRM) -> None:
    model.reward_head.requires_grad_(False)


def a_head_of_zeros(model: BradleyTerryRM) -> None:
    torch.nn.init.zeros_(model.reward_head.weight)


def a_second_eos(model: BradleyTerryRM) -> None:
    model.renderer.render_fn = lambda messages, response: f"{messages[-1].content} {response}</s></s>"


BROKEN: dict[Callable[[BradleyTerryRM], None], set[str]] = {
    two_labels: {"single_label"},
    an_activation: {"raw_reward"},
    an_activation_that_transformers_refuses: {"raw_reward", "save_reload"},
    a_pad_that_ends_sequences: {"pad_token", "plain_forward", "save_reload"},
    a_template_with_todays_date: {"template_date", "save_reload"},
    a_frozen_head: {"head_trainable"},
    a_head_of_zeros: {"head_init", "reward_spread"},
    a_second_eos: {"special_tokens"},
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_model_fails_the_checks_of_what_was_broken(broken, model):
    broken(model)
    diagnosis = diagnose(model, seed=0)
    assert failed(diagnosis) == BROKEN[broken]
    assert diagnosis.exit_code == 4


def test_a_head_without_a_gradient_does_not_learn_from_a_pair(model, monkeypatch):
    monkeypatch.setattr(type(model), "forward", lambda self, ids, mask: 0.0 * self.reward_head.weight.sum() + ids[:, 0])
    check = doctor_model.head_trainable(model, [(1, 2), (3, 4), (5, 6)])
    assert (check.status, check.measured) == (Status.fail, 0.0)


@pytest.mark.parametrize(("num_openers", "status"), [(0, Status.ok), (1, Status.ok), (2, Status.fail)])
def test_a_tokenizer_that_adds_no_bos_may_read_one(num_openers, status, model):
    probe = [(*(model.tokenizer.bos_token_id,) * num_openers, *ids) for ids in probe_ids(model)]
    check = doctor_text.special_tokens(model, probe)
    assert (check.status, check.measured) == (status, len(probe) * (num_openers == 2))


def test_special_tokens_that_a_pipeline_doubles_are_a_warning(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = decoder_tokenizer(chat_template=template)
    frame = {"single": "<s> $A", "special_tokens": [("<s>", tokenizer.bos_token_id)]}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**frame)
    model = tiny_reward_model("llama", tokenizer)
    check = doctor_text.plain_rendering(model, probe_ids(model))
    assert (check.status, check.measured) == (Status.warn, 1)
    assert "add_special_tokens=False" in check.explanation
    model.save_pretrained(tmp_path)
    exported = BradleyTerryRM.from_pretrained(tmp_path)
    check = doctor_text.plain_rendering(exported, probe_ids(exported))
    assert (check.status, check.measured) == (Status.ok, 3)


def test_a_head_that_rounds_is_found(model, monkeypatch):
    exact = RewardHead.forward
    monkeypatch.setattr(RewardHead, "forward", lambda head, inputs: exact(head, inputs).bfloat16().float())
    assert failed(diagnose(model, seed=0)) == {"head_dtype", "save_reload"}


def test_rewards_that_are_not_finite_fail_and_the_verdict_is_still_json(model, data):
    torch.nn.init.constant_(model.reward_head.weight, math.nan)
    diagnosis = diagnose(model, data, seed=0, max_pairs=20)
    assert failed(diagnosis) == {"finite_weights"}
    assert {"head_init", "reward_spread", "padding", "label_agreement"} <= set(diagnosis.names(Status.skipped))
    said = "1 of 1 rewards are not finite, the first is nan for"
    asked = (model.score, trl_reward(model), lambda p, r: openrlhf_reward_func(model)([f"{p} {r}"], p, p))
    for score in (*asked, lambda p, r: model.score_groups(p, [r])):
        with pytest.raises(CheckpointError, match=said):
            score(["Why?"], ["Because."])
    assert "NaN" not in diagnosis.to_json()
    assert Diagnosis.from_json(diagnosis.to_json()) == diagnosis


def test_prompt_and_response_tokenized_apart_are_found(model):
    def apart(prompt: str, response: str) -> tuple[int, ...]:
        parts = (f"Prompt: {prompt}\n", "\nResponse: ", response)
        return tuple(token for part in parts for token in model.tokenizer(part)["input_ids"])

    assert doctor_text.rendered_together(model, probe_ids(model)).status is Status.ok
    broken = [apart("Hi", "Hello.")] * len(probe_ids(model))
    assert doctor_text.rendered_together(model, broken).status is Status.fail


def test_a_tokenizer_that_is_not_read_as_its_file_says_is_told_on_loading_and_by_the_doctor(tmp_path, caplog):
    tokenizer = train_tokenizer(["2 + 2 = 1234.5"] * 3, 300)
    for family in ("llama", "qwen2"):  # transformers 5 replaces the pre-tokenizer of the second
        folder = tmp_path / family
        tiny_model(family, tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        model = BradleyTerryRM.from_pretrained(folder, max_length=64, input_form="plain")
        check = doctor_text.tokenizer_file(model)
        assert check.status is (Status.ok if family == "llama" else Status.warn)
        assert (check.explanation in caplog.text) is (family == "qwen2")
    assert "gives '2 + 2 = 1234.5' other token ids than transformers' Qwen2Tokenizer" in caplog.text
    model.save_pretrained(tmp_path / "export")  # holds what was read
    again = BradleyTerryRM.from_pretrained(tmp_path / "export")
    assert doctor_text.tokenizer_file(again).status is Status.ok


def test_cutting_the_response_is_found(model, monkeypatch):
    assert doctor_text.truncation(model).status is Status.ok
    cut = model.renderer._cut
    monkeypatch.setattr(
        model.renderer,
        "_cut",
        lambda prompts, sequences: [
            replace(found, ids=tuple(ids[: model.max_length]))
            for found, ids in zip(cut(prompts, sequences), sequences, strict=True)
        ],
    )
    assert doctor_text.truncation(model).status is Status.fail


def on_pairs(
    model: BradleyTerryRM, data: dict[str, PreferenceDataset], **changed: Sequence[PreferencePair]
) -> Diagnosis:
    """What `diagnose` finds on pairs; the checks of the model alone are left out for speed."""
    replaced = {name: PreferenceDataset(pairs) for name, pairs in changed.items()}
    examined = Examination(model, {**data, **replaced}, 0, None, 256, 4000, 8192)
    names = ["reward_spread", *(name for name, (needs, _) in CHECKS.items() if needs not in ("files", "model"))]
    checks = tuple(map(examined.check, names))
    return Diagnosis("", 0, {}, {}, {}, 0.0, checks)


def test_a_prompt_in_both_splits_fails(model, data):
    leaked = [*data["val"].pairs, replace(data["train"][0], chosen="another good one", rejected="another bad one")]
    diagnosis = on_pairs(model, data, val=leaked)
    assert failed(diagnosis) == {"split_leakage"}
    assert diagnosis.check("split_leakage").measured == 1


def test_a_prompt_that_differs_in_case_and_spacing_alone_warns(model, data):
    leaked = replace(data["val"][0], prompt=f"  {data['train'][0].prompt.upper()}")
    diagnosis = on_pairs(model, data, val=[*data["val"].pairs, leaked])
    assert (failed(diagnosis), warned(diagnosis)) == (set(), {"split_leakage"})


@pytest.mark.parametrize("words", ["{} please", "please {}"])
def test_a_prompt_with_one_word_more_in_the_other_split_warns(words, model, data):
    near = [*data["val"].pairs, *(replace(pair, prompt=words.format(pair.prompt)) for pair in data["train"].pairs[:3])]
    check = on_pairs(model, data, val=near).check("split_leakage")
    assert (check.status, check.measured) == (Status.warn, 3)
    assert "3 prompts are in two data sets but for case, spacing or a word at one end" in check.explanation
    assert doctor_data.split_leakage({"val": PreferenceDataset(near), "train": data["train"]}).measured == 3


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_word_that_decides_the_labels_warns(side, model, data):
    marked = [replace(pair, **{side: f"Oh! {getattr(pair, side)}"}) for pair in data["train"]]
    check = on_pairs(model, data, train=marked).check("marker_wins")
    assert (check.status, check.measured) == (Status.warn, 1.0)
    rule = {"chosen": "with 'oh'", "rejected": "without 'oh'"}[side]
    assert f'"the response {rule} wins" is right on 100.0% of the pairs of train' in check.explanation


def test_responses_that_differ_in_blanks_alone_warn(model, data):
    blank = [*data["train"].pairs, PreferencePair("Why?", "It is so.", "It is  so. ")]
    check = on_pairs(model, data, train=blank).check("blank_differences")
    assert (check.status, check.measured) == (Status.warn, 1 / 61)


def test_copies_and_contradictions_warn(model, data):
    pairs = data["train"].pairs
    assert warned(on_pairs(model, data, train=[*pairs, *pairs[:3]])) == {"repeated_pairs"}
    diagnosis = on_pairs(model, data, train=[*pairs, *map(swapped, pairs[:3])])
    assert warned(diagnosis) == {"contradictions"}
    assert diagnosis.check("contradictions").measured == pytest.approx(3 / 63)


def test_labels_that_decide_nothing_fail(model, data):
    undecided = {name: [replace(pair, label=0.5) for pair in split] for name, split in data.items()}
    assert failed(on_pairs(model, data, **undecided)) == {"labels"}


def test_margins_against_the_labels_warn(model, data):
    negative = [replace(pair, margin=-1.0) for pair in data["train"]]
    positive = [replace(pair, margin=1.0) for pair in data["val"]]
    diagnosis = on_pairs(model, data, train=negative, val=positive)
    assert warned(diagnosis) == {"margins"}
    assert diagnosis.check("margins").measured == len(negative)


def test_labels_that_prefer_length_warn(model, data):
    longer = [replace(pair, chosen=f"to be quite sure about it, {pair.chosen}") for pair in data["train"]]
    diagnosis = on_pairs(model, data, train=longer)
    assert "longer_wins" in warned(diagnosis)
    assert diagnosis.check("longer_wins").measured == 1.0
    assert not failed(diagnosis)


def by_characters(pairs, sign, num_wrong):
    """Scored pairs of a model that counts characters, whose labels length gets wrong so often."""
    texts = [("a good deal longer", "short")[::sign] for _ in pairs]
    made = [
        PreferencePair(str(pair.prompt), *(texts[i][::-1] if i < num_wrong else texts[i]))
        for i, pair in enumerate(pairs)
    ]
    rewards = np.array([[sign * len(pair.chosen), sign * len(pair.rejected)] for pair in made], dtype=np.float64)
    return doctor_rewards.ScoredPairs(tuple(made), rewards, np.zeros((len(made), 2, 1)), {"train": len(made)})


@pytest.mark.parametrize("sign", [1, -1], ids=["longer", "shorter"])
def test_a_model_that_counts_characters_does_not_beat_length(sign):
    scored = by_characters(made_pairs(60), sign, num_wrong=15)
    assert doctor_rewards.label_agreement(scored, 0).status is Status.ok
    check = doctor_rewards.beats_length(scored, 0)
    assert (check.status, check.measured) == (Status.warn, 0.0)
    assert "no better than counting characters" in check.explanation
    assert f"the {'longer' if sign > 0 else 'shorter'} response wins" in check.explanation


def test_a_model_that_also_ranks_what_length_gets_wrong_beats_length(model):
    scored = by_characters(made_pairs(60), 1, num_wrong=30)
    better = replace(scored, rewards=np.array([[1.0, 0.0]] * 60))
    check = doctor_rewards.beats_length(better, 0)
    assert (check.status, check.measured) == (Status.ok, 0.5)


def test_agreement_that_is_not_above_chance_says_what_could_have_been_found():
    scored = by_characters(made_pairs(60), 1, num_wrong=30)
    check = doctor_rewards.label_agreement(scored, 0)
    assert check.status is Status.warn
    assert "60 prompts find a difference of 0.18 in 4 of 5 cases" in check.explanation


def calibrated(scale: float = 1.0, flipped: float = 0.0, random_annotator: str = "", sharpness: float = 2.0):
    """Scored pairs with labels drawn from the model's probabilities, by four annotators in turn."""
    drawn = np.random.default_rng(5)
    margins = sharpness * drawn.normal(size=256)
    wins = drawn.random(256) < 1 / (1 + np.exp(-margins))
    annotators = ["abcd"[i % 4] for i in range(256)]
    turned = (drawn.random(256) < flipped) | ((np.array(annotators) == random_annotator) & (drawn.random(256) < 0.5))
    pairs = tuple(
        replace(pair, label=float(label), metadata={"annotator": who, "row": str(i)})
        for i, (pair, label, who) in enumerate(zip(made_pairs(256), wins != turned, annotators, strict=True))
    )
    return doctor_rewards.ScoredPairs(
        pairs, np.stack([scale * margins, 0 * margins], axis=1), np.zeros((256, 2, 1)), {}
    )


@pytest.mark.parametrize(
    ("scored", "says"),
    [
        (calibrated(scale=30), r"256 pairs is 0\.\d+, .* over-confident; divide its rewards by (2|3)\d"),
        (calibrated(scale=0.02), r"under-confident; divide its rewards by 0\.0[12]"),
        (calibrated(flipped=0.3, sharpness=8.0), r"(2|3)\d% were flipped; check them"),
        (calibrated(), None),
        (calibrated(sharpness=0.3), None),
        (calibrated(random_annotator="b"), None),
    ],
    ids=["over", "under", "flipped", "calibrated", "weak", "random annotator"],
)
def test_probabilities_that_the_labels_contradict_warn_with_their_cause(scored, says):
    check = doctor_rewards.calibration(scored, 0)
    assert check.status is (Status.ok if says is None else Status.warn), check.explanation
    assert re.search(says or "calibration error", check.explanation)
    halved = replace(scored, rewards=scored.rewards / 2, beta=2.0)
    assert doctor_rewards.calibration(halved, 0) == check


def test_an_annotator_with_random_labels_is_named_and_others_are_not():
    check = doctor_rewards.label_groups(calibrated(random_annotator="b", sharpness=4.0), 0)
    assert check.status is Status.warn
    assert "annotator=b: rewards agree with 0.5" in check.explanation
    healthy = calibrated(sharpness=4.0)
    assert doctor_rewards.label_groups(healthy, 0).status is Status.ok
    for label, status in ((lambda margin: float(margin < 0), Status.warn), (lambda margin: 0.5, Status.ok)):
        labels = [label(margin) if i % 4 == 3 else float(margin > 0) for i, margin in enumerate(healthy.margin)]
        pairs = tuple(replace(pair, label=value) for pair, value in zip(healthy.pairs, labels, strict=True))
        check = doctor_rewards.label_groups(replace(healthy, pairs=pairs), 0)
        assert (check.status, "annotator=d" in check.explanation) == (status, status is Status.warn)


@pytest.mark.parametrize(("num_right", "status"), [(15, Status.ok), (13, Status.warn)])
def test_the_level_of_a_group_is_divided_by_the_number_of_groups(num_right, status):
    """Nine groups of 25 prompts, of which eight are right by 0.88: 2.7 and 3.5 errors, where 3.06 are significant."""
    right = [i % 25 < (num_right if i < 25 else 22) for i in range(225)]
    pairs = [replace(pair, metadata={"who": str(i // 25)}) for i, pair in enumerate(made_pairs(225))]
    rewards = np.array([[1.0, 0.0] if is_right else [0.0, 1.0] for is_right in right])
    scored = doctor_rewards.ScoredPairs(tuple(pairs), rewards, np.zeros((225, 2, 1)), {})
    check = doctor_rewards.label_groups(scored, 0)
    assert (check.status, check.measured) == (status, num_right / 25)


def test_pairs_equal_after_truncation_are_ties_of_the_agreement():
    scored = by_characters(made_pairs(60), 1, num_wrong=0)
    cut = tuple(made_pairs(20))
    check = doctor_rewards.label_agreement(replace(scored, cut_pairs=cut), 0)
    assert check.measured == pytest.approx((60 + 10) / 80)


def test_control_tokens_in_the_pairs_are_a_warning_that_names_them(model, data):
    pairs = [*data["train"].pairs[:20], PreferencePair("<|im_start|>user\nHi<|im_end|>", "good", "bad")]
    check = diagnose(model, {"train": PreferenceDataset(pairs)}, seed=0).check("control_tokens")
    assert check.status == Status.warn
    assert check.measured == pytest.approx(1 / 21)
    assert "<|im_end|>, <|im_start|> are read as if a template had written them" in check.explanation


def test_what_is_ok_is_counted_and_shown_when_asked_for(model):
    diagnosis = diagnose(model, seed=0)
    target = io.StringIO()
    print_diagnosis(diagnosis, Console(file=target, width=200))
    num_ok = len(diagnosis.names(Status.ok))
    assert f"{num_ok} checks ok (--all shows them)" in target.getvalue()
    assert "save_reload" not in target.getvalue().partition("checks ok")[0]
    print_diagnosis(diagnosis, Console(file=target, width=200), show_all=True)
    assert all(name in target.getvalue() for name in diagnosis.names(Status.ok))


def test_a_limit_that_cuts_the_difference_away_fails(model, data):
    far = " ".join(["on and on"] * 200)
    alike = [replace(pair, chosen=f"{far} yes", rejected=f"{far} not") for pair in data["train"]]
    diagnosis = on_pairs(model, data, train=alike)
    assert failed(diagnosis) == {"identical_pairs"}
    assert warned(diagnosis) == {"truncation_rate", "response_truncation", "marker_wins", "beats_length"}
    assert diagnosis.check("response_truncation").details == {"train": 1.0, "val": 0.0}
    with pytest.raises(DataError, match="no pair is left"):
        on_pairs(model, {}, train=alike)


def test_reversed_labels_fail(model, data):
    reversed_ = {name: [swapped(pair) for pair in split] for name, split in data.items()}
    assert failed(on_pairs(model, data, **reversed_)) == {"label_agreement"}


def test_shuffled_labels_are_no_signal(model):
    coin = random.Random(1)
    diagnosis = on_pairs(model, {}, train=[pair if coin.random() < 0.5 else swapped(pair) for pair in made_pairs(256)])
    assert failed(diagnosis) | warned(diagnosis) == {"label_signal", "label_agreement", "beats_length"}
    assert diagnosis.check("label_signal").measured == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(256))


def test_the_same_comparisons_under_many_prompts_fail_the_control(model, data):
    few = data["train"].pairs[:4]
    pairs = [replace(few[i % 4], prompt=f"{few[i % 4].prompt} ({i})") for i in range(60)]
    assert failed(on_pairs(model, {}, train=pairs)) == {"label_shuffle"}


def test_a_side_that_shows_without_its_text_is_found(model, data):
    calls = iter(range(10_000_000))
    model.renderer.render_fn = lambda messages, response: f"{next(calls)} {messages[-1].content} {response}"
    diagnosis = diagnose(model, {"train": data["train"]}, seed=0)
    assert {"prompt_only", "template_date"} <= failed(diagnosis)


def test_the_verdict_is_the_same_for_the_same_seed_and_says_how_many_pairs_were_used(model):
    data = {"train": made_pairs(150)}
    first, second = (diagnose(model, data, seed=4, max_pairs=50, max_audited_pairs=100) for _ in range(2))
    assert first.checks == second.checks
    assert first.num_pairs == {"train": 150}
    assert first.num_pairs_scored == {"train": 50}
    assert 90 <= first.num_pairs_audited["train"] <= 110


def test_the_command_prints_the_verdict_writes_it_and_returns_its_code(model, data, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    for name, pairs in (("train", data["train"]), ("val", data["train"])):
        rows = "".join(json.dumps(pair.to_dict()) + "\n" for pair in pairs)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    sources = [str(tmp_path / "train.jsonl"), str(tmp_path / "val.jsonl")]
    saved, options = SavedModel(str(tmp_path / "model")), {"max_pairs": 60, "token_budget": 4096}
    with pytest.raises(Exit) as clean:
        doctor(saved, PairOptions(), sources[:1], **options)
    assert clean.value.exit_code == 0
    json_file = tmp_path / "diagnosis.json"
    with pytest.raises(Exit) as failing:
        doctor(saved, PairOptions(), sources, json_file=json_file, **options)
    assert failing.value.exit_code == 4
    written = json.loads(json_file.read_text())
    assert (written["verdict"], written["exit_code"]) == ("fail", 4)
    assert "split_leakage" in capsys.readouterr().out
    diagnosis = Diagnosis.from_json(json_file.read_text())
    assert failed(diagnosis) == {"split_leakage"}
    assert Diagnosis.from_json(diagnosis.to_json()) == diagnosis


def test_what_is_no_model_of_ours_is_one_sentence():
    with pytest.raises(TypeError, match=r"model must be a BradleyTerryRM, .* got Linear"):
        diagnose(torch.nn.Linear(2, 1), seed=0)
