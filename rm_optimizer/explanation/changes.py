"""Changes of a local copy for each cause of the closed list: of its recipe, its tensors or its rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import expit, logit
from torch import Tensor

from rm_optimizer.core.classifier.adapters import has_adapter
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.explanation.findings import Cause
from rm_optimizer.explanation.local_copy import POSITIONS, LocalCopy, plain_state
from rm_optimizer.explanation.recipe import NO_LIMIT, Recipe

Scores: TypeAlias = Float[np.ndarray, " sequences"]
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "You are a helpful, respectful and honest assistant.",
    "",
)
"""Default system messages of published templates."""
_OPENED = "{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}{% endif %}"
_TURNS = {
    "ChatML": "'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'",
    "Zephyr": "'<|' + m.role + '|>\n' + m.content + eos_token + '\n'",
    "Llama 3": "'<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>'",
    "Human and Assistant": "'\n\n' + ('Assistant' if m.role == 'assistant' else 'Human') + ': ' + m.content",
    "role: content": "m.role + ': ' + m.content + '\n'",
    "contents alone": "m.content + ('' if loop.last else '\n')",
    "Prompt and Response": "('Response: ' if loop.last else 'Prompt: ') + m.content + ('' if loop.last else '\n\n')",
}
TEMPLATES = {name: "{% for m in messages %}{{" + turn + "}}{% endfor %}" for name, turn in _TURNS.items()}
"""Published layouts that tools fall back to."""
LEAST_FITTED = 5
"""Fewest rewards to which factor and constant of a map are fitted."""
_ADAPTED = ".base_layer"


@dataclass(frozen=True)
class Change:
    """One change of a recipe.

    Args:
        cause: the cause that it is made for.
        fields: fields of the recipe with their new values.
    """

    cause: Cause
    fields: Mapping[str, Any]

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with the change."""
        return replace(recipe, **self.fields)


@dataclass(frozen=True)
class ScoreMap:
    """A map of rewards that a server or a pipeline applies.

    Args:
        causes: the causes that it is made for; none for the identity.
        slope: factor of the reward.
        shift: constant added to it.
        is_squashed: True for a sigmoid at the end.
        is_fitted: True if factor and constant were fitted to the other side's rewards.
    """

    causes: tuple[Cause, ...] = ()
    slope: float = 1.0
    shift: float = 0.0
    is_squashed: bool = False
    is_fitted: bool = field(default=False, kw_only=True)

    def apply(self, rewards: Scores) -> Scores:
        """The mapped rewards."""
        mapped = self.slope * rewards + self.shift
        return np.asarray(expit(mapped) if self.is_squashed else mapped)


def score_maps(own: Scores, other: Scores, bias: float) -> Iterator[ScoreMap]:
    """Maps that may turn one side's rewards into the other's, those without fitted constants first.

    Args:
        own: rewards of the local copy.
        other: rewards of the other side, of the same conversations.
        bias: bias of the local copy's head.
    """
    sigmoid, swapped = Cause("activation", "sigmoid, or softmax of two labels"), Cause("label_order", "swapped labels")
    dropped = Cause("head_bias", "head bias dropped")
    for last in ((), (sigmoid,)):
        yield ScoreMap(last, is_squashed=bool(last))
        yield ScoreMap((swapped, *last), -1.0, is_squashed=bool(last))
        if abs(bias) > 1e-6:
            yield ScoreMap((dropped, *last), shift=-bias, is_squashed=bool(last))
    for last in ((), (sigmoid,)):
        inside = (other > 1e-4) & (other < 1 - 1e-4) if last else np.ones(len(other), dtype=bool)
        if inside.sum() < LEAST_FITTED or np.ptp(own[inside]) < 1e-6:
            continue
        x, y = own[inside], logit(other[inside]) if last else other[inside]
        slope, shift = map(float, np.polyfit(x, y, 1))
        cause = Cause("scale", f"scale and shift: {slope:.5g} r {shift:+.5g}")
        if abs(slope - 1) * max(1.0, float(np.abs(own).max())) < 1e-4:
            slope, shift = 1.0, float((y - x).mean())
            cause = Cause("shift", f"constant shift {shift:+.5g}, such as a head bias or a mean")
        yield ScoreMap((cause, *last), slope, shift, bool(last), is_fitted=True)


