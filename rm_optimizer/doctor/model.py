"""Checks of the model: weights and final layer, pooling, padding, batch, dropout, attention kernel and saving."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rm_optimizer.core.classifier.adapters import has_adapter, has_untrained_adapter
from rm_optimizer.core.classifier.attention import choose_attention
from rm_optimizer.core.classifier.head import head_side_modules, initialize_head
from rm_optimizer.core.classifier.pooling import RewardHead, pooling_head_of, pools_last_token
from rm_optimizer.core.classifier.quantization import dtype_name
from rm_optimizer.core.model.losses import bradley_terry_loss
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.padding import pad_sequences
from rm_optimizer.doctor.diagnosis import Check, MeasuredValue, Status, judged, skipped
from rm_optimizer.doctor.probe_conversations import (
    UNIT,
    alone_rewards,
    change_of,
    change_tolerance,
    in_spreads,
    padded_rewards,
    running,
)
from rm_optimizer.errors import CheckpointError

_EXTRA_COLUMNS = 3


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


def _invariance(model: BradleyTerryRM, change: float, good: str, bad: str, **details: MeasuredValue) -> Check:
    """The check that a change of rewards is within the tolerance for arithmetic; NaN fails."""
    tolerance = change_tolerance(model)
    return judged(change <= tolerance, change, UNIT, f"at most {tolerance:g}", good, bad, details=details)


def padding(model: BradleyTerryRM, probe: Sequence[tuple[int, ...]]) -> Check:
    """Padding on the right, and for decoders also on the left, changes no reward."""
    probe = [ids[: max(1, model.max_length - _EXTRA_COLUMNS)] for ids in probe]  # it may have no further position
    sides = {"right": _EXTRA_COLUMNS} | ({"left": -_EXTRA_COLUMNS} if pools_last_token(model.model) else {})
    with running(model, training=False):
        alone = alone_rewards(model, probe)
        changes = {side: change_of(alone, padded_rewards(model, probe, extra=extra)) for side, extra in sides.items()}
    bad = "padding changes rewards, so they are not read at the last attended token; pool by the attention mask"
    good = f"padding on the {' or '.join(sides)} changes no reward"
    worst = max(changes.values(), key=lambda value: torch.inf if value != value else value)
    return _invariance(model, worst, good, bad, **changes)


def batch(model: BradleyTerryRM, probe: Sequence[tuple[int, ...]]) -> Check:
    """A sequence's reward depends neither on the other sequences of its batch nor on its row, without any padding."""
    shortest = min(len(ids) for ids in probe)
    rows = [ids[-shortest:] for ids in probe]
    with running(model, training=False):
        alone = alone_rewards(model, rows)
        together, reversed_ = padded_rewards(model, rows), padded_rewards(model, rows[::-1]).flip(0)
    change = max(change_of(alone, together), change_of(alone, reversed_))
    bad = "a reward depends on the other sequences of its batch; look for batch statistics or state in the model"
    return _invariance(model, change, "a reward is the same alone, in a batch and in any order", bad)


def plain_forward(model: BradleyTerryRM, probe: Sequence[tuple[int, ...]]) -> Check:
    """The classifier's own `transformers` forward pass gives the same rewards on right-padded sequences."""
    if (name := pooling_head_of(model.model)) is not None:
        return skipped("", f"plain transformers has no pooling head '{name}'")
    ids, mask = (tensor.to(model.device) for tensor in pad_sequences(probe, model.pad_choice.token_id))
    with running(model, training=False):
        ours, plain = model(ids, mask).double().cpu(), model.model(input_ids=ids, attention_mask=mask).logits
    if plain.shape != (len(probe), 1):
        shape = "x".join(str(size) for size in plain.shape)
        wrong = f"the classifier gives {shape} logits; load the model with num_labels=1"
        return Check("", Status.fail, shape, "", f"logits of shape {len(probe)}x1", wrong)
    change = change_of(ours, plain.squeeze(-1).double().cpu())
    bad = (
        "plain transformers reads other rewards than training, so a server will too; give the tokenizer a pad token "
        "that ends no sequence and pool the last attended token"
    )
    return _invariance(model, change, "plain transformers gives the same rewards", bad)


