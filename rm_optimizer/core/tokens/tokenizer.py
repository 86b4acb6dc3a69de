"""Tokenizers: trained on the run's own texts, their special tokens, and texts of token ids in rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rm_optimizer.core.pairs.pair import PreferencePair, as_messages
from rm_optimizer.core.pairs.sources import DataSource
from rm_optimizer.core.rows.messages import Turns
from rm_optimizer.core.rows.prompts import split_context
from rm_optimizer.core.rows.readers import Row, each, refusing
from rm_optimizer.core.tokens.conversation_text import plain_prompt
from rm_optimizer.core.tokens.template_fields import stored_template
from rm_optimizer.errors import CheckpointError, DataError

TOKENIZER_FILE = "tokenizer.json"
_PLAIN_TEXTS = (
    *("2 + 2 = 1234.5", "It's  two   spaces, don't!", "a\nb\n\n c\t d", "Ünïcode 中文 日本語 привет 🙂"),
    *("(x)[y]{z}!?.,;:--", " lead and trail "),
)
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"


def tokenizer_of_pairs(
    pairs: Sequence[PreferencePair], vocab_size: int, *, longest: int | None = None
) -> PreTrainedTokenizerFast:
    """Tokenizer trained on pairs. It has a chat template if they have tools, or messages with more than contents.

    Args:
        pairs: pairs whose texts are read.
        vocab_size: most tokens, as in `train_tokenizer`.
        longest: number of characters after which a text is not read any more; None reads all of it.
    """
    tokenizer = train_tokenizer((text[:longest] for text in rendered_texts(pairs)), vocab_size)
    turns = chain.from_iterable(pair.prompt for pair in pairs if not isinstance(pair.prompt, str))
    are_long = any(isinstance(response, Turns) for pair in pairs for response in (pair.chosen, pair.rejected))
    if are_long or any(message.fields for message in turns):
        tokenizer.chat_template = stored_template("fields")
    return tokenizer


def rendered_texts(pairs: Iterable[PreferencePair]) -> Iterator[str]:
    """Texts of the pairs for training a tokenizer: each prompt with its chosen response, and each rejected response."""
    for pair in pairs:
        yield plain_prompt(split_context(as_messages(pair.prompt))[1]) + pair.chosen
        yield pair.rejected


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE (Sennrich et al., 2016; over bytes as in GPT-2) learned from `texts`.

    The same texts give the same vocabulary. Every text can be encoded, since all 256 bytes are tokens. `<|bos|>` and
    `<|eos|>` surround each sequence. There is no chat template.

    Args:
        texts: texts from which the merges are learned, read once.
        vocab_size: most tokens, including the three special ones; there are fewer if the texts have no more merges.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Special ids that the tokenizer adds at the start and at the end of a text."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    framed = list(tokenizer("a")["input_ids"])
    extra = range(len(framed) - len(bare) + 1)
    start = next((i for i in extra if framed[i : i + len(bare)] == bare), 0)
    return tuple(framed[:start]), tuple(framed[start + len(bare) :])


class Frame:
    """Special tokens around the ids of a conversation.

    Args:
        tokenizer: tokenizer of the ids.
        is_written: True if the text has all special tokens, so that none is added.

    Attributes:
        added: ids that the tokenizer adds at the start and at the end of a text.
        both: start and end of a sequence: what the tokenizer adds, and EOS (or SEP) if it adds no end.
        lead: ids added at the start.
        end: ids added at the end.
        openers: BOS and CLS.
        closing: ids that a text which is written whole ends with.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, is_written: bool) -> None:
        self._tokenizer = tokenizer
        start, end = self.added = added_tokens(tokenizer)
        stop = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        self.both = start, end or (() if stop is None else (int(stop),))
        self.lead, self.end = ((), ()) if is_written else self.both
        self.openers = (tokenizer.bos_token_id, tokenizer.cls_token_id)
        self.closing: tuple[int, ...] = ()
        self._blank: dict[int, bool] = {}

    def framed(self, ids: list[int]) -> list[int]:
        """The ids with BOS and EOS, each added if it is missing."""
        ended = ids if not self.end or self.end_width(ids) else [*ids, *self.end]
        return ended if self.lead_width(ended) else [*self.lead, *ended]

    def completed(self, ids: list[int], opening: Sequence[int], closing: tuple[int, ...]) -> list[int]:
        """The ids with the special tokens that the tokenizer adds to a text, none of them twice.

        Args:
            ids: ids of a text.
            opening: ids with which every rendered conversation begins.
            closing: ids with which every rendered conversation ends; a text that ends so is framed as one.
        """
        lead, end = self.added
        if closing and tuple(ids[-len(closing) :]) == closing:
            ids, lead, end = self.framed(ids), tuple(opening), ()
        is_begun = tuple(ids[: len(lead)]) == lead or (ids and ids[0] in self.openers)
        is_ended = tuple(ids[-len(end) :]) == end
        return [*(() if is_begun else lead), *ids, *(() if is_ended else end)]

    def lead_width(self, ids: Sequence[int]) -> int:
        """Number of leading ids that are BOS or CLS."""
        if self.lead and tuple(ids[: len(self.lead)]) == self.lead:
            return len(self.lead)
        return int(bool(ids) and ids[0] in self.openers)

    def end_width(self, ids: Sequence[int]) -> int:
        """Number of trailing ids that are EOS and the blanks after it; 0 if the sequence does not end with EOS."""
        if self.closing:
            return len(self.closing) * (tuple(ids[-len(self.closing) :]) == self.closing)
        stop = len(ids)
        while stop and self._is_blank(ids[stop - 1]):
            stop -= 1
        start = max(0, stop - len(self.end))
        return len(ids) - start if self.end and tuple(ids[start:stop]) == self.end else 0

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            is_special = token in self._tokenizer.all_special_ids
            self._blank[token] = not is_special and not self._tokenizer.decode([token]).strip()
        return self._blank[token]


