"""Range checks of options, in one wording. Imports no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar

from rm_optimizer.errors import ConfigError, require_known

INTERVAL = re.compile(r"([\[(])([^,]+), ([^,]+)([\])])")


def within(interval: str, default: Any, *, needs: str = "") -> Any:
    """Field of `Options` whose number must lie in an interval, such as `[0, 1)` or `[0, 2**32)`; `needs` as below."""
    return field(default=default, metadata={"interval": interval, "needs": needs})


def needing(needs: str, default: Any) -> Any:
    """Field of `Options` that is read only under conditions on other options of its group.

    Args:
        needs: `name` (set or on), `!name` (null) or `name=value`; `,` joins conditions, `|` alternatives of one.
        default: the value, or a function that makes it.
    """
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata={"needs": needs})


@dataclass(kw_only=True)
class Options:
    """Options of one group, each number in the interval of its field.

    Args:
        group: name before the options, as the user types it; empty for options of the whole run.

    Raises:
        ConfigError: if a number lies outside, or an option with an interval is neither a number nor text nor None.
    """

    _group: ClassVar[str] = ""

    def __init_subclass__(cls, *, group: str | None = None) -> None:
        if group is not None:
            cls._group = f"{group}."

    def __post_init__(self) -> None:
        for item in fields(self):
            option, value = f"{self._group}{item.name}", getattr(self, item.name)
            is_number = isinstance(value, Real)  # numpy's numbers too
            if is_number:
                require_in(option, value, item.metadata.get("interval", "(-inf, inf)"))
            elif "interval" in item.metadata and value is not None:
                require(isinstance(value, str), option, "be a number", repr(value))
        self._check()

    def _check(self) -> None:
        """Refuse values that do not fit each other; called once each is in its interval."""


def require(condition: bool, option: str, expected: str, got: object) -> None:
    """Raise the one sentence for a value out of its range.

    Raises:
        ConfigError: if `condition` is false.
    """
    if not condition:
        raise ConfigError(f"{option} must {expected}, got {got}")


def require_once(option: str, kind: str, names: Iterable[object], remedy: str = "leave one out") -> None:
    """Raise if a name is given twice.

    Args:
        option: the option's name as the user types it.
        kind: kind of what is named, in the singular.
        names: the names.
        remedy: last clause of the sentence.

    Raises:
        ConfigError: naming the first such name.
    """
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    require(twice is None, option, f"name each {kind} once", f"'{twice}' twice; {remedy}")


def require_key(option: str, key: str) -> None:
    """Raise unless a key can be sent in a header; the key itself is not printed.

    Raises:
        ConfigError: if it is empty, or holds blanks or other than ASCII characters.
    """
    if not key or not all("!" <= character <= "~" for character in key):
        raise ConfigError(
            f"{option} must be ASCII characters without blanks, as it is sent in a header; choose another"
        )


def require_in(option: str, value: float, interval: str) -> None:
    """Raise unless a number lies in an interval; NaN and infinity lie in none.

    Args:
        option: the option's name as the user types it.
        value: the number.
        interval: such as `[0, 1)` or `(0, inf)`; a square bracket includes the end.

    Raises:
        ConfigError: if the value lies outside.

    Example:
        >>> require_in("optimizer.momentum", 0.9, "[0, 1)")
        >>> require_in("optimizer.momentum", 1.5, "[0, 1)")
        Traceback (most recent call last):
        rm_optimizer.errors.ConfigError: optimizer.momentum must lie in [0, 1), got 1.5
    """
    left, low, high, right = _ends(interval)
    require(math.isfinite(value), option, "be a finite number", value)
    above = value >= _number(low) if left == "[" else value > _number(low)
    below = value <= _number(high) if right == "]" else value < _number(high)
    words = in_words(interval)
    require(above and below, option, f"{'lie' if words.startswith('in ') else 'be'} {words}", value)


def in_words(interval: str) -> str:
    """An interval in words.

    Example:
        >>> in_words("[1, inf)"), in_words("(0, inf)"), in_words("[0, 1)")
        ('at least 1', 'positive', 'in [0, 1)')
    """
    left, low, high, _ = _ends(interval)
    if high != "inf":
        return f"in {interval}"
    return f"at least {low}" if left == "[" else "positive" if low == "0" else f"above {low}"


def _ends(interval: str) -> tuple[str, ...]:
    parts = INTERVAL.fullmatch(interval)
    assert parts is not None, f"not an interval: {interval}"
    return parts.groups()


def _number(text: str) -> float:
    base, _, power = text.partition("**")
    return float(float(base) ** int(power or 1))


_FORMS: Mapping[str, tuple[str, Any]] = {
    "str": ("text", str),
    "str | tuple": ("text or a list", str | list),
    "int": ("a number", int),
    "float": ("a number", int | float),
    "bool": ("true or false", bool),
    "tuple": ("a list", list),
    "Mapping": ("a mapping", Mapping),
    "Columns": ("a mapping", Mapping),
}
"""Words for the value of an option in YAML, and its type, by the beginning of the option's annotation."""


def require_options(shown: str, annotations: Mapping[str, str], given: object) -> None:
    """Refuse unknown options of a description in YAML, and values of another kind.

    Args:
        shown: the description, for the message.
        annotations: types of the options by name.
        given: the options.

    Raises:
        ConfigError: naming the option, or if the description is no mapping.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{shown} must be a mapping, got {given!r}")
    for name, value in given.items():
        require_known(f"option of {shown}", str(name), annotations)
        words, form = _FORMS.get(annotations[name].partition("[")[0], ("", object))
        if not isinstance(value, form):
            raise ConfigError(f"{shown}: {name} must be {words}, got {value!r}")
