"""Text of conversations: by a chat template with fixed dates that leaves nothing out, or in a form without one."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from rm_optimizer.core.rows.messages import Message
from rm_optimizer.core.tokens.content_rules import (
    ContentRules,
    ControlTokens,
    control_tokens,
    has_hidden_tags,
    shown_thinking,
    with_hidden_thinking,
    without_rules,
)
from rm_optimizer.core.tokens.template_fields import (
    CLOSING_TAG,
    REASONING_FIELDS,
    THINKING,
    Marks,
    Turn,
    is_name_of_call,
    linked_in_order,
    rebuilt,
    shape,
    texts_of,
)
from rm_optimizer.errors import ConfigError, ConversationRefused
from rm_optimizer.schema.data import Thinking

PINNED_DATE = "26 Jul 2024"
"""The date in pinned templates, which is the default of `date_string` in Llama 3.1's template."""

_PINNED_DAY = datetime(2024, 7, 26)
PIN_MARK = f"{{# dates pinned to {PINNED_DATE} #}}\n"
_SET_DATE = f"{{% set date_string = '{PINNED_DATE}' %}}\n"
_NOW_LITERAL = re.compile(r"""strftime_now\(\s*(?:format\s*=\s*)?(['"])(.*?)\1\s*\)""")
_log = logging.getLogger("rm_optimizer")
_MOST_KEPT = 4096
_PLAIN_TURN = ("role", "content")
_OWN_ARGUMENTS = frozenset({"messages", "add_generation_prompt", "chat_template", "tokenize", "continue_final_message"})
"""Arguments of `apply_chat_template` that a row cannot set."""
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
        self._unprinted: dict[tuple[Any, ...], tuple[tuple[int, str], ...]] = {}
        self._tokens: ControlTokens | None = None
        self._unshown: dict[tuple[str, ...], str | None] = {}

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

    def rendered(self, turns: Sequence[Turn], context: Mapping[str, Any], *, open_turn: bool = False) -> str:
        """The conversation as text.

        Args:
            turns: its messages.
            context: what else the template reads, by the names of `TEMPLATE_COLUMNS`.
            open_turn: True to add the generation prompt.

        Raises:
            ConversationRefused: if the template refuses the roles, their order or a value, or reads no such context.
        """
        arguments = dict(context)
        arguments |= arguments.pop("chat_template_kwargs", {})
        for name in arguments:
            if not self._mentions(rf"\b{re.escape(name)}\b") or name in _OWN_ARGUMENTS:
                raise ConversationRefused(
                    f"the tokenizer's chat template reads no {name}, which the row has; leave it out of the data, or "
                    "give the tokenizer a template that reads it"
                )
        named = [self._renamed(turn) if "reasoning_content" in turn else turn for turn in turns]
        try:
            text = self._tokenizer.apply_chat_template(
                named, tokenize=False, add_generation_prompt=open_turn, chat_template=self._bare, **arguments
            )
        except (TemplateError, TypeError) as error:
            if isinstance(error, TypeError) and not context and all(len(turn) == len(_PLAIN_TURN) for turn in turns):
                raise
            roles = ", ".join(turn["role"] for turn in turns)
            raise ConversationRefused(
                f"the tokenizer's chat template refuses a conversation with roles {roles} ({error}), "
                f"first message {turns[0]['content'][:60]!r}; change the roles, or pass a render_fn"
            ) from error
        return str(text)

    def whole(self, turns: Sequence[Turn], context: Mapping[str, Any]) -> str:
        """The conversation as text, in which each field of each message is whole.

        A result's `tool_call_id` and `name` may follow from its place after the calls.

        Raises:
            ConversationRefused: if the template refuses the conversation, or leaves out a message or a part of one.
        """
        rules = self.rules
        if rules != ContentRules():
            turns, context = rules.applied(turns, self._control), rules.of_context(context, self._control)
        if rules.thinking != Thinking.keep or has_hidden_tags(turns):
            return self._whole(turns, context)
        try:
            return self._whole(turns, context)
        except ConversationRefused:
            for places in (range(len(turns) - 1), range(len(turns))):
                with suppress(ConversationRefused):
                    return shown_thinking(self._whole(with_hidden_thinking(turns, places), context))
            raise

    def opened(self, turns: Sequence[Turn], context: Mapping[str, Any]) -> str:
        """The text before a response, by the rules of `whole`, with the generation prompt.

        Raises:
            ConversationRefused: if the template or a rule refuses the conversation.
        """
        # An answer follows, so that no turn here is the last one.
        *before, _ = self.rules.applied([*turns, {"role": "assistant", "content": "a"}], self._control)
        return self.rendered(before, self.rules.of_context(context, self._control), open_turn=True)

    @property
    def rules(self) -> ContentRules:
        """Rules for thinking and control tokens that the template was stored with."""
        template = self._tokenizer.chat_template
        return ContentRules.of(template) if isinstance(template, str) else ContentRules()

    def store(self, rules: ContentRules) -> None:
        """Store rules in the tokenizer's template, or in each of its named ones."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            raise ConfigError("data.thinking and data.special_tokens need one chat template, got several named ones")
        self._tokenizer.chat_template = rules.stored_in(template, self._control().tokens)

    @property
    def _bare(self) -> str | None:
        """The template without its rules, which are applied before it; None if it has several named ones."""
        template = self._tokenizer.chat_template
        return without_rules(template) if isinstance(template, str) else None

    def _control(self) -> ControlTokens:
        """The tokenizer's special tokens, and the control tokens that the template writes."""
        if self._tokens is None:
            turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
            frames = [self._tried([*turns[first:], {"role": "assistant", "content": "b"}], {}) for first in (0, 1)]
            added = (str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special)
            written = control_tokens(()).findall("\n".join([*frames, self._bare or ""]))
            tokens = {*self._tokenizer.all_special_tokens, *added, *written}
            longest = sorted((token for token in tokens if len(token) > 1), key=lambda token: (-len(token), token))
            self._tokens = ControlTokens(tuple(longest))
        return self._tokens

    def _whole(self, turns: Sequence[Turn], context: Mapping[str, Any]) -> str:
        """`whole` of turns that the rules were applied to."""
        text = self.rendered(turns, context)
        for number, path in self._not_printed(turns, context):
            if path == "name" and is_name_of_call(turns, number):
                continue
            turn, what = turns[number], f"{path} of message {number + 1} (role '{turns[number]['role']}')"
            if path == "content":
                what = f"a message with role '{turn['role']}', such as {turn['content'][:60]!r}"
            raise _not_read(what)
        parts = texts_of(turns)
        place = first_lost([part for _, _, part in parts], text)
        thoughts = [i for i, (_, path, _) in enumerate(parts) if path == THINKING]
        if place is None and text.count(CLOSING_TAG) < len(thoughts):
            place = thoughts[0]
        if place is not None:
            number, path, part = parts[place]
            of = {"content": "a part", THINKING: "the thinking"}.get(path, f"a part of {path}")
            remedy = "take that part out of the data, or give the tokenizer a template that keeps it"
            if path == THINKING:
                remedy = "data.thinking=keep shows it, and data.thinking=strip takes it out"
            shown = f"{of} of message {number + 1} (role '{turns[number]['role']}'), which begins {part[:60]!r}"
            raise ConversationRefused(f"the tokenizer's chat template leaves out {shown}; {remedy}")
        for number, turn in enumerate(turns):
            if "tool_call_id" not in turn or (other := linked_in_order(turns, number)) is None:
                continue
            if self.rendered([*turns[:number], other, *turns[number + 1 :]], context) == text:
                raise ConversationRefused(
                    f"the tokenizer's chat template prints nothing of tool_call_id of message {number + 1}, and the "
                    "result is not at the place of its call; put the results into the order of the calls"
                )
        for column in context.keys() & {"tools", "documents"}:
            if (lost := self._not_shown(turns, context, column, text)) is not None:
                raise _not_read(lost)
        return text

    def _not_printed(self, turns: Sequence[Turn], context: Mapping[str, Any]) -> Sequence[tuple[int, str]]:
        """Number and path of each part of the turns that leaves no trace, found once for each form of conversation."""
        setting = json.dumps(context.get("chat_template_kwargs"), sort_keys=True) if context else ""
        plain = len(_PLAIN_TURN)
        forms = ((t["role"], not t["content"].strip()) if len(t) == plain else shape(t) for t in turns)
        form = (setting, *context, *forms)
        if form not in self._unprinted:
            marks = Marks()
            printed = self.rendered([marks.turn(turn, number) for number, turn in enumerate(turns)], context)
            _make_room(self._unprinted)
            self._unprinted[form] = tuple(place for mark, place in marks.places.items() if mark not in printed)
        return self._unprinted[form]

    def _not_shown(self, turns: Sequence[Turn], context: Mapping[str, Any], column: str, text: str) -> str | None:
        """Path of a part of the tools or documents that leaves no trace in the text; None if all leave one."""
        key = (column, json.dumps(context, sort_keys=True), *(turn["role"] for turn in turns))
        if key in self._unshown:
            return self._unshown[key]
        marks, value = Marks(), context[column]
        printed = self._tried(turns, {**context, column: marks.value(value, column)})
        unclear = [(mark, path) for mark, (_, path) in marks.places.items() if mark not in printed]
        _make_room(self._unshown)
        self._unshown[key] = next(
            (
                path
                for mark, path in unclear
                if self._tried(turns, {**context, column: _with_mark(value, column, path, mark)}) == text
            ),
            None,
        )
        return self._unshown[key]

    def _tried(self, turns: Sequence[Turn], context: Mapping[str, Any]) -> str:
        """The rendered text; empty if the template refuses it."""
        try:
            return self.rendered(turns, context)
        except ConversationRefused:
            return ""

    def _renamed(self, turn: Turn) -> Turn:
        """The turn with its reasoning under the name by which the template reads it."""
        name = next((name for name in REASONING_FIELDS if self._mentions(rf"\.{name}\b|['\"]{name}['\"]")), "")
        rest = {field: value for field, value in turn.items() if field != "reasoning_content"}
        return {**rest, name: turn["reasoning_content"]} if name else turn

    def _mentions(self, pattern: str) -> bool:
        template = self._tokenizer.chat_template
        texts = template.values() if isinstance(template, dict) else [self._bare or ""]
        return any(re.search(pattern, text) for text in texts)


def _not_read(what: str) -> ConversationRefused:
    return ConversationRefused(
        f"the tokenizer's chat template prints nothing of {what}; take it out of the data, or give the tokenizer a "
        "template that reads it"
    )


def _with_mark(value: Any, column: str, path: str, mark: str) -> Any:
    """The value of a column with a mark at a path, as `Marks.value` names it."""
    return rebuilt(value, lambda at, part: mark if at == path else part, path=column)


def _make_room(found: dict[Any, Any]) -> None:
    if len(found) >= _MOST_KEPT:
        found.clear()


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
