"""Conversion of conversations to token ids, with one rendering, one pair of special tokens and one rule of truncation.

The whole conversation is rendered to text and tokenized once, because the tokens of a separate prompt and response
differ from the tokens of both together. A sequence, and so its reward, depends only on its own prompt and response.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from transformers import PreTrainedTokenizerBase

from rm_optimizer.core.pairs.pair import Message, PreferencePair, Prompt, as_messages, digest
from rm_optimizer.core.rows.messages import require_characters, turns_of
from rm_optimizer.core.rows.prompts import split_context
from rm_optimizer.core.tokens.content_rules import ContentRules
from rm_optimizer.core.tokens.conversation_text import ChatTemplate, plain_prompt
from rm_optimizer.core.tokens.template_fields import Turn
from rm_optimizer.core.tokens.tokenizer import Frame, require_one_template
from rm_optimizer.errors import ConfigError, ConversationRefused, DataError
from rm_optimizer.schema.data import SpecialTokens, Thinking

RenderFn: TypeAlias = Callable[[tuple[Message, ...], str], str]
"""Custom rendering: function of the messages before the response, and of the response, that returns the text."""

WRITTEN_MARK = "{# written whole #}\n"
"""Mark in a chat template that writes a whole sequence, so that nothing is added to the tokens of its text."""
PROBES: tuple[tuple[tuple[Message, ...], str], ...] = (
    ((Message("user", "What is 2 + 2?"),), "It is 4."),
    ((Message("user", "Hi."), Message("assistant", "Hello!"), Message("user", "Name\na colour.")), "Blue, ünd grün."),
    ((Message("system", "Be brief."), Message("user", "Why?")), "Because."),
)
_log = logging.getLogger("rm_optimizer")
MODEL_RENDERERS: WeakValueDictionary[int, ConversationRenderer] = WeakValueDictionary()
"""Renderers of living models by the `id` of their tokenizer, which such a renderer keeps alive, for `renderer_of`."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """The token ids of one prompt and response, and the numbers of tokens that were cut.

    Args:
        ids: token ids, special tokens included.
        prompt_cut: number of tokens cut from the left of the prompt.
        response_cut: number of tokens cut from the right of the response.
    """

    ids: tuple[int, ...]
    prompt_cut: int
    response_cut: int


class ConversationRenderer:
    r"""Renderer of a prompt and a response to text and token ids, the same for training, evaluation and serving.

    The tokenizer's chat template is used if there is one, with its dates pinned (which changes the tokenizer's
    `chat_template`), else ``Prompt: {prompt}\n\nResponse: {response}``. BOS (or CLS) is at the start exactly once if
    the tokenizer adds one, and EOS (or SEP) is at the end exactly once. Blank tokens that a template writes after EOS
    are kept. To a template with `WRITTEN_MARK` nothing is added. A sequence that is too long loses tokens from the left
    of its prompt, after BOS. A response that alone is too long also loses its right end, and EOS is kept.

    Args:
        tokenizer: a `transformers` tokenizer.
        max_length: most tokens of a sequence, special tokens included.
        render_fn: custom rendering, which replaces the template or the plain form.

    Raises:
        ValueError: if `max_length` leaves no room for other than special tokens.
        ConfigError: if the template's date cannot be pinned.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, render_fn: RenderFn | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.render_fn = render_fn
        if render_fn is None:
            require_one_template(tokenizer)
        self.frame = Frame(tokenizer, is_written=self.is_written)
        self._template = ChatTemplate(tokenizer)
        self.refused_tokens: dict[int, str] = {}
        if max_length <= (special := len(self.frame.lead) + len(self.frame.end)):
            raise ValueError(f"max_length must exceed the {special} special tokens of a sequence, got {max_length}")
        if self.kind == "chat_template":
            self._template.pin()
        self.frame.closing = self.closing() if self.is_written else ()
        self.template_hash, self.probe_rendering = self._probe()

    def refuse_tokens_from(self, num_embeddings: int) -> None:
        """Refuse conversations with an added token whose id has no row among the `num_embeddings` of the model."""
        added = self.tokenizer.get_added_vocab()
        self.refused_tokens = {index: token for token, index in added.items() if index >= num_embeddings}

    def closing(self) -> tuple[int, ...]:
        """The token ids that the rendering writes after every response."""
        one, other = self._ids([self.text("Hi.", "First."), self.text("Hi.", "2 + 2 = 4")])
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
        return tuple(reversed([token for token, _ in shared]))

    @property
    def kind(self) -> str:
        """Origin of the rendering: `custom`, `chat_template` or `plain`."""
        if self.render_fn is not None:
            return "custom"
        return "chat_template" if self.tokenizer.chat_template else "plain"

    @property
    def is_written(self) -> bool:
        """True if the chat template writes the whole sequence, so that no BOS or EOS is added."""
        return self.kind == "chat_template" and WRITTEN_MARK in self.tokenizer.get_chat_template()

    @property
    def pinned_date(self) -> str | None:
        """The date that the chat template is pinned to; None if it inserts no date."""
        return self._template.pinned_date if self.kind == "chat_template" else None

    @property
    def pad_token_id(self) -> int:
        """The id that fills masked positions: the tokenizer's, or else 0, since a masked id has no effect."""
        pad = self.tokenizer.pad_token_id
        return 0 if pad is None else int(pad)

    def text(self, prompt: Prompt, response: str) -> str:
        """The whole conversation as text.

        Raises:
            DataError: if the chat template refuses the conversation's roles or their order, or leaves out a message or
                a part of one.
        """
        return self._texts([prompt], [response])[0]

    def _texts(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[str]:
        """`text` of many conversations; a prompt that is the same object is read once."""
        kind, texts = self.kind, list[str]()
        prompts = list(prompts)  # which keeps them alive: an `id` may be given again after its object is gone
        read: dict[int, tuple[tuple[Message, ...], Mapping[str, Any], list[Turn]]] = {}
        for prompt, response in zip(prompts, responses, strict=True):
            if id(prompt) not in read:
                context, messages = split_context(_messages(prompt))
                read[id(prompt)] = messages, context, list(map(Message.to_dict, messages))
            messages, context, turns = read[id(prompt)]
            if kind == "chat_template":
                texts.append(self._template.whole([*turns, *map(Message.to_dict, turns_of(response))], context))
                continue
            *between, last = turns_of(response)
            before = (*messages, *between)
            if lost := [*context, *(name for message in (*before, last) for name in message.fields)]:
                reader = "a render_fn" if self.render_fn else "a tokenizer without a chat template"
                told = f"the row has {lost[0]}; name a model or tokenizer whose chat template reads it"
                raise ConversationRefused(f"{reader} reads roles and contents alone, and {told}")
            text = self.render_fn(before, last.content) if self.render_fn else plain_prompt(before) + last.content
            texts.append(text)
        return texts

    def refusal(self, pair: PreferencePair) -> str | None:
        """Reason why a side of the pair cannot be rendered; None if both can."""
        try:
            for response in (pair.chosen, pair.rejected):
                text = self.text(pair.prompt, response)
                _check_encodable([text])
                if self.refused_tokens:
                    self._ids([text])
        except ConversationRefused as error:
            return str(error)
        return None

    def encode(self, prompt: Prompt, response: str) -> Encoding:
        """Token ids of the conversation, cut to `max_length`.

        Raises:
            DataError: if the chat template refuses the conversation's roles or their order.
        """
        return self.encode_batch([prompt], [response])[0]

    def encode_batch(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Encoding]:
        """`encode` of many conversations, tokenized together.

        Raises:
            ValueError: if the numbers of prompts and responses differ.
            DataError: if the chat template refuses a conversation's roles or their order.
        """
        sequences = [self.frame.framed(ids) for ids in self._ids(self._texts(prompts, responses))]
        too_long = [i for i, ids in enumerate(sequences) if len(ids) > self.max_length]
        encodings = self._cut([prompts[i] for i in too_long], [sequences[i] for i in too_long])
        cut = dict(zip(too_long, encodings, strict=True))
        return [cut[i] if i in cut else Encoding(tuple(ids), 0, 0) for i, ids in enumerate(sequences)]

    def ids_of(self, conversations: Iterable[tuple[Prompt, str]]) -> list[tuple[int, ...]]:
        """Token ids of prompts with their responses, one conversation at least; see `encode_batch`."""
        prompts, responses = zip(*conversations, strict=True)
        return [encoding.ids for encoding in self.encode_batch(prompts, responses)]

    def encode_rendered(self, texts: Sequence[str], max_length: int) -> list[Encoding]:
        """Token ids of conversations that are already text; too long ones lose tokens from the left, after BOS.

        Args:
            texts: texts rendered by `text`.
            max_length: most tokens of a sequence.
        """
        encodings = []
        for ids in map(self.frame.framed, self._ids(list(texts))):
            lead, cut = self.frame.lead_width(ids), max(0, len(ids) - max_length)
            encodings.append(Encoding(tuple(ids[:lead] + ids[lead + cut :]), cut, 0))
        return encodings

    def encode_texts(self, texts: Sequence[str], *, adds_frame: bool) -> list[list[int]]:
        """Token ids of texts, with the special tokens that the tokenizer adds to a text, none of them twice.

        A text that ends as every rendered conversation gets the BOS and EOS of training. Some clients take BOS off.

        Args:
            texts: rendered conversations or other texts.
            adds_frame: True to add special tokens.
        """
        rows = self._ids(list(texts))
        return [self.frame.completed(ids, *self._rendered_frame) for ids in rows] if adds_frame else rows

    @cached_property
    def _rendered_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ids with which every rendered conversation begins, if they are BOS or CLS, and ends."""
        rendered = self.probe_ids(PROBES[:1])[0]
        return tuple(rendered[: self.frame.lead_width(rendered)]), self.closing()

    def probe_ids(self, probes: Sequence[tuple[Prompt, str]] = PROBES, *, adds_frame: bool = True) -> list[list[int]]:
        """Token ids of the conversations that the template accepts, with or without the added BOS and EOS."""
        found = []
        for prompt, response in probes:
            try:
                text = self.text(prompt, response)
            except (DataError, ValueError):
                continue
            ids = self._ids([text])[0]
            found.append(self.frame.framed(ids) if adds_frame else ids)
        return found

    def identity(self) -> dict[str, Any]:
        """Description of the rendering as JSON values, stored with a model so that it never scores with another one."""
        probed = {"template_hash": self.template_hash, "rendering": self.probe_rendering}
        return {"kind": self.kind, **probed, "pinned_date": self.pinned_date, "max_length": self.max_length}

    def _probe(self) -> tuple[str, str]:
        """Digest of the texts and ids of the fixed probe conversations, and the text of the first one."""
        seen: list[Any] = []
        for prompt, response in PROBES:
            # Only a single turn is checked to be whole, to keep the digest of earlier versions.
            is_unchecked = self.kind == "chat_template" and len(prompt) > 1
            turns = [*map(Message.to_dict, prompt), {"role": "assistant", "content": response}]
            try:
                text = self._template.rendered(turns, {}) if is_unchecked else self.text(prompt, response)
            except (DataError, ValueError) as error:
                if len(prompt) == 1:
                    raise DataError(f"a single user message and its response cannot be rendered: {error}") from error
                seen.append("refused")
            else:
                seen.append([text, self.frame.framed(self._ids([text])[0])])
        rules = {} if self.rules == ContentRules() else {"rules": [self.rules.thinking, self.rules.special_tokens]}
        return digest({"probes": seen, "pinned_date": self.pinned_date, **rules}), seen[0][0]

    @property
    def rules(self) -> ContentRules:
        """Rules for thinking and control tokens inside contents, which the chat template stores."""
        return self._template.rules if self.kind == "chat_template" else ContentRules()

    def store_rules(
        self, thinking: Thinking | None, special_tokens: SpecialTokens | None, *, is_new: bool = False
    ) -> None:
        """Store rules for thinking and control tokens in the tokenizer's chat template; None leaves one as it is.

        Args:
            thinking: handling of thinking.
            special_tokens: handling of control tokens inside contents.
            is_new: True for a model that is not trained yet. Unset, its control tokens are read as text, if its
                template can store this.

        Raises:
            ConfigError: if the rendering has no chat template that could store them.
        """
        if is_new and special_tokens is None and self.kind == "chat_template":
            special_tokens = SpecialTokens.as_text if isinstance(self.tokenizer.chat_template, str) else None
        if thinking is None and special_tokens is None:
            return
        if self.kind != "chat_template":
            raise ConfigError("data.thinking and data.special_tokens are stored in a chat template; the model has none")
        self._template.store(ContentRules(thinking or self.rules.thinking, special_tokens or self.rules.special_tokens))
        self.template_hash, self.probe_rendering = self._probe()

    def prompt_text(self, prompt: Prompt) -> str:
        """The text before the response, with the generation prompt."""
        context, messages = split_context(_messages(prompt))
        if self.render_fn is not None:
            return self.render_fn(messages, "")
        if self.kind != "chat_template":
            return plain_prompt(messages)
        return self._template.opened(list(map(Message.to_dict, messages)), context)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        _check_encodable(texts)
        encoded = self.tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        ids: list[list[int]] = encoded["input_ids"]
        for text, row in zip(texts, ids, strict=True) if self.refused_tokens else ():
            refused = next((index for index in row if index in self.refused_tokens), None)
            if refused is not None:
                token = f"{self.refused_tokens[refused]!r} (id {refused}) of {text[:60]!r}"
                told = "resize the embedding, or take the token out of the data"
                raise ConversationRefused(f"the model's embedding has no row for the token {token}; {told}")
        return ids

    def _cut(self, prompts: Sequence[Prompt], sequences: Sequence[list[int]]) -> list[Encoding]:
        """Encodings of sequences that are too long; a response starts where its sequence leaves the prompt alone."""
        texts = [self.prompt_text(prompt) for prompt in prompts]
        distinct = list(dict.fromkeys(texts))  # both sides of a pair have one prompt
        ids_of = dict(zip(distinct, self._ids(distinct), strict=True))
        encodings = []
        for text, ids in zip(texts, sequences, strict=True):
            alone = ids_of[text] if self.frame.lead_width(ids_of[text]) else [*self.frame.lead, *ids_of[text]]
            pairs = enumerate(zip(alone, ids, strict=False))
            start = next((i for i, (a, b) in pairs if a != b), min(len(alone), len(ids)))
            excess, lead = len(ids) - self.max_length, self.frame.lead_width(ids)
            prompt_cut = min(excess, max(0, start - lead))
            kept = ids[:lead] + ids[lead + prompt_cut :]
            tail = kept[len(kept) - self.frame.end_width(ids) :][: self.max_length - lead]
            kept = kept[: self.max_length - len(tail)] + tail
            encodings.append(Encoding(tuple(kept), prompt_cut, excess - prompt_cut))
        return encodings


def renderer_of(source: object, max_length: int | None = None) -> ConversationRenderer:
    """The rendering that a model, the tokenizer of a model, or a plain tokenizer means.

    A model's tokenizer brings the model's rendering and length, so that both see the same tokens.

    Args:
        source: a renderer, a `BradleyTerryRM`, its tokenizer, or a `transformers` tokenizer.
        max_length: most tokens of a sequence; None is the model's, or what a plain tokenizer states, at most 1024.

    Raises:
        TypeError: if it is something else.
    """
    own: object = MODEL_RENDERERS.get(id(source))
    own = getattr(source, "renderer", source) if own is None else own
    if isinstance(own, ConversationRenderer):
        is_same = max_length in (None, own.max_length)
        return own if is_same else ConversationRenderer(own.tokenizer, int(max_length or 0), own.render_fn)
    if not isinstance(own, PreTrainedTokenizerBase):
        told = f"got {type(source).__name__}; AutoTokenizer.from_pretrained(NAME) loads one"
        raise TypeError(f"tokenizer must be a transformers tokenizer or a BradleyTerryRM, {told}")
    return ConversationRenderer(own, max_length or min(own.model_max_length, 1024))


def _messages(prompt: Prompt) -> tuple[Message, ...]:
    try:
        return as_messages(prompt)
    except ValueError as error:
        raise ConversationRefused(str(error)) from error


def _check_encodable(texts: Sequence[str]) -> None:
    try:
        for text in texts:
            require_characters("a text", text)
    except ValueError as error:
        raise ConversationRefused(f"{error}; repair or drop the row") from error
