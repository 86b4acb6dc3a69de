"""Options that all trials of a study share, as name=value."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rm_optimizer.errors import ConfigError


def require_shared(
    overrides: Sequence[str], owned: Mapping[str, str], study: str, *, but: Collection[str] = ()
) -> None:
    """Refuse overrides that have several values or that the study sets itself.

    Args:
        overrides: options of every trial, as name=value.
        owned: options, and groups of them, that the study sets, each with the reason.
        study: name of the kind of study, for the message.
        but: options in these groups that may be set.

    Raises:
        ConfigError: if there is such an override, with its name.
    """
    for override in overrides:
        name, equals, value = override.lstrip("+").partition("=")
        if not equals:
            raise ConfigError(f"options of the runs are written name=value, got '{override}'")
        for option, reason in owned.items():
            if name == option or (name.startswith(f"{option}.") and name not in but):
                raise ConfigError(f"{study} sets {option} itself: {reason}; leave out {override}")
        if "," in value and not value.startswith(("[", "{", "'", '"')):
            raise ConfigError(f"options of {study} are the same in every run, got {override}; give one value")