def prefix_sharing(model: BradleyTerryRM, probe: Sequence[tuple[int, ...]]) -> Check:
    """Rewards are the same if a prompt is computed once for both of its responses."""
    obstacle = model.supports_prefix_sharing()
    if obstacle is not None:
        return skipped(f"at most {change_tolerance(model):g}", obstacle)
    rows = [np.array(ids, dtype=np.int32) for ids in probe]
    groups = [rows[1:3], *([row] for row in (rows[0], *rows[3:]))]
    with running(model, training=False):
        change = in_spreads(model.prefix_parity(groups), alone_rewards(model, probe))
    bad = "sharing a prompt between its responses changes rewards; set batching.prefix_sharing=off"
    good = "a prompt computed once for both responses gives the same rewards"
    return _invariance(model, change, good, bad)


def dropout(model: BradleyTerryRM, probe: Sequence[tuple[int, ...]]) -> Check:
    """Two passes in training mode give the same rewards."""
    with running(model, training=True):
        first, second = padded_rewards(model, probe), padded_rewards(model, probe)
    adapters = [module.p for name, module in model.named_modules() if "lora_dropout" in name and hasattr(module, "p")]
    bad = "two passes in training mode differ, so dropout is on and rewards are noisy; load with dropout=False"
    check = _invariance(model, change_of(first, second), "two passes in training mode agree", bad)
    if check.status is Status.fail and any(adapters):
        asked = (
            f"adapters have dropout {max(adapters):g}, as their configuration asks; set lora_dropout to 0 to stop it"
        )
        return replace(check, status=Status.warn, explanation=asked)
    return check


def attention_kernel(model: BradleyTerryRM, probe: Sequence[tuple[int, ...]]) -> Check:
    """The attention kernel gives the rewards of eager attention, and is the fastest one available."""
    kernel = str(model.model.config._attn_implementation)
    best = choose_attention(model.model.config, "auto", model.model.dtype)
    expected = f"{best}, with the rewards of eager attention"
    slow = f"{kernel} attention where {best} is at hand; load with attn_implementation=auto"
    if kernel == "eager":
        good = "the model has no other attention kernel"
        return judged(best == "eager", kernel, "", expected, good, slow, otherwise=Status.warn)
    with running(model, training=False):
        fast = padded_rewards(model, probe)
        model.model.set_attn_implementation("eager")
        try:
            eager = padded_rewards(model, probe)
        finally:
            model.model.set_attn_implementation(kernel)
    change = change_of(eager, fast)
    if not change <= change_tolerance(model):
        wrong = f"{kernel} attention gives other rewards than eager; load with attn_implementation=eager"
        return Check("", Status.fail, kernel, "", expected, wrong, {"change": change})
    good = f"{kernel} attention gives the rewards of eager attention"
    verdict = (kernel.startswith(best), kernel, "", expected, good, slow)
    return judged(*verdict, otherwise=Status.warn, details={"change": change})


def save_reload(model: BradleyTerryRM) -> Check:
    """The model gives the probe the same rewards after it is saved and loaded by plain `transformers`."""
    expected, unit = "rewards equal within the certificate's tolerance", "of max(1, |reward|)"
    if model.model.config.num_labels != 1:
        return skipped(expected, "only a model with one label can be saved as a reward model")
    with tempfile.TemporaryDirectory(prefix="rm-opt-doctor-") as folder:
        try:
            certificate = model.save_pretrained(Path(folder, "export"))
        except (CheckpointError, ValueError, RuntimeError) as error:  # transformers itself raises the last two
            return Check("", Status.fail, None, unit, expected, f"the model cannot be saved: {error}")
    details = {"tolerance": certificate.tolerance, "max_difference": certificate.max_difference}
    explanation = f"the saved model scores the same{' in plain transformers' * (pooling_head_of(model.model) is None)}"
    return Check("", Status.ok, certificate.relative_difference, unit, expected, explanation, details)
