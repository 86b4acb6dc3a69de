"""Overlap of data: prompts of one conversation, and fingerprints by which pairs are found again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.pairs.pair import PreferencePair, digest
from rm_optimizer.core.rows.messages import Prompt
from rm_optimizer.core.rows.prompts import as_messages


def _line_keys(prompt: Prompt) -> list[int]:
    """A key for the prompt up to and with each of its lines that has words; the last is the key of the whole prompt."""
    key, keys = b"", list[int]()
    for message in as_messages(prompt):
        words_so_far = blake2b(key + f"{message.role}\n".encode("utf-8", "surrogatepass"), digest_size=8)
        for line in message.content.splitlines():
            if words := folded_words(line):
                words_so_far.update("".join(f"{word} " for word in words).encode("utf-8", "surrogatepass"))
                key = words_so_far.digest()
                keys.append(int.from_bytes(key))
    return keys


def prompt_keys(prompts: Iterable[Prompt]) -> list[int]:
    """A key of each prompt, equal where its `folded_prompt_id` is."""
    return [(_line_keys(prompt) or [0])[-1] for prompt in prompts]


def folded_prompt_id(prompt: Prompt) -> str:
    r"""Identity of a prompt that ignores case, blanks, line breaks and messages without words; 16 hexadecimal digits.

    Example:
        >>> folded_prompt_id("Why\n so?\n") == folded_prompt_id("why so?")
        True
    """
    folded = [(message.role, folded_words(message.content)) for message in as_messages(prompt)]
    return digest([message for message in folded if message[1]])


def folded_words(text: str) -> list[str]:
    """Words of a text without regard to case."""
    return text.casefold().split()


def conversation_groups(prompts: Sequence[Prompt]) -> list[int]:
    r"""Number of the conversation that each prompt belongs to: the index of the first prompt of it.

    Example:
        >>> conversation_groups(["Hi", "Bye", "hi ", "Hi\nHow are you?"])
        [0, 1, 0, 0]
    """
    parent: dict[int, int] = {}
    first: dict[int, int] = {}

    def root(key: int) -> int:
        while parent[key] != key:
            parent[key] = key = parent[parent[key]]
        return key

    keys = prompt_keys(prompts)
    for index, key in enumerate(keys):
        parent.setdefault(key, key)
        first.setdefault(key, index)
    for prompt, key in zip(prompts, keys, strict=True):
        for prefix in _line_keys(prompt):
            if prefix in parent:
                earlier, later = sorted((root(prefix), root(key)), key=lambda found: first[found])
                parent[later] = earlier
    return [first[root(key)] for key in keys]


def continued(first: Sequence[Prompt], second: Sequence[Prompt]) -> list[bool]:
    r"""Flags of `second`, True if a prompt continues or is continued by one of `first`; equal ones do not count.

    Example:
        >>> continued(["Hi\nHow are you?", "Bye"], ["Hi", "Bye", "bye\nnow"])
        [True, False, True]
    """
    keys, others = prompt_keys(second), frozenset(prompt_keys(first))
    wanted = frozenset(keys)
    begun = {prefix for prompt in first for prefix in _line_keys(prompt)[:-1] if prefix in wanted}
    return [
        key in begun or any(prefix in others for prefix in _line_keys(prompt)[:-1])
        for key, prompt in zip(keys, second, strict=True)
    ]


def pair_fingerprints(pairs: Iterable[PreferencePair]) -> NDArray[np.uint64]:
    """Fingerprint of each pair and of its prompt, shape (pairs, 2)."""
    rows = []
    for pair in pairs:
        prompt = folded_prompt_id(pair.prompt)
        responses = sorted([folded_words(pair.chosen), folded_words(pair.rejected)])
        rows.append((int(digest([prompt, responses]), 16), int(prompt, 16)))
    return np.array(rows, dtype=np.uint64).reshape(-1, 2)
