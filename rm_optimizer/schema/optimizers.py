"""Options of optimizers and schedules: one dataclass for each registered name.

No tuned number stands here; the presets in `configs/optimizer` own them, each with its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING

from rm_optimizer.schema.checks import require, require_in


class MuonScaling(StrEnum):
    """Scale of Muon's orthogonal update for a matrix of `rows` x `columns`."""

    match_rms_adamw = "match_rms_adamw"
    """0.2 sqrt(max(rows, columns)): the size of an AdamW update (Liu et al., 2025, arXiv 2502.16982)."""
    original = "original"
    """sqrt(max(1, rows / columns)) (Jordan et al., 2024)."""


class Graft(StrEnum):
    """The optimizer whose update norm Shampoo takes over for each parameter."""

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
class OptimizerConfig:
    """Options of every optimizer."""

    name: str = MISSING
    """The optimizer's name in the registry."""
    lr: float = MISSING
    """Peak learning rate."""
    weight_decay: float = MISSING
    """Decay of matrices; norms, biases, embeddings and the reward head are never decayed."""
    head_lr_factor: float = 1.0
    """Learning rate of the reward head and the new matrices beside it, relative to `lr`."""
    layer_lr_decay: float = 1.0
    """Learning-rate factor from each layer to the one below it (Clark et al., 2020); 1 treats all layers alike."""

    def __post_init__(self) -> None:
        require_in("optimizer.lr", self.lr, "(0, inf)")
        require_in("optimizer.weight_decay", self.weight_decay, "[0, inf)")
        require_in("optimizer.head_lr_factor", self.head_lr_factor, "(0, inf)")
        require_in("optimizer.layer_lr_decay", self.layer_lr_decay, "(0, 1]")


@dataclass(kw_only=True)
class AdamConfig(OptimizerConfig):
    """Adam (Kingma & Ba, 2015); `weight_decay` is an L2 penalty, so at 0 this is AdamW bit for bit."""

    name: str = "adam"
    beta1: float = MISSING
    """Decay of the mean of gradients."""
    beta2: float = MISSING
    """Decay of the mean of squared gradients."""
    eps: float = MISSING
    """Added to the root of the mean square."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.beta1", self.beta1, "[0, 1)")
        require_in("optimizer.beta2", self.beta2, "[0, 1)")
        require_in("optimizer.eps", self.eps, "(0, inf)")


@dataclass(kw_only=True)
class AdamWConfig(AdamConfig):
    """AdamW (Loshchilov & Hutter, 2019)."""

    name: str = "adamw"


@dataclass(kw_only=True)
class SGDConfig(OptimizerConfig):
    """Stochastic gradient descent with momentum."""

    name: str = "sgd"
    momentum: float = MISSING
    """Decay of the momentum buffer."""
    nesterov: bool = MISSING
    """Look one step ahead along the momentum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.momentum", self.momentum, "[0, 1)")
        if self.nesterov is True:
            require_in("optimizer.momentum with optimizer.nesterov=true", self.momentum, "(0, 1)")


