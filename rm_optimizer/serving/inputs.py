"""Requests to token ids, checked: what a model cannot read is refused by name, and nothing is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rm_optimizer.core.base import Message, Prompt
from rm_optimizer.core.chat import ConversationRenderer
from rm_optimizer.errors import CheckpointError, DataError
from rm_optimizer.serving.api_errors import InvalidRequest, TooLarge, TooLong
from rm_optimizer.serving.engine import EngineDescription
from rm_optimizer.serving.protocol import MAX_ITEMS, ClassifyInput, ScoreItem, WireMessage

MAX_CHARACTERS_A_TOKEN = 64
"""A text longer than this many characters for each token the model reads is refused before it is tokenised."""

TokenSequence = tuple[int, ...]


@dataclass(frozen=True)
class InputReader:
    """Turns what requests hold into token ids, by the model's own tokenizer and rendering.

    Args:
        tokenizer: the model's.
        renderer: its rendering of conversations, with room for one token more than the model reads, so that what is too
            long is seen.
        max_length: most tokens that the model reads.
        vocab_size: ids are below it.
    """

    tokenizer: PreTrainedTokenizerBase
    renderer: ConversationRenderer
    max_length: int
    vocab_size: int

    @classmethod
    def of(cls, description: EngineDescription) -> InputReader:
        """The reader of an engine's model.

        Raises:
            CheckpointError: if conversations are not rendered as the engine's model renders them.
        """
        tokenizer = AutoTokenizer.from_pretrained(description.tokenizer_folder)
        renderer = ConversationRenderer(tokenizer, description.max_length + 1)
        if renderer.template_hash != description.identity["template_hash"]:
            raise CheckpointError("the model's rendering of conversations does not survive saving its tokenizer")
        return cls(tokenizer, renderer, description.max_length, description.vocab_size)

    def classify(self, value: ClassifyInput, *, add_special_tokens: bool) -> list[TokenSequence]:
        """Token ids of `/classify`'s `input`.

        Raises:
            InvalidRequest: if something is empty, or an id is not in the vocabulary.
            TooLong: if a sequence is too long.
            TooLarge: if there are too many sequences.
        """
        if isinstance(value, str):
            return self._texts([value], add_special_tokens, ["input"])
        if not value:
            raise InvalidRequest("input must not be empty", "input")
        if isinstance(value[0], int):
            return [self._checked(value, "input")]
        _check_count(len(value))
        names = [f"input[{index}]" for index in range(len(value))]
        if isinstance(value[0], str):
            return self._texts(value, add_special_tokens, names)
        return [self._checked(ids, name) for ids, name in zip(value, names, strict=True)]

    def conversation(self, messages: Sequence[WireMessage]) -> list[TokenSequence]:
        """Token ids of one conversation that ends with the response.

        Raises:
            InvalidRequest: if it does not end so, or the chat template refuses it.
            TooLong: if it is too long.
        """
        if len(messages) < 2 or messages[-1].role != "assistant":
            raise InvalidRequest(
                "messages must hold a prompt and end with the assistant's response, the text to score", "messages"
            )
        return self._conversations([_messages(messages[:-1])], [messages[-1].text], ["messages"])

    def items(self, items: Sequence[ScoreItem]) -> list[TokenSequence]:
        """Token ids of prompts and their responses, item after item.

        Raises:
            InvalidRequest: if something is empty, or the chat template refuses a conversation.
            TooLong: if a conversation is too long.
            TooLarge: if there are too many responses.
        """
        _check_count(sum(len(item.responses) for item in items))
        prompts: list[Prompt] = []
        names: list[str] = []
        for number, item in enumerate(items):
            if not item.prompt or (isinstance(item.prompt, str) and not item.prompt.strip()):
                raise InvalidRequest("prompt must not be empty", f"items[{number}].prompt")
            prompt: Prompt = item.prompt if isinstance(item.prompt, str) else _messages(item.prompt)
            prompts += [prompt] * len(item.responses)
            names += [f"items[{number}].responses[{index}]" for index in range(len(item.responses))]
        return self._conversations(prompts, [text for item in items for text in item.responses], names)

    def whole_texts(self, texts: Sequence[str]) -> list[TokenSequence]:
        """Token ids of rendered prompts and responses as OpenRLHF sends them: no padding, one EOS at the end.

        Raises:
            InvalidRequest: if a text is empty.
            TooLong: if a text is too long.
            TooLarge: if there are too many texts.
        """
        _check_count(len(texts))
        names = [f"query[{index}]" for index in range(len(texts))]
        return self._texts([self._ended(text) for text in texts], False, names)

    def _ended(self, text: str) -> str:
        marks = [mark for mark in (self.tokenizer.pad_token, self.tokenizer.eos_token) if mark]
        stripped = text
        while marks and (found := next((mark for mark in marks if stripped.endswith(mark)), None)):
            stripped = stripped.removesuffix(found)
        while self.tokenizer.pad_token and stripped.startswith(self.tokenizer.pad_token):
            stripped = stripped.removeprefix(self.tokenizer.pad_token)
        return stripped + (self.tokenizer.eos_token or "") if stripped else ""

    def _conversations(
        self, prompts: Sequence[Prompt], responses: Sequence[str], names: Sequence[str]
    ) -> list[TokenSequence]:
        for response, name in zip(responses, names, strict=True):
            self._check_text(response, name)
        try:
            encodings = self.renderer.encode_batch(prompts, responses)
        except DataError as error:
            raise InvalidRequest(str(error), names[0] if len(names) == 1 else None) from error
        return [self._checked(encoding.ids, name) for encoding, name in zip(encodings, names, strict=True)]

    def _texts(self, texts: Sequence[str], add_special_tokens: bool, names: Sequence[str]) -> list[TokenSequence]:
        for text, name in zip(texts, names, strict=True):
            self._check_text(text, name)
        rows: list[list[int]] = self.tokenizer(
            list(texts), add_special_tokens=add_special_tokens, return_attention_mask=False, verbose=False
        )["input_ids"]
        return [self._checked(row, name) for row, name in zip(rows, names, strict=True)]

    def _check_text(self, text: str, name: str) -> None:
        if not text:
            raise InvalidRequest(f"{name} must not be empty", name)
        if not is_encodable(text):
            raise InvalidRequest(f"{name} holds half of a UTF-16 surrogate pair, which is no character", name)
        if len(text) > MAX_CHARACTERS_A_TOKEN * self.max_length:
            raise TooLong(f"{name} has {len(text)} characters, more than {self.max_length} tokens can hold", name)

    def _checked(self, ids: Sequence[int], name: str) -> TokenSequence:
        if not ids:
            raise InvalidRequest(f"{name} must hold at least one token", name)
        if len(ids) > self.max_length:
            raise TooLong(f"{name} is longer than the model's {self.max_length} tokens; shorten it", name)
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise InvalidRequest(f"{name} holds a token id outside [0, {self.vocab_size})", name)
        return tuple(ids)


def is_encodable(text: str) -> bool:
    """Whether the text is made of characters; JSON can also spell halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _messages(messages: Sequence[WireMessage]) -> tuple[Message, ...]:
    return tuple(Message(message.role, message.text) for message in messages)


def _check_count(count: int) -> None:
    if count > MAX_ITEMS:
        raise TooLarge(f"expected at most {MAX_ITEMS} sequences in a request, got {count}; split it")
