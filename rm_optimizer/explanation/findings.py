"""Result of a comparison of two scorings: its causes from a closed list, the evidence and the remedy."""

from __future__ import annotations

from dataclasses import dataclass

from rm_optimizer.doctor.diagnosis import FAILED_EXIT_CODE
from rm_optimizer.records.codec import JsonRecord

REMEDIES = {
    "bos": "tokenize rendered text with add_special_tokens=False if the template writes BOS or CLS, else with True",
    "eos": "end each sequence once with EOS or SEP, as the model's own template and tokenizer do",
    "template": "render with the chat template stored with the model",
    "system_prompt": "give both sides the same system message, or a template that inserts none",
    "date": "write a fixed date into the chat template, as exports of rm-opt do",
    "generation_prompt": "render with add_generation_prompt=False, since the answer is there already",
    "thinking": "render the answer as it is, without an empty thinking block",
    "white_space": "leave the white space of the texts as it is",
    "truncation": "give both sides the same max_length, and cut the start of the prompt",
    "padding": "pass attention_mask, pad on the right, and read the last attended token",
    "pooling": "read the token that the model was trained with, for a decoder the last attended one",
    "activation": "ask for raw scores: function_to_apply='none', use_activation=false or raw_scores=true",
    "label_order": "read the label of the preferred class, or change the sign",
    "head_bias": "load the head with its bias",
    "scale": "undo the normalization, or fold it into the head of both",
    "shift": "fold the constant into the head's bias, or leave it: differences of rewards stay the same",
    "head_weights": "load the head that belongs to the model",
    "adapter": "merge the adapter exactly once, or serve it as an adapter",
    "attention": "give both sides the same attention kernel and sliding window, as the model's config.json has them",
    "pair": "give both sides one text, or both a pair of texts as tokenizer(prompt, response) makes it",
    "dtype": "compute both in float32, or accept the rounding of the half type",
    "tokenizer": "take the tokenizer files that were saved with the model",
    "weights": "load the same checkpoint on both sides",
    "chance": "switch to evaluation mode, model.eval(), which turns dropout off",
}
"""Closed list of the kinds of causes, each with its remedy."""
_ASKED = {
    "chance": "the other side gives other rewards when it is asked again",
    "padding": "the other side gives other rewards one by one than in one batch",
}
"""Evidence of the causes that questions to the other side show, without a local copy."""
_MOST_NAMED = 8


@dataclass(frozen=True)
class Cause:
    """One cause of a difference.

    Args:
        kind: its key in `REMEDIES`.
        name: the cause in words, such as "doubled BOS".
    """

    kind: str
    name: str


@dataclass(frozen=True)
class Intervention:
    """One change of the local copy, and how well its rewards then meet the other side's.

    Args:
        name: the changes in words.
        num_probes: number of conversations that were compared.
        num_met: number of these whose rewards meet.
        largest: largest difference that is left.
    """

    name: str
    num_probes: int
    num_met: int
    largest: float


@dataclass(frozen=True)
class Explanation(JsonRecord, indent=2, ensure_ascii=False, rows="interventions"):
    """Comparison of two scorings, with the causes of their difference.

    Args:
        a: name of the first side.
        b: name of the second side.
        local: "A" or "B", the side whose local copy was changed.
        num_probes: number of conversations.
        num_differing: number of these with different rewards.
        largest: largest difference.
        noise: largest difference of the local copy's rewards alone and in a batch.
        causes: the causes, empty if the sides agree or no cause is known.
        left: largest difference once the causes are applied to the local copy.
        lookalikes: other explanations with as few changes under which all rewards meet too.
        excluded: single changes that do not make the rewards meet.
        not_testable: causes that this comparison cannot test, each with its reason.
        remarks: sentences on a difference without a known cause.
        interventions: the changes that were tried.
        wall_seconds: duration in seconds.
    """

    a: str
    b: str
    local: str
    num_probes: int
    num_differing: int
    largest: float
    noise: float
    causes: tuple[Cause, ...] = ()
    left: float = 0.0
    lookalikes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    not_testable: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    interventions: tuple[Intervention, ...] = ()
    wall_seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """True if all rewards meet, alone and in a batch."""
        return not self.num_differing and not self.causes

    @property
    def cause(self) -> str:
        """The first cause in words; `agree` without a difference, `unknown` if no cause was found."""
        return self.causes[0].name if self.causes else "agree" if self.agrees else "unknown"

    @property
    def evidence(self) -> str:
        """Sentence on the rewards, once the causes are applied."""
        if self.agrees:
            return f"all {self.num_probes} rewards meet (largest difference {self.largest:.2g})"
        if not self.causes:
            return "no change from the closed list, and no two, make all rewards meet"
        asked = [_ASKED[cause.kind] for cause in self.causes if cause.kind in _ASKED]
        meets = f"with this, the local copy of {self.local} meets the other side on all {self.num_probes} conversations"
        rounding = ", the rounding of the type" if "dtype" in {cause.kind for cause in self.causes} else ""
        changed = [f"{meets} (largest difference {self.left:.2g}{rounding})"] if len(self.causes) > len(asked) else []
        return "; ".join([*asked, *changed])

    @property
    def remedy(self) -> str:
        """Sentence on what to do; empty if the sides agree."""
        known = "; ".join(dict.fromkeys(REMEDIES[cause.kind] for cause in self.causes))
        return known if self.causes or self.agrees else "give both sides as folders, whose files can be compared"

    @property
    def exit_code(self) -> int:
        """0 if the sides agree, else 4."""
        return 0 if self.agrees else FAILED_EXIT_CODE

    def __str__(self) -> str:
        between = f"A ({self.a}) and B ({self.b})"
        if self.agrees:
            told = (f"{between} agree: {self.evidence}", f"The noise is {self.noise:.1g}", *self.remarks)
            return ". ".join(told) + "."
        listed = {
            "Not told apart from": self.lookalikes,
            "Excluded": () if self.causes else self.excluded,
            "Not testable": () if self.causes else self.not_testable,
        }
        more = {
            title: f", and {len(names) - _MOST_NAMED} more" for title, names in listed.items() if names[_MOST_NAMED:]
        }
        sentences = [
            f"{between} differ on {self.num_differing} of {self.num_probes} rewards by up to {self.largest:.3g} "
            f"(noise {self.noise:.1g})",
            f"Cause: {' and '.join(cause.name for cause in self.causes) or 'unknown'}",
            f"{self.evidence[0].upper()}{self.evidence[1:]}",
            f"Remedy: {self.remedy}",
            *(
                f"{title}: {', '.join(names[:_MOST_NAMED])}{more.get(title, '')}"
                for title, names in listed.items()
                if names
            ),
            *self.remarks,
        ]
        return ". ".join(sentences) + "."

    __repr__ = __str__
