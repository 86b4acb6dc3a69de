"""Explanation of the difference between two scorings, by changing one thing at a time in a local copy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from rm_optimizer.core.classifier.adapters import has_adapter
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.rows.messages import Prompt
from rm_optimizer.core.rows.natural import listed
from rm_optimizer.doctor.probe_conversations import alone_rewards, padded_rewards, running
from rm_optimizer.errors import ConfigError, ConversationRefused, DataError, HandshakeFailed, RewardServerRefused
from rm_optimizer.explanation.changes import Scores
from rm_optimizer.explanation.findings import Cause, Explanation
from rm_optimizer.explanation.local_copy import LocalCopy
from rm_optimizer.explanation.probes import Conversation, conversation, group_of, probes
from rm_optimizer.explanation.search import Found, Search
from rm_optimizer.explanation.sides import (
    MOST_ROWS,
    Side,
    is_scores,
    loaded_model,
    model_side,
    other_side,
    read_conversations,
)
from rm_optimizer.serving.options import ServeOptions

TOLERANCE, NOISES = 1e-5, 8
"""Least difference that counts, and the same in units of the measured noise; each times max(1, |reward|)."""
MOST_HIDDEN = 256
"""Widest input of a head for which another linear head is fitted to rewards of further texts."""
_FOLDERS = "give both sides as folders"
_NEEDS = {
    "adapter": "the local copy has none",
    "head_weights": _FOLDERS,
    "weights": _FOLDERS,
    "tokenizer": _FOLDERS,
    "padding": "stored rewards are of one batch",
}
"""What is missing where a kind of cause has no change to try."""


def explain_difference(
    a: Any,
    b: Any,
    *,
    texts: str | os.PathLike[str] | Iterable[tuple[Prompt, str]] | None = None,
    layout: object = None,
    max_length: int | None = None,
) -> Explanation:
    """Compare two scorings of the same conversations, and name the cause of a difference by intervention.

    Built-in conversations and given ones are scored by both sides. If rewards differ by more than
    ``max(1e-5, 8 noise) max(1, |reward|)``, a local copy of one side is changed until every reward meets: one change
    from a closed list, then two. The noise is the largest difference of the copy's rewards alone and in a batch.

    Args:
        a: a model (folder, hub id, adapter folder, run, `BradleyTerryRM`); address of a server; file of prompts,
            responses and rewards; object with `score`; `pipeline`; or function of prompts and responses.
        b: the other side, in the same forms. One of the two must be a model.
        texts: further conversations: a file with columns prompt and response, or tuples of prompt and response.
        layout: columns and parsed columns of the files of rewards and texts, as `rm-opt score` takes them.
        max_length: most tokens of a sequence of models that are loaded; None takes the stored number.

    Raises:
        ConfigError: if neither side is a model, a side is something else, or a layout is given without a file.
        CheckpointError: if a model cannot be loaded.
        DataError: if a file cannot be used.
    """
    began = time.perf_counter()
    paths = [each for each in (a, b, texts) if isinstance(each, str | os.PathLike)]
    if layout is not None and texts not in paths and not any(map(is_scores, paths)):
        raise ConfigError("layout needs a file of prompts, responses and rewards")
    first, second = model_side(a, max_length), model_side(b, max_length)
    models = [side.model for side in (first, second) if side is not None and side.model is not None]
    if not models:
        raise ConfigError("expected a model as A or B (a folder, hub id or adapter), whose local copy can be changed")
    first, second = (
        side or other_side(source, models[0].renderer, layout) for side, source in ((first, a), (second, b))
    )
    is_second = len(models) == 2 and has_adapter(models[1].model) and not has_adapter(models[0].model)
    is_local_b = first.model is None or is_second
    given = () if texts is None else _given(texts, layout)
    found = _compared(models[is_second], first if is_local_b else second, given)
    return Explanation(
        first.name, second.name, "B" if is_local_b else "A", **found, wall_seconds=time.perf_counter() - began
    )


def require_rewards(options: ServeOptions, served: Callable[..., Sequence[float]]) -> None:
    """Compare the rewards that a server gives with the file of its option `check`.

    Args:
        options: options of the server.
        served: rewards of prompts and responses by the server.

    Raises:
        HandshakeFailed: if they differ; the text names the cause, the evidence and the remedy.
    """
    assert options.check is not None
    print(f"rm-opt serve: comparing with the rewards of {options.check}", flush=True)
    scores = options.check if is_scores(options.check) else None
    model, _ = loaded_model(options.checkpoint if scores else options.check, None, options.dtype)
    for side, texts in ((scores, None), (served, scores)):
        if side is not None and not (found := explain_difference(model, side, texts=texts)).agrees:
            raise HandshakeFailed(str(found))


def _given(texts: str | os.PathLike[str] | Iterable[tuple[Prompt, str]], layout: object) -> list[Conversation]:
    """The user's conversations; of a file the first `MOST_ROWS`."""
    if isinstance(texts, str | os.PathLike):
        return [talk for talk, _ in read_conversations(Path(texts), layout)][:MOST_ROWS]
    return [conversation(prompt, response) for prompt, response in listed("texts", texts)]


