"""Restoration of conversations rendered by a client to the text that training rendered.

A trainer such as OpenRLHF decodes its samples. This doubles or drops the special tokens at their ends, drops the chat
template's text after the last of them, and adds padding on either side. A policy's sample also lacks what the template
writes between the generation prompt and the answer, such as an empty thinking block. None of this may change a reward.
"""

from __future__ import annotations

from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.errors import ConversationRefused

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
        self._back = _marks([*ends, *(token for token in added if token in self._tail)])
        self._front = _marks([*ends, tokenizer.bos_token, tokenizer.cls_token])
        self._head = rendered[: self._start(rendered)]
        decoded = tokenizer.decode(list(renderer.encode(_PROMPT, _RESPONSE).ids))
        start = self._start(decoded)
        # True if decoding writes a blank between the first special token and the text that follows.
        self._has_gap = start > 0 and decoded.startswith(" ", start) and not rendered.startswith(f"{self._head} ")
        self._opening = self._generation = rendered.partition(_PROMPT)[2].partition(_RESPONSE)[0]
        if renderer.kind == "chat_template" and _RESPONSE in rendered:
            self._generation = renderer.prompt_text(_PROMPT).partition(_PROMPT)[2]
        self._ends_of_prompts = tuple(filter(None, (self._generation, self._opening)))

    def restored(self, text: str, prompt: object = None) -> str:
        """Text as training rendered it; empty if nothing stands between the special tokens.

        Args:
            text: conversation as a client rendered it.
            prompt: beginning of the text, up to the answer. Without it, or if it is anything else, the last turn is the
                answer.

        Raises:
            ConversationRefused: if the chat template changes an answer whose beginning is unknown, or refuses it.
        """
        start = self._start(text)
        if self._has_gap and start and text[start : start + 1] == " ":
            start += 1
        body = text[start : self._end(text, start)]
        if not body.strip():
            return ""
        before = prompt[self._start(prompt) :] if isinstance(prompt, str) and len(prompt) <= len(text) else ""
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


def _marks(tokens: list[str | None]) -> tuple[str, ...]:
    """Distinct tokens, longest first, so that no token is matched by its own prefix."""
    return tuple(sorted({token for token in tokens if token}, key=len, reverse=True))
