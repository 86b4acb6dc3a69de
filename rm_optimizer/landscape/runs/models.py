"""Weights of models to compare, which are one function of them, by names that tell the models apart."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from rm_optimizer.core.model.identity import differing_settings
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import ConfigError


def read_models(
    checkpoints: Sequence[str], paths: Sequence[str | Path]
) -> dict[str, Callable[[], Mapping[str, Tensor]]]:
    """Readers of the weights of each model by its name.

    Args:
        checkpoints: the models as given.
        paths: files that their weights are read from.

    Raises:
        ConfigError: if a model reads text as other tokens than the first one, or computes otherwise on them.
    """
    models: dict[str, Callable[[], Mapping[str, Tensor]]] = {}
    first: BradleyTerryRM | None = None
    for name, path in zip(names_of(checkpoints), paths, strict=True):
        model = BradleyTerryRM.from_pretrained(path)
        first = first or model
        if differing := differing_settings(first, model):
            shown = f"{', '.join(differing[:3])}{' …' * (len(differing) > 3)}"
            raise ConfigError(
                f"landscape.others must be models that differ from the checkpoint in their weights alone, and {name} "
                f"has another {shown}; compare models of one architecture and tokenizer"
            )
        weights = {key: value.detach().clone() for key, value in model.model.state_dict().items()}
        models[name] = partial(dict, weights)
    return models


def names_of(checkpoints: Sequence[str]) -> list[str]:
    """Names of models: the ends of their paths, of as many parts as tell them apart, numbered where none do.

    Example:
        >>> names_of(["runs/a/best", "runs/lr0.1/best"]), names_of(["org/name", "org/name"])
        (['a/best', 'lr0.1/best'], ['org/name (1)', 'org/name (2)'])
    """
    parts = [Path(os.path.abspath(each) if os.path.exists(each) else each).parts for each in checkpoints]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]).removesuffix(".ckpt") for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{each} ({number})" for number, each in enumerate(checkpoints, start=1)]