def changes(local: LocalCopy) -> Iterator[Change]:
    """Changes of one stage, the likeliest first."""

    def change(kind: str, name: str, **fields: Any) -> Change:
        return Change(Cause(kind, name), fields)

    rendering, renderer = local.rendering, local.rendering.renderer
    first, last = ("CLS", "SEP") if renderer.tokenizer.cls_token_id is not None else ("BOS", "EOS")
    starts, ends = rendering.usual_lead, bool(rendering.after_end(renderer.encode("Hi", "Yes").ids))
    if rendering.lead is not None:
        for number, word in ((2, "doubled"), (0, "missing")) if starts else ((1, "added"),):
            yield change("bos", f"{word} {first}", bos=number)
    if rendering.end is not None:
        for eos, word in (("none", "missing"), ("twice", "doubled")) if ends else (("once", "added"),):
            yield change("eos", f"{word} {last}", eos=eos)
        yield change("eos", f"blank after {last} lost", eos="unblanked")
    if starts and ends:
        yield change("bos", f"doubled {first} and {last}", bos=2, eos="twice")
        yield change("bos", f"missing {first} and {last}", bos=0, eos="none")
    yield change("generation_prompt", "generation prompt appended", generation=True)
    yield change("thinking", "empty thinking block", thinking=True)
    for text in SYSTEM_PROMPTS:
        yield change("system_prompt", f"default system prompt {text!r}", system=text)
    for day in (date.today() + timedelta(days) for days in (0, -1, 1)):
        for text in (f"{day:%d %b %Y}", f"{day:%Y-%m-%d}"):
            yield change("date", f"date {text} in the template", date=text)
    yield change("date", "date 26 Jul 2024 in the template", date="26 Jul 2024")
    for part in ("contents", "answer", "text"):
        yield change("white_space", f"stripped white space ({part})", strip=part)
    if has_adapter(local.model.model):
        for factor, word in ((0, "not merged"), (2, "merged twice")):
            parameters = local.model.named_parameters()
            local.tensors[word] = {name: factor * value for name, value in parameters if ".lora_B." in name}
            yield change("adapter", f"adapter {word}", weights=word)
    if local.other is not None and rendering.other is not None:
        yield from _of_files(local, rendering.other)
    for name, template in TEMPLATES.items():
        template += _OPENED if name == "ChatML" else ""
        yield change("template", f"other template ({name})", template=template)
        yield change("template", f"other template ({name})", template=template, eos="once")
    config = local.model.model.config.get_text_config()
    own, other_window = (
        getattr(each, "sliding_window", None)
        for each in (config, None if local.other is None else local.other.model.config.get_text_config())
    )
    for kernel in {"eager", "sdpa"} - {str(config._attn_implementation).removesuffix("_unpadded")}:
        yield change("attention", f"attention kernel {kernel}", attention=kernel)
    if own is not None:
        yield change("attention", "no sliding window", attention=str(NO_LIMIT))
    if other_window not in (None, own):
        yield change("attention", f"sliding window of {other_window}", attention=str(other_window))
    if renderer.tokenizer.sep_token_id is not None:
        has_types = getattr(local.model.model.config, "type_vocab_size", 0) > 1
        name = "prompt and response as a pair of texts" + ", with token types" * has_types
        yield change("pair", name, pair=True, types="pair" * has_types)
        if "separator" in getattr(local.model.model.config, "reward_head", {}):
            yield change("pair", "all token types 0, as of a single text", types="single")
    if "file" in rendering.renderers:
        name = f"tokenizer.json as it is, which {type(renderer.tokenizer).__name__} reads otherwise"
        yield change("tokenizer", name, tokenizer="file")
    for place in ("mean", *POSITIONS):
        yield change("pooling", f"pooled token ({place})", pool=place)


