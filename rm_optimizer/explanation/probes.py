"""Conversations on which two scorings are compared, so that each cause changes some of them and not others."""

from __future__ import annotations

from typing import TypeAlias

from rm_optimizer.core.pairs.pair import Message
from rm_optimizer.core.rows.messages import Prompt
from rm_optimizer.core.rows.prompts import as_messages, split_context
from rm_optimizer.core.storage.certificate import DEFAULT_PROBE
from rm_optimizer.core.tokens.chat import ConversationRenderer

Conversation: TypeAlias = tuple[tuple[Message, ...], str]
"""Messages before the response, and the response."""
_WORD, _REPEATS = " Tell", 64
"""A short word whose repetitions make a text of some number of tokens."""
_TWICE = 2048
"""Longest limit at which a conversation of twice its tokens is asked too."""


def conversation(prompt: Prompt, response: str) -> Conversation:
    """The conversation with its prompt as messages."""
    return as_messages(prompt), response


def group_of(talk: Conversation) -> str:
    """Kind of a conversation: with a system message, of several turns, with blanks at an edge, or plain."""
    messages = split_context(talk[0])[1]
    if messages[0].role == "system":
        return "system messages"
    if any(text != text.strip() for text in (*(message.content for message in messages), talk[1])):
        return "white space at an edge"
    return "several turns" if len(messages) > 1 else "one turn"


def probes(renderer: ConversationRenderer) -> list[Conversation]:
    """The built-in conversations for a rendering: the certificate's, and those that tell causes apart.

    These have a system message, blanks at the edges, and lengths below, around and above the limit, in the prompt or
    in the response.
    """
    limit = renderer.max_length
    per_word = len(renderer.tokenizer(_WORD * _REPEATS, add_special_tokens=False)["input_ids"]) / _REPEATS

    def long(tokens: int) -> str:
        return (_WORD * max(1, round(tokens / per_word))).strip()

    brief = Message("system", "Be brief.")
    given: list[tuple[Prompt, str]] = [
        ("Hi", "Yes"),
        *DEFAULT_PROBE,
        ((brief, Message("user", "Hi")), "Hello."),
        ((brief, Message("user", "What is 2 + 2?")), "4"),
        ((Message("user", "Hi"),), " Hello.\n\n"),
        ((Message("user", "  Hi \n"),), "Hello."),
        ((Message("user", "Hi"),), "\nYes. "),
        *((long(tokens), "Not now.") for tokens in (limit // 3, limit // 2, 3 * limit // 4, limit + 8)),
        ("Go on.", long(limit + 32)),
        (long(limit // 2), long(limit // 2 + 16)),
        *([(long(2 * limit), "Fine, again.")] if limit <= _TWICE else []),
    ]
    return [conversation(prompt, response) for prompt, response in given]
