"""Text of conversations: by a chat template with fixed dates that leaves nothing out, or in a form without one."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TypeAlias

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from rm_optimizer.core.rows.messages import Message
from rm_optimizer.errors import ConfigError, ConversationRefused

Turn: TypeAlias = Mapping[str, str]
"""Message in the form that chat templates take."""
PINNED_DATE = "26 Jul 2024"
"""The date in pinned templates, which is the default of `date_string` in Llama 3.1's template."""

_PINNED_DAY = datetime(2024, 7, 26)
PIN_MARK = f"{{# dates pinned to {PINNED_DATE} #}}\n"
_SET_DATE = f"{{% set date_string = '{PINNED_DATE}' %}}\n"
_NOW_LITERAL = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(['"])(.*?)\1\s*\)""")
_log = logging.getLogger("rm_optimizer")
ROLE_NAMES = {"user": "Human", "assistant": "Assistant", "system": "System"}


def pin_dates(template: str) -> str:
    """The chat template with every inserted date fixed to `PINNED_DATE`; a template without dates is not changed.

    The template itself is rewritten, so that every later use of it renders the same text. Calls of
    ``strftime_now("…")`` become literals, and a ``date_string`` that the template expects from its caller gets a value.
    A second pinning changes nothing.

    Raises:
        ConfigError: if the template formats today's date with a format that is not a literal.

    Example:
        >>> print(pin_dates("Today is {{ strftime_now('%d %b %Y') }}."))
        {# dates pinned to 26 Jul 2024 #}
        Today is {{ '26 Jul 2024' }}.
    """
    pinned = _NOW_LITERAL.sub(lambda call: f"{call[1]}{_PINNED_DAY.strftime(call[2])}{call[1]}", template)
    if re.search(r"strftime_now\s*\(", pinned):
        raise ConfigError(
            "the chat template calls strftime_now with a computed format, which cannot be pinned to a fixed date; "
            "write the date into the tokenizer's chat_template"
        )
    if re.search(r"\bdate_string\b", pinned) and not re.search(r"\bset\s+date_string\b", pinned):
        pinned = _SET_DATE + pinned
    return pinned if pinned == template else PIN_MARK + pinned


def transcript(messages: Sequence[Message]) -> str:
    r"""Several messages as one text, for tokenizers without a chat template.

    Example:
        >>> transcript([Message("user", "Hi."), Message("assistant", "Hello!")])
        'Human: Hi.\n\nAssistant: Hello!'
    """
    return "\n\n".join(f"{ROLE_NAMES.get(m.role, m.role.capitalize())}: {m.content}" for m in messages)


def plain_prompt(messages: Sequence[Message]) -> str:
    r"""The text before the response, for tokenizers without a chat template.

    Example:
        >>> plain_prompt([Message("user", "Hi.")])
        'Prompt: Hi.\n\nResponse: '
    """
    is_text = len(messages) == 1 and messages[0].role == "user"
    return f"Prompt: {messages[0].content if is_text else transcript(messages)}\n\nResponse: "


class ChatTemplate:
    """Renderer of messages by the chat template of a tokenizer.

    Args:
        tokenizer: a tokenizer with a chat template, which may change.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._unprinted: dict[tuple[str, ...], int | None] = {}

    def pin(self) -> None:
        """Fix the dates of the tokenizer's template, or of each of its named ones; a change is logged.

        Raises:
            ConfigError: if a date cannot be pinned.
        """
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            pinned: str | dict[str, str] = {name: pin_dates(text) for name, text in template.items()}
        else:
            pinned = pin_dates(template)
        if pinned != template:
            _log.warning("the chat template inserts today's date; it is pinned to %s", PINNED_DATE)
        self._tokenizer.chat_template = pinned

    @property
    def pinned_date(self) -> str | None:
        """The date that the template is pinned to; None if it inserts no date."""
        return PINNED_DATE if PIN_MARK in self._tokenizer.get_chat_template() else None

    def rendered(self, turns: Sequence[Turn], *, open_turn: bool = False) -> str:
        """The conversation as text.

        Args:
            turns: its messages.
            open_turn: True to add the generation prompt.

        Raises:
            ConversationRefused: if the template refuses the roles or their order.
        """
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=open_turn)
        except TemplateError as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise ConversationRefused(
                f"the tokenizer's chat template refuses a conversation with roles {roles} ({error}), "
                f"first message {turns[0]['content'][:60]!r}; change the roles, or pass a render_fn"
            ) from error
        return str(text)

    def whole(self, turns: Sequence[Turn]) -> str:
        """The conversation as text, in which each message is whole.

        Raises:
            ConversationRefused: if the template refuses the conversation, or leaves out a message or a part of one.
        """
        text, roles = self.rendered(turns), tuple(turn["role"] for turn in turns)
        if roles not in self._unprinted:  # found once for each order of roles
            marks = [f"rmopt{number}mark" for number in range(len(roles))]
            probe = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
            printed = self.rendered(probe)
            self._unprinted[roles] = next((i for i, mark in enumerate(marks) if mark not in printed), None)
        if (number := self._unprinted[roles]) is not None:
            raise ConversationRefused(
                f"the tokenizer's chat template prints nothing of a message with role '{turns[number]['role']}' in a "
                f"conversation with roles {', '.join(roles)}, such as {turns[number]['content'][:60]!r}; change the "
                "role to one that the template reads, or give the tokenizer another chat template"
            )
        if (lost := first_lost([turn["content"] for turn in turns], text)) is not None:
            raise ConversationRefused(
                f"the tokenizer's chat template leaves out a part of message {lost + 1} (role "
                f"'{turns[lost]['role']}'), which begins {turns[lost]['content'][:60]!r}; take that part out of the "
                "data (templates strip <think> blocks, for one), or give the tokenizer a template that keeps it"
            )
        return text


def first_lost(contents: Sequence[str], text: str) -> int | None:
    r"""Index of the first content that is not whole in the text, each at its own place; None if all are.

    Blanks at its ends are ignored, since templates strip them, and more blanks may be inside it, such as an indent.
    A content may be in the text as a JSON string.

    Example:
        >>> first_lost(["Why?", "<think>Hm.</think>Because."], "User: Why? Assistant: Because.")
        1
        >>> first_lost(["one\ntwo"], "User: one two"), first_lost(["one\ntwo"], "User:\n  one\n  two")
        (0, None)
    """
    place = 0
    for content in contents:
        found = text.find(content.strip(), place)
        if found < 0:
            return _first_lost_anywhere(contents, text)
        place = found + len(content.strip())
    return None


def _first_lost_anywhere(contents: Sequence[str], text: str) -> int | None:
    """`first_lost` for templates that move or rewrite contents; longer contents are removed from the text first."""
    rest = "".join(text.split())
    for index in sorted(range(len(contents)), key=lambda i: -len(contents[i])):
        quoted = (json.dumps(contents[index], ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        forms = (form for form in (contents[index], *quoted) if _has_blanks(form, text))
        form = next((bare for form in forms if (bare := "".join(form.split())) in rest), None)
        if form is None:
            return index
        rest = rest.replace(form, "\0", 1) if form else rest
    return None


def _has_blanks(content: str, text: str) -> bool:
    """True if the content is in the text with no fewer line breaks and no less indent and blanks than it has."""
    words, runs = re.split(r"\s+", content.strip()), re.findall(r"\s+", content.strip())
    gaps = [*(r"[^\S\n]*\n" * run.count("\n") + rf"[^\S\n]{{{len(run.rpartition(chr(10))[2])},}}" for run in runs), ""]
    return re.search("".join(map("".join, zip(map(re.escape, words), gaps, strict=True))), text) is not None
