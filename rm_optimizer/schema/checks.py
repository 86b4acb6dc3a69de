"""Range checks of options, in one wording. Imports no torch."""

from __future__ import annotations

import re

from rm_optimizer.errors import ConfigError

INTERVAL = re.compile(r"([\[(])([^,]+), ([^,]+)([\])])")


def require(condition: bool, option: str, expected: str, got: object) -> None:
    """Raise the one sentence for a value out of its range.

    Raises:
        ConfigError: if `condition` is false.
    """
    if not condition:
        raise ConfigError(f"{option} must {expected}, got {got}")


def require_key(option: str, key: str) -> None:
    """Raise unless a key can be sent in a header; the key itself is not printed.

    Raises:
        ConfigError: if it is empty, or holds blanks or other than ASCII characters.
    """
    if not key or not all("!" <= character <= "~" for character in key):
        raise ConfigError(
            f"{option} must be ASCII characters without blanks, as it is sent in a header; choose another"
        )


def require_in(option: str, value: object, interval: str) -> None:
    """Raise unless a number lies in an interval; NaN lies in none.

    Text passes: it is an interpolation or a missing value that has not been resolved yet.

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
    if isinstance(value, str):
        return
    parts = INTERVAL.fullmatch(interval)
    assert parts is not None, f"not an interval: {interval}"
    assert isinstance(value, int | float), f"{option} is {type(value).__name__}, not a number"
    left, low, high, right = parts.groups()
    above = value >= float(low) if left == "[" else value > float(low)
    below = value <= float(high) if right == "]" else value < float(high)
    require(above and below, option, f"lie in {interval}", value)


def require_seed(option: str, value: object) -> None:
    """Raise unless a seed lies in [0, 2**32), the range that NumPy takes; text is not resolved yet.

    Raises:
        ConfigError: if it lies outside.
    """
    if not isinstance(value, str):
        require(isinstance(value, int) and 0 <= value < 2**32, option, "lie in [0, 2**32)", value)
