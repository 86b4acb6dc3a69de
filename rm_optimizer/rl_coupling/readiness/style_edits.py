"""Sensitivity to style: edits that keep what a response says, and preferences that they turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.intervals import clustered_share
from rm_optimizer.core.pairs.pair import PreferencePair, Scorer

_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+")


def as_list(text: str) -> str:
    """The sentences as a Markdown list.

    Example:
        >>> as_list("Wait. Then stir.").splitlines()
        ['- Wait.', '- Then stir.']
    """
    return "\n".join(f"- {sentence}" for sentence in _SENTENCE_ENDS.split(text.strip()))


def with_bold_start(text: str) -> str:
    """The first sentence in Markdown's bold."""
    first, *rest = _SENTENCE_ENDS.split(text.strip(), maxsplit=1)
    return " ".join([f"**{first}**", *rest])


def in_paragraphs(text: str) -> str:
    """Each sentence in a paragraph of its own."""
    return "\n\n".join(_SENTENCE_ENDS.split(text.strip()))


def with_courtesy(text: str) -> str:
    """The text and a polite last sentence."""
    return f"{text.rstrip()} I hope this helps!"


EDITS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {"list": as_list, "bold": with_bold_start, "paragraphs": in_paragraphs, "courtesy": with_courtesy}
)
"""Edits by name."""


def style_flips(model: Scorer, pairs: Sequence[PreferencePair]) -> dict[str, Estimate]:
    """Share of pairs whose preferred response changes when the other one is edited, for each edit and over all.

    The response with the lower reward is edited. An edit that leaves a text as it is, and a pair of equal rewards, take
    no part.

    Args:
        model: the model in question.
        pairs: pairs of different responses.

    Returns:
        Estimates under `style_flips` and `style_flips_edit_NAME`; an edit that changes no text is left out.
    """
    sides = [(pair.chosen, pair.rejected) for pair in pairs]
    edited = [tuple(edit(text) for text in both for edit in EDITS.values()) for both in sides]
    groups = model.score_groups(
        [pair.prompt for pair in pairs], [both + more for both, more in zip(sides, edited, strict=True)]
    )
    flips: dict[str, list[tuple[str, float]]] = {name: [] for name in EDITS}
    for pair, both, more, rewards in zip(pairs, sides, edited, (group.tolist() for group in groups), strict=True):
        loser = int(rewards[0] > rewards[1])
        if rewards[0] == rewards[1]:
            continue
        for place, name in enumerate(EDITS):
            index = loser * len(EDITS) + place
            if more[index] != both[loser]:
                flips[name].append((pair.prompt_id, float(rewards[2 + index] > rewards[1 - loser])))
    shares = {f"style_flips_edit_{name}": _share(rows) for name, rows in flips.items() if rows}
    return {"style_flips": _share([row for rows in flips.values() for row in rows]), **shares}


def _share(rows: Sequence[tuple[str, float]]) -> Estimate:
    return clustered_share(np.array([flip for _, flip in rows]), [prompt for prompt, _ in rows])
