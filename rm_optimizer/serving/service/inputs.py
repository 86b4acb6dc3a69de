"""Conversion of requests to checked token ids. Invalid fields are refused by name, and nothing is cut silently."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeAlias

import transformers

from rm_optimizer.core.rows.messages import Message, Prompt, read_messages, response_of
from rm_optimizer.core.rows.prompts import as_messages, with_context
from rm_optimizer.core.tokens.chat import ConversationRenderer, Encoding
from rm_optimizer.core.tokens.content_rules import control_tokens
from rm_optimizer.errors import CheckpointError, ConversationRefused, DataError
from rm_optimizer.schema.data import SpecialTokens
from rm_optimizer.serving.engine import EngineDescription
from rm_optimizer.serving.protocol import MAX_ITEMS, ScoreItem, WireMessage
from rm_optimizer.serving.service.api_errors import InvalidRequest, TooLarge, TooLong

_PROMPT, _RESPONSE = "rmopt prompt", "rmopt response"
"""Conversation of the probe whose rendering shows the text around a prompt and a response."""


class RenderedTexts:
    """Restorer of the beginning, the last turn's opening and the end of texts as the renderer writes them."""

    def __init__(self, renderer: ConversationRenderer) -> None:
        tokenizer, self._renderer = renderer.tokenizer, renderer
        rendered = renderer.text(_PROMPT, _RESPONSE)
        self._tail = rendered.rpartition(_RESPONSE)[2] if _RESPONSE in rendered else ""
        ends = [tokenizer.pad_token, tokenizer.eos_token, tokenizer.sep_token]
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        written = [*ends, *(token for token in added if token in self._tail)]
        self._back = _leading([token[::-1] for token in written if token])  # of the text from its end
        self._front = _leading([*ends, tokenizer.bos_token, tokenizer.cls_token])
        self._head = rendered[: self._front(rendered)]
        decoded = tokenizer.decode(list(renderer.encode(_PROMPT, _RESPONSE).ids))
        start = self._front(decoded)
        # True if decoding writes a blank between the first special token and the text that follows.
        self._has_gap = start > 0 and decoded.startswith(" ", start) and not rendered.startswith(f"{self._head} ")
        self._opening = self._generation = rendered.partition(_PROMPT)[2].partition(_RESPONSE)[0]
        if renderer.kind == "chat_template" and _RESPONSE in rendered:
            self._generation = renderer.prompt_text(_PROMPT).partition(_PROMPT)[2]
        self._ends_of_prompts = tuple(filter(None, (self._generation, self._opening)))

    def restored(self, text: str, prompt: object = None) -> str:
        """Text as training rendered it; empty if nothing is between the special tokens.

        Args:
            text: conversation as a client rendered it.
            prompt: beginning of the text, up to the answer. Without it, or if it is anything else, the last turn is the
                answer.

        Raises:
            ConversationRefused: if the chat template changes an answer whose beginning is unknown, or refuses it.
        """
        start = self._front(text)
        if self._has_gap and start and text[start : start + 1] == " ":
            start += 1
        body = text[start : len(text) - self._back(text[start:][::-1])]  # blanks before the end stay
        if not body.strip():
            return ""
        before = prompt[self._front(prompt) :] if isinstance(prompt, str) and len(prompt) <= len(text) else ""
        present = next(size for size in range(len(self._tail), -1, -1) if body.endswith(self._tail[:size]))
        return self._head + self._last_turn(body[: len(body) - present], before) + self._tail

    def _last_turn(self, body: str, prompt: str) -> str:
        """The body with the text that the template writes from the generation prompt to the end of the answer."""
        if self._renderer.kind != "chat_template":
            return body
        is_known = body.startswith(prompt) and prompt.endswith(self._ends_of_prompts)
        mark = self._generation or self._opening
        place = body.rfind(mark, 0, len(prompt) if is_known else len(body)) if mark else -1
        if place >= 0:
            answer = body[place:].removeprefix(self._generation)
            answer = answer.removeprefix(self._opening.removeprefix(self._generation))
            turn = self._renderer.text(_PROMPT, answer).partition(_PROMPT)[2].removesuffix(self._tail)
            if is_known or turn == body[place:] or (self._opening.startswith(mark) and mark not in body[:place]):
                return body[:place] + turn
        elif self._opening == self._generation or self._opening in body:
            return body
        raise ConversationRefused(
            f"the chat template writes {self._opening!r} before an answer, and where this one begins is unknown: send "
            f"`prompts` with the text up to the answer and {mark!r} at its end, or use /rm/score; got {body[:60]!r}"
        )


