"""Options of optimizers and schedules: one dataclass for each registered name.

No tuned number is here; the presets in `configs/optimizer` own them, each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING

from rm_optimizer.schema.checks import Options, require, require_in, within


class MuonScaling(StrEnum):
    """Scale of Muon's orthogonal update for a matrix of `rows` x `columns`."""

    match_rms_adamw = "match_rms_adamw"
    """0.2 sqrt(max(rows, columns)): the size of an AdamW update (Liu et al., 2025, arXiv 2502.16982)."""
    original = "original"
    """sqrt(max(1, rows / columns)) (Jordan et al., 2024)."""


class Graft(StrEnum):
    """The optimizer whose update norm Shampoo uses for each parameter."""

    sgd = "sgd"
    adagrad = "adagrad"
    rmsprop = "rmsprop"


class ScheduleName(StrEnum):
    """Shapes of the learning rate after warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"
    """Warm-up, stable, decay: constant until the last `decay_ratio` of the steps."""


@dataclass(kw_only=True)
class OptimizerConfig(Options, group="optimizer"):
    """Options of every optimizer."""

    name: str = MISSING
    """The optimizer's name in the registry."""
    lr: float = within("(0, inf)", MISSING)
    """Peak learning rate."""
    weight_decay: float = within("[0, inf)", MISSING)
    """Decay of matrices; norms, biases, embeddings and the reward head are never decayed."""
    head_lr_factor: float = within("(0, inf)", 1.0)
    """Learning rate of the reward head and of new matrices next to it, relative to `lr`."""
    layer_lr_decay: float = within("(0, 1]", 1.0)
    """Learning-rate factor from each layer to the one below it (Clark et al., 2020); 1 treats all layers the same."""


@dataclass(kw_only=True)
class AdamConfig(OptimizerConfig):
    """Adam (Kingma & Ba, 2015); `weight_decay` is an L2 penalty, so at 0 this is AdamW bit for bit."""

    name: str = "adam"
    beta1: float = within("[0, 1)", MISSING)
    """Decay of the mean of gradients."""
    beta2: float = within("[0, 1)", MISSING)
    """Decay of the mean of squared gradients."""
    eps: float = within("(0, inf)", MISSING)
    """Added to the root of the mean square."""


@dataclass(kw_only=True)
class AdamWConfig(AdamConfig):
    """AdamW (Loshchilov & Hutter, 2019)."""

    name: str = "adamw"


@dataclass(kw_only=True)
class AdamW8bitConfig(AdamConfig):
    """AdamW with moments in eight bits, by blocks of 256 (Dettmers et al., 2022); embeddings keep whole moments."""

    name: str = "adamw_8bit"
    paged: bool = False
    """Let the driver move the moments into the processor's memory when the GPU's is full."""


@dataclass(kw_only=True)
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    name: str = "sgd"
    momentum: float = within("[0, 1)", MISSING)
    """Decay of the momentum buffer."""
    nesterov: bool = MISSING
    """Look one step ahead along the momentum."""

    def _check(self) -> None:
        if self.nesterov is True and self.momentum != MISSING:
            require_in("optimizer.momentum with optimizer.nesterov=true", self.momentum, "(0, 1)")


@dataclass(kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer & Stern, 2018); `lr` is relative to the size of each parameter."""

    name: str = "adafactor"
    beta2_decay: float = within("[-1, 0)", MISSING)
    """Exponent of the growing second-moment decay 1 - step^beta2_decay."""
    clip: float = within("[1, inf)", MISSING)
    """Largest root mean square of an update before the learning rate."""


@dataclass(kw_only=True)
class LionConfig(OptimizerConfig):
    """Lion (Chen et al., 2023)."""

    name: str = "lion"
    beta1: float = within("[0, 1)", MISSING)
    """Weight of the momentum in the sign that is stepped along."""
    beta2: float = within("[0, 1)", MISSING)
    """Decay of the momentum itself."""


@dataclass(kw_only=True)
class MuonConfig(AdamConfig):
    """Muon on hidden matrices, AdamW (`adamw_lr`, `beta1`, `beta2`, `eps`) on everything else."""

    name: str = "muon"
    adamw_lr: float = within("(0, inf)", MISSING)
    """Peak learning rate of the AdamW half."""
    momentum: float = within("[0, 1)", MISSING)
    """Decay of Muon's momentum buffer."""
    nesterov: bool = True
    """Look one step ahead along the momentum."""
    ns_steps: int = within("[1, 99]", MISSING)
    """Newton-Schulz iterations of each orthogonalization."""
    scaling: MuonScaling = MuonScaling.match_rms_adamw
    """Scale of the orthogonal update for a matrix."""


@dataclass(kw_only=True)
class SAMConfig(AdamConfig):
    """Sharpness-aware minimization around AdamW (Foret et al., 2021); two passes a step."""

    name: str = "sam"
    rho: float = within("(0, inf)", MISSING)
    """Radius of the ascent step."""
    adaptive: bool = False
    """Measure the radius relative to each weight (ASAM; Kwon et al., 2021); needs a `rho` at least 10 times larger."""


