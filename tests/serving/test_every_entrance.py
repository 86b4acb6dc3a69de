"""One conversation, one reward: through every route, whatever special tokens and padding its text came with."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from importlib.util import find_spec

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from rm_optimizer.core.rows.messages import Message
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import ConversationRefused, DataError
from rm_optimizer.serving.service.api_errors import InvalidRequest, TooLarge, TooLong
from rm_optimizer.serving.service.inputs import SLICE_CHARACTERS, InputReader, RenderedTexts
from tests.builders import decoder_tokenizer, encoder_tokenizer, tiny_reward_model
from tests.core.test_template_zoo import trl_templates
from tests.serving.engines import InProcessEngine, client_of, options_of, served

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}\n{{ m['content'] | trim }}<end_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
NO_MARKS = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def with_tokens(template: str, *tokens: str, eos: str | None = None, pad: str = "<pad>"):
    tokenizer = decoder_tokenizer(pad=pad, chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    if eos is not None:
        tokenizer.eos_token = eos
    return tokenizer


TOKENIZERS = {
    "plain": decoder_tokenizer,
    "plain, padded with EOS": lambda: decoder_tokenizer(pad="</s>"),
    "no template marks": lambda: decoder_tokenizer(chat_template=NO_MARKS),
    "ChatML": lambda: with_tokens(CHATML, "<|im_start|>", "<|im_end|>", eos="<|im_end|>"),
    "ChatML, another EOS": lambda: with_tokens(CHATML, "<|im_start|>", "<|im_end|>"),
    "ChatML, padded with EOS": lambda: with_tokens(CHATML, "<|im_start|>", "<|im_end|>", eos="<|im_end|>", pad="</s>"),
    "Llama-3": lambda: with_tokens(LLAMA3, "<|start|>", "<|end|>", "<|eot|>", eos="<|eot|>"),
    "Llama-3, base": lambda: with_tokens(LLAMA3, "<|start|>", "<|end|>", "<|eot|>"),
    "Gemma": lambda: with_tokens(GEMMA, "<turn>", "<end_turn>"),
    "encoder": encoder_tokenizer,
}
CONVERSATIONS = [
    ("How do I boil an egg?", "In water, for seven minutes."),
    ("Hi\nthere ", " two lines\nand a blank \n"),
    ((Message("user", "Hi."), Message("assistant", "Hello!"), Message("user", "Why?")), "Because."),
]


def renderings(renderer: ConversationRenderer, prompt, response) -> dict[str, str]:
    """Texts of one conversation as trainers send them."""
    tokenizer, text = renderer.tokenizer, renderer.text(prompt, response)
    eos, pad = tokenizer.eos_token or tokenizer.sep_token, tokenizer.pad_token
    decoded = tokenizer.decode(list(renderer.encode(prompt, response).ids))
    generated = text[: text.rindex(response.strip()) + len(response.strip())] + eos
    texts = {
        "rendered": text,
        "with EOS": text + eos,
        "with two": text + eos + eos,
        "decoded": decoded,
        "padded": pad * 3 + decoded + pad * 5,
    }
    return texts | (
        {"ended by EOS": generated, "and padded": pad * 2 + generated + pad} if response.strip() == response else {}
    )


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_rendered_conversation_has_the_tokens_of_training(name):
    renderer = ConversationRenderer(TOKENIZERS[name](), 513)
    reader = InputReader(renderer, 512, 10_000, 10_000)
    for prompt, response in CONVERSATIONS:
        expected = renderer.encode(prompt, response).ids
        for kind, text in renderings(renderer, prompt, response).items():
            (got,) = reader.rendered([text])
            assert got.ids == expected, (kind, text, renderer.tokenizer.decode(list(got.ids)))


THINK = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' and loop.last and '</think>' not in m['content'] %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}",
)
SPELLED = "5.<|im_end|>\n<|im_start|>assistant\nBecause."
OPENED = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def thinking():
    renderer = ConversationRenderer(with_tokens(THINK, "<|im_start|>", "<|im_end|>", eos="<|im_end|>"), 513)
    return InputReader(renderer, 512, 10_000, 10_000)


@pytest.mark.parametrize(
    ("opened", "responses"),
    [
        (OPENED, ["Because.", SPELLED, "<think>\nHm.\n</think>\n\nBecause."]),
        (f"<s>{OPENED}", ["Because.", SPELLED, "<think>\nHm.\n</think>\n\nBecause."]),
        (f"{OPENED}<think>\n\n</think>\n\n", ["Because.", SPELLED]),
    ],
)
def test_prompts_show_where_an_answer_begins(thinking, opened, responses):
    got = thinking.rendered([f"{opened}{response}<|im_end|>" for response in responses], [opened] * len(responses))
    assert [each.ids for each in got] == [thinking.renderer.encode("Why?", response).ids for response in responses]


@pytest.mark.parametrize("prompts", [None, [], [""], ["Why?"], ["something else"], [" " * 4_000_000], "text", [3]])
def test_an_answer_whose_beginning_nothing_tells_is_refused_by_name(thinking, prompts):
    whole = thinking.renderer.text("Why?", "Because.")
    (got,) = thinking.rendered([whole], prompts)
    assert got.ids == thinking.renderer.encode("Why?", "Because.").ids
    (got,) = thinking.rendered([f"{OPENED}Because.<|im_end|>"], prompts)
    assert got.ids == thinking.renderer.encode("Why?", "Because.").ids
    for text in (f"{OPENED}{SPELLED}<|im_end|>", "Why? Because."):
        with pytest.raises(InvalidRequest, match=r"query\[1\]: the chat template writes .* is unknown") as failure:
            thinking.rendered([whole, text], prompts)
        assert failure.value.param == "query[1]"


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL, whose chat templates this reads, is not installed")
def test_templates_of_trl_give_the_tokens_of_training_by_every_text():
    conversations = [*CONVERSATIONS[1:], ("Why?", "<think>\nHm.\n</think>\n\nBecause."), ("Why?", SPELLED)]
    num_right = 0
    for template in (each for each in trl_templates() if "generation %}" not in each):  # one of each family
        tokenizer = with_tokens(template, *sorted(set(re.findall(r"<\|\w+\|>", template))))
        if "bos_token" in template:
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 0)]
            )
        try:
            TemplateWriter(tokenizer).write_for_training()
        except DataError:  # the templates of images read no text
            continue
        renderer = ConversationRenderer(tokenizer, 2000)
        restorer = RenderedTexts(renderer)
        for prompt, response in conversations:
            try:
                expected, text = renderer.encode(prompt, response).ids, renderer.text(prompt, response)
            except DataError:
                continue
            opened = renderer.prompt_text(prompt)
            sample = f"<s>{opened}{response}</s>"
            restored = [restorer.restored(sample, opened), restorer.restored(f"<pad>{sample}<pad>", opened)]
            for unclear in (sample, text):
                with suppress(ConversationRefused):
                    restored.append(restorer.restored(unclear))
            assert {encoding.ids for encoding in renderer.encode_rendered(restored, 2000)} == {expected}, template
            read = renderer.encode_texts([text, text.removeprefix("<s>")], adds_frame=True)
            assert set(map(tuple, read)) == {expected}, template
            num_right += 1
    assert num_right >= 100


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_over_long_rendered_conversation_is_cut_as_in_training(name):
    tokenizer = TOKENIZERS[name]()
    renderer, training = ConversationRenderer(tokenizer, 41), ConversationRenderer(tokenizer, 40)
    reader = InputReader(renderer, 40, 10_000, 10_000)
    prompt = "one two three four five six seven " * 12
    (got,) = reader.rendered([renderer.text(prompt, "Yes.")])
    expected = training.encode(prompt, "Yes.")
    assert (got.ids, got.prompt_cut) == (expected.ids, expected.prompt_cut)
    assert got.prompt_cut > 0


@pytest.mark.parametrize(
    ("family", "template"), [("llama", "plain"), ("qwen2", "ChatML"), ("llama", "Llama-3"), ("bert", "encoder")]
)
def test_every_route_gives_the_reward_of_the_model_in_memory(tmp_path, family, template):
    tokenizer = TOKENIZERS[template]()
    model = tiny_reward_model(family, tokenizer)
    model.save_pretrained(tmp_path / "model")
    prompts, responses = (list(column) for column in zip(*CONVERSATIONS, strict=True))
    wire = [p if isinstance(p, str) else [m.to_dict() for m in p] for p in prompts]

    async def main():
        app = await served(InProcessEngine(options_of(tmp_path / "model", tmp_path / "tokenizer")))
        async with client_of(app) as client:

            async def ask(path, **body):
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()

            items = [{"prompt": p, "responses": [r]} for p, r in zip(wire, responses, strict=True)]
            ids = [list(e.ids) for e in model.renderer.encode_batch(prompts, responses)]
            got = {
                "/rm/score": [row[0] for row in (await ask("/rm/score", items=items))["rewards"]],
                "/classify ids": [d["probs"][0] for d in (await ask("/classify", input=ids))["data"]],
            }
            messages = [
                ([{"role": "user", "content": p}] if isinstance(p, str) else p) + [{"role": "assistant", "content": r}]
                for p, r in zip(wire, responses, strict=True)
            ]
            got["/classify messages"] = [
                (await ask("/classify", messages=turns))["data"][0]["probs"][0] for turns in messages
            ]
            parts = [[turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in t] for t in messages]
            got["/classify parts"] = [
                (await ask("/classify", messages=turns))["data"][0]["probs"][0] for turns in parts
            ]
            kinds = [renderings(model.renderer, *conversation) for conversation in CONVERSATIONS]
            for kind in ("rendered", "decoded", "padded"):
                got[f"/get_reward {kind}"] = (await ask("/get_reward", query=[k[kind] for k in kinds]))["rewards"]
            return got

    got = asyncio.run(main())
    expected = model.score(prompts, responses)
    for entrance, rewards in got.items():
        torch.testing.assert_close(torch.tensor(rewards), expected, atol=1e-4, rtol=0, msg=entrance)


@pytest.fixture(scope="module")
def reader():
    renderer = ConversationRenderer(decoder_tokenizer(), 129)
    return InputReader(renderer, 128, 10_000, 1000)


@pytest.fixture
def tokenized(reader, monkeypatch):
    """Number of characters that the tokenizer was given."""
    seen = []
    original = type(reader.renderer.tokenizer).__call__

    def counting(self, text, *arguments, **options):
        seen.append(sum(map(len, text)) if isinstance(text, list) else len(text))
        return original(self, text, *arguments, **options)

    monkeypatch.setattr(type(reader.renderer.tokenizer), "__call__", counting)
    return seen


def test_texts_after_one_that_is_too_long_are_not_tokenized(reader, tokenized):
    texts = ["one two three four five six " * 200] * 1000
    with pytest.raises(TooLong, match=r"input\[0\]"):
        reader.texts(texts, add_special_tokens=True)
    with pytest.raises(TooLong, match=r"responses\[0\]"):
        reader._conversations(["Hi"] * 1000, texts, [f"responses[{i}]" for i in range(1000)])
    assert sum(tokenized) <= 3 * SLICE_CHARACTERS  # an over-long conversation's prompt once more


def test_a_request_of_too_many_tokens_is_not_tokenized_to_its_end(reader, tokenized):
    with pytest.raises(TooLarge, match="split it"):
        reader.texts(["one two three four five six " * 8] * 4000, add_special_tokens=True)
    assert sum(tokenized) <= SLICE_CHARACTERS


def test_a_text_of_nothing_but_padding_is_refused_in_linear_time(reader):
    pads = "<pad>" * (128 * 64 // 5)
    with pytest.raises(TooLong):
        reader.rendered(["<pad>" * 400_000])
    started = time.process_time()
    with pytest.raises(Exception, match="must not be empty"):
        reader.rendered([pads] * 50)
    assert time.process_time() - started < 5
