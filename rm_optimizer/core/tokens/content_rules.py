"""Rules for thinking and for control tokens inside contents, stored in the chat template of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rm_optimizer.core.tokens.template_fields import Turn
from rm_optimizer.errors import ConversationRefused
from rm_optimizer.schema.data import SpecialTokens, Thinking

_MARK = re.compile(r"\{# rules: thinking=(\w+) special_tokens=(\w+) #\}\n")
_THINKING = re.compile(r"\s*<think>.*?</think>\s*|(?:(?!<think>).)*?</think>\s*", re.DOTALL)
"""Thinking at the start of an answer; if its opening is in the generation prompt, all up to the closing tag."""
_HIDDEN = {"<think>": "\ue0f0", "</think>": "\ue0f1"}
"""Characters for private use that a template does not take for the tags."""


@dataclass(frozen=True)
class ContentRules:
    """Rules by which contents are changed or refused before a chat template renders them.

    Args:
        thinking: handling of thinking.
        special_tokens: handling of control tokens inside contents.
    """

    thinking: Thinking = Thinking.refuse
    special_tokens: SpecialTokens = SpecialTokens.keep

    @staticmethod
    @cache
    def of(template: str) -> ContentRules:
        """The rules that a chat template was stored with."""
        found = _MARK.search(template)
        return ContentRules(Thinking(found[1]), SpecialTokens(found[2])) if found else ContentRules()

    def stored_in(self, template: str) -> str:
        """The template with these rules in place of any other."""
        bare = _MARK.sub("", template)
        mark = f"{{# rules: thinking={self.thinking} special_tokens={self.special_tokens} #}}\n"
        return bare if self == ContentRules() else mark + bare

    def applied(self, turns: Sequence[Turn], control: Callable[[], re.Pattern[str]]) -> list[Turn]:
        """The turns as the template gets them.

        Args:
            turns: messages of a conversation.
            control: function that returns the pattern of the template's and the tokenizer's control tokens.

        Raises:
            ConversationRefused: if a content has a control token and the rule refuses it, or a response is nothing but
                thinking that is stripped.
        """
        last = len(turns) - 1
        found = list(turns)
        if self.thinking in (Thinking.strip, Thinking.strip_earlier):
            kept = last if self.thinking == Thinking.strip_earlier else len(turns)
            found = [_without_thinking(turn) if i != kept else turn for i, turn in enumerate(turns)]
            if found and _is_blank(found[last]) and not _is_blank(turns[last]):
                raise ConversationRefused(f"message {last + 1} is nothing but thinking, which data.thinking strips")
        if self.special_tokens != SpecialTokens.keep:
            found = [_mapped(turn, lambda text: self._checked(text, control())) for turn in found]
        return found

    def of_context(self, context: Mapping[str, Any], control: Callable[[], re.Pattern[str]]) -> Mapping[str, Any]:
        """The values beside the messages as the template gets them."""
        if self.special_tokens == SpecialTokens.keep or not context:
            return context
        return {name: _mapped(value, lambda text: self._checked(text, control())) for name, value in context.items()}

    def _checked(self, text: str, control: re.Pattern[str]) -> str:
        if self.special_tokens == SpecialTokens.as_text:
            return control.sub(lambda token: f"{token[0][0]} {token[0][1:]}", text)
        if found := control.search(text):
            raise ConversationRefused(
                f"a content holds the control token {found[0]!r} in {text[max(0, found.start() - 20) :][:60]!r}; take "
                "it out, or read such tokens as text with data.special_tokens=as_text"
            )
        return text


def with_hidden_thinking(turns: Sequence[Turn], places: Sequence[int]) -> list[Turn]:
    """The turns with the thinking of some as content whose tags a template does not recognize."""
    found = list(turns)
    for place in places:
        turn = dict(turns[place])
        if turn["role"] == "assistant":
            if reasoning := turn.pop("reasoning_content", None):
                turn["content"] = f"<think>\n{reasoning}\n</think>\n\n{turn['content']}"
            for tag, hidden in _HIDDEN.items():
                turn["content"] = turn["content"].replace(tag, hidden)
        found[place] = turn
    return found


def shown_thinking(text: str) -> str:
    """The rendered text with the tags of `with_hidden_thinking`."""
    for tag, hidden in _HIDDEN.items():
        text = text.replace(hidden, tag)
    return text


def has_hidden_tags(turns: Sequence[Turn]) -> bool:
    """True if a content itself holds a character that stands for a tag."""
    return any(hidden in turn["content"] for turn in turns for hidden in _HIDDEN.values())


def _without_thinking(turn: Turn) -> Turn:
    if turn["role"] != "assistant":
        return turn
    bare = {name: value for name, value in turn.items() if name != "reasoning_content"}
    found = _THINKING.match(turn["content"]) if "</think>" in turn["content"] else None
    return bare | {"content": turn["content"][found.end() :]} if found else bare


def _is_blank(turn: Turn) -> bool:
    return turn["role"] == "assistant" and not turn["content"].strip() and "tool_calls" not in turn


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The value with each text in it changed, the names of its parts included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): _mapped(part, change) for name, part in value.items()}
    return [_mapped(part, change) for part in value] if isinstance(value, list) else value