def _of_files(local: LocalCopy, other: ConversationRenderer) -> Iterator[Change]:
    """Changes to what the other side's files hold: tensors that differ, by layer, its template and its tokenizer."""
    tokenizer = local.rendering.renderer.tokenizer
    differ = _differing(local)
    for dtype in (torch.bfloat16, torch.float16):
        own = local.model.state_dict()
        if differ and all(_is_rounding(own[name], value, dtype) for name, value in differ.items()):
            name = f"weights rounded to {str(dtype).removeprefix('torch.')}"
            yield _transplant(local, "dtype", name, differ)
            differ = {}
    head = {name: value for name, value in differ.items() if name.startswith(f"{local.head}.")}
    if head:
        kind = "head_bias" if [*head] == [f"{local.head}.bias"] else "head_weights"
        yield _transplant(local, kind, f"other {kind.replace('_', ' ')}", head)
    layers: dict[str, dict[str, Tensor]] = {}
    for name in differ.keys() - head.keys():
        block = re.match(r"model\.(.*?\.\d+)\.", name)
        layers.setdefault(block[1] if block else name.removeprefix("model."), {})[name] = differ[name]
    for layer, tensors in sorted(layers.items()):
        yield _transplant(local, "weights", f"other weights in {layer}", tensors)
    if len(layers) + bool(head) > 1:
        named = ", ".join([*sorted(layers), *head][:4])
        yield _transplant(local, "weights", f"other weights ({len(differ)} tensors, in {named}, …)", differ)
    if (template := other.tokenizer.chat_template) != tokenizer.chat_template and template:
        yield Change(Cause("template", "chat template of the other folder"), {"template": template})
    odd = sorted(tokenizer.get_vocab().items() ^ other.tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = ", ".join(dict.fromkeys(repr(token) for token, _ in odd[:6]))
    told = f" (tokens {tokens})" if odd else ""
    table = {local.embedding: differ[local.embedding]} if local.embedding in differ and odd else {}
    grown = _transplant(local, "tokenizer", "other embeddings", table).fields if table else {}
    for part in local.rendering.parts:
        yield Change(Cause("tokenizer", f"other {part} of the tokenizer{told}"), {"tokenizer": part, **grown})
    if len(local.rendering.parts) != 1 or template != tokenizer.chat_template:
        yield Change(Cause("tokenizer", f"other tokenizer{told or ' or template'}"), {"tokenizer": "other", **grown})


def _is_rounding(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """True if one of two tensors is the other, rounded to a type."""
    return any(torch.equal(exact.to(dtype).to(half.dtype), half) for exact, half in ((one, other), (other, one)))


def _differing(local: LocalCopy) -> dict[str, Tensor]:
    """Tensors of the other side that differ, by their names here."""
    assert local.other is not None
    own, theirs = plain_state(local.model), plain_state(local.other)
    names = {name: name.removeprefix("model.").replace(_ADAPTED, "") for name in local.model.state_dict()}
    return {
        name: theirs[plain].to(local.model.device)
        for name, plain in names.items()
        if plain in theirs and (own[plain].shape != theirs[plain].shape or not torch.equal(own[plain], theirs[plain]))
    }


def _transplant(local: LocalCopy, kind: str, name: str, tensors: Mapping[str, Tensor]) -> Change:
    """Change to tensors of the other side, whose layers lose their adapter, since it is merged in these."""
    layers = tuple(f"{key.partition(_ADAPTED)[0]}.lora_B." for key in tensors if _ADAPTED in key)
    unadapted = {key: 0 * value for key, value in local.model.named_parameters() if key.startswith(layers or "-")}
    local.tensors[name] = {**tensors, **unadapted}
    return Change(Cause(kind, name), {"weights": name})
