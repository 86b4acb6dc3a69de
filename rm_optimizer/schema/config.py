"""The options of a training run. Defaults that suit everyone are here; tuned numbers are in presets."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from rm_optimizer.errors import ConfigError, require_known
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.schema.checks import Options, needing, require, within
from rm_optimizer.schema.data import DataConfig
from rm_optimizer.schema.monitors import Mode, better_mode
from rm_optimizer.schema.optimizers import OptimizerConfig, ScheduleConfig
from rm_optimizer.schema.publish import PublishConfig

ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")
"""Values of `hardware.accelerator`."""


class Attention(StrEnum):
    """Attention kernels; `auto` takes the first that works of flash_attention_2, sdpa, eager."""

    auto = "auto"
    flash_attention_2 = "flash_attention_2"
    sdpa = "sdpa"
    eager = "eager"


class WeightType(StrEnum):
    """Type of the weights of a base model; its head and an adapter are float32 in any case."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class PrefixSharing(StrEnum):
    """Computation of a prompt once for both responses: `auto` where it is exact, `on`, `off`."""

    auto = "auto"
    on = "on"
    off = "off"


class Resume(StrEnum):
    """Treatment of an earlier run in the folder: `none` refuses it, `auto` continues it, `restart` removes it."""

    none = "none"
    auto = "auto"
    restart = "restart"


class OnOutOfMemory(StrEnum):
    """Response to a training pass that does not fit into memory: end the run, or halve its passes and go on."""

    stop = "stop"
    halve = "halve"


class WandbMode(StrEnum):
    """Mode of Weights & Biases."""

    offline = "offline"
    online = "online"


FREEZE_BACKBONE = "backbone"
"""`model.freeze` that trains the reward head's side alone."""


@dataclass(kw_only=True)
class ModelConfig(Options, group="model"):
    """The base model: a checkpoint that loads with one label, or a small decoder built from `architecture`."""

    name: str = MISSING
    """The preset's name, shown in results."""
    path: str | None = None
    """Hub id, folder, run folder or Lightning .ckpt; null builds `architecture` and trains a tokenizer."""
    revision: str | None = needing("path", None)
    """Hub revision (branch, tag or commit)."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """`model_type` and configuration fields of the decoder to build when `path` is null."""
    vocab_size: int = within("[300, inf)", 2048, needs="!path")
    """Vocabulary of the tokenizer trained when `path` is null."""
    max_length: int | None = within("[8, inf)", MISSING)
    """Tokens kept of prompt with response; null takes a model's recorded length, or its positions up to 1024."""
    adamw_lr: float = within("(0, inf)", MISSING)
    """Learning rate that suits AdamW on all weights of this model; the optimizer presets scale it."""
    lora_lr: float = within("(0, inf)", 1.0e-4)
    """Learning rate that suits AdamW on LoRA factors; the optimizer presets scale it if there is an adapter."""
    batch_size: int = within("[1, inf)", MISSING)
    """Pairs of an optimizer step that suit this learning rate; default of `batching.batch_size`."""
    gpu_tokens: int = within("[1, inf)", MISSING)
    """Tokens, padding included, whose forward and backward pass fits a GPU of 80 GB in bf16-mixed."""
    attn_implementation: Attention = Attention.auto
    """Attention kernel."""
    pooling_head: str | None = None
    """Pooling head of a decoder that a plug-in registered (`register_pooling_head`); null reads the last token."""
    freeze: str | None = None
    """Weights that are not trained: `backbone`, or a number for the embeddings and as many layers after them."""
    router_aux_loss_coef: float | None = within("(0, inf)", None)
    """Coefficient of the balancing loss of a mixture of experts in the training loss; null leaves it out."""
    dtype: WeightType = needing("path", WeightType.float32)
    """Type of the base's weights; bfloat16 halves their memory, and those that train are rounded at random."""
    dropout: bool = False
    """Keep the dropout of the backbone's configuration, functional attention dropout included."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    trust_remote_code: bool = False
    """Run the checkpoint's own modeling code."""

    def _check(self) -> None:
        described = self.path is not None or bool(self.architecture)
        require(described, "model.path", "be set when model.architecture is empty", "null")
        if self.path is not None and self.architecture:
            raise ConfigError(
                f"model={self.name} builds its own model, so model.path must be null, got '{self.path}'; "
                "take model=custom, or leave model out, to start from that path"
            )
        is_known = self.freeze in (None, FREEZE_BACKBONE) or (self.freeze.isascii() and self.freeze.isdigit())
        require(is_known, "model.freeze", f"be {FREEZE_BACKBONE}, a number of layers or null", self.freeze)
        known = self.max_length is not None or self.path is not None
        require(known, "model.max_length", "be set when model.path is null", "null")


