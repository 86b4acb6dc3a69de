"""Token ids of a conversation by a recipe: what a caller of a reward model does otherwise than this package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rm_optimizer.core.pairs.pair import Message
from rm_optimizer.core.rows.prompts import split_context
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.tokenizer import TOKENIZER_FILE, read_otherwise
from rm_optimizer.errors import ConversationRefused
from rm_optimizer.explanation.probes import Conversation

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
NO_LIMIT = 1 << 20
"""Limit on the tokens of a sequence that nothing reaches."""
_DATE = re.compile(r"\d{1,2} [A-Z][a-z]{2} \d{4}|\d{4}-\d{2}-\d{2}")
_END_WIDTH = 4
"""Most tokens from EOS to the end of a sequence: EOS itself and the blanks after it."""


@dataclass(frozen=True)
class Recipe:
    """Stages from messages to a reward; each default is this package's own rule.

    Args:
        max_length: most tokens of a sequence.
        template: text of another chat template.
        system: system message put before a conversation that has none.
        thinking: True to put an empty thinking block before the answer.
        strip: `contents`, `answer` or `text`, which lose the blanks at their edges.
        date: date in place of each date that the text has.
        generation: True to append the generation prompt.
        bos: number of BOS (or CLS) at the start.
        eos: `none`, `once`, `twice`, or `unblanked` for an EOS without the blanks after it.
        tokenizer: `own`, `other` for the other side's folder, a part's name for that part alone, or `file`
            for `tokenizer.json` as it is, where transformers' class reads it otherwise.
        cut: `prompt` (this package's rule), `left`, `left_all` (BOS too), `right` or `right_end` (EOS is kept).
        pair: True to read prompt and response as the tokenizer's pair of texts.
        types: token types of the other kind: `pair`, by the place of SEP, or `single`, all 0; empty for the model's.
        pool: position of the hidden state that the head reads; `own` for the model's.
        weights: name of the weights in place of the model's own.
        attention: another attention kernel, or the width of another sliding window.
    """

    max_length: int
    template: str | None = None
    system: str | None = None
    thinking: bool = False
    strip: str = ""
    date: str | None = None
    generation: bool = False
    bos: int | None = None
    eos: str = ""
    tokenizer: str = "own"
    cut: str = "prompt"
    pair: bool = False
    types: str = ""
    pool: str = "own"
    weights: str = ""
    attention: str = ""

    @property
    def rendering(self) -> Recipe:
        """The part of the recipe that decides the token ids."""
        return replace(self, pool="own", weights="", attention="", types="")


class RecipeRenderer:
    """Renderer of conversations by recipes; the default recipe gives the ids of `ConversationRenderer`.

    Args:
        renderer: rendering of the local copy.
        other: rendering of the other side, if its folder is given.

    Attributes:
        renderers: renderings by the tokenizers that recipes name.
        parts: names of the parts in which the other side's tokenizer differs.
        base: the default recipe.
        lead: id of BOS or CLS; None without one.
        end: id of EOS or SEP; None without one.
        usual_lead: number of BOS or CLS at the start of the model's sequences.
    """

    def __init__(self, renderer: ConversationRenderer, other: ConversationRenderer | None = None) -> None:
        self.renderer = renderer
        self.other = other
        self.renderers = {"own": renderer} | ({} if other is None else {"other": other})
        mixed = {} if other is None else dict(_mixed(renderer.tokenizer, other.tokenizer))
        self.parts = tuple(mixed)
        file = Path(str(renderer.tokenizer.name_or_path), TOKENIZER_FILE)
        if file.is_file() and read_otherwise(renderer.tokenizer, file) is not None:
            mixed["file"] = PreTrainedTokenizerFast.from_pretrained(file.parent)
        for name, tokenizer in mixed.items():
            tokenizer.chat_template = renderer.tokenizer.chat_template
            self.renderers[name] = ConversationRenderer(tokenizer, renderer.max_length, renderer.render_fn)
        self.base = Recipe(renderer.max_length)
        tokenizer, (start, end) = renderer.tokenizer, renderer.frame.both
        self.lead = start[0] if start else tokenizer.bos_token_id
        self.lead = tokenizer.cls_token_id if self.lead is None else self.lead
        self.end = end[-1] if end else None
        self.usual_lead = self.num_lead(renderer.encode("Hi", "Yes").ids)
        self._rows: dict[tuple[int, Recipe], tuple[int, ...]] = {}
        self._talks: dict[int, Conversation] = {}  # keeps them alive, so that no `id` is given twice

    def ids(self, talk: Conversation, recipe: Recipe) -> tuple[int, ...]:
        """Token ids of a conversation.

        Raises:
            ConversationRefused: if the recipe's template refuses it.
        """
        self._talks[id(talk)] = talk
        key = (id(talk), recipe.rendering)
        if key not in self._rows:
            self._rows[key] = self._ids(talk, recipe.rendering)
        return self._rows[key]

    def num_lead(self, row: Sequence[int]) -> int:
        """Number of BOS or CLS at the start."""
        return sum(1 for _ in takewhile(lambda token: token == self.lead, row))

    def after_end(self, row: Sequence[int]) -> int:
        """Index after the last EOS or SEP, which only blanks may follow; 0 without one."""
        tail = list(row[-_END_WIDTH:])
        return len(row) - tail[::-1].index(self.end) if self.end in tail else 0

    def _ids(self, talk: Conversation, recipe: Recipe) -> tuple[int, ...]:
        renderer = self.renderers[recipe.tokenizer]
        if recipe == replace(self.base, tokenizer=recipe.tokenizer):
            return renderer.encode(*talk).ids
        prompt, response = _changed(talk, recipe)
        if recipe.pair:
            return self._pair(prompt, response)[: recipe.max_length]
        row = self._with_special_tokens(self._tokens(self._text(prompt, response, recipe), recipe), recipe)
        if len(row) <= recipe.max_length:
            return tuple(row)
        start = 0
        if recipe.cut == "prompt":
            opened = self._with_special_tokens(self._tokens(self._text(prompt, None, recipe), recipe), recipe)
            start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opened, row, strict=False)))
        return tuple(self._cut(row, start, recipe))

    def _pair(self, prompt: tuple[Message, ...], response: str) -> tuple[int, ...]:
        """Ids of a prompt of one turn and a response as a pair of texts.

        Raises:
            ConversationRefused: if the tokenizer has no SEP.
        """
        text, tokenizer = "\n\n".join(message.content for message in prompt), self.renderer.tokenizer
        if None in (tokenizer.cls_token_id, tokenizer.sep_token_id):
            raise ConversationRefused("the tokenizer has no pairs of texts")
        first, second = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, response))
        return (tokenizer.cls_token_id, *first, tokenizer.sep_token_id, *second, tokenizer.sep_token_id)

    def _text(self, prompt: tuple[Message, ...], response: str | None, recipe: Recipe) -> str:
        """The rendered text; without a response the text before one, with the generation prompt."""
        renderer = self.renderers[recipe.tokenizer]
        if recipe.template is None and not recipe.generation and not recipe.thinking:
            with suppress(ConversationRefused):
                text = renderer.prompt_text(prompt) if response is None else renderer.text(prompt, response)
                return _finished(text, recipe)
        turns = [message.to_dict() for message in split_context(prompt)[1]]
        turns += [] if response is None else [{"role": "assistant", "content": response}]
        try:
            text = renderer.tokenizer.apply_chat_template(
                turns,
                tokenize=False,
                add_generation_prompt=recipe.generation or response is None,
                chat_template=recipe.template,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ConversationRefused(f"the template refuses a conversation ({error})") from error
        return _finished(str(text), recipe)

    def _tokens(self, text: str, recipe: Recipe) -> list[int]:
        """Ids of the text, framed by this package's rule if it is the model's own text up to the answer's end."""
        renderer = self.renderers[recipe.tokenizer]
        if recipe.template is None and not recipe.generation:
            return list(renderer.encode_rendered([text], NO_LIMIT)[0].ids)
        (row,) = renderer.encode_texts([text], adds_frame=False)
        return row if self.lead is None else [self.lead] * self.usual_lead + row[self.num_lead(row) :]

    def _with_special_tokens(self, row: list[int], recipe: Recipe) -> list[int]:
        """The ids with as many BOS and EOS as the recipe says."""
        if recipe.bos is not None and self.lead is not None:
            row = [self.lead] * recipe.bos + row[self.num_lead(row) :]
        at = self.after_end(row)
        if recipe.eos == "none":
            return row[: at - 1] if at else row
        if recipe.eos == "unblanked":
            return row[:at] if at else row
        missing = {"once": not at, "twice": 2 - bool(at)}.get(recipe.eos, 0)
        return row if self.end is None else row + [self.end] * missing

    def _cut(self, row: list[int], start: int, recipe: Recipe) -> list[int]:
        """Ids of a sequence that is too long, by the recipe's rule; its response begins at `start`."""
        most, lead = recipe.max_length, self.num_lead(row)
        over = len(row) - most
        if recipe.cut == "left":
            return row[:lead] + row[lead + over :]
        if recipe.cut == "left_all":
            return row[over:]
        if recipe.cut == "right" or self.end is None:
            return row[:most]
        if recipe.cut == "right_end":
            return [*row[: most - 1], self.end]
        gone, at = min(over, max(0, start - lead)), self.after_end(row)
        kept, tail = row[:lead] + row[lead + gone :], row[at - 1 :] if at else []
        return kept[: most - len(tail)] + tail


def _mixed(
    own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
) -> Iterator[tuple[str, PreTrainedTokenizerBase]]:
    """Names of the parts of `tokenizer.json` that differ, and the own tokenizer with this part of the other's."""
    if not (isinstance(own, PreTrainedTokenizerFast) and isinstance(other, PreTrainedTokenizerFast)):
        return
    mine, theirs = (json.loads(each.backend_tokenizer.to_str()) for each in (own, other))
    for part in ("added_tokens", "normalizer", "pre_tokenizer", "model"):
        if mine[part] != theirs[part]:
            is_same = part == "model" and mine[part].get("vocab") == theirs[part].get("vocab")
            name = {"model": "merges" if is_same else "vocabulary"}.get(part, part.replace("_", " "))
            backend = Tokenizer.from_str(json.dumps(mine | {part: theirs[part]}))
            yield name, PreTrainedTokenizerFast(tokenizer_object=backend, **own.special_tokens_map)


def _changed(talk: Conversation, recipe: Recipe) -> Conversation:
    """The conversation with the recipe's changes of its messages."""
    prompt, response = talk
    if recipe.strip == "contents":
        prompt = tuple(replace(message, content=message.content.strip()) for message in prompt)
    if recipe.strip in ("contents", "answer"):
        response = response.strip()
    if recipe.system is not None and split_context(prompt)[1][0].role != "system":
        prompt = (Message("system", recipe.system), *prompt)
    return prompt, EMPTY_THOUGHT + response if recipe.thinking else response


def _finished(text: str, recipe: Recipe) -> str:
    """The text with the recipe's date, and without the blanks at its edges if it strips them."""
    text = text if recipe.date is None else _DATE.sub(recipe.date, text)
    return text.strip() if recipe.strip == "text" else text
