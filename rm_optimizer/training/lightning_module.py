"""Optimizer steps on batches of pairs: in a plain Lightning trainer, and in a run, the same for every split."""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from jaxtyping import Float
from pytorch_lightning.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from rm_optimizer.core.base import BaseRewardModel
from rm_optimizer.core.classifier.quantization import is_quantized
from rm_optimizer.core.model.losses import configured_pair_losses
from rm_optimizer.core.model.reward_model import BradleyTerryRM, require_bradley_terry
from rm_optimizer.core.model.sharding import (
    in_step,
    is_sharded,
    most_over_ranks,
    shard_model,
    spare_batch,
    unreduced_gradients,
    whole,
)
from rm_optimizer.core.storage.adapter_files import adapter_tensor_names, separate_base
from rm_optimizer.core.storage.loading import PAYLOAD_KEY, WEIGHTS_PREFIX, checkpoint_payload
from rm_optimizer.core.tokens.batching import AnyPairBatch, MacroBatch, PairBatch
from rm_optimizer.errors import CheckpointError, ConfigError, DataError, OutOfMemory
from rm_optimizer.optim import build_optimizer, build_schedule, set_train_mode
from rm_optimizer.schema import LossConfig, TrainConfig, compose, typed
from rm_optimizer.schema.config import OnOutOfMemory
from rm_optimizer.schema.optimizers import OptimizerConfig, ScheduleConfig
from rm_optimizer.training.data.in_memory import PreferenceDataModule
from rm_optimizer.training.folder.record import RUN_KEY, RunRecord
from rm_optimizer.training.stopping import diverged
from rm_optimizer.training.strategy import ShardedStrategy

log = logging.getLogger("rm_optimizer")

ADAMW_LR = 1.0e-5
"""Learning rate of AdamW in a plain trainer; the optimizer presets scale it."""