@dataclass(kw_only=True)
class BatchingConfig(Options, group="batching"):
    """Division of pairs into optimizer steps and forward passes."""

    batch_size: int = within("[1, inf)", MISSING)
    """Pairs of one optimizer step, over all devices."""
    micro_token_budget: int = within("[1, inf)", MISSING)
    """Tokens, padding included, of one forward and backward pass; limits memory and never changes the gradient."""
    eval_token_budget: int = within("[1, inf)", MISSING)
    """Tokens, padding included, of one evaluation or scoring pass."""
    prefix_sharing: PrefixSharing = PrefixSharing.auto
    """Compute each prompt once for both responses; rewards and gradients stay the same."""


@dataclass(kw_only=True)
class LossConfig(Options, group="loss"):
    """The Bradley-Terry loss and its additions, which are off by default."""

    name: str | None = None
    """Function of the margins or rewards as module:function, or a registered loss; null is Bradley-Terry's."""
    beta: float = within("(0, inf)", 1.0)
    """Inverse temperature: P(chosen > rejected) = sigmoid(beta (chosen - rejected - margin))."""
    label_smoothing: float = within("[0, 0.5)", 0.0, needs="!name")
    """Probability that a label is flipped, in [0, 0.5)."""
    margin_scale: float = within("[0, inf)", 0.0)
    """Factor on each pair's `margin` before it is subtracted inside the sigmoid; 0 ignores margins."""
    center_rewards: float = within("[0, inf)", 0.0, needs="!name")
    """Coefficient of mean (chosen + rejected)^2."""
    reward_l2: float = within("[0, inf)", 0.0, needs="!name")
    """Coefficient of mean (chosen^2 + rejected^2) / 2."""
    score_range: list[float] | None = None
    """Lowest and highest score, [1, 5]: fit rewards to the responses' scores, mapped to -1 to 1; null is off."""
    score_share: float = within("(0, 1]", 1.0, needs="score_range")
    """Share of the squared error of the scores in the loss; the rest is the loss of the pairs."""

    @property
    def is_of_margins(self) -> bool:
        """True if a pair's loss depends on the difference of its rewards alone; not known of a named loss."""
        return self.name is None and self.score_range is None and not (self.center_rewards or self.reward_l2)

    def _check(self) -> None:
        if self.score_range is None:
            return
        is_range = len(self.score_range) == 2 and self.score_range[0] < self.score_range[1]
        require(is_range, "loss.score_range", "be the lowest and the highest score, such as [1, 5]", self.score_range)
        of_pairs = ("name", "label_smoothing", "margin_scale", "center_rewards", "reward_l2")
        given = [name for name in of_pairs if getattr(self, name) != getattr(LossConfig, name)]
        if self.score_share == 1 and given:
            raise ConfigError(
                f"loss.{given[0]} is part of the loss of pairs, which loss.score_share=1 leaves out; set less"
            )


@dataclass(kw_only=True)
class EarlyStoppingConfig(Options, group="training.early_stopping"):
    """Stop when the monitored validation metric no longer improves."""

    enabled: bool = False
    """Stop early."""
    patience: int = within("[1, inf)", 5, needs="enabled")
    """Evaluations without improvement before stopping."""
    min_delta: float = within("[0, inf)", 0.0, needs="enabled")
    """Improvement that counts, in the metric's unit."""


@dataclass(kw_only=True)
class CalibrationConfig(Options, group="training.calibration"):
    """Calibration of the preference probabilities, measured during training."""

    enabled: bool = False
    """Log calibration error, temperature and a reliability diagram of evaluations to every logger."""
    every: int = within("[1, inf)", 1, needs="enabled")
    """Evaluations between two measurements; the first and the last are always measured."""


@dataclass(kw_only=True)
class HessianConfig(Options, group="training.hessian"):
    """Curvature of the training loss on fixed pairs, measured while training."""

    enabled: bool = False
    """Measure the Hessian's top eigenvalue and trace while training; setting `every` turns this on too."""
    every: int | None = within("[1, inf)", None)
    """Optimizer steps between measurements; null spaces them evenly, to a tenth of the time or less."""
    num_pairs: int = within("[1, inf)", 32, needs="enabled|every")
    """Training pairs that the loss is averaged over; drawn by the seed, the same at every measurement."""
    num_products: int = within("[1, 2]", 2, needs="enabled|every")
    """Hessian-vector products of a measurement, more if its residual is large; with 1 a new top one shows later."""

    @property
    def is_on(self) -> bool:
        """True if a run measures."""
        return self.enabled or self.every is not None


