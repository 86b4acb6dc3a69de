"""One conversation, one text, one list of token ids: whatever the tokenizer, the template and the day."""

from __future__ import annotations

import datetime

import pytest
import transformers.utils.chat_template_utils as chat_template_utils
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rm_optimizer.core.model.identity import require_rendering
from rm_optimizer.core.pairs.pair import Message
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.conversation_text import PINNED_DATE, pin_dates
from rm_optimizer.errors import CheckpointError, ConfigError, DataError
from tests.builders import decoder_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + date_string + "<|eot_id|>" }}
{%- for message in messages %}
    {{- "<|start_header_id|>" + message["role"] + "<|end_header_id|>\n\n" + message["content"] | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\n\n" }}
{%- endif %}
"""
ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %}{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
SPECIAL = [
    "<pad>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]


def byte_bpe(*, adds_bos: bool = False, chat_template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    texts = ["Prompt: hello there Response: general assistant user system what is two and two it is four"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.chat_template = chat_template
    return tokenizer


def word_piece() -> PreTrainedTokenizerFast:
    words = ["prompt", "response", ":", "hello", "there", "what", "is", "it", "four", "two", *"abcde.!?"]
    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words])}
    core = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]"
    )


def llama() -> PreTrainedTokenizerFast:
    return byte_bpe(adds_bos=True, chat_template=LLAMA, bos_token="<s>", eos_token="<|eot_id|>")


def chatml() -> PreTrainedTokenizerFast:
    return byte_bpe(chat_template=CHATML, eos_token="<|im_end|>", pad_token="<pad>")


def on_day(monkeypatch: pytest.MonkeyPatch, day: datetime.datetime) -> None:
    class Frozen(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return day

    assert hasattr(chat_template_utils, "datetime")
    monkeypatch.setattr(chat_template_utils, "datetime", Frozen)
    chat_template_utils._compile_jinja_template.cache_clear()


TOKENIZERS = {
    "bos and eos": (lambda: byte_bpe(adds_bos=True, bos_token="<s>", eos_token="</s>"), "<s>", "</s>"),
    "bos defined but not added": (lambda: byte_bpe(bos_token="<s>", eos_token="</s>"), None, "</s>"),
    "eos alone": (lambda: byte_bpe(eos_token="</s>"), None, "</s>"),
    "cls and sep": (word_piece, "[CLS]", "[SEP]"),
    "llama template": (llama, "<s>", "<|eot_id|>"),
    "bos without bos in the template": (
        lambda: byte_bpe(adds_bos=True, chat_template=CHATML, bos_token="<s>", eos_token="</s>"),
        "<s>",
        "</s>",
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("max_length", [18, 200])
def test_bos_and_eos_stand_exactly_once_on_any_sequence_cut_or_not(name: str, max_length: int):
    build, first, last = TOKENIZERS[name]
    tokenizer = build()
    renderer = ConversationRenderer(tokenizer, max_length)
    for prompt, response in (("what is it ?", "four ."), ("what " * 30, "two ."), ("what", "four two " * 60)):
        ids = renderer.encode(prompt, response).ids
        tokens = tokenizer.convert_ids_to_tokens(list(ids))
        assert len(ids) <= max_length
        assert tokens[-1] == last
        assert tokens[-2] != last
        assert (tokens[0] == first) == (first is not None)
        assert tokens.count("<s>") + tokens.count("[CLS]") == (first is not None)


def test_a_tokenizer_without_special_tokens_gets_none():
    tokenizer = byte_bpe()
    ids = ConversationRenderer(tokenizer, 100).encode("hello", "there").ids
    assert tokenizer.decode(ids) == "Prompt: hello\n\nResponse: there"


def test_blank_tokens_after_the_templates_eos_stay_and_no_eos_is_added():
    tokenizer = chatml()
    renderer = ConversationRenderer(tokenizer, 100)
    text = tokenizer.decode(renderer.encode("hello", "there").ids)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nthere<|im_end|>\n"


def test_an_eos_that_the_response_brings_is_not_doubled():
    tokenizer = byte_bpe(eos_token="</s>")
    renderer = ConversationRenderer(tokenizer, 100)
    assert renderer.encode("hello", "there</s>").ids == renderer.encode("hello", "there").ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_gets_no_special_token_twice_and_its_bos_back(name: str):
    build, first, _ = TOKENIZERS[name]
    tokenizer = build()
    renderer = ConversationRenderer(tokenizer, 512)
    framed, bare = (tokenizer("hello there", add_special_tokens=adds)["input_ids"] for adds in (True, False))
    assert renderer.encode_texts(["hello there", tokenizer.decode(framed)], adds_frame=True) == [framed, framed]
    assert renderer.encode_texts(["hello there"], adds_frame=False) == [bare]
    if renderer.closing():
        text = renderer.text("what is it ?", "four .")
        ids = list(renderer.encode("what is it ?", "four .").ids)
        assert renderer.encode_texts([text, text.removeprefix(first or "")], adds_frame=True) == [ids, ids]


def test_plain_rendering_of_text_and_of_messages():
    renderer = ConversationRenderer(byte_bpe(eos_token="</s>"), 100)
    assert renderer.text("2 + 2?", "4") == "Prompt: 2 + 2?\n\nResponse: 4"
    assert renderer.text((Message("user", "2 + 2?"),), "4") == renderer.text("2 + 2?", "4")
    turns = (Message("system", "S"), Message("user", "A"), Message("assistant", "B"), Message("user", "C"))
    expected = "Prompt: System: S\n\nHuman: A\n\nAssistant: B\n\nHuman: C\n\nResponse: D"
    assert renderer.text(turns, "D") == expected


def test_ids_are_those_of_transformers_own_chat_tokenization():
    tokenizer = llama()
    renderer = ConversationRenderer(tokenizer, 200)
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    theirs = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=True)["input_ids"]
    assert list(renderer.encode("hello", "there").ids) == theirs


def test_the_batch_gives_what_each_conversation_gives_alone():
    renderer = ConversationRenderer(llama(), 60)
    prompts = ["hello", "what is two " * 20, (Message("system", "be"), Message("user", "x " * 70))]
    responses = ["there", "four", "it is " * 40]
    together = renderer.encode_batch(prompts, responses)
    assert together == [renderer.encode(p, r) for p, r in zip(prompts, responses, strict=True)]
    assert renderer.encode_batch([], []) == []


def test_prompts_that_are_made_one_by_one_are_told_apart():
    def transcript(number: int) -> str:
        return f"\n\nHuman: number {number}\n\nAssistant:"

    class Numbered(list):
        """Prompts of which each exists only while it is read."""

        def __iter__(self):
            return map(transcript, range(len(self)))

    renderer = ConversationRenderer(decoder_tokenizer(), 64)
    alone = [renderer.encode(transcript(number), "Yes.") for number in range(20)]
    assert renderer.encode_batch(Numbered(range(20)), ["Yes."] * 20) == alone


def test_an_over_long_prompt_loses_its_left_end_and_the_response_nothing():
    tokenizer = byte_bpe(adds_bos=True, bos_token="<s>", eos_token="</s>")
    whole = ConversationRenderer(tokenizer, 1000).encode("x y z " * 50, " four two")
    cut = ConversationRenderer(tokenizer, 40).encode("x y z " * 50, " four two")
    assert len(cut.ids) == 40
    assert cut.prompt_cut == len(whole.ids) - 40
    assert cut.response_cut == 0
    assert cut.ids == whole.ids[:1] + whole.ids[-39:]


def test_a_response_too_long_alone_loses_its_right_end_and_keeps_eos():
    tokenizer = byte_bpe(adds_bos=True, bos_token="<s>", eos_token="</s>")
    response = "".join(chr(ord("a") + i % 26) for i in range(200))
    cut = ConversationRenderer(tokenizer, 20).encode("hello", response)
    text = tokenizer.decode(cut.ids)
    assert text.startswith("<s>")
    assert text.endswith("</s>")
    body = text.removeprefix("<s>").removesuffix("</s>").strip()
    assert response.startswith(body)
    whole = ConversationRenderer(tokenizer, 1000).encode("hello", response)
    assert cut.prompt_cut + cut.response_cut == len(whole.ids) - 20
    assert cut.response_cut > 0


def test_a_chat_response_too_long_keeps_eos_and_the_blank_after_it():
    tokenizer = chatml()
    text = tokenizer.decode(ConversationRenderer(tokenizer, 24).encode("hello", "b c d " * 50).ids)
    assert text.endswith("<|im_end|>\n")
    assert text.count("<|im_end|>") == 1


@settings(max_examples=60)
@given(
    prompt=st.text(min_size=1, max_size=80).filter(str.strip),
    response=st.text(min_size=1, max_size=80),
    limit=st.integers(8, 120),
)
def test_cutting_conserves_tokens_and_never_exceeds_the_limit(prompt: str, response: str, limit: int):
    whole = LONG.encode(prompt, response)
    LONG.max_length = limit
    try:
        cut = LONG.encode(prompt, response)
    finally:
        LONG.max_length = 10_000
    assert len(cut.ids) == min(limit, len(whole.ids))
    assert len(cut.ids) + cut.prompt_cut + cut.response_cut == len(whole.ids)
    assert cut.ids[0] == whole.ids[0]
    if not cut.response_cut:
        assert cut.ids[1:] == whole.ids[len(whole.ids) - len(cut.ids) + 1 :]


LONG = ConversationRenderer(byte_bpe(adds_bos=True, bos_token="<s>", eos_token="</s>"), 10_000)

NOW = "{{ strftime_now('%Y-%m-%d') }}" + CHATML
CALLER = "{{ date_string }}" + CHATML
MACRO = '{%- set today = strftime_now( "%d %B %Y" ) -%}{{ today }}' + CHATML


@pytest.mark.parametrize("template", [LLAMA, NOW, CALLER, MACRO], ids=["llama", "now", "caller", "set"])
def test_a_sequence_is_the_same_whatever_day_it_is(monkeypatch: pytest.MonkeyPatch, template: str):
    seen = set()
    for day in (datetime.datetime(2025, 1, 2), datetime.datetime(2031, 11, 30)):
        on_day(monkeypatch, day)
        tokenizer = byte_bpe(chat_template=template, bos_token="<s>", eos_token="<|eot_id|>")
        renderer = ConversationRenderer(tokenizer, 200)
        assert renderer.pinned_date == PINNED_DATE
        seen.add((renderer.encode("hello", "there").ids, renderer.template_hash))
    assert len(seen) == 1


def test_the_pin_is_tested_against_a_template_that_does_change_by_the_day(monkeypatch: pytest.MonkeyPatch):
    seen = set()
    for day in (datetime.datetime(2025, 1, 2), datetime.datetime(2031, 11, 30)):
        on_day(monkeypatch, day)
        tokenizer = byte_bpe(chat_template=NOW)
        seen.add(tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False))
    assert len(seen) == 2


def test_a_server_that_renders_with_the_pinned_template_agrees_even_if_it_passes_a_date():
    tokenizer = byte_bpe(chat_template=CALLER, eos_token="<|im_end|>")
    text = ConversationRenderer(tokenizer, 200).text("hello", "there")
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, date_string="1 Jan 2030") == text
    assert text.startswith(PINNED_DATE)


@pytest.mark.parametrize("template", [LLAMA, NOW, CALLER, MACRO, CHATML, "\n  {% if true %}x{% endif %}\n"])
def test_pinning_twice_changes_nothing_and_white_space_stays(template: str):
    pinned = pin_dates(template)
    assert pin_dates(pinned) == pinned
    turns = [{"role": "user", "content": "hello"}]
    tokenizer = byte_bpe(bos_token="<s>", eos_token="</s>")

    def rendered(text: str) -> str:
        return str(tokenizer.apply_chat_template(turns, chat_template=text, tokenize=False, date_string="DATE"))

    if "date_string" not in template and "strftime_now" not in template:
        assert pinned == template
    marked = "  {% if true %}x{% endif %}\n{{ date_string }}"
    assert rendered(pin_dates(marked)) == rendered(marked).replace("DATE", PINNED_DATE)


def test_the_pin_is_said_once(caplog: pytest.LogCaptureFixture):
    tokenizer = llama()
    with caplog.at_level("INFO", logger="rm_optimizer"):
        first = ConversationRenderer(tokenizer, 100)
        second = ConversationRenderer(tokenizer, 100)
    assert [record.message for record in caplog.records] == [
        "the chat template inserts today's date; it is pinned to 26 Jul 2024"
    ]
    assert first.identity() == second.identity()


def test_a_date_that_cannot_be_pinned_is_refused():
    with pytest.raises(ConfigError, match="strftime_now with a computed format"):
        pin_dates("{{ strftime_now(format_of_the_day) }}")


def test_each_of_several_named_templates_is_pinned():
    tokenizer = byte_bpe(eos_token="<|im_end|>")
    tokenizer.chat_template = {"default": NOW, "tool_use": LLAMA}
    renderer = ConversationRenderer(tokenizer, 100)
    assert renderer.pinned_date == PINNED_DATE
    assert not any("strftime_now(" in text for text in tokenizer.chat_template.values())


def test_a_conversation_the_template_refuses_is_one_clear_sentence():
    tokenizer = byte_bpe(chat_template=ALTERNATING, bos_token="<s>", eos_token="</s>")
    renderer = ConversationRenderer(tokenizer, 100)
    assert renderer.text("hello", "there") == "<s>[INST] hello [/INST]there</s>"
    with pytest.raises(DataError, match=r"refuses a conversation with roles system, user, assistant .*must alternate"):
        renderer.encode((Message("system", "be brief"), Message("user", "hello")), "there")


def test_half_a_surrogate_pair_is_named():
    with pytest.raises(DataError, match="half of a UTF-16 surrogate pair"):
        LONG.encode("a \ud83d b", "there")


def test_template_hash_is_of_behavior():
    plain = ConversationRenderer(byte_bpe(eos_token="</s>"), 100)
    assert plain.template_hash == ConversationRenderer(byte_bpe(eos_token="</s>"), 50).template_hash
    others = [byte_bpe(eos_token="<|im_end|>"), byte_bpe(adds_bos=True, bos_token="<s>", eos_token="</s>"), chatml()]
    spaced = byte_bpe(chat_template=CHATML + " ", eos_token="<|im_end|>")
    hashes = {ConversationRenderer(tokenizer, 100).template_hash for tokenizer in [*others, spaced]}
    assert len(hashes | {plain.template_hash}) == 5
    comment = byte_bpe(chat_template="{# a comment #}" + CHATML, eos_token="<|im_end|>", pad_token="<pad>")
    assert ConversationRenderer(comment, 100).template_hash == ConversationRenderer(chatml(), 100).template_hash


def test_identity_is_checked_when_a_model_is_loaded():
    stored = ConversationRenderer(llama(), 100).identity()
    assert stored["kind"] == "chat_template"
    assert stored["pinned_date"] == PINNED_DATE
    assert "Today Date: 26 Jul 2024" in stored["rendering"]
    require_rendering(ConversationRenderer(llama(), 50), stored)
    with pytest.raises(CheckpointError, match="restore the tokenizer and chat template"):
        require_rendering(ConversationRenderer(chatml(), 100), stored)


def shout(messages: tuple[Message, ...], response: str) -> str:
    return f"{messages[-1].content.upper()} >> {response}"


def test_a_rendering_of_ones_own_is_used_cut_and_remembered():
    tokenizer = chatml()
    renderer = ConversationRenderer(tokenizer, 20, render_fn=shout)
    assert renderer.text("hello", "there") == "HELLO >> there"
    cut = renderer.encode("x" * 60, "there")
    assert tokenizer.decode(cut.ids).endswith("XX >> there<|im_end|>")
    assert cut.response_cut == 0
    with pytest.raises(CheckpointError, match="pass the same one as render_fn"):
        require_rendering(ConversationRenderer(tokenizer, 20), renderer.identity())


def test_a_limit_without_room_is_refused():
    with pytest.raises(ValueError, match="max_length must exceed the 2 special tokens"):
        ConversationRenderer(word_piece(), 2)


def test_a_reward_sequence_depends_on_its_own_prompt_and_response_only():
    renderer = ConversationRenderer(llama(), 60)
    prompt = "what is two " * 20
    alone = renderer.encode(prompt, "four")
    beside = renderer.encode_batch([prompt, prompt], ["four", "it is four " * 30])[0]
    assert alone == beside


def test_several_templates_without_a_default_are_refused():
    tokenizer = decoder_tokenizer()
    tokenizer.chat_template = {"rag": "{{ messages }}", "tool_use": "{{ messages }}"}
    with pytest.raises(CheckpointError, match=r"several chat templates \(rag, tool_use\) and none named 'default'"):
        ConversationRenderer(tokenizer, 64)