def read_otherwise(tokenizer: PreTrainedTokenizerBase, file: str | Path) -> str | None:
    """Sentence on a plain text that gets other ids from the tokenizer than from its own `tokenizer.json`, or None.

    transformers 5 replaces parts of that file for some model types, such as the pre-tokenizer for `qwen2`.
    """
    own = Tokenizer.from_file(str(file))
    own.no_truncation()
    own.no_padding()
    for text in _PLAIN_TEXTS:
        if own.encode(text, add_special_tokens=False).ids != tokenizer(text, add_special_tokens=False)["input_ids"]:
            return (
                f"{file} gives {text!r} other token ids than transformers' {type(tokenizer).__name__}, which is read; "
                "if the model was trained with the file's ids, load it with the transformers version of its config.json"
            )
    return None


def require_one_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with several named chat templates and no default, since the model's own is unknown.

    Raises:
        CheckpointError: if there is no default, with the names of the templates.
    """
    named = tokenizer.chat_template
    if isinstance(named, dict) and "default" not in named:
        raise CheckpointError(
            f"the tokenizer has several chat templates ({', '.join(sorted(named))}) and none named 'default'; "
            "save it with the one that the model reads as chat_template.jinja"
        )


_TOKEN_COLUMN = re.compile(r"(^|_)((input_)?ids|attention_mask|token_type_ids|labels)($|_(chosen|rejected)$)").search
_SPEAKERS = ("user", "assistant")


def with_texts(source: DataSource) -> DataSource:
    """The source with conversations in place of token ids, where its layout names the tokenizer that made them.

    Columns have the names that TRL's trainers give them, with the ids of whole conversations, or of responses where
    those of their prompt have a column too. Where both sides start with the prompt's ids, they are whole.

    Raises:
        DataError: naming the row, if it has no token ids, or the tokenizer does not give its ids for what they spell.
    """
    if source.layout.tokenizer is None:
        return source
    from transformers import AutoTokenizer  # takes a second

    try:
        tokenizer = AutoTokenizer.from_pretrained(source.layout.tokenizer)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{source.path}: the tokenizer {source.layout.tokenizer} cannot be loaded: {reason}") from error
    forms, rows = [*_forms(tokenizer)], list[Row]()

    def read(row: Row) -> Row:
        found = {name: cell for name, cell in row.items() if not _TOKEN_COLUMN(name)}
        prompt, sides = [*(row.get("prompt_input_ids") or row.get("prompt_ids") or [])], dict[str, list[int]]()
        for side in ("chosen", "rejected"):
            names = (f"{side}_input_ids", f"{side}_ids", f"input_ids_{side}")
            if (ids := next(filter(None, map(row.get, names)), None)) is None:
                raise ValueError(f"there are no token ids of {side}; leave layout's tokenizer out")
            sides[side] = [*ids]
        if all(ids[: len(prompt)] == prompt for ids in sides.values()):
            prompt = []  # they hold it already
        return found | {side: _spelled(tokenizer, forms, [*prompt, *ids]) for side, ids in sides.items()}

    for file in (file for part in source.files() for file in part.files):
        refuse = refusing(file)
        rows += [row for _, row in each(replace(source, path=file).stored(refuse), read, refuse)]
    return replace(source, rows=rows)


def _forms(tokenizer: PreTrainedTokenizerBase) -> Iterator[list[str]]:
    """Texts around the contents of two turns of each speaker, without and with a system turn before them."""
    marks = zip(_SPEAKERS * 2, "\ue000\ue001\ue002\ue003", strict=True)
    turns = [{"role": role, "content": mark} for role, mark in marks]
    for system in ([], [{"role": "system", "content": "\ue004"}]):
        with suppress(TemplateError, ValueError):
            parts = re.split("[\ue000-\ue004]", tokenizer.apply_chat_template([*system, *turns], tokenize=False))
            if len(parts) == len(system) + len(turns) + 1:
                yield parts


def _spelled(
    tokenizer: PreTrainedTokenizerBase, forms: Sequence[Sequence[str]], ids: list[int]
) -> str | list[dict[str, str]]:
    """The messages whose rendering has these ids, or the text that has them.

    Raises:
        ValueError: if there is neither.
    """
    text, stop = tokenizer.decode(ids), tokenizer.eos_token or ""
    if tokenizer(text, add_special_tokens=False)["input_ids"] == ids:
        for *starts, to_answer, to_user, to_last, end in forms:
            if not text.startswith(starts[0]):
                continue
            body, messages = text.removeprefix(starts[0]), list[dict[str, str]]()
            if len(starts) > 1:
                system, _, body = body.partition(starts[1])
                messages.append({"role": "system", "content": system})
            body = body.removesuffix(end + stop if body.endswith(end + stop) else end)
            for place, turn in enumerate(turns := body.split(to_user), 1):
                # A template may write an empty thinking block before the last answer.
                contents = turn.partition(to_last if place == len(turns) and to_last in turn else to_answer)[::2]
                messages += [{"role": role, "content": each} for role, each in zip(_SPEAKERS, contents, strict=True)]
            with suppress(TemplateError):
                rendered = tokenizer.apply_chat_template(messages, tokenize=False)
                if text in (rendered, rendered + stop):
                    return messages
    plain: str = tokenizer.decode(ids, skip_special_tokens=True)
    if ids in (tokenizer(plain)["input_ids"], tokenizer(plain, add_special_tokens=False)["input_ids"]):
        return plain
    raise ValueError("the named tokenizer and its chat template give other token ids for what the ids spell")
