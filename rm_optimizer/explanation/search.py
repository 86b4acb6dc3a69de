"""Search for the fewest changes of a local copy under which every reward meets the other side's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from jaxtyping import Bool

from rm_optimizer.errors import ConversationRefused
from rm_optimizer.explanation.changes import ScoreMap, Scores, changes, score_maps
from rm_optimizer.explanation.findings import Cause, Intervention
from rm_optimizer.explanation.local_copy import LocalCopy
from rm_optimizer.explanation.probes import Conversation
from rm_optimizer.explanation.recipe import NO_LIMIT, Recipe

SCREEN, FITTED = 4, 8
"""Numbers of the shortest conversations that screen a change, and that fit the constants of a map."""
LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
"""Common limits on the length, which are tried first."""
_MOST_LENGTHS = 512
_CUTS = {
    "prompt": "",
    "left": ", cut on the left after BOS",
    "right": ", cut on the right",
    "right_end": ", cut on the right before EOS",
    "left_all": ", cut on the left with BOS",
}
HALF_ROUNDINGS = 4
"""Largest error of a half type, in units of the change that the type makes in the local copy."""


@dataclass(frozen=True)
class Found:
    """Changes under which all rewards meet, and the largest difference that is left."""

    causes: tuple[Cause, ...]
    left: float


class Search:
    """Search among the changes of a local copy.

    Args:
        local: the local copy.
        talks: conversations that both sides score.
        target: the other side's rewards.
        tolerance: largest difference of each reward that counts as equal.

    Attributes:
        changes: the changes that have an effect here; of those with the same token ids, the likeliest.
        same: names of the others of these, by its name.
        tried: the interventions so far.
    """

    def __init__(self, local: LocalCopy, talks: Sequence[Conversation], target: Scores, tolerance: Scores) -> None:
        self.local, self.talks, self.target, self.tolerance = local, talks, target, tolerance
        self.base = local.rendering.base
        self.tried: list[Intervention] = []
        self.same: dict[str, set[str]] = {}
        self.order = np.argsort(self._lengths(self.base), kind="stable").tolist()
        seen = {self._effect(self.base): ""}
        self.changes = []
        for change in changes(local):
            with suppress(ConversationRefused, ValueError):  # a kernel that the model does not have
                if "attention" in change.fields and not self._has_effect(change.of(self.base)):
                    continue
                first = seen.setdefault(self._effect(change.of(self.base)), name := change.cause.name)
                self.changes += [change] if first is name else []
                self.same.setdefault(first, set()).update({name} - {first})

    def explanations(self) -> list[Found]:
        """Explanations of the fewest causes, the likeliest first; empty if one or two changes do not explain all."""
        found = [*self._explained(self.base, (), with_maps=True)]
        for change in self.changes:
            found += self._explained(change.of(self.base), (change.cause,), with_maps=True)
        found = found or [*self._by_half_type()]
        if not found or min(len(each.causes) for each in found) > 2:
            for one, other in combinations(self.changes, 2):
                if not one.fields.keys() & other.fields.keys():
                    recipe = other.of(one.of(self.base))
                    found += self._explained(recipe, (one.cause, other.cause), with_maps=False)
        fewest = min((len(each.causes) for each in found), default=0)
        return [each for each in found if len(each.causes) == fewest]

    def _effect(self, recipe: Recipe) -> tuple[object, ...]:
        rows = tuple(self.local.rendering.ids(talk, recipe) for talk in self.talks)
        return rows, recipe.pool, recipe.weights, recipe.attention, recipe.types

    def _has_effect(self, recipe: Recipe) -> bool:
        """True if a recipe gives the local copy other rewards than its own."""
        own, changed = (self.local.score(self.talks, each) for each in (self.base, recipe))
        return bool((np.abs(changed - own) > self.tolerance).any())

    def _lengths(self, recipe: Recipe) -> Scores:
        """Number of tokens of each conversation before it is cut."""
        whole = replace(recipe, max_length=NO_LIMIT)
        return np.array([len(self.local.rendering.ids(talk, whole)) for talk in self.talks])

    def _left(self, recipe: Recipe, score_map: ScoreMap, places: Sequence[int]) -> Scores:
        """Absolute differences that are left, of the conversations at some places."""
        own = self.local.score([self.talks[place] for place in places], recipe)
        return np.asarray(np.abs(score_map.apply(own) - self.target[places]))

    def _met(
        self, recipe: Recipe, score_map: ScoreMap, causes: tuple[Cause, ...]
    ) -> tuple[Found, Bool[np.ndarray, " talks"]]:
        """Try changes on all conversations, and tell which meet."""
        left = self._left(recipe, score_map, range(len(self.talks)))
        self._note(causes, left, left <= self.tolerance)
        return Found(causes, float(left.max())), left <= self.tolerance

    def _explained(self, recipe: Recipe, causes: tuple[Cause, ...], *, with_maps: bool) -> Iterator[Found]:
        """Explanations by a recipe, with maps of its rewards and with other limits on the length."""
        with suppress(ConversationRefused):
            for score_map in self._screened(recipe, causes, with_maps=with_maps):
                found, is_met = self._met(recipe, score_map, (*causes, *score_map.causes))
                if is_met.all():
                    yield found
                elif is_met.any():
                    yield from self._with_other_limit(recipe, score_map, found.causes, is_met)

    def _screened(self, recipe: Recipe, causes: tuple[Cause, ...], *, with_maps: bool) -> list[ScoreMap]:
        """Maps under which the shortest conversations meet; fitted ones only if no other does."""
        few, several = self.order[:SCREEN], self.order[:FITTED]
        left = self._left(recipe, ScoreMap(), few)
        if not with_maps:
            return [ScoreMap()] if (left <= self.tolerance[few]).all() else []
        self._note(causes, left, left <= self.tolerance[few])
        own = self.local.score([self.talks[place] for place in several], recipe)
        bias = self.local.model.reward_head.bias
        kept: list[ScoreMap] = []
        for score_map in score_maps(own, self.target[several], 0.0 if bias is None else float(bias.detach())):
            places = several if score_map.is_fitted else few
            left = self._left(recipe, score_map, places)
            if (left <= self.tolerance[places]).all() and not (score_map.is_fitted and kept):
                kept.append(score_map)
        return kept

    def _with_other_limit(
        self, recipe: Recipe, score_map: ScoreMap, causes: tuple[Cause, ...], is_met: Bool[np.ndarray, " talks"]
    ) -> Iterator[Found]:
        """The explanation with another limit or side, if conversations above some length do not meet."""
        lengths = self._lengths(recipe)
        bad = sorted(np.flatnonzero(~is_met).tolist(), key=lambda place: lengths[place])
        shorter = lengths[is_met & (lengths < lengths[bad[0]])]
        if not len(shorter):
            return
        low, longest, other = int(shorter.max()), int(lengths.max()), self.local.rendering.other
        limits = [NO_LIMIT, self.base.max_length, *([] if other is None else [other.max_length])]
        if lengths[is_met].max() == low:  # exactly those above a length differ, so that the limit is unknown
            limits += [limit for limit in (*LENGTHS, *range(low, low + _MOST_LENGTHS)) if low <= limit < longest]
        for limit in dict.fromkeys(limits):
            for cut, side in _CUTS.items():
                changed = replace(recipe, cut=cut, max_length=limit)
                with suppress(ConversationRefused):
                    if any((self._left(changed, score_map, [i]) > self.tolerance[[i]]).any() for i in bad):
                        continue
                    name = "no truncation" if limit == NO_LIMIT else f"truncation at {limit} tokens{side}"
                    found, is_met = self._met(changed, score_map, (*causes, Cause("truncation", name)))
                    if is_met.all():
                        yield found
                        return

    def _by_half_type(self) -> Iterator[Found]:
        """A half type, alone or with one change, if the rewards are all numbers of the type or nearer to it."""
        every = range(len(self.talks))
        own = self.local.score(self.talks, self.base)
        for name in ("bfloat16", "float16"):
            dtype, cause = getattr(torch, name), Cause("dtype", f"computation in {name}")
            is_on_grid = bool((torch.tensor(self.target).to(dtype).double().numpy() == self.target).all())
            self.local.tensors[name] = {key: value.to(dtype) for key, value in self.local.model.named_parameters()}
            recipe = replace(self.base, weights=name)
            allowed = HALF_ROUNDINGS * float(np.abs(self.local.score(self.talks, recipe) - own).max())
            left, was = self._left(recipe, ScoreMap(), every), np.abs(own - self.target)
            self._note((cause,), left, left <= allowed)
            is_nearer = was.max() <= allowed and np.linalg.norm(left) < 0.5 * np.linalg.norm(was)
            if is_nearer or (is_on_grid and left.max() <= allowed):
                yield Found((cause,), float(left.max()))
                return
            for change in self.changes if is_on_grid else ():
                with suppress(ConversationRefused):
                    error = float(self._left(change.of(recipe), ScoreMap(), every).max())
                    if "weights" not in change.fields and error <= min(allowed, 0.25 * left.max()):
                        yield Found((change.cause, cause), error)

    def _note(self, causes: tuple[Cause, ...], left: Scores, is_met: Bool[np.ndarray, " talks"]) -> None:
        name = " and ".join(cause.name for cause in causes) or "no change"
        self.tried.append(Intervention(name, len(left), int(is_met.sum()), float(left.max())))
