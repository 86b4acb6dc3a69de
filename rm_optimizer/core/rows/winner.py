"""Winner column of two responses: its values, and the preference that each of them means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rm_optimizer.errors import ConfigError

FORM = "FIRST,SECOND or FIRST,SECOND,TIE, with | between values that mean the same"


@dataclass(frozen=True)
class Winner:
    """Values that name the better response.

    Args:
        first: values by which `response_a` is better.
        second: values by which `response_b` is better.
        tie: values by which neither is.
    """

    first: frozenset[str]
    second: frozenset[str]
    tie: frozenset[str]

    def preference(self, value: object) -> float:
        """Probability that `response_a` is better: 1, 0 or 0.5.

        Raises:
            ValueError: if the value names none of the three.

        Example:
            >>> [parse_winner("model_a,model_b,tie|tie (bothbad)").preference(name) for name in ("model_b", "Tie")]
            [0.0, 0.5]
        """
        key = _key(value)
        for values, preference in ((self.first, 1.0), (self.second, 0.0), (self.tie, 0.5)):
            if key in values:
                return preference
        known = ", ".join(sorted(self.first | self.second | self.tie))
        raise ValueError(f"winner must be one of {known}, got {value!r}")


def parse_winner(value: object) -> Winner:
    """The values that an option names: a list of two or three values or lists of values, or text as in `FORM`.

    Raises:
        ConfigError: if there are not two or three, or one stands twice.
    """
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, Sequence) or len(items) not in (2, 3):
        raise ConfigError(f"winner must name the values of the winner column as {FORM}, got {value!r}")
    sets = [frozenset(map(_key, _alternatives(item))) for item in items]
    first, second, tie = (*sets, frozenset[str]())[:3]
    if first & second or first & tie or second & tie:
        raise ConfigError(f"winner must name each value of the winner column once, got {value!r}")
    return Winner(first, second, tie)


def _alternatives(item: object) -> Sequence[object]:
    if isinstance(item, str):
        return item.split("|")
    return item if isinstance(item, Sequence) else [item]


def _key(value: object) -> str:
    """The value as text that is the same for `1`, `1.0` and `"1"`, and for `Tie` and `tie`."""
    text = str(value).strip().casefold()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text
