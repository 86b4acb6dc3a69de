"""Checks of the tokenization: padding, special tokens, the template, its date and truncation."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import partial
from itertools import takewhile
from pathlib import Path

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import Message, Prompt, as_messages
from rm_optimizer.core.storage.certificate import DEFAULT_PROBE
from rm_optimizer.core.tokens.tokenizer import TOKENIZER_FILE, read_otherwise
from rm_optimizer.core.tokens.written_template import plain_agreement
from rm_optimizer.doctor.diagnosis import Check, MeasuredValue, Status, judged, skipped

_DAYS = (datetime(2024, 1, 2), datetime(2031, 10, 29))
_ANSWER = "It is so."


def pad_token(model: BradleyTerryRM, probe: Sequence[tuple[int, ...]]) -> Check:
    """Tokenizer and model have the same pad id, and it ends no sequence."""
    expected = "0 sequences end with the pad token, and tokenizer and model agree on it"
    tokenizer, config = model.tokenizer, model.model.config.get_text_config()
    pad = config.pad_token_id
    num_ending = sum(ids[-1] == pad for ids in probe)
    agrees = pad is not None and pad == tokenizer.pad_token_id == model.pad_choice.token_id
    details: dict[str, MeasuredValue] = {
        "token": tokenizer.pad_token,
        "token_id": pad,
        "is_eos": str(pad == tokenizer.eos_token_id),
        "origin": model.pad_choice.reason,
    }
    bad = (
        f"{tokenizer.pad_token!r} also ends sequences, so plain transformers reads the reward one token early; "
        "load the model with BradleyTerryRM, which chooses another pad token"
    )
    if not agrees:
        bad = f"tokenizer and model name different pad ids ({tokenizer.pad_token_id} and {pad}); set both to the same"
    good = f"{tokenizer.pad_token!r} pads and ends no sequence ({model.pad_choice.reason})"
    verdict = (agrees and not num_ending, num_ending, f"of {len(probe)} sequences", expected, good, bad)
    return judged(*verdict, details=details)


def tokenizer_file(model: BradleyTerryRM) -> Check:
    """The tokenizer gives plain texts the ids of the `tokenizer.json` it was read from."""
    expected, file = "the ids of tokenizer.json", Path(str(model.tokenizer.name_or_path), TOKENIZER_FILE)
    if not file.is_file():
        return skipped(expected, "the tokenizer was not read from a folder with tokenizer.json")
    difference = read_otherwise(model.tokenizer, file)
    verdict = ("other ids" if difference else "the same ids", "", expected, "plain texts get the ids of tokenizer.json")
    return judged(difference is None, *verdict, difference or "", otherwise=Status.warn)


def special_tokens(model: BradleyTerryRM, probe: Sequence[tuple[int, ...]]) -> Check:
    """EOS (or SEP) ends each sequence exactly once; BOS (or CLS) starts it exactly once if the tokenizer adds one."""
    expected = "each sequence opens with BOS exactly once where the tokenizer adds it, and closes with EOS exactly once"
    tokenizer = model.tokenizer
    openers = _openers(model)
    closers = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {None}
    if not closers:
        return skipped(expected, "the tokenizer has neither EOS nor SEP")
    closing = model.renderer.closing()
    if model.renderer.is_written and not closers.intersection(closing):
        ending = tokenizer.decode(list(closing))
        reason = f"its chat template writes the whole sequence, which ends with {ending!r}"
        return skipped(expected, reason)
    adds_opener = tokenizer("a")["input_ids"][0] in openers
    num_openers = [_leading(ids, openers) for ids in probe]
    num_closers = [_leading(_stripped(model, ids)[::-1], closers) for ids in probe]
    opens = [count == 1 if adds_opener else count <= 1 for count in num_openers]
    wrong_start, wrong_end = opens.count(False), sum(count != 1 for count in num_closers)
    num_wrong = sum(not first or last != 1 for first, last in zip(opens, num_closers, strict=True))
    good = "special tokens are once at either end of every sequence"
    bad = (
        f"{wrong_start} sequences open with BOS and {wrong_end} close with EOS zero times or twice; let the rendering "
        "or the tokenizer add them, not both"
    )
    verdict = (not num_wrong, num_wrong, f"of {len(probe)} sequences", expected, good, bad)
    return judged(*verdict, details={"wrong_start": wrong_start, "wrong_end": wrong_end})


def plain_rendering(model: BradleyTerryRM, probe: Sequence[tuple[int, ...]]) -> Check:
    """Plain `apply_chat_template`, its text in the tokenizer and in a pipeline give the tokens that the model reads."""
    expected, renderer = (
        "3 ways: apply_chat_template, its text in the tokenizer, its text in a pipeline",
        model.renderer,
    )
    if renderer.kind != "chat_template":
        reason = "the model renders by no chat template; score through BradleyTerryRM or rm-opt serve"
        return skipped(expected, reason)
    talks = [(*as_messages(prompt), Message("assistant", response)) for prompt, response in DEFAULT_PROBE]
    as_tokens, as_text = plain_agreement(talks, probe, model.max_length, model.tokenizer)
    remedy = "score through BradleyTerryRM or rm-opt serve"
    if as_tokens:
        remedy = "tokenize the text with add_special_tokens=False; an export of the model does that where it can"
    good, bad = "special tokens are written once, whichever way is taken", f"not every way gives its tokens; {remedy}"
    verdict = (as_tokens and as_text, as_tokens + 2 * as_text, "of 3 ways", expected, good, bad)
    return judged(*verdict, otherwise=Status.warn)


def _openers(model: BradleyTerryRM) -> set[int]:
    return {model.tokenizer.bos_token_id, model.tokenizer.cls_token_id} - {None}


def _leading(ids: Sequence[int], wanted: set[int]) -> int:
    """Number of ids at the start that are in `wanted`."""
    return next((i for i, token in enumerate(ids) if token not in wanted), len(ids))


def _stripped(model: BradleyTerryRM, ids: Sequence[int]) -> Sequence[int]:
    """The ids without the blanks that a template writes after its EOS."""
    special, stop = set(model.tokenizer.all_special_ids), len(ids)
    while stop and ids[stop - 1] not in special and not model.tokenizer.decode([ids[stop - 1]]).strip():
        stop -= 1
    return ids[:stop]


def template_date(model: BradleyTerryRM) -> Check:
    """A conversation has the same text on any day."""
    expected = "the same text on any two days"
    if model.renderer.kind == "custom":
        texts = [model.renderer.text(*DEFAULT_PROBE[0]) for _ in range(2)]
        what = "render_fn, called twice, gives"
    elif model.renderer.kind == "chat_template":
        prompt, response = DEFAULT_PROBE[0]
        turns = [message.to_dict() for message in (*as_messages(prompt), Message("assistant", response))]
        write = partial(model.tokenizer.apply_chat_template, turns, tokenize=False)  # a template's `set` comes first
        texts = [write(strftime_now=day.strftime, date_string=day.strftime("%d %b %Y")) for day in _DAYS]
        what = f"the chat template, on {_DAYS[0]:%d %b %Y} and {_DAYS[1]:%d %b %Y}, gives"
    else:
        return skipped(expected, "the tokenizer has no chat template, and the plain form has no date")
    is_same = texts[0] == texts[1]
    remedy = "load the tokenizer through BradleyTerryRM, which pins the date, or write the date into the template"
    good, bad = f"{what} one text", f"{what} two texts, so rewards change by the day; {remedy}"
    details = {name: getattr(model.renderer, name) for name in ("kind", "template_hash", "pinned_date")}
    return judged(is_same, len(set(texts)), "different texts", expected, good, bad, details=details)


def rendered_together(model: BradleyTerryRM, probe: Sequence[tuple[int, ...]]) -> Check:
    """Check that the model reads the tokens of the whole conversation's text, not of separate parts."""
    expected = "every sequence holds the tokens of the whole conversation's text"
    whole = [_whole_text_ids(model, prompt, response) for prompt, response in DEFAULT_PROBE]
    short = [i for i, ids in enumerate(whole) if len(ids) + 4 <= model.max_length]
    if not short:
        return skipped(expected, f"max_length={model.max_length} cuts every probe conversation")
    read = {i: [list(probe[i][start : start + len(whole[i])]) for start in range(len(probe[i]))] for i in short}
    num_wrong = sum(whole[i] not in read[i] for i in short)
    good = "prompt and response are rendered together and tokenized once"
    bad = (
        "sequences differ from the tokens of the conversation's text; render prompt and response together and tokenize "
        "the text once"
    )
    return judged(not num_wrong, num_wrong, f"of {len(short)} sequences", expected, good, bad)