def _compared(model: BradleyTerryRM, other: Side, given: Sequence[Conversation]) -> dict[str, Any]:
    """Fields of the explanation: rewards of a local model and of another side, and the causes of a difference."""
    readers = [each.renderer for each in (model, other.model) if each is not None]
    talks = []
    asked = other.stored or (*probes(model.renderer), *given)
    for talk in asked:
        try:
            all(reader.encode(*talk) for reader in readers)
            talks.append(talk)
        except ConversationRefused:
            continue
    if not talks:
        raise DataError(f"the model's chat template refuses every conversation of {other.name}")
    local, change, num_all = LocalCopy(model, other.model), 0.0, len(talks)
    if other.can_be_asked:
        talks, target = _asked_alone(other, talks, local)
        together = np.array(other.score(talks))
        change = float(np.abs(np.array(other.score(talks)) - together).max())
    else:
        together = target = np.array(other.score(talks))
    rows = [local.rendering.ids(talk, local.rendering.base) for talk in talks]
    with running(model, training=False):
        alone, padded = alone_rewards(model, rows), padded_rewards(model, rows)
    noise = float((alone - padded).abs().max())
    tolerance = max(TOLERANCE, NOISES * noise) * np.maximum(1.0, np.abs(target)) + _half_unit(target)
    differ = np.abs(alone.numpy() - target)
    is_different, depends = differ > tolerance, bool((np.abs(together - target) > tolerance).any())
    told: dict[str, Any] = {}
    if change > tolerance.max():
        cause = Cause("chance", f"rewards that change by {change:.3g} when the same is asked again")
        told = {"causes": (cause,), "left": float(differ.max())}
    elif is_different.any() or depends:
        search = Search(local, talks, target, tolerance)
        found = search.explanations() if is_different.any() else []
        if not found and is_different.any():
            found = _other_head(local, talks, other, target, 10 * float(tolerance.max()))
            told = {} if found else {"remarks": tuple(_remarks(talks, alone.numpy(), target, is_different))}
        told |= _fields(search, found, other)
        if depends:
            told["causes"] = (Cause("padding", "rewards that depend on the padding of a batch"), *told["causes"])
    refused = {"chat template": len(asked) - num_all, "other side": num_all - len(talks)}
    words = [f"The {name} refused {number} conversations" for name, number in refused.items() if number]
    told["remarks"] = (*told.get("remarks", ()), *words)
    counts = {"num_probes": len(talks), "num_differing": int(is_different.sum())}
    return {**counts, "largest": float(differ.max()), "noise": noise, **told}


