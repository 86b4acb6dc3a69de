"""Restoration of conversations rendered by a client to the text that training rendered.

A trainer such as OpenRLHF decodes its samples. This doubles or drops the special tokens at their ends, drops the chat
template's text after the last of them, and adds padding on either side. None of this may change a reward.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from rm_optimizer.core.tokens.chat import ConversationRenderer

_RESPONSE = "rmopt response"
"""Response of the probe whose rendering shows the text around a conversation."""


class RenderedTexts:
    """Restorer of the beginning and the end of texts as the renderer writes them."""

    def __init__(self, renderer: ConversationRenderer) -> None:
        tokenizer = renderer.tokenizer
        rendered = renderer.text("Hi.", _RESPONSE)
        self._tail = rendered.rpartition(_RESPONSE)[2] if _RESPONSE in rendered else ""
        ends = [tokenizer.pad_token, tokenizer.eos_token, tokenizer.sep_token]
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._back = _marks([*ends, *(token for token in added if token in self._tail)])
        self._front = _marks([*ends, tokenizer.bos_token, tokenizer.cls_token])
        self._head = rendered[: self._start(rendered)]
        self._has_gap = self._writes_gap(tokenizer, renderer, rendered)

    def restored(self, text: str) -> str:
        """Text as training rendered it; empty if nothing stands between the special tokens."""
        start = self._start(text)
        if self._has_gap and start and text[start : start + 1] == " ":
            start += 1
        body = text[start : self._end(text, start)]
        if not body.strip():
            return ""
        present = next(size for size in range(len(self._tail), -1, -1) if body.endswith(self._tail[:size]))
        return self._head + body + self._tail[present:]

    def _start(self, text: str) -> int:
        """Index after the last of the leading special tokens, between which blanks may stand."""
        place = start = 0
        while True:
            mark = next((mark for mark in self._front if text.startswith(mark, place)), None)
            if mark is not None:
                place = start = place + len(mark)
            elif text[place : place + 1].isspace():
                place += 1
            else:
                return start

    def _end(self, text: str, start: int) -> int:
        """Index of the first of the trailing special tokens; blanks before it belong to the response."""
        place = end = len(text)
        while place > start:
            mark = next((mark for mark in self._back if text.endswith(mark, start, place)), None)
            if mark is not None:
                place = end = place - len(mark)
            elif text[place - 1].isspace():
                place -= 1
            else:
                break
        return end

    def _writes_gap(self, tokenizer: PreTrainedTokenizerBase, renderer: ConversationRenderer, rendered: str) -> bool:
        """True if decoding writes a blank between the first special token and the text that follows."""
        decoded = tokenizer.decode(list(renderer.encode("Hi.", _RESPONSE).ids))
        start = self._start(decoded)
        return start > 0 and decoded[start : start + 1] == " " and not rendered[self._start(rendered) :].startswith(" ")


def _marks(tokens: list[str | None]) -> tuple[str, ...]:
    """Distinct tokens, longest first, so that no token is matched by its own prefix."""
    return tuple(sorted({token for token in tokens if token}, key=len, reverse=True))
