"""Checks of the weights, and of the final layer: initialization, precision, gradient, outputs and activation."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from rm_optimizer.core.classifier.adapters import has_adapter, has_untrained_adapter
from rm_optimizer.core.classifier.head import head_side_modules, initialize_head
from rm_optimizer.core.classifier.pooling import RewardHead
from rm_optimizer.core.classifier.quantization import dtype_name
from rm_optimizer.core.model.losses import bradley_terry_loss
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.padding import pad_sequences
from rm_optimizer.doctor.diagnosis import Check, Status, judged, skipped
from rm_optimizer.doctor.probe_conversations import running


def is_head_fresh(model: BradleyTerryRM) -> bool:
    """True if the head still has its initial weights, which are drawn again from the recorded seed to compare."""
    drawn_from = re.fullmatch(r"normal\(.*\), seed=(\d+)", model.head_init)
    if drawn_from is None:
        return False
    again = RewardHead(model.reward_head.in_features, 1, bias=False)
    initialize_head(again, int(drawn_from[1]))
    rounding = torch.finfo(model.model.dtype).eps
    return torch.allclose(model.reward_head.weight.float().cpu(), again.weight, rtol=rounding, atol=0)


def finite_weights(model: BradleyTerryRM) -> Check:
    """No weight is NaN or infinite."""
    broken = [
        name
        for name, weight in model.model.named_parameters()
        if weight.is_floating_point() and not weight.detach().float().isfinite().all()
    ]
    bad = (
        f"values that are not finite in {', '.join(broken[:3])}; every reward may be wrong, so give another checkpoint"
    )
    unit = "weights with values that are not finite"
    return judged(not broken, len(broken), unit, "0", "all weights are finite", bad)


def head_init(model: BradleyTerryRM) -> Check:
    """The head's weights are finite and not all zero; a fresh head is small, so that the first loss is log 2."""
    weight = model.reward_head.weight.detach().double()
    std, fresh_std = float(weight.square().mean().sqrt()), 1 / (weight.shape[1] + 1)
    is_fresh = is_head_fresh(model)
    is_usable = 0 < std < torch.inf
    good = "the head is at its random start" if is_fresh else "the head has trained weights"
    bad = "the head's weights are zero or not finite, so rewards do not tell responses apart; train again"
    expected, unit = f"finite and more than 0; {fresh_std:.3g} at the start", "root mean square of the weights"
    details = {"origin": model.head_init, "fresh": str(is_fresh)}
    return judged(is_usable, std, unit, expected, good, bad, details=details)


def adapter_trained(model: BradleyTerryRM) -> Check:
    """An adapter of a model with a trained head was trained too."""
    if not has_adapter(model.model):
        return skipped("", "the model has no adapter")
    is_zero = has_untrained_adapter(model.model)
    good = "adapter and head are at their start" if is_zero else "the adapter has trained weights"
    bad = (
        "all lora_B are zero, so the adapter adds nothing to the base, although the head is trained; check that "
        "training reached it, and that its weights were saved"
    )
    is_good, expected = not is_zero or is_head_fresh(model), "not zero if the head is trained"
    return judged(is_good, "zero" if is_zero else "not zero", "factors B", expected, good, bad, otherwise=Status.warn)


def head_dtype(model: BradleyTerryRM, probe: Sequence[tuple[int, ...]]) -> Check:
    """The head computes in float32 or float64, even under bfloat16 autocast."""
    with running(model, training=False), torch.autocast(model.device.type, dtype=torch.bfloat16):
        ids, mask = (tensor.to(model.device) for tensor in pad_sequences(probe, model.pad_choice.token_id))
        rewards = model(ids, mask)
    kinds = (model.reward_head.weight.dtype, rewards.dtype)
    is_exact = all(kind in (torch.float32, torch.float64) for kind in kinds)
    is_rounded = bool((rewards == rewards.bfloat16()).all() and rewards.unique().numel() > 1)
    name = dtype_name(kinds[1] if is_exact else kinds[0])
    good = "the head computes in full precision inside mixed precision"
    bad = "the head rounds rewards to a half type, which ties unequal responses; compute it in float32"
    is_good, details = is_exact and not is_rounded, {"rounded_under_autocast": str(is_rounded)}
    return judged(is_good, name, "", "float32 or float64", good, bad, details=details)


def head_trainable(model: BradleyTerryRM, probe: Sequence[tuple[int, ...]]) -> Check:
    """The head's gradient of a pair's loss is finite and not zero."""
    expected, unit = "more than 0", "norm of the loss's gradient"
    frozen = [
        f"{module}.{name}"
        for module in head_side_modules(model.model)
        for name, parameter in model.model.get_submodule(module).named_parameters()
        if not parameter.requires_grad
    ]
    if frozen:
        reason = f"{', '.join(frozen)} on the head's side require no gradient; unfreeze them before training"
        return Check("", Status.fail, 0.0, unit, expected, reason)
    ids, mask = (tensor.to(model.device) for tensor in pad_sequences(probe[1:3], model.pad_choice.token_id))
    with running(model, training=False), torch.enable_grad():
        rewards = model(ids, mask)
        gradient = torch.autograd.grad(bradley_terry_loss(rewards[:1], rewards[1:]), model.reward_head.weight)[0]
    norm = float(gradient.norm())
    bad = "the head gets no usable gradient from a pair; check that hidden states are finite and differ"
    is_usable = 0 < norm < torch.inf
    return judged(is_usable, norm, unit, expected, "the head learns from a pair", bad)


def single_label(model: BradleyTerryRM) -> Check:
    """Check for one output in both head and configuration."""
    config, outputs = model.model.config, model.reward_head.out_features
    good = "the head has one output and the configuration says so"
    bad = f"configuration and head have {config.num_labels} and {outputs} labels; load the model with num_labels=1"
    is_single = config.num_labels == outputs == 1
    return judged(is_single, config.num_labels, "labels", "1 label", good, bad)


def raw_reward(model: BradleyTerryRM) -> Check:
    """The configuration makes servers return the raw output; for classification they apply a sigmoid or softmax."""
    kind = model.model.config.problem_type
    good = "servers apply no activation to a regression"
    bad = "servers may apply a sigmoid or softmax to the reward; set problem_type to 'regression'"
    return judged(kind == "regression", str(kind), "", "problem_type regression", good, bad)