def _leading(tokens: Sequence[str | None]) -> Callable[[str], int]:
    """Function for the length of leading special tokens, with blanks between them; none is matched by its prefix."""
    distinct = sorted({token for token in tokens if token}, key=len, reverse=True)
    pattern = re.compile(rf"(?:\s*?(?:{'|'.join(map(re.escape, distinct))}))*+")
    return lambda text: next(pattern.finditer(text)).end()  # which at least matches the empty text


MAX_CHARACTERS_A_TOKEN = 64
"""Most characters of a text for each token of the model's limit; a longer text is refused before tokenization."""
SLICE_CHARACTERS = 2**18
"""Characters that are tokenized at once, one text at least; lengths are checked after each slice."""

TokenSequence = tuple[int, ...]
Text: TypeAlias = str | Message | WireMessage | ScoreItem | Sequence["Text"]
"""Text of a request in any of its forms."""
_log = logging.getLogger("rm_optimizer")


@dataclass(frozen=True)
class InputReader:
    """Converter of requests to token ids by the model's own tokenizer and rendering.

    Args:
        renderer: renderer of the model with a limit of one token more than the model reads, so that longer sequences
            are detected.
        max_length: most tokens that the model reads.
        vocab_size: exclusive upper bound of the token ids.
        max_request_tokens: most tokens of all sequences of a request.
        count_control: function that takes the number of responses and prompts of a request with a control token inside,
            and `warns`, False for a model that reads them as plain text.
    """

    renderer: ConversationRenderer
    max_length: int
    vocab_size: int
    max_request_tokens: int
    count_control: Callable[..., None] = lambda count, *, warns: None

    @classmethod
    def of(
        cls, description: EngineDescription, max_request_tokens: int, count_control: Callable[..., None]
    ) -> InputReader:
        """Reader for an engine's model, with the arguments of the class.

        Raises:
            CheckpointError: if conversations are rendered differently than by the engine's model.
        """
        renderer = ConversationRenderer(
            stored_tokenizer(Path(description.tokenizer_folder)), description.max_length + 1
        )
        if renderer.template_hash != description.identity["template_hash"]:
            raise CheckpointError("the model's rendering of conversations does not survive saving its tokenizer")
        text = renderer.text("Hi.", "Hello.")
        if renderer.encode_texts([text], adds_frame=True) != [list(renderer.encode("Hi.", "Hello.").ids)]:
            _log.warning(
                "/classify reads the text of a conversation as other tokens than training did; send it messages or "
                "token ids, or use /rm/score or /get_reward"
            )
        return cls(renderer, description.max_length, description.vocab_size, max_request_tokens, count_control)

    def token_ids(self, value: list[int] | list[list[int]]) -> list[TokenSequence]:
        """Token ids of `/classify`'s `input`, checked.

        Raises:
            InvalidRequest: if something is empty, or an id is not in the vocabulary.
            TooLong: if a sequence is too long.
            TooLarge: if the request has too many tokens.
        """
        if not value:
            raise InvalidRequest("input must not be empty", "input")
        rows: list[list[int]] = value if isinstance(value[0], list) else [value]
        names = [f"input[{index}]" for index in range(len(rows))] if rows is value else ["input"]
        found = [self._checked(ids, name) for ids, name in zip(rows, names, strict=True)]
        self._check_total(sum(map(len, found)))
        return found

    def texts(self, value: str | list[str], *, add_special_tokens: bool) -> list[TokenSequence]:
        """Token ids of `/classify`'s `input`, with special tokens as in `ConversationRenderer.encode_texts` or none.

        Raises:
            InvalidRequest: if something is empty.
            TooLong: if a sequence is too long.
            TooLarge: if the request has too many tokens.
        """
        texts = [value] if isinstance(value, str) else value
        names = ["input"] if isinstance(value, str) else [f"input[{index}]" for index in range(len(value))]
        self._check_texts(texts, names)

        tokenize = partial(self.renderer.encode_texts, adds_frame=add_special_tokens)
        return self._in_slices(list(map(len, texts)), lambda part: tokenize(texts[part]), names)

    def conversation(self, messages: Sequence[WireMessage], values: Mapping[str, Any]) -> list[TokenSequence]:
        """Token ids of one conversation that ends with the response.

        Args:
            messages: its messages.
            values: what else the chat template reads.

        Raises:
            InvalidRequest: if it does not end so, or the chat template refuses it.
            TooLong: if it is too long.
        """
        turns = _messages(messages, "messages")
        if len(turns) < 2 or turns[-1].role != "assistant":
            raise InvalidRequest(
                "messages must hold a prompt and end with the assistant's response, the text to score", "messages"
            )
        with _refusing("messages"):
            prompt = with_context(turns[:-1], values)
        return self._conversations([prompt], [response_of(turns[-1:])], ["messages"])

    def items(self, items: Sequence[ScoreItem]) -> list[TokenSequence]:
        """Token ids of prompts and their responses, item after item.

        Raises:
            InvalidRequest: if something is empty, or the chat template refuses a conversation.
            TooLong: if a conversation is too long.
            TooLarge: if there are too many responses.
        """
        count = sum(len(item.responses) for item in items)
        if count > MAX_ITEMS:
            raise TooLarge(f"expected at most {MAX_ITEMS} sequences in a request, got {count}; split it", "items")
        prompts: list[Prompt] = []
        responses: list[str] = []
        names: list[str] = []
        for number, item in enumerate(items):
            if not item.prompt or (isinstance(item.prompt, str) and not item.prompt.strip()):
                raise InvalidRequest("prompt must not be empty", f"items[{number}].prompt")
            prompt: Prompt = (
                item.prompt if isinstance(item.prompt, str) else _messages(item.prompt, f"items[{number}].prompt")
            )
            with _refusing(f"items[{number}]"):
                prompts += [with_context(prompt, item.values())] * len(item.responses)
            for index, response in enumerate(item.responses):
                names.append(f"items[{number}].responses[{index}]")
                with _refusing(names[-1]):
                    own = response if isinstance(response, str) else response_of(_messages(response, names[-1]))
                responses.append(own)
        return self._conversations(prompts, responses, names)

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return control_tokens(self.renderer.tokenizer.all_special_tokens)

    @cached_property
    def _rendered(self) -> RenderedTexts:
        return RenderedTexts(self.renderer)

    def rendered(self, texts: Sequence[str], prompts: object = None) -> list[Encoding]:
        """Token ids of conversations that the client has rendered, as OpenRLHF sends them.

        They equal the ids from `items` for the same conversations, for any padding and special tokens around them. An
        over-long text loses tokens from its left, as an over-long prompt does in training.

        Args:
            texts: whole conversations.
            prompts: list of the texts up to each answer; an entry that does not begin its text is ignored.

        Raises:
            InvalidRequest: if a text is empty, or the chat template changes an answer whose beginning is unknown, or
                refuses it.
            TooLong: if a text is far too long.
            TooLarge: if the request has too many tokens.
        """
        names = [f"query[{index}]" for index in range(len(texts))]
        self._check_texts(texts, names)
        restored = list[str]()
        befores = chain(prompts if isinstance(prompts, list) else (), repeat(None))
        for text, name in zip(texts, names, strict=True):
            with _refusing(name):
                restored.append(self._rendered.restored(text, next(befores)))
        self._check_texts(restored, names)
        encodings = list[Encoding]()

        def tokenize(part: slice) -> Sequence[Sequence[int]]:
            encodings.extend(self.renderer.encode_rendered(restored[part], self.max_length))
            return [encoding.ids for encoding in encodings[part]]

        self._in_slices(list(map(len, restored)), tokenize, names)
        return encodings

    def _conversations(
        self, prompts: Sequence[Prompt], responses: Sequence[str], names: Sequence[str]
    ) -> list[TokenSequence]:
        self._check_texts(responses, names)
        different = {id(prompt): prompt for prompt in prompts}  # responses of one item have the same prompt
        before = {place: num_characters(prompt) for place, prompt in different.items()}
        sizes = [before[id(prompt)] + len(text) for prompt, text in zip(prompts, responses, strict=True)]
        for size, name in zip(sizes, names, strict=True):
            self._check_size(size, name)

        def tokenize(part: slice) -> Sequence[Sequence[int]]:
            try:
                encodings = self.renderer.encode_batch(prompts[part], responses[part])
            except DataError as error:
                raise InvalidRequest(str(error), names[0] if len(names) == 1 else None) from error
            return [encoding.ids for encoding in encodings]

        rows = self._in_slices(sizes, tokenize, names)
        texts = [message.shown() for prompt in different.values() for message in as_messages(prompt)]
        if found := sum(self._control.search(text) is not None for text in chain(responses, texts)):
            self.count_control(found, warns=self.renderer.rules.special_tokens == SpecialTokens.keep)
        return rows

    def _in_slices(
        self, sizes: Sequence[int], tokenize: Callable[[slice], Sequence[Sequence[int]]], names: Sequence[str]
    ) -> list[TokenSequence]:
        """Tokenize all rows, checked slice by slice, so that a refused request is not tokenized to its end."""
        rows = list[TokenSequence]()
        total = size = 0
        cuts = [0]  # slices hold adjacent texts of up to `SLICE_CHARACTERS` characters together
        for index, own in enumerate(sizes):
            if index > cuts[-1] and size + own > SLICE_CHARACTERS:
                cuts.append(index)
                size = 0
            size += own
        for part in map(slice, cuts, [*cuts[1:], len(sizes)]):
            checked = [self._checked(ids, name) for ids, name in zip(tokenize(part), names[part], strict=True)]
            total += sum(map(len, checked))
            self._check_total(total)
            rows += checked
        return rows

    def _check_texts(self, texts: Sequence[str], names: Sequence[str]) -> None:
        if not texts:
            raise InvalidRequest("input must not be empty", "input")
        for text, name in zip(texts, names, strict=True):
            if not text:
                raise InvalidRequest(f"{name} must not be empty", name)
            self._check_size(len(text), name)
            try:
                text.encode()
            except UnicodeEncodeError:  # JSON can also encode halves of surrogate pairs
                reason = f"{name} holds half of a UTF-16 surrogate pair, not a character; remove it"
                raise InvalidRequest(reason, name) from None

    def _check_size(self, num_characters: int, name: str) -> None:
        if num_characters > MAX_CHARACTERS_A_TOKEN * self.max_length:
            raise TooLong(f"{name} has {num_characters} characters, more than {self.max_length} tokens can hold", name)

    def _check_total(self, tokens: int) -> None:
        if tokens > self.max_request_tokens:
            raise TooLarge(
                f"the request holds {tokens} tokens or more, more than the {self.max_request_tokens} the server ever "
                "accepts at once; split it"
            )

    def _checked(self, ids: Sequence[int], name: str) -> TokenSequence:
        if not ids:
            raise InvalidRequest(f"{name} must hold at least one token", name)
        if len(ids) > self.max_length:
            raise TooLong(f"{name} is longer than the model's {self.max_length} tokens; shorten it", name)
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise InvalidRequest(f"{name} holds a token id outside [0, {self.vocab_size})", name)
        return tuple(ids)


