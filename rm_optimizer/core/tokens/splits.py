"""Training and validation pairs of a run: read, split by prompt, and checked for common conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rm_optimizer.core.pairs.pair import PreferencePair, continued, prompt_keys
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.core.tokens.dataset import PreferenceDataset, distinct_prompts, load_pairs
from rm_optimizer.errors import DataError
from rm_optimizer.schema.data import DataConfig


def require_disjoint_prompts(train: PreferenceDataset, val: PreferenceDataset) -> None:
    """Refuse validation on prompts that training has seen.

    Raises:
        DataError: if any prompt is in both; the text gives their number and one of them, and names the option that
            permits it.
    """
    prompts = [*distinct_prompts(val).values()]
    seen = frozenset(prompt_keys(distinct_prompts(train).values()))
    shared = [prompt for prompt, key in zip(prompts, prompt_keys(prompts), strict=True) if key in seen]
    if not shared:
        return
    text = shared[0] if isinstance(shared[0], str) else shared[0][-1].content
    raise DataError(
        f"{len(shared)} of {len(prompts)} validation prompts are also in the training data (case and blanks aside), "
        f"such as {text[:80]!r}; remove them from one, or set data.allow_prompt_overlap=true"
    )


def num_leaked_pairs(train: PreferenceDataset, val: PreferenceDataset) -> int:
    """Validation pairs of a conversation of which training has an earlier or a later turn."""
    trained, prompts = distinct_prompts(train), distinct_prompts(val)
    is_leaked = dict(zip(prompts, continued([*trained.values()], [*prompts.values()]), strict=True))
    return sum(is_leaked[identity] for identity in val.prompt_ids)


@dataclass(frozen=True)
class TrainVal:
    """Training and validation pairs of a run.

    Args:
        train: training pairs.
        val: validation pairs.
        val_origin: origin of the validation pairs, in words.
        ceiling: accuracy of the synthetic world's gold reward on validation; None for other data.
    """

    train: PreferenceDataset
    val: PreferenceDataset
    val_origin: str = "pairs in memory"
    ceiling: float | None = None

    @property
    def fingerprints(self) -> tuple[str, str]:
        """Digests of the training and of the validation pairs."""
        return self.train.fingerprint, self.val.fingerprint

    def notes(self, *, uses_margins: bool) -> tuple[str, ...]:
        """Sentences on unexpected properties: columns, labels, unused margins, conversations in both splits.

        Args:
            uses_margins: True if the loss reads margins.
        """
        found = list(dict.fromkeys((*self.train.notes, *self.val.notes)))
        for name, data in (("training", self.train), ("validation", self.val)):
            if (note := label_note(data.pairs)) is not None:
                found.append(f"{name}: {note}")
        if not uses_margins and (num_margins := sum(pair.margin is not None for pair in self.train.pairs)):
            found.append(f"{num_margins} training pairs have a margin, which is not used; loss.margin_scale uses it")
        if leaked := num_leaked_pairs(self.train, self.val):
            found.append(
                f"{leaked} of {len(self.val)} validation pairs ({leaked / len(self.val):.1%}) are of conversations of "
                "which an earlier or later turn is trained on; their accuracy is too good. Split by conversation"
            )
        return tuple(found)


def label_note(pairs: Sequence[PreferencePair]) -> str | None:
    """The counts of a label column in a sentence; None where every label is 1.

    Example:
        >>> label_note([PreferencePair("a?", "b", "c"), PreferencePair("a?", "b", "d", label=0.0)])
        'labels: 1 ones, 1 zeros, 0 between; chosen loses in 1 of 2 pairs'
    """
    ones, zeros = sum(pair.label == 1.0 for pair in pairs), sum(pair.label == 0.0 for pair in pairs)
    if ones == len(pairs):
        return None
    losing = sum(pair.label < 0.5 for pair in pairs)
    between = len(pairs) - ones - zeros
    return f"labels: {ones} ones, {zeros} zeros, {between} between; chosen loses in {losing} of {len(pairs)} pairs"


def load_training_data(config: DataConfig) -> TrainVal:
    """Training and validation pairs according to the options; validation prompts are never training prompts.

    Without `train` it is the synthetic world; without `val` a share of the training prompts is held out. `max_pairs`
    then limits training alone.

    Raises:
        DataError: if a source or row is bad, or prompts overlap and that is not allowed.
    """
    world = synthetic_world(config.synthetic) if config.train is None else None
    train = load_pairs(config.train, config) if world is None else PreferenceDataset(world.train)
    if config.val is not None:
        val = load_pairs(config.val, config)
        data = TrainVal(train, val, ", ".join(val.sources))
    elif world is not None:
        data = TrainVal(train, PreferenceDataset(world.val), "the synthetic world's held-out prompts", world.ceiling)
    else:
        data = split_off(train, config)
    if not config.allow_prompt_overlap:
        require_disjoint_prompts(data.train, data.val)
    if config.max_pairs is None:
        return data
    return replace(data, train=data.train.subset(config.max_pairs, config.split_seed))


def split_off(train: PreferenceDataset, config: DataConfig) -> TrainVal:
    """Training pairs, and a share of their prompts held out for validation."""
    kept, val = train.split_by_prompt(config.val_fraction, config.split_seed)
    origin = f"{config.val_fraction:.0%} of the training prompts, held out with split_seed={config.split_seed}"
    return TrainVal(kept, val, origin)
