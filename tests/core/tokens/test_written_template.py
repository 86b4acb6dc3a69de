"""Plain `apply_chat_template` gives the tokens that a model is trained on, or that others trained theirs on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.rows.messages import Message
from rm_optimizer.core.tokens.chat import WRITTEN_MARK
from rm_optimizer.doctor.diagnosis import Status
from rm_optimizer.doctor.text import special_tokens
from rm_optimizer.errors import ConfigError, ConversationRefused
from tests.builders import (
    decoder_tokenizer,
    encoder_tokenizer,
    fresh_reward_model,
    tiny_model,
    tiny_reward_model,
)

GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
OPEN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}\n"
)
CONVERSATIONS = (
    (("user", "Hi"), ("assistant", "Hello.")),
    (("user", "What is 2 + 2?"), ("assistant", "4"), ("user", "Sure?\n"), ("assistant", "Yes, {{ 'sure' }}.")),
    (("system", "Be brief."), ("user", "Why?"), ("assistant", "Because.")),
    (("tool", "ünd 日本"), ("assistant", "Two\nlines")),
)


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    made = encoder_tokenizer() if kind == "encoder" else decoder_tokenizer()
    if kind == "gemma":
        made.add_special_tokens({"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
    made.chat_template = {"gemma": GEMMA, "open": OPEN}.get(kind)
    return made


def base(kind: str, folder: Path, *, has_head: bool = False) -> Path:
    family = "bert" if kind == "encoder" else "llama"
    made = tokenizer(kind)
    model = tiny_model(family, made)
    (model if has_head else model.base_model).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def plain_rewards(folder: Path, conversations: Sequence[Any] = CONVERSATIONS, **trust: bool) -> dict[str, list[float]]:
    """As a model card has it: the folder's own template and model, in plain transformers' three ways."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **trust).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    classify = pipeline("text-classification", model=str(folder), device="cpu", **trust)
    found: dict[str, list[float]] = {"template": [], "text": [], "pipeline": []}
    for turns in conversations:
        messages = [{"role": role, "content": content} for role, content in turns]
        with torch.no_grad():
            batch = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
            found["template"].append(model(**batch).logits.item())
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            found["text"].append(model(**tokenizer(text, return_tensors="pt")).logits.item())
        found["pipeline"].append(classify(text)[0]["score"])
    return found


def in_three_ways(rewards: Sequence[float]) -> dict[str, Any]:
    return dict.fromkeys(("template", "text", "pipeline"), pytest.approx(list(rewards), abs=1e-5))


def scores(model: BradleyTerryRM) -> list[float]:
    prompts = [tuple(Message(role, content) for role, content in turns[:-1]) for turns in CONVERSATIONS]
    return model.score(prompts, [turns[-1][1] for turns in CONVERSATIONS]).tolist()


@pytest.mark.parametrize("kind", ["plain", "encoder", "gemma", "open"])
def test_what_is_trained_here_is_rendered_by_plain_transformers(kind: str, tmp_path: Path):
    model = BradleyTerryRM.from_pretrained(base(kind, tmp_path / "base"), new_head=True, max_length=96)
    with torch.no_grad():
        model.reward_head.weight.mul_(30)
    rewards = scores(model)
    model.save_pretrained(tmp_path / "export")
    assert plain_rewards(tmp_path / "export") == in_three_ways(rewards)
    assert json.loads((tmp_path / "export" / "export.json").read_text())["plain_rendering"] is True
    loaded = BradleyTerryRM.from_pretrained(tmp_path / "export")
    assert scores(loaded) == pytest.approx(rewards, abs=1e-6)
    assert loaded.identity() == model.identity()
    last = model.tokenizer.decode(model.renderer.encode("Hi", "Hello.").ids)
    assert last.endswith({"encoder": "[SEP]", "gemma": "<end_of_turn>\n"}.get(kind, "</s>"))


def test_a_model_built_from_its_configuration_brings_a_template_too(tmp_path: Path):
    model = fresh_reward_model("llama", max_length=96)
    model.save_pretrained(tmp_path)
    assert plain_rewards(tmp_path) == in_three_ways(scores(model))
    text = model.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}], tokenize=False
    )
    assert text == "Prompt: Hi\n\nResponse: Hello.</s>"


def test_an_eos_that_the_response_brings_is_not_doubled():
    model = fresh_reward_model("llama", max_length=96)
    assert model.renderer.encode("Hi", "there</s>") == model.renderer.encode("Hi", "there")


@pytest.mark.parametrize("kind", ["gemma", "open"])
def test_a_reward_model_of_others_is_read_where_its_own_template_ends(kind: str, tmp_path: Path):
    folder = base(kind, tmp_path, has_head=True)
    model = BradleyTerryRM.from_pretrained(folder, max_length=96)
    assert scores(model) == pytest.approx(plain_rewards(folder)["template"], abs=1e-5)
    assert model.renderer.encode("Hi", "Hello.").ids[-1] != model.tokenizer.eos_token_id


def test_a_template_that_writes_everything_stays_as_it_is():
    chat = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>\n{% endfor %}"
    reader = decoder_tokenizer(chat_template=chat)
    fresh_reward_model("llama", reader, max_length=96)
    assert reader.chat_template == chat


def test_an_encoder_whose_template_writes_no_cls_is_framed_and_said_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    base("encoder", tmp_path, has_head=True)
    reader = encoder_tokenizer()
    reader.chat_template = OPEN
    reader.save_pretrained(tmp_path)
    model = BradleyTerryRM.from_pretrained(tmp_path, max_length=96)
    assert model.tokenizer.decode(model.renderer.encode("Hi", "Hello.").ids).startswith("[CLS]")
    assert "the chat template writes no [CLS]" in caplog.text


