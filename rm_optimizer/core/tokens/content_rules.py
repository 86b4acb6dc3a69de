"""Rules for thinking and for control tokens inside contents, stored in the chat template of a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from rm_optimizer.core.tokens.template_fields import Turn, rebuilt, split_thinking, stored_template
from rm_optimizer.errors import ConversationRefused
from rm_optimizer.schema.data import SpecialTokens, Thinking

_STORED = re.compile(r"\{# rules: thinking=(\w+) special_tokens=(\w+) #\}\n(?:.*?\{# end of rules #\}\n)?", re.DOTALL)
_HIDDEN = {"<think>": "\ue0f0", "</think>": "\ue0f1"}
"""Characters for private use that a template does not take for the tags."""
_CONTROL = (
    r"<\|[\w ]{2,40}\|>|<\uff5c[^\uff5c\n]{2,40}\uff5c>|</?s>|\[/?INST\]|<</?SYS>>|<extra_id_\d+>|"
    r"<(?:start|end)_of_turn>|<(?:bos|eos|pad|unk|sep|cls|mask)>|\[(?:CLS|SEP|MASK|PAD)\]"
)
"""Tokens that chat templates and tokenizers of common families write around content."""
READINGS: Mapping[SpecialTokens, str] = {
    SpecialTokens.keep: "are read as if a template had written them, so that a text can forge a turn",
    SpecialTokens.as_text: "are read as plain text",
    SpecialTokens.refuse: "are refused",
}
"""Parts of sentences on control tokens inside texts, by the rule for them."""


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
        found = _STORED.search(template)
        return ContentRules(Thinking(found[1]), SpecialTokens(found[2])) if found else ContentRules()

    def stored_in(self, template: str, tokens: Collection[str]) -> str:
        """The template with these rules in place of any other.

        Args:
            template: chat template of a tokenizer.
            tokens: control tokens, the longest first.
        """
        bare = without_rules(template)
        if self == ContentRules():
            return bare
        mark = f"{{# rules: thinking={self.thinking} special_tokens={self.special_tokens} #}}\n"
        is_code = self.special_tokens == SpecialTokens.as_text
        return mark + stored_template("as_text", TOKENS=list(tokens)) * is_code + bare

    def applied(self, turns: Sequence[Turn], control: Callable[[], ControlTokens]) -> list[Turn]:
        """The turns as the template gets them.

        Args:
            turns: messages of a conversation.
            control: function that returns the control tokens of template and tokenizer.

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
            tokens = control()
            for place, turn in enumerate(found):
                is_plain = turn.keys() == {"role", "content"}  # as most are
                if not is_plain or tokens.pattern.search(f"{turn['role']}\0{turn['content']}"):
                    found[place] = self._applied_to(turn, tokens)
        return found

    def of_context(self, context: Mapping[str, Any], control: Callable[[], ControlTokens]) -> Mapping[str, Any]:
        """The values that the template gets with the messages."""
        if self.special_tokens == SpecialTokens.keep or not context:
            return context
        return {name: self._applied_to(value, control()) for name, value in context.items()}

    def _applied_to(self, value: Any, control: ControlTokens) -> Any:
        """The value with each text in it changed, the names of its parts included."""

        def changed(path: str, part: Any) -> Any:
            return self._checked(part, control) if isinstance(part, str) else part

        return rebuilt(value, changed, changed)

    def _checked(self, text: str, control: ControlTokens) -> str:
        if (found := control.pattern.search(text)) is None:
            return text
        if self.special_tokens == SpecialTokens.refuse:
            raise ConversationRefused(
                f"a content holds the control token {found[0]!r} in {text[max(0, found.start() - 20) :][:60]!r}; take "
                "it out, or read such tokens as text with data.special_tokens=as_text"
            )
        for token in control.tokens:  # one after another, as the stored template does it
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text


@dataclass(frozen=True)
class ControlTokens:
    """Control tokens of a chat template and its tokenizer.

    Args:
        tokens: the tokens, the longest first.
    """

    tokens: tuple[str, ...]

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of any of them."""
        return re.compile("|".join(map(re.escape, self.tokens)) or "(?!)")


def control_tokens(special_tokens: Iterable[str]) -> re.Pattern[str]:
    """Pattern of tokens that frame a conversation: of common families, and these of a tokenizer."""
    return re.compile("|".join([*map(re.escape, special_tokens), _CONTROL]))


@cache
def without_rules(template: str) -> str:
    """The chat template as it was before rules were stored in it."""
    return _STORED.sub("", template)


def with_hidden_thinking(turns: Sequence[Turn], places: Sequence[int]) -> list[Turn]:
    """The turns with the thinking of some as content whose tags a template does not recognize.

    Empty blocks are left out, and an opening tag that was in the generation prompt is written.
    """
    found = list(turns)
    for place in places:
        turn = dict(turns[place])
        if turn["role"] == "assistant":
            thinking, answer = split_thinking(turn["content"])
            if reasoning := turn.pop("reasoning_content", None):
                turn["content"] = f"<think>\n{reasoning}\n</think>\n\n{turn['content']}"
            elif not thinking:
                turn["content"] = answer
            elif not turn["content"].lstrip().startswith("<think>"):
                turn["content"] = f"<think>\n{turn['content']}"
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
    """True if a content itself holds a character that replaces a tag."""
    return any(hidden in turn["content"] for turn in turns for hidden in _HIDDEN.values())


def _without_thinking(turn: Turn) -> Turn:
    if turn["role"] != "assistant":
        return turn
    bare = {name: value for name, value in turn.items() if name != "reasoning_content"}
    return bare | {"content": split_thinking(turn["content"])[1]}


def _is_blank(turn: Turn) -> bool:
    return turn["role"] == "assistant" and not turn["content"].strip() and "tool_calls" not in turn
