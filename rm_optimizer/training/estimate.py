"""Memory, disk and time of a run before it starts, from the model's configuration and the pairs, without weights."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AutoConfig, AutoTokenizer

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.classifier.attention import keeping_padding
from rm_optimizer.core.classifier.building import LoadOptions, build, read_config
from rm_optimizer.core.classifier.head import head_side_modules
from rm_optimizer.core.classifier.quantization import parameter_size
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.model_files import find_source
from rm_optimizer.core.tokens.batching import AnyPairBatch, PairBatch
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.core.tokens.tokenizer import tokenizer_of_pairs
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import CheckpointError, ConfigError
from rm_optimizer.optim import OPTIMIZERS, build_optimizer
from rm_optimizer.optim.param_groups import describe_groups
from rm_optimizer.records.codec import JsonRecord
from rm_optimizer.records.locations import SourceKind
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.adapters import AdapterKind
from rm_optimizer.schema.config import PrefixSharing
from rm_optimizer.training.callbacks.memory_profile import PEAK_BF16_FLOPS, ModelFlops
from rm_optimizer.training.data.in_memory import PreferenceDataModule
from rm_optimizer.training.data.run_data import FIRST_PAIRS, data_module, load_data, order_of
from rm_optimizer.training.preparation import freeze

log = logging.getLogger("rm_optimizer")

UTILIZATION = 0.35
"""Share of a chip's bfloat16 peak that the estimate of time assumes."""
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
"""Mode in which tensors have shapes and no data."""
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
        activations: bytes kept for the backward pass of the largest micro-batch; None if the forward pass cannot be
            followed without data, as in some mixtures of experts.
        working: bytes of one layer's tensors once more, for their gradients or since they are computed again.
        tokens: tokens of that micro-batch, padding included.
        checkpoint: bytes of one checkpoint.
        kept_checkpoints: number of checkpoints that are kept.
        export: bytes of the best weights and of the export.
        steps: optimizer steps.
        operations: floating-point operations of all steps; None for models without a formula.
    """

    parameters: int
    trainable: int
    weights: int
    gradients: int
    optimizer: int
    activations: int | None
    working: int | None
    tokens: int
    checkpoint: int
    kept_checkpoints: int
    export: int
    steps: int
    operations: float | None

    @property
    def memory(self) -> int:
        """Bytes on a device in the backward pass of the largest micro-batch, as far as they are known."""
        known = self.weights + self.gradients + self.optimizer
        return known if self.activations is None or self.working is None else known + self.activations + self.working

    @property
    def disk(self) -> int:
        """Bytes of the run folder."""
        return self.kept_checkpoints * self.checkpoint + self.export

    def sentences(self, chip: str | None = None) -> tuple[str, str, str]:
        """Memory of a device, disk of the run, and its time on a chip of `PEAK_BF16_FLOPS`, each in a line.

        Raises:
            ConfigError: if the chip is unknown.
        """
        peak = None if chip is None else peak_of_chip(chip)
        time = f"time: {self.steps:,} steps"
        if self.operations is None:
            time += "; the operations of this model are unknown, so measure three of them with --measure"
        else:
            time += f" of {self.operations / self.steps:.3g} operations"
            if peak is None:
                time += "; name a chip (--chip H100), or measure three of them here (--measure)"
            else:
                seconds = self.operations / (UTILIZATION * peak)
                time += f", {duration(seconds)} on one {chip} if it reaches {UTILIZATION:.0%} of its bfloat16 peak"
        parts = f"weights {size(self.weights)}, gradients {size(self.gradients)}, optimizer {size(self.optimizer)}"
        backward = self.memory - self.weights - self.gradients - self.optimizer
        last = f"backward pass of {self.tokens:,} tokens {size(backward)}"
        if self.activations is None:
            last = (
                f"without the backward pass of {self.tokens:,} tokens, which needs the values of this model's tensors"
            )
        return (
            f"memory: {size(self.memory)} on each device: {parts}, {last}",
            f"disk: {size(self.disk)}: up to {self.kept_checkpoints} checkpoints of {size(self.checkpoint)}, "
            f"best weights and export {size(self.export)}",
            time,
        )


def peak_of_chip(chip: str) -> float:
    """Dense bfloat16 peak of a chip in FLOP/s.

    Raises:
        ConfigError: if the chip is unknown.
    """
    if chip not in PEAK_BF16_FLOPS:
        raise ConfigError(f"--chip must be one of {', '.join(sorted(PEAK_BF16_FLOPS))}, got '{chip}'")
    return PEAK_BF16_FLOPS[chip]


def estimate_run(config: TrainConfig) -> RunEstimate:
    """Count what a run needs, on tensors without data; the model's weights are not read.

    Args:
        config: the composed options, changed in place.

    Raises:
        ConfigError: if the base model is no folder or hub id.
    """
    data = load_data(config)
    model = _skeleton(config, data.train)
    if config.batching.prefix_sharing == PrefixSharing.auto:  # which compares rewards
        can_share = model.supports_prefix_sharing() is None
        config.batching.prefix_sharing = PrefixSharing.on if can_share else PrefixSharing.off
    return count_run(config, model, data_module(data, config, model, order_of(data, config)))


def count_run(config: TrainConfig, model: BradleyTerryRM, batches: PreferenceDataModule) -> RunEstimate:
    """Count what a run needs by its model, on tensors without data, and its batches.

    Args:
        config: the composed options.
        model: the model to train, with or without its weights.
        batches: pairs of the run; of streamed ones the first are counted.
    """
    steps = batches.num_steps
    optimizer = build_optimizer(model, config.optimizer, head_names=model.head_parameter_names(), num_steps=steps)
    state = 0
    for row in describe_groups(optimizer):
        entry = OPTIMIZERS[row.algorithm if row.algorithm in OPTIMIZERS else config.optimizer.name]
        known = entry.state_bytes_per_param
        if math.isnan(known):
            log.warning("the state of optimizer=%s is not known, and counts as AdamW's", config.optimizer.name)
            known = OPTIMIZERS["adamw"].state_bytes_per_param
        state += int(row.num_parameters * known)
    sampled = min(SAMPLED_STEPS, steps)
    places = [number * steps // sampled for number in range(sampled)]
    packed = batches.macro_batches()
    micro = [batch for place in places for batch in packed[place].micro]
    flops = ModelFlops.of_model(model)
    operations = None if flops is None else sum(map(flops.of_batch, micro)) / sampled * steps
    largest = max(micro, key=lambda batch: batch.num_padded_tokens)
    half = torch.autocast("cpu", torch.bfloat16, enabled="bf16" in config.hardware.precision)
    with half:
        activations, working = _backward_bytes(model, largest)
    parameters = list(model.parameters())
    shards = config.hardware.devices if config.hardware.strategy.startswith("fsdp") else 1
    trainable = sum(each.numel() for each in parameters if each.requires_grad)
    gradients = 4 * trainable  # float32 for weights in bfloat16 too
    is_apart = config.adapter.kind != AdapterKind.none and config.model.path is not None
    weights = _stored_bytes(model, in_four_bits=config.adapter.kind == AdapterKind.qlora)
    stored = gradients if is_apart else weights
    return RunEstimate(
        parameters=sum(map(parameter_size, parameters)),
        trainable=trainable,
        weights=weights // shards,
        gradients=gradients // shards,
        optimizer=state // shards,
        activations=activations,
        working=working,
        tokens=largest.num_padded_tokens,
        checkpoint=stored + state,
        kept_checkpoints=config.training.keep_checkpoints,
        export=stored + _stored_bytes(model, in_four_bits=False),
        steps=steps,
        operations=operations,
    )


NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""Bytes of a weight in four bits and of its share of the doubly quantized constants (Dettmers et al., 2023)."""