def test_the_doctor_finds_no_fault_in_a_template_that_closes_its_own_turn(tmp_path: Path):
    model = BradleyTerryRM.from_pretrained(base("gemma", tmp_path), new_head=True, max_length=24)
    check = special_tokens(model, [model.renderer.encode("Hi", "Hello.").ids])
    assert check.status is Status.skipped
    assert "ends with '<end_of_turn>\\n'" in check.explanation


def test_a_cut_conversation_keeps_what_its_template_ends_with(tmp_path: Path):
    model = BradleyTerryRM.from_pretrained(base("gemma", tmp_path), new_head=True, max_length=24)
    assert WRITTEN_MARK in model.tokenizer.chat_template
    for prompt, response in (("Hi", "b c d " * 40), ("b c d " * 40, "Hello.")):
        encoding = model.renderer.encode(prompt, response)
        assert len(encoding.ids) == 24
        text = model.tokenizer.decode(encoding.ids)
        assert text.startswith("<s>")
        assert text.endswith("<end_of_turn>\n")


def test_a_date_that_is_pinned_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = base("gemma", tmp_path, has_head=True)
    template = folder / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }} " + template.read_text())
    model = BradleyTerryRM.from_pretrained(folder, max_length=96)
    assert model.renderer.pinned_date == "26 Jul 2024"
    assert [text.split(" is ")[0] for text in caplog.messages] == ["the chat template inserts today's date; it"]


def test_an_export_of_an_earlier_version_keeps_its_frame_and_its_rewards(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    reader = tokenizer("gemma")  # to which earlier versions appended EOS, whatever the template wrote
    model = tiny_reward_model("llama", reader, max_length=96)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "export.json").read_text())["plain_rendering"] is False
    assert "apply_chat_template of the exported tokenizer gives other tokens" in caplog.text
    loaded = BradleyTerryRM.from_pretrained(tmp_path)
    assert loaded.renderer.encode("Hi", "Hello.").ids[-1] == reader.eos_token_id
    assert scores(loaded) == pytest.approx(scores(model), abs=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_reward_model_of_text_pairs_is_read_as_its_tokenizer_makes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    reader = encoder_tokenizer()
    tiny_model("deberta-v2", reader, type_vocab_size=0).save_pretrained(tmp_path / "theirs")
    reader.save_pretrained(tmp_path / "theirs")
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs").eval()
    prompts, responses = ["What is 2 + 2?", "Hi"], ["4, ünd 日本", "Hello.\nworld"]
    with torch.no_grad():
        cards = [
            plain(**reader(*texts, return_tensors="pt")).logits.item() for texts in zip(prompts, responses, strict=True)
        ]
    model = BradleyTerryRM.from_pretrained(tmp_path / "theirs", input_form="pair", max_length=96)
    assert model.score(prompts, responses).tolist() == pytest.approx(cards, abs=1e-5)
    assert not caplog.text
    model.save_pretrained(tmp_path / "ours")
    again = BradleyTerryRM.from_pretrained(tmp_path / "ours")
    assert again.score(prompts, responses).tolist() == pytest.approx(cards, abs=1e-5)
    assert not caplog.text
    guessed = BradleyTerryRM.from_pretrained(tmp_path / "theirs", max_length=96)
    assert "the form of its input is unknown" in caplog.text
    assert "input_form='pair'" in caplog.text
    assert guessed.score(prompts, responses).tolist() != pytest.approx(cards, abs=1e-5)
    with pytest.raises(ConfigError, match="did you mean 'pair'"):
        BradleyTerryRM.from_pretrained(tmp_path / "theirs", input_form="pairs", max_length=96)
    with pytest.raises(ConfigError, match=r"ours reads its input is known; leave the option out"):
        BradleyTerryRM.from_pretrained(tmp_path / "ours", input_form="pair")


def test_token_types_of_text_pairs_follow_the_separator_or_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    names = {"model_input_names": ["input_ids", "token_type_ids"]}
    untyped, other, typed = encoder_tokenizer(), encoder_tokenizer(**names), encoder_tokenizer(**names)
    special = [("[CLS]", 1), ("[SEP]", 2)]
    other.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS]:1 $A [SEP] $B [SEP]", special_tokens=special
    )
    folders = {}
    for name, tokenizer in {"untyped": untyped, "other": other, "typed": typed}.items():
        folders[name] = str(tmp_path / name)
        tiny_model("bert", tokenizer).save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    with pytest.raises(ConfigError, match=r"token types \[1, 0, .* do not change after \[SEP\]"):
        BradleyTerryRM.from_pretrained(folders["other"], input_form="pair")
    BradleyTerryRM.from_pretrained(folders["untyped"], input_form="pair")
    assert "add token_type_ids to model_input_names" in caplog.text
    model = BradleyTerryRM.from_pretrained(folders["typed"], input_form="pair")
    with pytest.raises(ConversationRefused, match=r"a text contains \[SEP\], after which the model reads the response"):
        model.score("a [SEP] b", "c")
    model.save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours", trust_remote_code=False)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours", trust_remote_code=True)
    stored = AutoTokenizer.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        rewards = [plain(**stored("Hi", text, return_tensors="pt")).logits.item() for text in ("Yes.", "No.")]
    assert model.score("Hi", ["Yes.", "No."]).tolist() == pytest.approx(rewards, abs=1e-5)