class RewardModelLightning(pl.LightningModule):
    """Lightning module that trains a reward model with a plain `pl.Trainer`.

    Batches come from `create_dataloader`, or are mappings of tensors as a `DataLoader` of a `PreferenceDataset` gives
    them. A step is the weighted mean loss of a batch, with the schedule of the optimizer's preset over the trainer's
    steps. It logs `train/loss` and `train/accuracy`, and `val/loss`, `val/accuracy` and `val/mean_margin` as means over
    all validation pairs. For runs that resume, split batches by tokens or use several processes, see
    `train_reward_model`.

    Args:
        base_model: the model to train. One that is no `BradleyTerryRM` is trained by its own `compute_loss`.
        learning_rate: peak learning rate; None is the optimizer preset's multiple of 1e-5, the rate of AdamW.
        optimizer_name: name of the optimizer.
        loss: options of the loss; None is Bradley-Terry's.
        optimizer: options of the optimizer, in place of `learning_rate` and `optimizer_name`.
        schedule: schedule of the learning rate; None is the optimizer preset's.
        num_steps: optimizer steps; 0 asks the trainer.

    Raises:
        ConfigError: if the optimizer is unknown, or the trainer has several processes or half-precision weights.
        TypeError: if the model is no reward model.
    """

    def __init__(
        self,
        base_model: BaseRewardModel,
        learning_rate: float | None = None,
        optimizer_name: str = "adamw",
        *,
        loss: LossConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        schedule: ScheduleConfig | None = None,
        num_steps: int = 0,
    ) -> None:
        if not isinstance(base_model, BaseRewardModel):
            require_bradley_terry(base_model)
        super().__init__()
        if optimizer is None or schedule is None:
            self.save_hyperparameters("learning_rate", "optimizer_name")
            rate = [] if learning_rate is None else [f"optimizer.lr={learning_rate}"]
            rate += [f"model.adamw_lr={learning_rate or ADAMW_LR}", f"optimizer={optimizer_name}", "output_dir=."]
            preset = typed(compose(rate), TrainConfig)
            optimizer, schedule = optimizer or preset.optimizer, schedule or preset.schedule
        self.model = base_model
        self.base = None
        if isinstance(base_model, BradleyTerryRM):
            self.base = separate_base(base_model.model)  # before the weights are sharded
            # bitsandbytes adds its own entries to the state of four-bit matrices
            self.strict_loading = self.base is None and not is_quantized(base_model.model)
        self.loss_config = loss or LossConfig()
        self.optimizer_config = optimizer
        self.schedule_config = schedule
        self.num_steps = num_steps
        self.step_metrics: dict[str, float | int] = {}
        self._sums = torch.zeros(5, dtype=torch.float64)

    def setup(self, stage: str) -> None:
        """Refuse trainers whose numbers would be wrong, and put a loaded model into training mode."""
        if self.automatic_optimization and self.trainer.world_size > 1:
            raise ConfigError(
                "RewardModelLightning in a plain trainer takes devices=1, since Lightning deals other pairs to "
                "other processes than their weights assume; train_reward_model(options={'hardware.devices': N}) does"
            )
        if str(self.trainer.precision) in ("bf16-true", "16-true"):
            raise ConfigError(
                f"precision must be 32-true or bf16-mixed, which keep float32 weights (half ones round small updates "
                f"away), got {self.trainer.precision}"
            )
        if stage == "fit":
            self.train()

    def configure_optimizers(self) -> Any:
        """The optimizer and its schedule, stepped once an optimizer step."""
        if not self.num_steps:
            steps = self.trainer.estimated_stepping_batches
            if not math.isfinite(steps):
                raise ConfigError("the schedule needs the length of training; give pl.Trainer max_epochs or max_steps")
            self.num_steps = int(steps)
        head = self.model.head_parameter_names() if isinstance(self.model, BradleyTerryRM) else []
        optimizer = build_optimizer(self.model, self.optimizer_config, head_names=head, num_steps=self.num_steps)
        schedule = build_schedule(optimizer, self.schedule_config, self.num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Put the training weights into the model, since a checkpoint holds the evaluation weights."""
        self._train_weights(True)

    def _train_weights(self, is_training: bool) -> None:
        for optimizer in self.trainer.optimizers:
            set_train_mode(optimizer, is_training)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Weighted mean loss of a batch."""
        loss, sums = self._measured(batch)
        self._log("train", sums, loss.detach())
        return loss

    def on_validation_start(self) -> None:
        """Put the evaluation weights into the model."""
        self._train_weights(False)
        self._sums = torch.zeros(5, dtype=torch.float64, device=self.device)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add the pairs of a batch to the sums over all validation pairs."""
        self._sums = self._sums + self._measured(batch)[1]

    def on_validation_epoch_end(self) -> None:
        """Log the means over all validation pairs."""
        self._log("val", self._sums, self._sums[0] / self._sums[1])

    def on_validation_end(self) -> None:
        """Put the training weights back, after callbacks have saved the weights of this evaluation."""
        self._train_weights(True)

    def _measured(self, batch: Any) -> tuple[Tensor, Float[Tensor, " 5"]]:
        """Weighted mean loss of a batch, and sums of loss and weight and of `_decided_sums`."""
        micro = batch.micro if isinstance(batch, MacroBatch) else (PairBatch.of(batch),)
        parts, sums = [], torch.zeros(5, dtype=torch.float64, device=self.device)
        for pairs in micro:
            losses, margins = self.pair_losses(pairs)
            parts.append((losses * pairs.weight).sum())
            own = torch.stack([parts[-1].detach().double(), pairs.weight.double().sum()])
            sums += torch.cat([own, _decided_sums(margins, pairs)])
        return torch.stack(parts).sum() / (batch.total_weight if isinstance(batch, MacroBatch) else sums[1]), sums

    def _log(self, stage: str, sums: Float[Tensor, " 5"], loss: Tensor) -> None:
        weight, correct, margin, decided, mean = torch.cat([sums[1:], loss.to(sums).view(1)]).tolist()
        values = {f"{stage}/loss": mean}
        if decided:
            values |= {f"{stage}/accuracy": correct / decided, f"{stage}/mean_margin": margin / decided}
        self.log_dict(values, prog_bar=True, batch_size=max(1, round(weight)))

    def pair_losses(self, batch: AnyPairBatch) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"]]:
        """Loss and margin of each pair of a micro-batch."""
        if isinstance(self.model, BradleyTerryRM):
            chosen, rejected = batch.split(self.model.rewards_of(batch))
            values = {name: getattr(batch, name) for name in ("margin", "label", "scores")}
            losses = configured_pair_losses(chosen, rejected, self.loss_config, **values)
            return losses, (chosen - rejected).detach()
        assert isinstance(batch, PairBatch), "only decoders of this package share prompts"
        if (batch.label != 1).any() or (batch.weight != 1).any():
            raise DataError(f"{type(self.model).__name__}.compute_loss reads no labels and no weights; leave them out")
        sides = [(batch.input_ids[side::2], batch.attention_mask[side::2]) for side in (0, 1)]
        rewards: dict[int, Tensor] = {}  # by the identity of the ids that `compute_loss` gives the model

        def keep(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], reward: Tensor) -> None:
            rewards[id(given[0] if given else named.get("input_ids"))] = reward.detach()

        with self.model.register_forward_hook(keep, with_kwargs=True):
            loss = self.model.compute_loss(*sides[0], *sides[1])
        with torch.no_grad():  # a second pass, for a loss that computes the rewards in another way
            chosen, rejected = (
                rewards[id(ids)] if id(ids) in rewards else self.model(ids, mask) for ids, mask in sides
            )
        return loss.expand(batch.num_pairs), chosen - rejected

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add everything that `from_pretrained` needs to load the `.ckpt`, and leave out an adapter's base."""
        if isinstance(self.model, BradleyTerryRM):
            checkpoint[PAYLOAD_KEY] = checkpoint_payload(self.model, self.base)
            if self.base is not None:
                kept = {WEIGHTS_PREFIX + name for name in adapter_tensor_names(self.model.model)}
                state = checkpoint["state_dict"]
                checkpoint["state_dict"] = {name: value for name, value in state.items() if name in kept}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of an adapter that was trained with another base."""
        base = ((checkpoint.get(PAYLOAD_KEY) or {}).get("adapter") or {}).get("base")
        if base and (self.base is None or self.base.fingerprint != base["fingerprint"]):
            raise CheckpointError(
                f"the checkpoint holds an adapter of other weights than {base['source']} holds now; restore that base"
            )


class RunModule(RewardModelLightning):
    """Module of a run: weighted mean pair loss of a macro-batch, clipped, one step.

    Optimization is manual, because a macro-batch is split into micro-batches by tokens. Each micro-batch adds
    ``sum_i w_i l_i / W`` with ``W`` the weight of the whole macro-batch over all ranks. So the gradient is the same for
    every split and world size. The whole computation is one closure, so that two-pass optimizers use the same pairs
    twice.

    Args:
        model: the model to fit.
        config: options of the run.
        datamodule: its pairs.
    """

    model: BradleyTerryRM
    validation_step = None  # type: ignore[assignment]  # the run evaluates by a callback, and Lightning warns of others

    def __init__(self, model: BradleyTerryRM, config: TrainConfig, datamodule: PreferenceDataModule) -> None:
        require_bradley_terry(model)
        super().__init__(
            model,
            loss=config.loss,
            optimizer=config.optimizer,
            schedule=config.schedule,
            num_steps=datamodule.num_steps,
        )
        self.automatic_optimization = False
        self.gradient_clip_norm = config.training.gradient_clip_norm
        self.on_out_of_memory = config.hardware.on_out_of_memory
        self.pass_tokens: int | None = None
        self.router_aux_loss_coef = config.model.router_aux_loss_coef or 0.0
        self.pair_ids = datamodule.pair_ids
        self.steps_per_epoch = datamodule.steps_per_epoch
        self.run_dir = Path(config.output_dir)
        self.record: RunRecord | None = None
        self.last_checkpoint: Path | None = None
        self.pairs_seen = 0
        self.passes_made = 0
        self.validation_metrics: dict[str, float] = {}

    def configure_model(self) -> None:
        """Shard the model over the ranks if the strategy does so; called once, before the optimizer is built."""
        strategy = self.trainer.strategy
        if isinstance(strategy, ShardedStrategy) and not is_sharded(self.model):
            shard_model(self.model, strategy.device_mesh["data_parallel"])

    def training_step(self, batch: MacroBatch, batch_idx: int) -> None:
        """Take one optimizer step on a macro-batch and leave its metrics in `step_metrics`."""
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        assert not isinstance(optimizer, list), "one optimizer a run"
        assert isinstance(schedule, LRScheduler), "one schedule a run"
        learning_rate = max(group["lr"] for group in optimizer.param_groups)
        passes: list[dict[str, float]] = []
        device = self.device.type
        forward = torch.autocast(  # the present autocast, as a context that can be entered again
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=torch.is_autocast_enabled(device),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

        def closure() -> Tensor:
            sums, micro, known = None, batch.micro, self.pass_tokens
            while sums is None:
                optimizer.zero_grad()
                micro = self._fitting(micro)
                try:
                    with forward:
                        sums = self._accumulate(replace(batch, micro=micro))
                except torch.OutOfMemoryError as error:
                    self._shrink(micro, error)
            if self.pass_tokens != known:
                self._report_what_fits(batch, micro)
            totals = self._totals(sums, self._clip())
            self._check_finite(batch, totals["loss"], totals["grad_norm"])
            passes.append(totals)
            return torch.tensor(totals["loss"])

        # Lightning's autocast is meant for the forward pass; the optimizers' own matrix products stay in float32.
        with torch.autocast(device, enabled=False):
            try:
                optimizer.step(closure=closure)
            except torch.OutOfMemoryError as error:
                raise OutOfMemory(
                    f"the state of optimizer={self.optimizer_config.name} does not fit into the memory of "
                    f"{self.device}: {error}; train an adapter (adapter=lora), or take more devices"
                ) from error
        schedule.step()
        metrics = {**passes[0], "lr": learning_rate, "num_pairs": len(batch.pair_index)}
        self.step_metrics = {f"train/{name}": value for name, value in metrics.items()}
        self.pairs_seen += len(batch.pair_index)
        self.passes_made += len(passes)
        epoch = {"epoch": self.global_step / self.steps_per_epoch}
        for logger in self.trainer.loggers:
            logger.log_metrics({**epoch, **self.step_metrics}, step=self.global_step)

    def _fitting(self, micro: tuple[AnyPairBatch, ...]) -> tuple[AnyPairBatch, ...]:
        """The micro-batches, halved until each has at most the tokens that are known to fit."""
        parts: list[AnyPairBatch] = []
        for each in micro:
            too_large = self.pass_tokens is not None and each.num_padded_tokens > self.pass_tokens
            halves = each.halves() if too_large else None
            parts += [each] if halves is None else self._fitting(halves)
        return tuple(parts)

    def _shrink(self, micro: tuple[AnyPairBatch, ...], error: torch.OutOfMemoryError) -> None:
        """Halve the tokens of a pass, after one did not fit into memory.

        Raises:
            OutOfMemory: if none can be halved, or several ranks take part.
        """
        largest = max(each.num_padded_tokens for each in micro)
        self.pass_tokens = largest // 2
        if self.trainer.world_size > 1:  # the other ranks wait for this one's gradients
            raise OutOfMemory(
                f"a pass of {largest} tokens does not fit into the memory of {self.device}; set "
                f"batching.micro_token_budget={largest // 2} or less"
            ) from error
        if len(self._fitting(micro)) == len(micro):
            raise OutOfMemory(
                f"the smallest pass, of {largest} tokens, does not fit into the memory of {self.device}, so no "
                "batching.micro_token_budget does; set model.gradient_checkpointing=true or a smaller model.max_length"
            ) from error

    def _report_what_fits(self, batch: MacroBatch, micro: tuple[AnyPairBatch, ...]) -> None:
        """Go on with passes that were halved, if that was asked for.

        Raises:
            OutOfMemory: if not, naming a budget whose passes were computed here.
        """
        tried, fits = (max(each.num_padded_tokens for each in parts) for parts in (batch.micro, micro))
        found = f"a pass of {tried} tokens does not fit into the memory of {self.device}, one of {fits} does"
        if self.on_out_of_memory == OnOutOfMemory.stop:
            raise OutOfMemory(
                f"{found}; set batching.micro_token_budget={fits}, or hardware.on_out_of_memory=halve, which halves "
                "such passes without a change of the gradient"
            )
        log.warning("%s; larger passes are halved from now on, which changes no gradient", found)

    def _accumulate(self, batch: MacroBatch) -> Float[Tensor, " 5"]:
        """Add the gradient of the macro-batch, and return its loss, accuracy and margin as sums over all ranks."""
        strategy, micro = self.trainer.strategy, batch.micro
        if self.splits_model:  # its ranks make passes together, so some follow with weight zero
            count = most_over_ranks(len(micro), self.device)
            micro = tuple(each for each, _ in in_step(micro, spare_batch(self.model, self.device), count))
        sums = torch.zeros(5, dtype=torch.float64, device=self.device)
        balance = self.model.router_balance
        for number, pairs in enumerate(micro, 1):
            waits: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if number < len(micro) and self.splits_model:  # gradients stay on this rank up to the last pass
                waits = unreduced_gradients(self.model)
            elif number < len(micro) and isinstance(strategy, ParallelStrategy):
                waits = strategy.block_backward_sync()
            with waits:
                losses, margins = self.pair_losses(pairs)
                share = (losses * pairs.weight).sum() / batch.total_weight
                router = torch.zeros_like(share)
                if balance is not None:
                    assert isinstance(pairs, PairBatch), "prompts are not shared with a balancing loss"
                    router = balance.loss(pairs.attention_mask) * pairs.weight.sum() / batch.total_weight
                # DDP and FSDP2 take the mean over ranks, we need the sum
                self.manual_backward((share + self.router_aux_loss_coef * router) * self.trainer.world_size)
            parts = torch.stack([share, router]).detach().double()
            sums += torch.cat([parts, _decided_sums(margins, pairs)])
        if not micro:  # the other ranks wait for the reduction of this one's gradients, which are zero
            nothing = [(parameter * 0).sum() for parameter in self.parameters() if parameter.requires_grad]
            self.manual_backward(torch.stack(nothing).sum())
        if self.trainer.world_size > 1:
            sums = strategy.reduce(sums, reduce_op="sum")
        return sums

    def _totals(self, sums: Float[Tensor, " 5"], norm: Float[Tensor, ""]) -> dict[str, float]:
        """The numbers of a step, for which the processor waits once."""
        loss, router_loss, correct, margin, decided, grad_norm = torch.cat([sums, norm.to(sums).view(1)]).tolist()
        accuracy, mean_margin = (total / decided if decided else math.nan for total in (correct, margin))
        found = {"loss": loss, "accuracy": accuracy, "mean_margin": mean_margin, "grad_norm": grad_norm}
        return found if self.model.router_balance is None else {**found, "router_loss": router_loss}

    @property
    def splits_model(self) -> bool:
        """True if FSDP2 splits the model over the ranks."""
        return isinstance(self.trainer.strategy, ShardedStrategy)

    def _clip(self) -> Float[Tensor, ""]:
        """Clip the gradients by the norm over all shards, and return the norm before."""
        limit = self.gradient_clip_norm or float("inf")
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(trainable, limit)
        return whole(norm) if self.splits_model else norm

    def _check_finite(self, batch: MacroBatch, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        is_loss = not math.isfinite(loss)
        what = f"the {'loss' if is_loss else 'gradient norm'} became {loss if is_loss else norm} at step"
        # a checkpoint of the same weights would have the same loss
        bad_from = self.global_step if is_loss else self.global_step + 1
        raise diverged(
            f"{what} {self.global_step + 1}", self.pair_ids(batch.pair_index), self.run_dir, weights_of=bad_from
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the run's record to what the `.ckpt` needs to be loaded."""
        super().on_save_checkpoint(checkpoint)
        if self.record is not None:
            checkpoint[PAYLOAD_KEY][RUN_KEY] = self.record.payload(self.global_step)


def _decided_sums(margins: Float[Tensor, " pairs"], batch: AnyPairBatch) -> Float[Tensor, " 3"]:
    """Weighted sums over the pairs with a preferred response: correctly ranked ones, their margin, their weight."""
    side = torch.sign(batch.label.double() - 0.5)
    lead = side * margins.double()
    right = 0.5 + 0.5 * torch.sign(lead)
    return torch.stack([right, lead, torch.ones_like(lead)]) @ (batch.weight.double() * side.abs())