def _asked_alone(other: Side, talks: Sequence[Conversation], local: LocalCopy) -> tuple[list[Conversation], Scores]:
    """The conversations that the other side scores one by one, with its rewards; it may refuse too long ones."""
    kept, scores = list[Conversation](), list[float]()
    for talk in talks:
        try:
            scores += other.score([talk])
            kept.append(talk)
        except (RewardServerRefused, RuntimeError, IndexError, ValueError):
            if 2 * len(local.rendering.ids(talk, local.rendering.base)) < local.model.max_length:
                raise  # another template may double the tokens, and no more
    return kept, np.array(scores)


def _fields(search: Search, found: Sequence[Found], other: Side) -> dict[str, Any]:
    names = [" and ".join(cause.name for cause in each.causes) for each in found]
    causes = found[0].causes if found else ()
    same = {name for cause in causes for name in search.same.get(cause.name, ())}
    tested = {change.cause.kind for change in search.changes} | ({"padding"} if not other.stored else set())
    missing = {kind: reason for kind, reason in _NEEDS.items() if kind not in tested}
    if other.model is not None:
        missing = {kind: reason for kind, reason in missing.items() if reason != _FOLDERS}
    return {
        "causes": causes,
        "left": found[0].left if found else 0.0,
        "lookalikes": tuple(sorted(same.union(names[1:]) - {*names[:1]})),
        "excluded": tuple(dict.fromkeys(change.cause.name for change in search.changes if change.cause not in causes)),
        "not_testable": tuple(f"{kind} ({reason})" for kind, reason in missing.items()),
        "interventions": tuple(search.tried),
    }


def _other_head(
    local: LocalCopy, talks: Sequence[Conversation], other: Side, target: Scores, allowed: float
) -> list[Found]:
    """Another linear head on the same inputs, fitted to rewards of short texts and checked on all conversations."""
    width = local.model.reward_head.in_features
    if width > MOST_HIDDEN or other.stored:
        return []
    words = [word for messages, text in talks for word in f"{messages[-1].content} {text}".split()]
    draw = np.random.default_rng(0)
    fresh = [conversation(*(" ".join(draw.choice(words, 6)) for _ in range(2))) for _ in range(3 * width // 2 + 2)]
    scores = np.concatenate([other.score([talk]) for talk in fresh] if other.can_be_asked else [other.score(fresh)])
    given, checked = (np.pad(local.head_inputs(part), ((0, 0), (0, 1)), constant_values=1) for part in (fresh, talks))
    fit = np.linalg.lstsq(given, scores, rcond=1e-10)[0]
    left = float(np.abs(checked @ fit - target).max())
    name = f"other head weights (a linear head fitted to {len(fresh)} other conversations)"
    return [Found((Cause("head_weights", name),), left)] if left <= allowed else []


def _remarks(talks: Sequence[Conversation], own: Scores, other: Scores, is_different: Any) -> Iterator[str]:
    """Sentences on a difference without a cause: the kinds of conversations, and the order of the rewards."""
    groups = np.array([group_of(talk) for talk in talks])
    num: Callable[[str], int] = lambda name: int(is_different[groups == name].sum())  # noqa: E731
    yield "Differing: " + ", ".join(
        f"{num(name)} of {(groups == name).sum()} with {name}" for name in sorted({*groups})
    )
    if "system messages" in groups and num("system messages") == 0 < num("one turn"):
        yield "Only conversations without a system message differ, so one side inserts one"
    yield f"The rank correlation of the rewards is {float(spearmanr(own, other).statistic):.3f}"


def _half_unit(rewards: Scores) -> float:
    """Half of the last decimal of rounded rewards; 0 if they are not rounded."""
    for digits in range(1, 6):
        if np.ptp(rewards) > 10.0**-digits and np.abs(rewards - rewards.round(digits)).max() < 1e-9:
            return float(0.5 * 10.0**-digits)
    return 0.0
