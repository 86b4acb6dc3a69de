"""Text inside an override, in the grammar of Hydra. Imports no Hydra."""

from __future__ import annotations

import re


def in_quotes(text: str) -> str:
    r"""Text in single quotes, from which Hydra's grammar reads the same text back.

    Example:
        >>> print(in_quotes("it's"))
        'it\'s'
    """
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"(\\+)$", r"\1\1", text)) + "'"