def _stored_bytes(model: BradleyTerryRM, *, in_four_bits: bool) -> int:
    """Bytes of the weights, with the frozen matrices of the layers in four bits or in the type they have unpacked."""
    side = tuple(f"model.{name}." for name in head_side_modules(model.model))
    total = 0.0
    for name, module in model.named_modules():
        is_layer = isinstance(module, nn.Linear) and not f"{name}.".startswith(side)
        for parameter in module.parameters(recurse=False):
            type_of = getattr(parameter, "quant_state", parameter)
            is_packed = in_four_bits and is_layer and parameter.ndim == 2 and not parameter.requires_grad
            total += parameter_size(parameter) * (NF4_BYTES if is_packed else type_of.dtype.itemsize)
    return int(total)


def _skeleton(config: TrainConfig, train: PreferenceDataset) -> BradleyTerryRM:
    """The model of a run with tensors that have shapes and no data."""
    options = LoadOptions(
        "sdpa",
        config.model.dropout,
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
        dtype=getattr(torch, config.model.dtype.value),
    )
    fields, pairs = dict(config.model.architecture), train.pairs
    try:
        source = None if config.model.path is None else find_source(config.model.path, config.model.revision)
    except CheckpointError as error:
        known = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
        if config.model.path not in known:
            raise
        log.warning(
            "%s; counted by its published configuration, with a tokenizer learned from the pairs, whose numbers of "
            "tokens differ from its own",
            error,
        )
        source, fields, pairs = None, known[config.model.path], pairs[:FIRST_PAIRS]
    if source is None:
        tokenizer = tokenizer_of_pairs(pairs, fields.get("vocab_size", config.model.vocab_size))
        fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id} | fields
        described = AutoConfig.for_model(fields.pop("model_type"), **fields)
    else:
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
        adapter = config.adapter  # matrices in four bits keep as much for the backward pass as whole ones
        if adapter.kind == AdapterKind.qlora:
            adapter = replace(adapter, kind=AdapterKind.lora)
        add_adapter(model.model, adapter, seed=config.seed)
    if config.model.freeze is not None:
        freeze(model, config.model.freeze)
    if config.model.gradient_checkpointing:
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with FAKE:
        return model.to_empty(device="cpu").train()