@dataclass(kw_only=True)
class ScheduleFreeConfig(AdamConfig):
    """Schedule-Free AdamW (Defazio et al., 2024); `beta1` is the interpolation between average and iterate."""

    name: str = "schedulefree"
    beta1: float = within("(0, 1)", MISSING)
    weight_lr_power: float = within("[0, inf)", MISSING)
    """Weight of a step in the average is the largest learning rate so far to this power."""


@dataclass(kw_only=True)
class SOAPConfig(AdamConfig):
    """SOAP: Adam in Shampoo's eigenbasis (Vyas et al., 2024)."""

    name: str = "soap"
    precondition_frequency: int = within("[1, inf)", MISSING)
    """Steps between updates of the eigenbasis."""
    max_precondition_dim: int = within("[1, inf)", MISSING)
    """Larger dimensions keep the identity as their basis."""


@dataclass(kw_only=True)
class AdEMAMixConfig(AdamConfig):
    """AdEMAMix: AdamW with a second, slow momentum (Pagliardini et al., 2024)."""

    name: str = "ademamix"
    beta3: float = within("(0, 1)", MISSING)
    """Decay of the slow momentum."""
    alpha: float = within("[0, inf)", MISSING)
    """Weight of the slow momentum."""
    slow_warmup_ratio: float = within("[0, 1]", MISSING)
    """Share of the run over which `alpha` and `beta3` grow to their values; 0 starts with them."""


@dataclass(kw_only=True)
class ProdigyConfig(AdamConfig):
    """Prodigy: Adam that estimates its own learning rate (Mishchenko & Defazio, 2024); `lr` only multiplies it."""

    name: str = "prodigy"
    d_coef: float = within("(0, inf)", MISSING)
    """Factor on the estimate; the knob to tune."""

    def _check(self) -> None:
        for option in ("head_lr_factor", "layer_lr_decay"):
            value, expected = getattr(self, option), "be 1 with prodigy, which has one rate for all parameters"
            require(value == 1, f"optimizer.{option}", expected, value)


@dataclass(kw_only=True)
class MARSConfig(AdamConfig):
    """MARS-AdamW: variance-reduced gradients on matrices, AdamW on vectors (Yuan et al., 2024)."""

    name: str = "mars"
    gamma: float = within("[0, inf)", MISSING)
    """Strength of the gradient correction."""


@dataclass(kw_only=True)
class ScionConfig(OptimizerConfig):
    """Scion, unconstrained: steps of a fixed norm for each kind of parameter (Pethick et al., 2025)."""

    name: str = "scion"
    momentum: float = within("[0, 1)", MISSING)
    """Decay of the momentum (one minus the paper's alpha)."""
    hidden_scale: float = within("(0, inf)", MISSING)
    """Radius of the spectral norm for hidden and new matrices and LoRA factors."""
    sign_scale: float = within("(0, inf)", MISSING)
    """Radius of the sign norm for embeddings, routers and the reward head's weight."""
    vector_scale: float = within("(0, inf)", MISSING)
    """Radius of the root-mean-square norm for norms and biases."""


@dataclass(kw_only=True)
class ShampooConfig(OptimizerConfig):
    """Shampoo in blocks with grafting (Gupta et al., 2018; Anil et al., 2020)."""

    name: str = "shampoo"
    beta1: float = within("[0, 1)", MISSING)
    """Decay of the momentum."""
    beta2: float = within("[0, 1]", MISSING)
    """Decay of the preconditioner's statistics."""
    graft: Graft = MISSING
    """Optimizer whose update norm each parameter's step gets."""
    block_size: int = within("[1, inf)", MISSING)
    """Side of the blocks that a matrix is divided into."""
    start_step: int = within("[1, inf)", MISSING)
    """First step with preconditioning; earlier steps are the graft's."""
    precondition_frequency: int = within("[1, inf)", MISSING)
    """Steps between computations of the inverse roots."""


OPTIMIZER_OPTIONS: dict[str, type[OptimizerConfig]] = {
    kind.name: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, OptimizerConfig) and kind is not OptimizerConfig
}
"""Options of the optimizers of this package by name; `rm_optimizer.optim` registers the builders."""


@dataclass(kw_only=True)
class ScheduleConfig(Options, group="schedule"):
    """Learning-rate factor over the optimizer steps."""

    name: ScheduleName = MISSING
    """Shape after warm-up."""
    warmup_steps: int | None = within("[0, inf)", None)
    """Steps below the peak; null takes `warmup_ratio`."""
    warmup_ratio: float = within("[0, 1)", 0.0, needs="!warmup_steps")
    """Share of all steps below the peak, rounded up."""
    min_lr_ratio: float = within("[0, 1]", 0.0)
    """Learning rate after the last step, relative to the peak."""
    decay_ratio: float | None = within("(0, 1]", None)
    """Share of all steps that decay; for `wsd` only."""

    def _check(self) -> None:
        if self.name == ScheduleName.wsd:
            require(self.decay_ratio is not None, "schedule.decay_ratio", "be set with schedule.name=wsd", "null")
        elif self.name != MISSING:
            expected = f"be null with schedule.name={self.name}"
            require(self.decay_ratio is None, "schedule.decay_ratio", expected, self.decay_ratio)
        if self.name == ScheduleName.constant:
            expected = "be 0 with schedule.name=constant, which does not decay"
            require(self.min_lr_ratio == 0, "schedule.min_lr_ratio", expected, self.min_lr_ratio)
