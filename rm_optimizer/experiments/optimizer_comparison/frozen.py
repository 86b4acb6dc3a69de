"""Setting that is equal for all arms of a comparison, written and hashed before the first run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rm_optimizer.core.model.identity import weights_digest
from rm_optimizer.core.pairs.dataset import PreferenceDataset, load_pairs, require_disjoint_prompts
from rm_optimizer.core.pairs.pair import digest
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.experiments.cost import steps_of
from rm_optimizer.experiments.optimizer_comparison.options import ComparisonOptions
from rm_optimizer.experiments.study import FROZEN_FILE
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.files import write_json_lines, write_text
from rm_optimizer.records.run_options import flat, is_among, options_of
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.training.base_model import build_model

KEPT = ("id", "source", "subset")
"""Metadata that the written pairs keep."""
HELD_OUT = 0.2
"""Share of the prompts that is held out if no validation pairs are given; it is divided into validation and test."""
_OF_AN_ARM = ("optimizer", "schedule", "seed", "output_dir", "data", "model.adamw_lr", "model.lora_lr", "logger")


@dataclass(frozen=True, kw_only=True)
class Frozen(JsonRecord, indent=1):
    """The setting of a comparison, `frozen.json`.

    Args:
        digest: digest of the model, the pairs, the shared options and the steps, which is part of every trial's name.
        options: options of the comparison.
        model: digest of the base model's weights with the head of seed 0.
        fingerprints: digests of the pairs, by split: `train`, `val` and `test`.
        sizes: number of pairs, by split.
        prompts: number of different prompts, by split.
        shared: digest of the options that all runs share.
        steps: optimizer steps of every run.
    """

    digest: str
    options: ComparisonOptions
    model: str
    fingerprints: dict[str, str]
    sizes: dict[str, int]
    prompts: dict[str, int]
    shared: str
    steps: int

    @classmethod
    def read(cls, folder: Path) -> Frozen | None:
        """The setting of the comparison in a folder; None if there is none.

        Raises:
            ConfigError: if it is damaged.
        """
        path = folder / FROZEN_FILE
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path} is damaged; start the comparison in another folder") from error


def pairs_file(folder: Path, split: str) -> Path:
    """File of the pairs of a split, `train`, `val` or `test`, in the folder of a comparison."""
    return folder / "data" / f"{split}.jsonl"


def freeze(options: ComparisonOptions, folder: Path) -> Frozen:
    """Write the pairs and the setting of a comparison, or read the setting if the folder holds the same comparison.

    Args:
        options: options of the comparison.
        folder: folder of the comparison.

    Raises:
        ConfigError: if options are refused, or the folder holds another comparison.
        DataError: if pairs cannot be read, or the splits share prompts.
    """
    options.require_fair()
    splits = _splits(options)
    known = Frozen.read(folder)
    fingerprints = {part: data.fingerprint for part, data in splits.items()}
    if known is not None:
        _require_same(known, options, fingerprints, folder)
        known = replace(known, options=options)
        write_text(folder / FROZEN_FILE, known.to_json() + "\n")
        return known
    for part, data in splits.items():
        rows = []
        for pair in data.pairs:
            row = pair.to_dict()
            metadata = row.pop("metadata")
            rows.append(row | {name: metadata[name] for name in KEPT if metadata.get(name) is not None})
        write_json_lines(pairs_file(folder, part), rows)
    config = options.config(options.reference)
    contents = {
        "model": weights_digest(build_model(config.model, splits["train"], seed=0).model),
        "fingerprints": fingerprints,
        "shared": digest([[name, value] for name, value in flat(options_of(config)) if not is_among(name, _OF_AN_ARM)]),
        "steps": steps_of(config, len(splits["train"])),
    }
    frozen = Frozen(
        digest=digest(contents),
        options=options,
        sizes={part: len(data) for part, data in splits.items()},
        prompts={part: len(set(data.prompt_ids)) for part, data in splits.items()},
        **contents,  # type: ignore[arg-type]
    )
    write_text(folder / FROZEN_FILE, frozen.to_json() + "\n")
    return frozen


def _splits(options: ComparisonOptions) -> dict[str, PreferenceDataset]:
    named = [override for override in options.overrides if override.lstrip("+").startswith("data.")]
    data = typed(compose([*named, "model=custom", "model.path=x", "output_dir=."]), TrainConfig).data
    train = load_pairs(options.train, data)
    if options.val is None:
        train, held_out = train.split_by_prompt(HELD_OUT, data.split_seed)
    else:
        held_out = load_pairs(options.val, data)
    if options.test is None:
        sizes = options.val_pairs, options.test_pairs
        share = 0.5 if sizes[0] is None or sizes[1] is None else sizes[1] / (sizes[0] + sizes[1])
        val, test = held_out.split_by_prompt(share, data.split_seed)
    else:
        val, test = held_out, load_pairs(options.test, data)
    require_disjoint_prompts(train, val)
    for name, other in (("training", train), ("validation", val)):
        if not set(other.prompt_ids).isdisjoint(test.prompt_ids):
            raise DataError(
                f"test prompts must be untouched, but some stand in the {name} pairs; remove them from --test"
            )
    return {
        "train": train if options.pairs is None else train.subset(options.pairs, data.split_seed),
        "val": _limited(val, options.pairs_per_prompt, options.val_pairs, data.split_seed),
        "test": _limited(test, options.pairs_per_prompt, options.test_pairs, data.split_seed),
    }


def _limited(data: PreferenceDataset, per_prompt: int | None, most: int | None, seed: int) -> PreferenceDataset:
    """A random subset of at most `most` pairs, in their order, with at most `per_prompt` pairs of each prompt."""
    if per_prompt is not None:
        seen: Counter[str] = Counter()
        kept = []
        for position in np.random.default_rng(seed).permutation(len(data)).tolist():
            seen[data.prompt_ids[position]] += 1
            if seen[data.prompt_ids[position]] <= per_prompt:
                kept.append(position)
        data = PreferenceDataset.from_pairs(data[position] for position in sorted(kept))
    return data if most is None else data.subset(most, seed)


def _require_same(known: Frozen, options: ComparisonOptions, fingerprints: dict[str, str], folder: Path) -> None:
    """Refuse options or pairs that differ from those in the folder; only the number of final seeds may change."""
    before = replace(known.options, seeds=options.seeds)
    if before != options or known.fingerprints != fingerprints:
        names = [name for name in vars(options) if getattr(before, name) != getattr(options, name)]
        changed = ", ".join(names) or "pairs in the same files"
        raise ConfigError(f"{folder} holds a comparison with other {changed}; choose another --output")