def _whole_text_ids(model: BradleyTerryRM, prompt: Prompt, response: str) -> list[int]:
    text = model.renderer.text(prompt, response)
    ids: list[int] = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def truncation(model: BradleyTerryRM) -> Check:
    """A prompt that is too long loses its left end; the response and the special tokens remain."""
    expected = f"a sequence of {model.max_length} tokens that opens and closes like a short one"
    whole = model.renderer.encode("why?", _ANSWER)
    if whole.prompt_cut or whole.response_cut:
        reason = f"max_length={model.max_length} is too short for a prompt of one word; raise it"
        return Check("", Status.fail, len(whole.ids), "tokens", expected, reason)
    cut = model.renderer.encode("why? " * 2 * model.max_length, _ANSWER)
    either = [_whole_text_ids(model, "why?", response) for response in (_ANSWER, "Zebras")]
    shared = takewhile(lambda both: both[0] == both[1], zip(*either, strict=False))
    response_tokens = len(either[0]) - len(list(shared))
    same_end = cut.ids[-response_tokens:] == whole.ids[-response_tokens:]
    same_start = cut.ids[0] == whole.ids[0] or whole.ids[0] not in _openers(model)
    is_whole = len(cut.ids) == model.max_length and cut.prompt_cut > 0 and cut.response_cut == 0
    is_right = is_whole and same_start and same_end
    good = "a prompt that is too long loses tokens from its left, and the response is kept"
    bad = "cutting an over-long prompt changes the response or the special tokens; cut the prompt's left end only"
    details = {"prompt_cut": cut.prompt_cut, "response_cut": cut.response_cut}
    return judged(is_right, len(cut.ids), "tokens", expected, good, bad, details=details)
