"""Hydra's walk over the presets, made once for each choice of them: later compositions begin with a copy.

A composition reads some forty files, of which all but a few are the same in every test. Overrides of values are parsed
and applied each time, and so is everything where another folder than that of the presets is searched.
"""

from __future__ import annotations

from copy import copy, deepcopy
from dataclasses import replace

from hydra._internal import config_loader_impl as loader
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from rm_optimizer.schema.composition import config_root

_list, _compose = loader.create_defaults_list, loader.ConfigLoaderImpl._compose_config_from_defaults_list
_lists: dict[tuple[object, ...], DefaultsList] = {}
_compositions: dict[str, DictConfig] = {}


def install() -> None:
    """Let Hydra compose so in this process."""
    loader.create_defaults_list = listed_once
    loader.ConfigLoaderImpl._compose_config_from_defaults_list = composed_once
    CachingConfigRepository.__init__ = share_sources


def share_sources(self: CachingConfigRepository, delegate: IConfigRepository) -> None:
    """Copy the repository, whose list of sources is replaced and never changed, without the schemas in them."""
    self.delegate, self.cache = copy(delegate), {}


def has_presets_alone(repo: IConfigRepository) -> bool:
    return {source.path for source in repo.get_sources() if source.scheme() == "file"} == {config_root()}


def listed_once(
    repo: IConfigRepository,
    config_name: str | None,
    overrides_list: list[Override],
    prepend_hydra: bool,
    skip_missing: bool,
) -> DefaultsList:
    if not has_presets_alone(repo):
        return _list(repo, config_name, overrides_list, prepend_hydra, skip_missing)
    values = Overrides(repo, overrides_list).config_overrides
    groups = tuple(str(line.input_line) for line in overrides_list if line not in values)
    key = (config_name, groups, prepend_hydra, skip_missing)
    if key not in _lists:
        _lists[key] = _list(repo, config_name, overrides_list, prepend_hydra, skip_missing)
    return replace(_lists[key], config_overrides=values)


def composed_once(self: loader.ConfigLoaderImpl, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
    if not has_presets_alone(repo):
        return _compose(self, defaults, repo)
    key = repr(defaults)
    if key not in _compositions:
        _compositions[key] = _compose(self, defaults, repo)
    return deepcopy(_compositions[key])