@dataclass(kw_only=True)
class TrainingConfig(Options, group="training"):
    """The training loop: its length, evaluations and checkpoints."""

    epochs: float = within("(0, inf)", 1.0)
    """Passes over the training pairs; a fraction is allowed."""
    max_steps: int | None = within("[1, inf)", None)
    """Optimizer steps; overrides `epochs`."""
    gradient_clip_norm: float = within("[0, inf)", 1.0)
    """Largest gradient norm; 0 does not clip."""
    evals_per_epoch: int | None = within("[1, inf)", None)
    """Evaluations in each epoch, and one after the last step; null: at most ten, for a fifth of the work at most."""
    eval_at_start: bool = True
    """Evaluate before the first step."""
    checkpoint_every: int | None = within("[1, inf)", None)
    """Optimizer steps between periodic checkpoints; null saves `evals_per_epoch` times an epoch, or ten times."""
    keep_checkpoints: int = within("[1, inf)", 2)
    """Number of periodic checkpoints to keep, in addition to the best."""
    monitor: str = "val/nll"
    """Validation metric that selects the best checkpoint and stops early."""
    mode: Mode | None = None
    """Direction of improvement of `monitor`: smaller (min) or larger (max); null takes the metric's own."""
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    """Early stopping."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """Calibration during training."""
    hessian: HessianConfig = field(default_factory=HessianConfig)
    """Curvature during training."""
    suites: Any = None
    """Suites to score: a name, a list, or {name: FILE} and {name: {SET: FILE}} with local copies."""
    suites_every: int | None = within("[1, inf)", None, needs="suites")
    """Evaluations from one scoring of suites to the next; null: for a tenth of the work at most."""
    num_bootstrap: int = within("[100, inf)", 1000)
    """Bootstrap resamples over prompts for the intervals of the final evaluation."""
    progress: bool = True
    """Show a progress bar, or log a line a minute if no terminal can show one."""

    def _check(self) -> None:
        self.mode = better_mode(self.monitor, self.mode)


@dataclass(kw_only=True)
class HardwareConfig(Options, group="hardware"):
    """Devices and processes of a run."""

    accelerator: str = "auto"
    """Lightning's accelerator: auto, cpu, gpu."""
    devices: int = within("[1, inf)", 1)
    """Devices on each machine."""
    num_nodes: int = within("[1, inf)", 1)
    """Machines; with more than one, torchrun or SLURM starts the processes."""
    strategy: str = "auto"
    """fsdp2 splits the model over the devices; any other name is Lightning's: auto, ddp."""
    precision: str = "32-true"
    """Lightning's precision: 32-true or bf16-mixed; the reward head and the loss are float32 in any case."""
    num_threads: int | None = within("[1, inf)", None)
    """CPU threads of each process; null leaves torch's own choice."""
    num_workers: int = within("[0, inf)", 0)
    """Data-loader processes of each device; default of `data.num_workers`."""
    pin_memory: bool = False
    """Load batches into page-locked memory, from which copies to a GPU do not block the CPU."""
    compile: bool = False
    """Compile the backbone to fused kernels, which takes minutes at the first steps; numbers change by rounding."""
    pass_tokens: int = within("[1, inf)", MISSING)
    """Tokens of a forward and backward pass that fit into memory; default of `batching.micro_token_budget`."""
    on_out_of_memory: OnOutOfMemory = OnOutOfMemory.stop
    """A training pass that does not fit: stop names the tokens that fit, halve goes on with the same gradient."""
    eval_pass_tokens: int = within("[1, inf)", MISSING)
    """Tokens of an evaluation pass that fit into memory; default of `batching.eval_token_budget`."""

    def _check(self) -> None:
        require_known("hardware.accelerator", self.accelerator, ACCELERATORS)
        if self.on_out_of_memory == OnOutOfMemory.halve:  # the others would wait for a rank that repeats its passes
            ranks = self.devices * self.num_nodes
            require(ranks == 1, "hardware.on_out_of_memory", "be stop where several devices reduce gradients", "halve")
        clash = self.compile and self.strategy == "fsdp2"
        require(not clash, "hardware.compile", "be false with hardware.strategy=fsdp2, which is untested", "true")
        known = "be 32-true or bf16-mixed, which keep float32 weights (half ones round small updates away)"
        if self.precision in ("16-mixed", "16"):
            known = (
                "be 32-true or bf16-mixed: float16 overflows above 65,504, and scaling against it leaves out steps, so "
                "the weights would depend on the scale"
            )
        require(self.precision in ("32-true", "bf16-mixed"), "hardware.precision", known, self.precision)


