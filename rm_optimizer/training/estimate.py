"""Memory, disk and time of a run before it starts, from the model's configuration and the pairs, without weights."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoTokenizer

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.classifier.building import LoadOptions, build, read_config
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.model_files import find_source
from rm_optimizer.core.tokens.batching import AnyPairBatch, PairBatch
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.core.tokens.tokenizer import tokenizer_of_pairs
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import ConfigError
from rm_optimizer.optim import OPTIMIZERS, build_optimizer
from rm_optimizer.optim.param_groups import describe_groups
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.locations import SourceKind
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.adapters import AdapterKind
from rm_optimizer.schema.config import PrefixSharing
from rm_optimizer.schema.data import Streaming
from rm_optimizer.training.callbacks.memory_profile import (
    CPU_MEMORY,
    GPU_MEMORY,
    PEAK_BF16_FLOPS,
    PROFILE_FILE,
    ModelFlops,
)
from rm_optimizer.training.data.run_data import data_module, load_data, order_of
from rm_optimizer.training.preparation import freeze
from rm_optimizer.training.run import run_training

UTILIZATION = 0.35
"""Share of a chip's bfloat16 peak that the estimate of time assumes."""
SAMPLED_STEPS = 8
"""Steps, evenly over the run, whose batches are counted."""


@dataclass(frozen=True)
class RunEstimate(JsonRecord):
    """Memory of each device of a run in bytes, its disk, and its work.

    Args:
        parameters: parameters of the model, a weight in four bits once.
        trainable: those that train.
        weights: bytes of the weights.
        gradients: bytes of the gradients.
        optimizer: bytes of the optimizer's state.
        activations: bytes kept for the backward pass of the largest micro-batch.
        working: bytes of one layer's tensors once more, for their gradients or since they are computed again.
        tokens: tokens of that micro-batch, padding included.
        checkpoint: bytes of one checkpoint.
        disk: bytes of the run folder: checkpoints, best weights and export.
        steps: optimizer steps.
        operations: floating-point operations of all steps; None for models without a formula.
    """

    parameters: int
    trainable: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    tokens: int
    checkpoint: int
    disk: int
    steps: int
    operations: float | None

    @property
    def memory(self) -> int:
        """Bytes on a device in the backward pass of the largest micro-batch."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working

    def sentences(self, chip: str | None = None) -> tuple[str, str, str]:
        """Memory of a device, disk of the run, and its time on a chip of `PEAK_BF16_FLOPS`, each in a line.

        Raises:
            ConfigError: if the chip is unknown.
        """
        if chip is not None and chip not in PEAK_BF16_FLOPS:
            raise ConfigError(f"--chip must be one of {', '.join(sorted(PEAK_BF16_FLOPS))}, got '{chip}'")
        time = f"time: {self.steps:,} steps"
        if self.operations is None:
            time += "; the operations of this model are unknown, so measure three of them with --measure"
        else:
            time += f" of {self.operations / self.steps:.3g} operations"
            if chip is None:
                time += "; name a chip (--chip H100), or measure three of them here (--measure)"
            else:
                seconds = self.operations / (UTILIZATION * PEAK_BF16_FLOPS[chip])
                time += f", {_duration(seconds)} on one {chip} if it reaches {UTILIZATION:.0%} of its bfloat16 peak"
        parts = f"weights {_size(self.weights)}, gradients {_size(self.gradients)}, optimizer {_size(self.optimizer)}"
        return (
            f"memory: {_size(self.memory)} on each device: {parts}, "
            f"backward pass of {self.tokens:,} tokens {_size(self.activations + self.working)}",
            f"disk: {_size(self.disk)}, each checkpoint {_size(self.checkpoint)}",
            time,
        )


def measured(config: TrainConfig, steps: int) -> str:
    """Run three steps in a temporary folder, and tell the time of a run and the memory in one sentence.

    Args:
        config: the composed options, changed in place.
        steps: optimizer steps of the run.
    """
    config.training.max_steps, config.training.eval_at_start, config.profile_memory = 3, False, True
    config.training.suites, config.schedule.warmup_steps, config.schedule.warmup_ratio = None, None, 0.0
    config.logger = replace(config.logger, tensorboard=False, wandb=False)
    with tempfile.TemporaryDirectory() as folder:
        config.output_dir = folder
        run_training(config)
        profile = json.loads((Path(folder) / PROFILE_FILE).read_text(encoding="utf-8"))
    median = profile["median"]
    memory = next(median[name] for name in (GPU_MEMORY[0], CPU_MEMORY[1]) if name in median)
    return (
        f"measured: {median['step_seconds']:.3g} s a step on {profile['device']}, "
        f"{_duration(median['step_seconds'] * steps)} for all without evaluations; "
        f"{_size(memory)} ({profile['memory']})"
    )


def estimate_run(config: TrainConfig) -> RunEstimate:
    """Count what a run needs, on tensors without data; the model's weights are not read.

    Args:
        config: the composed options.

    Raises:
        ConfigError: if the options cannot be counted: four bits, streamed pairs, or a base that is no folder or hub id.
    """
    if config.adapter.kind == AdapterKind.qlora:
        raise ConfigError(
            "an estimate does not know weights in four bits; take adapter=lora, whose weights need eight times as much"
        )
    if config.data.streaming != Streaming.off:
        raise ConfigError("an estimate needs pairs in memory; set data.streaming=off and data.max_pairs")
    config.data.num_workers, config.hardware.pin_memory = 0, False
    data = load_data(config)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = _skeleton(config, data.train, fake)
    if config.batching.prefix_sharing == PrefixSharing.auto:  # which compares rewards
        can_share = model.supports_prefix_sharing() is None
        config.batching.prefix_sharing = PrefixSharing.on if can_share else PrefixSharing.off
    batches = data_module(data, config, model, order_of(data, config))
    head, steps = model.head_parameter_names(), batches.num_steps
    with fake:
        optimizer = build_optimizer(model, config.optimizer, head_names=head, num_steps=steps)
    state = 0
    for row in describe_groups(optimizer):
        entry = OPTIMIZERS[row.algorithm if row.algorithm in OPTIMIZERS else config.optimizer.name]
        state += int(row.num_parameters * entry.state_bytes_per_param)
    sampled = min(SAMPLED_STEPS, steps)
    places = [number * steps // sampled for number in range(sampled)]
    micro = [batch for place in places for batch in next(iter(batches.steps(place, place + 1))).micro]
    flops = ModelFlops.of_model(model)
    operations = None if flops is None else sum(map(flops.of_batch, micro)) / sampled * steps
    largest = max(micro, key=lambda batch: batch.num_padded_tokens)
    half = torch.autocast("cpu", torch.bfloat16, enabled="bf16" in config.hardware.precision)
    with fake, half:
        activations = whole = kept_bytes(model, largest)
        if config.model.gradient_checkpointing:  # a layer is computed again, and then keeps all of its tensors
            model.model.gradient_checkpointing_disable()
            whole = kept_bytes(model, largest)
    parameters = list(model.parameters())
    trainable = [each for each in parameters if each.requires_grad]
    shards = config.hardware.devices if config.hardware.strategy.startswith("fsdp") else 1
    weights, trained = _bytes(parameters), _bytes(trainable)
    is_apart = config.adapter.kind != AdapterKind.none and config.model.path is not None
    stored = trained if is_apart else weights
    return RunEstimate(
        parameters=sum(map(Tensor.numel, parameters)),
        trainable=sum(map(Tensor.numel, trainable)),
        weights=weights // shards,
        gradients=trained // shards,
        optimizer=state // shards,
        activations=activations,
        working=whole // model.model.config.get_text_config().num_hidden_layers,
        tokens=largest.num_padded_tokens,
        checkpoint=stored + state,
        disk=config.training.keep_checkpoints * (stored + state) + stored + weights,
        steps=steps,
        operations=operations,
    )


def _skeleton(config: TrainConfig, train: PreferenceDataset, fake: FakeTensorMode) -> BradleyTerryRM:
    """The model of a run with tensors that have shapes and no data."""
    options = LoadOptions(
        "sdpa",
        config.model.dropout,
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
        dtype=getattr(torch, config.model.dtype.value),
    )
    if config.model.path is None:
        tokenizer = tokenizer_of_pairs(train.pairs, config.model.vocab_size)
        fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id} | config.model.architecture
        described = AutoConfig.for_model(fields.pop("model_type"), **fields)
    else:
        source = find_source(config.model.path, config.model.revision)
        if source.kind not in (SourceKind.FOLDER, SourceKind.HUB):
            raise ConfigError(f"an estimate needs a model folder or hub id, got {config.model.path}")
        described = read_config(source.location, options)
        tokenizer = AutoTokenizer.from_pretrained(
            source.location, revision=config.model.revision, trust_remote_code=config.model.trust_remote_code
        )
    if tokenizer.chat_template is None:
        TemplateWriter(tokenizer).write_for_training()  # as training does
    with torch.device("meta"):
        model = BradleyTerryRM(build(described, options), tokenizer=tokenizer, max_length=config.model.max_length)
        add_adapter(model.model, config.adapter, seed=config.seed)
    if config.model.freeze is not None:
        freeze(model, config.model.freeze)
    if config.model.gradient_checkpointing:
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with fake:
        model.to_empty(device="cpu")
    model.train()
    return model


def _bytes(tensors: list[nn.Parameter]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def kept_bytes(model: BradleyTerryRM, batch: AnyPairBatch) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward pass, weights left out."""
    own = {each.untyped_storage()._cdata for each in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if isinstance(batch, PairBatch):  # the wrapper looks at values of the mask, which fake tensors do not have
            result = model.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        else:
            result = model.rewards_of(batch)
    del result  # held until here, as what it keeps is freed with it
    return sum(kept.values())
