"""Options of adapters: full fine-tuning, LoRA, or LoRA on a base in four bits.

No tuned number is here; the presets in `configs/adapter` own them, each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rm_optimizer.schema.checks import Options, require, within


class AdapterKind(StrEnum):
    """Trained part of the backbone; the reward head always trains, in full."""

    none = "none"
    """Every weight."""
    lora = "lora"
    """Low-rank factors on frozen matrices (Hu et al., 2021, arXiv 2106.09685)."""
    qlora = "qlora"
    """The same, the frozen matrices stored in four bits (Dettmers et al., 2023, arXiv 2305.14314)."""


@dataclass(kw_only=True)
class AdapterConfig(Options, group="adapter"):
    """A low-rank adapter, or none."""

    kind: AdapterKind = AdapterKind.none
    """none trains every weight; lora and qlora train low-rank factors and the modules at the reward head."""
    rank: int | None = within("[1, inf)", None)
    """Rank of the factors."""
    alpha: float | None = within("(0, inf)", None)
    """The factors' product is scaled by alpha / rank."""
    dropout: float | None = within("[0, 1)", None)
    """Dropout on the input of the factors in training; `model.dropout` does not change it."""
    targets: list[str] | None = None
    """Names (or their last parts) of the layers adapted; null takes every linear layer of the backbone's blocks."""

    def _check(self) -> None:
        if self.kind == AdapterKind.none:
            for name in ("rank", "alpha", "dropout", "targets"):
                value = getattr(self, name)
                require(value is None, f"adapter.{name}", "be null without an adapter (add adapter=lora)", value)
            return
        for name in ("rank", "alpha", "dropout"):
            require(getattr(self, name) is not None, f"adapter.{name}", f"be set with adapter.kind={self.kind}", "null")
        require(self.targets is None or len(self.targets) > 0, "adapter.targets", "name a layer or be null", "[]")
