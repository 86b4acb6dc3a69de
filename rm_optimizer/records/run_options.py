"""Options that a resumed run may change, and the comparison of the others with its start. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema.checks import Options

FREE = (
    *("resume", "output_dir", "plugins", "profile_memory", "publish", "logger"),
    *("training.progress", "training.calibration", "training.hessian", "training.num_bootstrap"),
    *("training.suites", "training.suites_every"),
    *("training.checkpoint_every", "training.keep_checkpoints"),
    *("hardware.num_threads", "hardware.num_workers", "hardware.pin_memory", "hardware.compile"),
    *("hardware.pass_tokens", "hardware.eval_pass_tokens", "hardware.on_out_of_memory"),
    *("batching.micro_token_budget", "batching.eval_token_budget", "batching.prefix_sharing"),
    *("model.attn_implementation", "model.gradient_checkpointing", "model.trust_remote_code"),
    *("data.num_workers", "data.fetch_timeout", "data.cache_dir", "data.streaming_store_mb"),
    *("model.adamw_lr", "model.lora_lr", "model.batch_size", "model.gpu_tokens"),
)
"""Options, and groups of them, that change no result beyond rounding.

Those of the last line affect a run only through the learning rate, the batch size and the token budgets, which are
compared or free themselves.
"""
BY_CONTENT = ("data.train", "data.val", "data.on_bad_row", "data.max_bad_share", "data.allow_prompt_overlap")
"""Options that may change as long as the fingerprints of the pairs stay the same."""
LENGTH = ("training.max_steps", "training.epochs")
"""Options that may only grow, which extends the run."""


def options_of(config: Options) -> dict[str, Any]:
    """Options as JSON values."""
    options: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return options


def decisive_options(options: Mapping[str, Any], *but: str) -> dict[str, Any]:
    """Dotted names and values of the options that can change a result.

    Args:
        options: nested options.
        but: further options, and groups of them, to leave out.
    """
    return {name: value for name, value in flat(options) if not is_among(name, (*FREE, *but))}


def changed_options(before: Mapping[str, Any], after: Mapping[str, Any], *but: str) -> list[str]:
    """Dotted names of the decisive options that differ, see `decisive_options`."""
    old, new = decisive_options(before, *but), decisive_options(after, *but)
    return [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]


def has_same_length(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """True if both sets of options give the same number of steps over the same pairs."""
    old, new = before["training"], after["training"]
    is_by_steps = old["max_steps"] is not None
    return bool(old["max_steps"] == new["max_steps"] and (is_by_steps or old["epochs"] == new["epochs"]))


def require_same_options(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuse to continue a run with options that would change its result.

    Raises:
        ConfigError: if options differ or the length shrinks, with their names and values.
    """
    old, new = dict(flat(before)), dict(flat(after))
    if changed := changed_options(before, after, *BY_CONTENT, *LENGTH):
        told = "; ".join(f"{name} was {_shown(old.get(name))}, is {_shown(new.get(name))}" for name in changed[:4])
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise ConfigError(
            f"resume=auto continues a run under the options it started with, but {told}{more}; "
            "set them back, or choose another hydra.run.dir"
        )
    steps, epochs = LENGTH
    name = epochs if old[steps] is new[steps] is None else steps
    # if only one of them has a number of steps, the lengths are compared after the pairs are read
    if None not in (old[name], new[name]) and new[name] < old[name]:
        raise ConfigError(
            f"resume=auto makes a run longer, not shorter, but {name} was {old[name]}, is {new[name]}; "
            "set it back, or choose another hydra.run.dir"
        )


def flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of nested options."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def paths_of(source: Any) -> list[str]:
    """The paths and hub names in the value of `data.train` or `data.val`."""
    if isinstance(source, Mapping):
        return paths_of(source.get("path"))
    if isinstance(source, str):
        return [source]
    return [path for item in source for path in paths_of(item)] if isinstance(source, Sequence) else []


def is_among(name: str, options: Collection[str]) -> bool:
    """True if an option is one of these options or belongs to one of these groups."""
    return any(name == option or name.startswith(f"{option}.") for option in options)


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