@dataclass(kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor (Shazeer & Stern, 2018); `lr` is relative to the size of each parameter."""

    name: str = "adafactor"
    beta2_decay: float = MISSING
    """Exponent of the growing second-moment decay 1 - step^beta2_decay."""
    clip: float = MISSING
    """Largest root mean square of an update before the learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.beta2_decay", self.beta2_decay, "[-1, 0)")
        require_in("optimizer.clip", self.clip, "[1, inf)")


@dataclass(kw_only=True)
class LionConfig(OptimizerConfig):
    """Lion (Chen et al., 2023)."""

    name: str = "lion"
    beta1: float = MISSING
    """Weight of the momentum in the sign that is stepped along."""
    beta2: float = MISSING
    """Decay of the momentum itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.beta1", self.beta1, "[0, 1)")
        require_in("optimizer.beta2", self.beta2, "[0, 1)")


@dataclass(kw_only=True)
class MuonConfig(AdamConfig):
    """Muon on hidden matrices, AdamW (`adamw_lr`, `beta1`, `beta2`, `eps`) on everything else."""

    name: str = "muon"
    adamw_lr: float = MISSING
    """Peak learning rate of the AdamW half."""
    momentum: float = MISSING
    """Decay of Muon's momentum buffer."""
    nesterov: bool = True
    """Look one step ahead along the momentum."""
    ns_steps: int = MISSING
    """Newton-Schulz iterations of each orthogonalization."""
    scaling: MuonScaling = MuonScaling.match_rms_adamw
    """Scale of the orthogonal update for a matrix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.adamw_lr", self.adamw_lr, "(0, inf)")
        require_in("optimizer.momentum", self.momentum, "[0, 1)")
        require_in("optimizer.ns_steps", self.ns_steps, "[1, 99]")


@dataclass(kw_only=True)
class SAMConfig(AdamConfig):
    """Sharpness-aware minimization around AdamW (Foret et al., 2021); two passes a step."""

    name: str = "sam"
    rho: float = MISSING
    """Radius of the ascent step."""
    adaptive: bool = False
    """Measure the radius relative to each weight (ASAM; Kwon et al., 2021); wants `rho` 10 times larger or more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.rho", self.rho, "(0, inf)")


@dataclass(kw_only=True)
class ScheduleFreeConfig(AdamConfig):
    """Schedule-Free AdamW (Defazio et al., 2024); `beta1` is the interpolation between average and iterate."""

    name: str = "schedulefree"
    weight_lr_power: float = MISSING
    """Weight of a step in the average is the largest learning rate so far to this power."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.beta1", self.beta1, "(0, 1)")
        require_in("optimizer.weight_lr_power", self.weight_lr_power, "[0, inf)")


@dataclass(kw_only=True)
class SOAPConfig(AdamConfig):
    """SOAP: Adam in Shampoo's eigenbasis (Vyas et al., 2024)."""

    name: str = "soap"
    precondition_frequency: int = MISSING
    """Steps between updates of the eigenbasis."""
    max_precondition_dim: int = MISSING
    """Larger dimensions keep the identity as their basis."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.precondition_frequency", self.precondition_frequency, "[1, inf)")
        require_in("optimizer.max_precondition_dim", self.max_precondition_dim, "[1, inf)")


@dataclass(kw_only=True)
class AdEMAMixConfig(AdamConfig):
    """AdEMAMix: AdamW with a second, slow momentum (Pagliardini et al., 2024)."""

    name: str = "ademamix"
    beta3: float = MISSING
    """Decay of the slow momentum."""
    alpha: float = MISSING
    """Weight of the slow momentum."""
    slow_warmup_ratio: float = MISSING
    """Share of the run over which `alpha` and `beta3` grow to their values; 0 starts with them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.beta3", self.beta3, "(0, 1)")
        require_in("optimizer.alpha", self.alpha, "[0, inf)")
        require_in("optimizer.slow_warmup_ratio", self.slow_warmup_ratio, "[0, 1]")


@dataclass(kw_only=True)
class ProdigyConfig(AdamConfig):
    """Prodigy: Adam that estimates its own learning rate (Mishchenko & Defazio, 2024); `lr` only multiplies it."""

    name: str = "prodigy"
    d_coef: float = MISSING
    """Factor on the estimate; the knob to tune."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.d_coef", self.d_coef, "(0, inf)")
        for option in ("head_lr_factor", "layer_lr_decay"):
            value = getattr(self, option)
            require(
                value == 1, f"optimizer.{option}", "be 1 with prodigy, which has one rate for all parameters", value
            )


@dataclass(kw_only=True)
class MARSConfig(AdamConfig):
    """MARS-AdamW: variance-reduced gradients on matrices, AdamW on vectors (Yuan et al., 2024)."""

    name: str = "mars"
    gamma: float = MISSING
    """Strength of the gradient correction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.gamma", self.gamma, "[0, inf)")


@dataclass(kw_only=True)
class ScionConfig(OptimizerConfig):
    """Scion, unconstrained: steps of a fixed norm for each kind of parameter (Pethick et al., 2025)."""

    name: str = "scion"
    momentum: float = MISSING
    """Decay of the momentum (one minus the paper's alpha)."""
    hidden_scale: float = MISSING
    """Radius of the spectral norm for hidden and new matrices and LoRA factors."""
    sign_scale: float = MISSING
    """Radius of the sign norm for embeddings, routers and the reward head's weight."""
    vector_scale: float = MISSING
    """Radius of the root-mean-square norm for norms and biases."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.momentum", self.momentum, "[0, 1)")
        for option in ("hidden_scale", "sign_scale", "vector_scale"):
            require_in(f"optimizer.{option}", getattr(self, option), "(0, inf)")


@dataclass(kw_only=True)
class ShampooConfig(OptimizerConfig):
    """Shampoo in blocks with grafting (Gupta et al., 2018; Anil et al., 2020)."""

    name: str = "shampoo"
    beta1: float = MISSING
    """Decay of the momentum."""
    beta2: float = MISSING
    """Decay of the preconditioner's statistics."""
    graft: Graft = MISSING
    """Update whose norm each parameter's step takes."""
    block_size: int = MISSING
    """Side of the blocks a matrix is cut into."""
    start_step: int = MISSING
    """First step that is preconditioned; earlier ones are the graft's own."""
    precondition_frequency: int = MISSING
    """Steps between computations of the inverse roots."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_in("optimizer.beta1", self.beta1, "[0, 1)")
        require_in("optimizer.beta2", self.beta2, "[0, 1]")
        for option in ("block_size", "start_step", "precondition_frequency"):
            require_in(f"optimizer.{option}", getattr(self, option), "[1, inf)")


@dataclass(kw_only=True)
class ScheduleConfig:
    """Learning-rate factor over the optimizer steps."""

    name: ScheduleName = MISSING
    """Shape after warm-up."""
    warmup_steps: int | None = None
    """Steps below the peak; null takes `warmup_ratio`."""
    warmup_ratio: float = 0.0
    """Share of all steps below the peak, rounded up."""
    min_lr_ratio: float = 0.0
    """Learning rate after the last step, relative to the peak."""
    decay_ratio: float | None = None
    """Share of all steps that decay; for `wsd` only."""

    def __post_init__(self) -> None:
        require_in("schedule.warmup_ratio", self.warmup_ratio, "[0, 1)")
        require_in("schedule.min_lr_ratio", self.min_lr_ratio, "[0, 1]")
        if self.warmup_steps is not None:
            require_in("schedule.warmup_steps", self.warmup_steps, "[0, inf)")
            expected = "be 0 when schedule.warmup_steps is set"
            require(
                isinstance(self.warmup_ratio, str) or self.warmup_ratio == 0,
                "schedule.warmup_ratio",
                expected,
                self.warmup_ratio,
            )
        if self.decay_ratio is not None:
            require_in("schedule.decay_ratio", self.decay_ratio, "(0, 1]")
        self._check_shape()

    def _check_shape(self) -> None:
        if self.name == MISSING:
            return
        if self.name == ScheduleName.wsd:
            require(self.decay_ratio is not None, "schedule.decay_ratio", "be set with schedule.name=wsd", "null")
        else:
            expected = f"be null with schedule.name={self.name}"
            require(self.decay_ratio is None, "schedule.decay_ratio", expected, self.decay_ratio)
        if self.name == ScheduleName.constant:
            expected = "be 0 with schedule.name=constant, which does not decay"
            require(
                isinstance(self.min_lr_ratio, str) or self.min_lr_ratio == 0,
                "schedule.min_lr_ratio",
                expected,
                self.min_lr_ratio,
            )