def stored_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerBase:
    """Tokenizer of a folder. One without a model is loaded by its class: `AutoTokenizer` imports torch and SciPy."""
    stored = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    is_plain = not (folder / "config.json").exists() and "auto_map" not in stored
    kind = getattr(transformers, stored.get("tokenizer_class", ""), None) if is_plain else None
    tokenizer: transformers.PreTrainedTokenizerBase = (kind or transformers.AutoTokenizer).from_pretrained(folder)
    return tokenizer


def refuse_cuts(sequences: Sequence[TokenSequence], most: int | None) -> None:
    """Refuse sequences that a client wants truncated, since servers truncate different ends with different rewards.

    Args:
        sequences: token ids before any truncation.
        most: requested length of each in tokens; None and -1 request no truncation below the model's own limit.

    Raises:
        TooLong: naming the first longer one.
    """
    limit = math.inf if most is None or most == -1 else most
    for index, ids in enumerate(sequences):
        if len(ids) > limit:
            raise TooLong(
                f"sequence {index} has {len(ids)} tokens, more than the {most} of truncate_prompt_tokens; nothing is "
                "truncated here, as a cut text has another reward: shorten it, or leave truncate_prompt_tokens out",
                "truncate_prompt_tokens",
            )


def num_characters(value: Text) -> int:
    """Number of characters of a text, a message, an item, or all of several."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Message):
        return len(value.shown())
    if isinstance(value, WireMessage):
        return len(value.text) + len(value.reasoning_content or "") + len(json.dumps(value.tool_calls or ""))
    if isinstance(value, ScoreItem):
        return num_characters([value.prompt, *value.responses]) + len(json.dumps(value.values()))
    return sum(map(num_characters, value))


def _messages(messages: Sequence[WireMessage], name: str) -> tuple[Message, ...]:
    for place, message in enumerate(messages):
        if message.content is None and message.tool_calls is None:
            field = f"{name}[{place}].content"
            raise InvalidRequest(f"{field} is missing, and the message has no tool_calls", field)
    with _refusing(name):
        return tuple(
            Message(message.role, message.text)
            if message.model_fields_set <= {"role", "content"}
            else read_messages(name, [message.model_dump(exclude_none=True)])[0]
            for message in messages
        )


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Context whose errors of values name the field at fault."""
    try:
        yield
    except (ValueError, ConversationRefused) as error:
        raise InvalidRequest(f"{name}: {str(error).removeprefix(f'{name}: ')}", name) from error
