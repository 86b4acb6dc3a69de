"""Tensors of a trainer's model for an update, and the rewards by which the server verifies them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rm_optimizer.core.classifier.adapters import has_adapter
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.adapter_files import merged_state
from rm_optimizer.core.storage.certificate import DEFAULT_PROBE
from rm_optimizer.errors import ConfigError
from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.update_protocol import TensorSpec, WeightProbe
from rm_optimizer.serving.weights.live_weights import dtype_name, names_of_mode, tensor_sha256

PROBE_TOLERANCE = {"cpu": 1e-4}
OTHER_TOLERANCE = 1e-3
"""Tolerance of a sender on another kind of device than the CPU."""


def sent_tensors(model: BradleyTerryRM, mode: RewardModelTrainingMode) -> dict[str, Tensor]:
    """The tensors of a mode, by their names in the `transformers` classifier.

    `full` is the plain classifier, an adapter merged into it; `head_only` the final layer; `lora` the adapter with the
    head-side modules that train beside it.

    Raises:
        ConfigError: if the mode is `lora` and the model has no adapter, or `head_only` and it has.
    """
    inner = model.model
    if mode is RewardModelTrainingMode.lora and not has_adapter(inner):
        raise ConfigError("mode lora sends an adapter, and the model has none; use full or head_only")
    if mode is RewardModelTrainingMode.head_only and has_adapter(inner):
        raise ConfigError("mode head_only leaves out the adapter that the model has; use lora or full")
    if mode is RewardModelTrainingMode.full and has_adapter(inner):
        return merged_state(inner)
    state = inner.state_dict()
    return {name: state[name] for name in sorted(names_of_mode(inner, mode))}


def manifest(tensors: Mapping[str, Tensor]) -> list[TensorSpec]:
    """Names, shapes, types and digests, in the order of the names."""
    return [
        TensorSpec(name=name, shape=list(tensor.shape), dtype=dtype_name(tensor.dtype), sha256=tensor_sha256(tensor))
        for name, tensor in sorted(tensors.items())
    ]


def weight_probe(model: BradleyTerryRM) -> WeightProbe:
    """Probe of short conversations with their rewards by the model in memory."""
    prompts, responses = (list(column) for column in zip(*DEFAULT_PROBE[:4], strict=True))
    return WeightProbe(
        input_ids=[list(encoding.ids) for encoding in model.renderer.encode_batch(prompts, responses)],
        rewards=model.score(prompts, responses).tolist(),
        tolerance=PROBE_TOLERANCE.get(model.device.type, OTHER_TOLERANCE),
    )