@dataclass(kw_only=True)
class LoggerConfig(Options, group="logger"):
    """Loggers of the metrics in addition to `metrics.csv`, which is always written."""

    tensorboard: bool = True
    """TensorBoard event files in the run folder."""
    wandb: bool = False
    """Weights & Biases."""
    wandb_mode: WandbMode = needing("wandb", WandbMode.offline)
    """Offline writes files that `wandb sync` uploads later."""
    project: str = needing("wandb", "rm-optimizer")
    """W&B project."""
    name: str | None = needing("wandb", None)
    """Name of the run in W&B; null takes the run folder's name."""
    group: str | None = needing("wandb", None)
    """W&B group of the run, such as a study's."""
    tags: list[str] = needing("wandb", list)
    """W&B tags of the run, each of 1 to 64 characters: [baseline, seed0]."""
    log_model: bool = needing("wandb", True)
    """Log the exported model as a W&B artifact by reference; `wandb sync` uploads it from the run folder."""

    def _check(self) -> None:
        for tag in self.tags:
            require(1 <= len(tag) <= 64, "logger.tags", "hold tags of 1 to 64 characters, as W&B demands", repr(tag))


@dataclass(kw_only=True)
class TrainConfig(Options):
    """All options of `rm-opt train`."""

    seed: int = within("[0, 2**32)", 0)
    """Seed of head, data order and dropout."""
    resume: Resume = Resume.none
    """Treatment of an earlier run in the run folder: `none` refuses it, `auto` continues it, `restart` removes it."""
    output_dir: str = MISSING
    """The run folder."""
    plugins: list[str] = field(default_factory=list)
    """Modules to import first, which register optimizers, losses and other entries: [my_package.optimizers]."""
    profile_memory: bool = False
    """Log memory, token rates, padding and MFU of every step, and write their medians to `profile.json`."""
    publish: PublishConfig = field(default_factory=PublishConfig)
    """Publishing of weights to a reward server."""
    model: ModelConfig = MISSING
    adapter: AdapterConfig = MISSING
    data: DataConfig = MISSING
    batching: BatchingConfig = MISSING
    loss: LossConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    schedule: ScheduleConfig = MISSING
    training: TrainingConfig = MISSING
    hardware: HardwareConfig = MISSING
    logger: LoggerConfig = MISSING

    def _check(self) -> None:
        model, adapter, hardware = self.model, self.adapter, self.hardware
        if MISSING in (model, adapter, hardware):
            return
        if adapter.kind == AdapterKind.qlora and model.path is None:
            raise ConfigError(
                f"adapter=qlora stores pretrained weights in four bits, and model={model.name} starts from random "
                "ones; take a pretrained model (model=qwen, model.path=MODEL) or adapter=lora"
            )
        if model.router_aux_loss_coef is not None:
            option, is_frozen = "model.router_aux_loss_coef", model.freeze == FREEZE_BACKBONE
            require(not is_frozen, option, "be null with model.freeze=backbone", "a number")
            require(not hardware.compile, option, "be null with hardware.compile=true", "a number")
            halves = hardware.on_out_of_memory == OnOutOfMemory.halve
            need = "be stop with model.router_aux_loss_coef (it balances each pass, so halves change the gradient)"
            require(not halves, "hardware.on_out_of_memory", need, "halve")
        if model.dtype == WeightType.bfloat16:
            require(adapter.kind != AdapterKind.qlora, "model.dtype", "be float32 with adapter=qlora", model.dtype)
            alone = hardware.devices * hardware.num_nodes == 1 and hardware.strategy == "auto"
            need = "be float32 with several devices, whose gradients in bfloat16 would be summed, unless adapter=lora"
            require(alone or not self.trains_half_weights, "model.dtype", need, model.dtype)
        if adapter.kind != AdapterKind.none and model.freeze:
            raise ConfigError(
                f"adapter={adapter.kind} trains no weight of the backbone, so model.freeze={model.freeze} "
                "would have no effect; leave one of them out"
            )

    @property
    def trains_half_weights(self) -> bool:
        """True if weights of the base model train in bfloat16."""
        is_frozen = self.adapter.kind != AdapterKind.none or self.model.freeze == FREEZE_BACKBONE
        return self.model.dtype == WeightType.bfloat16 and not is_frozen
