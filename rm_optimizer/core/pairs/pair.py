"""Preference pairs, their identities, and the prompts of one conversation."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rm_optimizer.core.rows.messages import Message as Message
from rm_optimizer.core.rows.messages import Prompt as Prompt
from rm_optimizer.core.rows.messages import (
    Turns,
    read_messages,
    read_response,
    require_characters,
    require_response,
    response_json,
    turns_of,
)
from rm_optimizer.core.rows.prompts import as_messages as as_messages
from rm_optimizer.core.rows.prompts import split_context


def digest(value: Any) -> str:
    """16 hexadecimal digits of the SHA-256 of the value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def prompt_json(prompt: Prompt) -> Any:
    """The prompt as JSON values: text, or its messages, of which the first may hold tools and documents."""
    return prompt if isinstance(prompt, str) else [message.to_dict() for message in prompt]


def prompt_id(prompt: Prompt) -> str:
    """Stable identity of a prompt; text, a transcript and messages that say the same are the same prompt."""
    return digest(prompt_json(as_messages(prompt)))


@dataclass(frozen=True)
class PreferencePair:
    """One comparison: of two responses to one prompt, `chosen` was preferred.

    Args:
        prompt: text, or the messages before the response; never empty.
        chosen: the preferred response: text, or messages from where the two part to the assistant's last.
        rejected: the other response, different from `chosen`.
        margin: strength of the preference in the source's own units (never mix units), or None.
        metadata: further values of the row (`source`, `subset`, …); JSON values.
        label: probability that `chosen` is the better one, in [0, 1]; 1 is a plain preference, 0.5 a tie.
        weight: number of pairs that this one counts for, positive.

    Raises:
        ValueError: if a text is empty, the responses are equal, or a number is out of range.

    Example:
        >>> pair = PreferencePair("2 + 2?", "4", "5")
        >>> pair.pair_id == PreferencePair("2 + 2?", "4", "5", margin=1.0).pair_id
        True
    """

    prompt: Prompt
    chosen: str
    rejected: str
    margin: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    label: float = 1.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) and self.prompt != ():
            object.__setattr__(self, "prompt", read_messages("prompt", self.prompt))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        texts = [self.prompt] if isinstance(self.prompt, str) else [message.content for message in self.prompt]
        if not self.prompt or (isinstance(self.prompt, str) and not self.prompt.strip()):
            raise ValueError("prompt must not be empty")
        last = None if isinstance(self.prompt, str) else self.prompt[-1]
        for name in ("chosen", "rejected"):
            response = read_response(name, getattr(self, name))
            require_response(name, response)
            object.__setattr__(self, name, response)
            is_last = last is not None and last.role == "assistant" and not last.fields
            if is_last and texts[-1].strip() == response.strip():
                raise ValueError(f"the prompt ends with the {name} response; give the messages before it as the prompt")
        for text in texts:
            require_characters("prompt", text)
        if self.chosen == self.rejected:
            raise ValueError("chosen and rejected must differ")
        margin = 0.0 if self.margin is None else self.margin
        for name, value, is_valid, expected in (
            ("margin", margin, math.isfinite, "be finite"),
            ("label", self.label, lambda label: 0.0 <= label <= 1.0, "lie in [0, 1]"),
            ("weight", self.weight, lambda weight: 0.0 < weight < math.inf, "be positive and finite"),
        ):
            if not isinstance(value, Real):
                raise ValueError(f"{name} must be a number, got {value!r}")
            if not is_valid(value):
                raise ValueError(f"{name} must {expected}, got {value}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by value: a read-only mapping view cannot be pickled itself."""
        fields = (self.prompt, self.chosen, self.rejected, self.margin, dict(self.metadata), self.label, self.weight)
        return type(self), fields

    @property
    def pair_id(self) -> str:
        """Stable identity of prompt and both responses; 16 hexadecimal digits."""
        return digest([self.prompt_id, response_json(self.chosen), response_json(self.rejected)])

    @property
    def prompt_id(self) -> str:
        """Stable identity of the prompt; 16 hexadecimal digits."""
        return prompt_id(self.prompt)

    @property
    def scores(self) -> tuple[float, float] | None:
        """Scores of chosen and rejected, from the metadata; None without both."""
        for names in (("chosen_score", "rejected_score"), ("score_chosen", "score_rejected")):
            found = [float(value) for value in map(self.metadata.get, names) if isinstance(value, int | float)]
            if len(found) == 2 and all(map(math.isfinite, found)):
                return found[0], found[1]
        return None

    def to_dict(self) -> dict[str, Any]:
        """The pair as JSON values; messages become `{"role", "content"}` objects, and tools a column."""
        context, messages = split_context(() if isinstance(self.prompt, str) else self.prompt)
        sides: dict[str, Any] = {"chosen": self.chosen, "rejected": self.rejected}
        if any(isinstance(response, Turns) for response in sides.values()):
            sides = {name: [turn.to_dict() for turn in turns_of(response)] for name, response in sides.items()}
        return {
            "prompt": self.prompt if isinstance(self.prompt, str) else [message.to_dict() for message in messages],
            **sides,
            **{name: getattr(self, name) for name in ("margin", "label", "weight")},
            "metadata": dict(self.metadata),
            **context,
        }


def _line_keys(prompt: Prompt) -> list[int]:
    """A key for the prompt up to and with each of its lines that has words; the last is the key of the whole prompt."""
    key, keys = b"", list[int]()
    for message in as_messages(prompt):
        words_so_far = hashlib.blake2b(key + f"{message.role}\n".encode("utf-8", "surrogatepass"), digest_size=8)
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
    from scipy.cluster.hierarchy import DisjointSet  # takes a fifth of a second

    keys = prompt_keys(prompts)
    conversations, first = DisjointSet(keys), dict[int, int]()
    for prompt, key in zip(prompts, keys, strict=True):
        for prefix in _line_keys(prompt):
            if prefix in conversations:
                conversations.merge(prefix, key)
    return [first.setdefault(conversations[key], index) for index, key in enumerate(keys)]


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
