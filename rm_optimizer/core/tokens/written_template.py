"""Chat templates that write a model's whole sequence, so that plain `apply_chat_template` gives the model's input.

A sequence starts with BOS (or CLS) and ends with EOS (or SEP). If a tokenizer has no template, or one that does not
write them, it gets a template that does before training, and exports contain that template. The input of a reward
model from elsewhere is exactly the text of its own template, without an EOS that its training did not have.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from rm_optimizer.core.pairs.pair import Message, Prompt
from rm_optimizer.core.tokens.chat import PROBES, WRITTEN_MARK, ConversationRenderer
from rm_optimizer.core.tokens.conversation_text import ROLE_NAMES
from rm_optimizer.core.tokens.template_fields import stored_template
from rm_optimizer.errors import ConfigError, DataError, did_you_mean

FORMS = ("plain", "pair")
"""Input forms of a reward model without a chat template: `chat.plain_prompt`, and a tokenizer's text pair."""
_ENOUGH = 1 << 20
_log = logging.getLogger("rm_optimizer")


class TemplateWriter:
    """Writer of the chat template that gives a model's input, before training or for a trained model.

    Args:
        tokenizer: tokenizer to change.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        renderer = ConversationRenderer(tokenizer, _ENOUGH)
        self._frame = renderer.frame.both
        self._framed, self._written = renderer.probe_ids(), renderer.probe_ids(adds_frame=False)
        # Every sequence starts with BOS or CLS, or the tokenizer adds none.
        self._has_lead = not self._frame[0] or all(map(renderer.frame.lead_width, self._written))
        try:
            self._closing: tuple[int, ...] | None = renderer.closing()
        except DataError:  # the template renders no single turn
            self._closing = None

    def write_for_training(self) -> None:
        """Make the template write the whole sequence, for a model that is not trained yet.

        If a template ends a turn with its own special token, the sequence ends there, as with plain
        `apply_chat_template`. Otherwise the template gets EOS. The tokenizer is not changed if its template writes the
        whole sequence already, or if the completed template gives other tokens than the text with BOS and EOS (some
        SentencePiece tokenizers).
        """
        lead, end = (self._text_of(ids) for ids in self._frame)
        template = self.tokenizer.chat_template
        if not template:
            self._install(_without_template(lead, "Prompt: ", "\n\nResponse: ", end), self._framed)
            return
        if not isinstance(template, str) or self._closing is None or self._written == self._framed:
            return
        completed = template if self._has_lead else f"{{{{ {json.dumps(lead)} }}}}{template}"
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        if special.intersection(self._closing):
            ids = [ids if self._has_lead else [*self._frame[0], *ids] for ids in self._written]
            self._install(completed, ids)
        else:
            ending = f"{{% if not add_generation_prompt %}}{{{{ {json.dumps(end)} }}}}{{% endif %}}"
            self._install(completed.removesuffix("\n") + ending, self._framed)

    def write_as_read(self, form: str | None, source: object) -> None:
        """Make the template write the input of a reward model that was trained elsewhere.

        Nothing is added to the text of its template. Without a template, the form decides.

        Args:
            form: `plain`, `pair` (the input of OpenAssistant's DeBERTa), or None, which means `plain` with a warning.
            source: path or name of the model, for the messages.

        Raises:
            ConfigError: if the form is unknown, or no template can write the tokenizer's text pairs.
        """
        tokenizer, template = self.tokenizer, self.tokenizer.chat_template
        if template:
            if not isinstance(template, str) or WRITTEN_MARK in template or self._written == self._framed:
                return
            if tokenizer.cls_token_id is None or self._has_lead:
                self._install(template, self._written)
                return
            _log.warning(
                "the chat template writes no %s; it is added, with %s, as the tokenizer does for text; whether the "
                "model was trained so is unknown",
                tokenizer.cls_token,
                tokenizer.sep_token,
            )
            return
        if form not in (None, *FORMS):
            raise ConfigError(did_you_mean("input_form", str(form), FORMS))
        if form is None:
            _log.warning(
                "%s has neither a chat template nor our export.json, so the form of its input is unknown; its rewards "
                "here are those of 'Prompt: …\\n\\nResponse: …'. If its card calls tokenizer(prompt, response), "
                "evaluate, score and doctor take --input-form pair; for the rest, store it once with "
                "BradleyTerryRM.from_pretrained('%s', input_form='pair').save_pretrained('FOLDER') and give FOLDER. "
                "The form 'plain' silences this",
                source,
                source,
            )
        if form != "pair":
            self.write_for_training()
            return
        pairs = (("Name a colour.", "Blue, ünd grün."), ("hi", "Hello\nworld"))
        expected = [list(tokenizer(*pair)["input_ids"]) for pair in pairs]
        prompt, response = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in pairs[0])
        start = _find(expected[0], prompt, 0)
        middle = _find(expected[0], response, start + len(prompt))
        frame = (expected[0][:start], expected[0][start + len(prompt) : middle], expected[0][middle + len(response) :])
        lead, between, end = (self._text_of(ids) for ids in frame)
        if not self._install(_without_template(lead, "", between, end), expected, pairs):
            raise ConfigError(
                "input_form='pair' is not possible with this tokenizer: no template writes its text pairs; "
                "pass a render_fn to from_pretrained"
            )

    def _install(
        self, template: str, ids: Sequence[Sequence[int]], probes: Sequence[tuple[Prompt, str]] = PROBES
    ) -> bool:
        """Give the tokenizer a template with its mark, unless it gives the probes other ids; False restores the old."""
        before = self.tokenizer.chat_template
        self.tokenizer.chat_template = WRITTEN_MARK + template
        if ConversationRenderer(self.tokenizer, _ENOUGH).probe_ids(probes) == ids:
            return True
        self.tokenizer.chat_template = before
        _log.info("plain apply_chat_template gives other tokens than training: no template writes this frame")
        return False

    def _text_of(self, ids: Sequence[int]) -> str:
        return "".join(self.tokenizer.convert_ids_to_tokens(list(ids)))


def _find(ids: list[int], part: list[int], start: int) -> int:
    """Index of the first occurrence of `part` from `start` on; the length of the ids without one."""
    places = range(start, len(ids) - len(part) + 1)
    return next((place for place in places if ids[place : place + len(part)] == part), len(ids))


def _without_template(lead: str, opening: str, middle: str, end: str) -> str:
    """A chat template that writes lead, opening, prompt, middle, response and end."""
    return stored_template("plain", NAMES=ROLE_NAMES, LEAD=lead, OPENING=opening, MIDDLE=middle, END=end)


def plain_agreement(
    conversations: Sequence[Sequence[Message]],
    ids: Sequence[Sequence[int]],
    max_length: int,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[bool, bool]:
    """True if plain `apply_chat_template` gives a model's tokens, and if its text does, which a pipeline tokenizes.

    Args:
        conversations: whole conversations; those that are cut decide nothing.
        ids: token ids that the model reads of each.
        max_length: most tokens of a sequence.
        tokenizer: plain tokenizer, such as a stored one.
    """
    write = tokenizer.apply_chat_template
    as_tokens = as_text = bool(tokenizer.chat_template)
    for conversation, read in zip(conversations, ids, strict=True) if as_tokens else ():
        if len(read) < max_length:
            turns = [turn.to_dict() for turn in conversation]
            as_tokens &= list(write(turns, tokenize=True, return_dict=True)["input_ids"]) == [*read]
            as_text &= list(tokenizer(str(write(turns, tokenize=False)))["input_ids"]) == [*read]
    return as_tokens, as_text


def add_nothing_to_texts(tokenizer: Path, config: Path, input_names: Sequence[str]) -> None:
    """Change a stored tokenizer so that it adds no special tokens to a single text; text pairs keep theirs.

    Its chat template writes them, and `transformers` cannot add only those that are missing. Tokenizer classes such as
    BERT's set up their own post-processor (transformers 5.19), so the stored class is the one that keeps the file's.

    Args:
        tokenizer: its `tokenizer.json`.
        config: its `tokenizer_config.json`.
        input_names: names of the model's inputs, such as `token_type_ids`, which belong to the replaced class.
    """
    stored = json.loads(tokenizer.read_text(encoding="utf-8"))
    stored["post_processor"] = _without_frame(stored["post_processor"] or {}) or None
    tokenizer.write_text(json.dumps(stored, ensure_ascii=False, indent=2), encoding="utf-8")
    options = json.loads(config.read_text(encoding="utf-8"))
    kept = {key: value for key, value in options.items() if key not in ("add_bos_token", "add_eos_token")}
    kept |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": list(input_names)}
    config.write_text(json.dumps(kept, ensure_ascii=False, indent=2), encoding="utf-8")


def _without_frame(processor: dict[str, Any]) -> dict[str, Any]:
    """A post-processor of tokenizer.json without the special tokens of a single text."""
    if "processors" in processor:
        return processor | {"processors": list(map(_without_frame, processor["processors"]))}
    if "cls" in processor:  # BertProcessing, RobertaProcessing
        special = [tuple(processor["cls"]), tuple(processor["sep"])]
        (cls, _), (sep, _) = special
        kind, middle = (1, sep) if processor["type"] == "BertProcessing" else (0, f"{sep} {sep}")
        pair = f"{cls} $A {middle} $B:{kind} {sep}:{kind}"
        made = TemplateProcessing(single="$A", pair=pair, special_tokens=special)
        return dict(json.loads(made.__getstate__()))
    return processor | ({"single": [{"Sequence": {"id": "A", "type_id": 0}}]} if "single" in processor else {})