def _backward_bytes(model: BradleyTerryRM, batch: AnyPairBatch) -> tuple[int, int] | tuple[None, None]:
    """Bytes that a backward pass needs, and one layer's; None if the forward pass reads values of tensors."""
    recomputed: list[Any] = [each for each in model.modules() if getattr(each, "gradient_checkpointing", False)]
    torch_log = logging.getLogger("torch._subclasses.fake_tensor")
    torch_log.disabled = True  # it logs the stack of the error that is caught here
    try:
        with FAKE, torch.compiler.set_stance("force_eager"), keeping_padding(model.model):
            kept = whole = kept_bytes(model, batch)
            if recomputed:  # a layer is computed again, and then keeps all of its tensors
                for each in recomputed:
                    each.gradient_checkpointing = False
                whole = kept_bytes(model, batch)
    except Exception as error:
        log.debug("the forward pass without data ended with %s: %s", type(error).__name__, error)
        return None, None
    finally:
        torch_log.disabled = False
        for each in recomputed:
            each.gradient_checkpointing = True
    return kept, whole // model.model.config.get_text_config().num_hidden_layers


def duration(seconds: float) -> str:
    """Seconds in hours, minutes or seconds, whichever is the largest unit that is reached."""
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def size(count: float) -> str:
    """Bytes as GiB, or as MiB below one."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def kept_bytes(model: BradleyTerryRM, batch: AnyPairBatch) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward pass, weights left out."""
    weights = [*model.parameters()]
    fakes = [each if isinstance(each, FakeTensor) else FAKE.from_tensor(each) for each in weights]
    own = {each.untyped_storage()._cdata for each in (*weights, *fakes)}
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
