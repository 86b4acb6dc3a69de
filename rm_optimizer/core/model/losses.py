"""The Bradley-Terry loss and its regularizers: pure functions of rewards.

Every function takes rewards of shape `(pairs,)` and computes in float32 or better for every type of them. It is finite
and has the right gradient for margins of any finite size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from inspect import isfunction, signature
from typing import Protocol, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rm_optimizer.errors import ConfigError, did_you_mean
from rm_optimizer.schema import LossConfig
from rm_optimizer.schema.registry import Registry, import_plugins

MarginLoss: TypeAlias = Callable[[Tensor], Tensor]
"""Loss of each pair by the margin of the better response, shape (pairs,)."""


class PairLoss(Protocol):
    """Loss of each pair by its rewards, in place of Bradley-Terry's."""

    def __call__(
        self,
        chosen: Float[Tensor, " pairs"],
        rejected: Float[Tensor, " pairs"],
        /,
        *,
        margin: Float[Tensor, " pairs"],
        label: Float[Tensor, " pairs"],
    ) -> Float[Tensor, " pairs"]:
        """Loss of each pair, given the margin it ought to have and the probability that `chosen` is better."""
        ...


LossT = TypeVar("LossT", bound=PairLoss | MarginLoss)
LOSSES: Registry[PairLoss] = Registry("loss")
"""Losses that users have registered."""


def register_loss(name: str) -> Callable[[LossT], LossT]:
    """Decorator that makes a function of the rewards a loss of runs: `loss.name=NAME`.

    A function `f` of one argument gets the margins `z = c - r - margin`; with the label `y` its loss is
    `y f(z) + (1 - y) f(-z)`.

    Args:
        name: name of the loss, as the user types it.

    Raises:
        ConfigError: if the name is taken, or the function does not return one finite, differentiable loss a pair that
            is the same in every batch.

    Example:
        >>> @register_loss("hinge")
        ... def hinge(chosen, rejected, *, margin, label):
        ...     return torch.relu(1 + margin - (2 * label - 1) * (chosen - rejected))
    """

    def add(loss: LossT) -> LossT:
        LOSSES.add(name, _checked(name, loss), made_by=loss)
        return loss

    return add


def loss_named(name: str) -> PairLoss:
    """The loss that `loss.name` means: a registered one, or the function of `module:function`.

    Raises:
        ConfigError: if it is unknown, or `register_loss` does not accept the function.
    """
    return _imported(name) if ":" in name else LOSSES[name]


@cache
def _imported(name: str) -> PairLoss:
    module, _, function = name.partition(":")
    import_plugins([module], "loss.name")
    content = vars(import_module(module))
    if not callable(content.get(function)):
        known = [key for key, value in content.items() if isfunction(value) and value.__module__ == module]
        raise ConfigError(did_you_mean(f"function of {module} in loss.name", function, known))
    return _checked(name, content[function])


def _checked(name: str, function: PairLoss | MarginLoss) -> PairLoss:
    """The function as a loss of pairs, once it is found to be one."""
    loss: PairLoss = partial(_of_margins, function) if len(signature(function).parameters) == 1 else function  # type: ignore[assignment, arg-type]
    try:
        signature(loss).bind(None, None, margin=None, label=None)
    except TypeError as error:
        raise ConfigError(
            f"the loss '{name}' must take (chosen, rejected, *, margin, label), or the margins alone, got "
            f"{signature(function)}: {error}"
        ) from error
    _require_pairwise(name, loss)
    return loss


def _of_margins(function: MarginLoss, chosen: Tensor, rejected: Tensor, *, margin: Tensor, label: Tensor) -> Tensor:
    z = chosen - rejected - margin
    return label * function(z) + (1 - label) * function(-z)


@torch.enable_grad()
def _require_pairwise(name: str, loss: PairLoss) -> None:
    """Refuse a loss that is not one finite number a pair, independent of the other pairs, with the right gradient."""
    draws = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    chosen, rejected, margin, label = *draws[:2], draws[2].abs(), draws[3].sigmoid()

    def losses(c: Tensor, r: Tensor, at: slice = slice(None)) -> Tensor:
        return loss(c[at], r[at], margin=margin[at], label=label[at])

    whole, far = losses(chosen, rejected), torch.tensor([1e4, -1e4] * 3, dtype=torch.float64)
    if not isinstance(whole, Tensor) or whole.shape != chosen.shape:
        got = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
        raise ConfigError(f"the loss '{name}' must return one number a pair, of shape (6,) for 6 pairs, got {got}")
    parts = torch.cat([losses(chosen, rejected, slice(0, 2)), losses(chosen, rejected, slice(2, 6))])
    if not torch.allclose(parts, whole):
        raise ConfigError(f"the loss '{name}' of a pair must not depend on the other pairs; leave out means over pairs")
    if not losses(far, -far).isfinite().all():
        raise ConfigError(f"the loss '{name}' must be finite at margins of 10,000; use logsigmoid or softplus")
    inputs = chosen.requires_grad_(), rejected.requires_grad_()
    if not (losses(*inputs).requires_grad and torch.autograd.gradcheck(losses, inputs, raise_exception=False)):
        raise ConfigError(f"the loss '{name}' must be differentiable in both rewards; leave out detach and item")


def bradley_terry_pair_losses(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    *,
    beta: float = 1.0,
    label_smoothing: float = 0.0,
    margin: Float[Tensor, " pairs"] | None = None,
    label: Float[Tensor, " pairs"] | None = None,
    center_rewards: float = 0.0,
    reward_l2: float = 0.0,
) -> Float[Tensor, " pairs"]:
    """Loss of each pair under Bradley-Terry, its regularizers included.

    `-p log sigmoid(z) - (1 - p) log sigmoid(-z) + center_rewards (c + r)^2 + reward_l2 (c^2 + r^2) / 2` with
    `z = beta (c - r - margin)` and `p = (1 - eps) label + eps (1 - label)`, where `eps` is the label smoothing
    (Bradley & Terry, 1952; margin inside the sigmoid as in Touvron et al., 2023, arXiv:2307.09288, Eq. 2; centering as
    in Eisenstein et al., 2023, arXiv:2312.09244; smoothing as in Mitchell, 2023, "A note on DPO with noisy
    preferences", Eq. 3). Natural log: equal rewards cost log 2. Because everything is a sum over pairs, any split of a
    batch adds up exactly. The regularizers act on rewards before `beta`.

    Args:
        chosen: rewards of the preferred responses.
        rejected: rewards of the other responses, in the same order.
        beta: inverse temperature, positive.
        label_smoothing: probability that a label is flipped, in [0, 0.5).
        margin: reward by which `chosen` ought to lead; None is 0.
        label: probability that `chosen` is the better one, in [0, 1]; none is 1.
        center_rewards: coefficient of `(c + r)^2`, which pulls the mean reward of a pair to 0; not negative.
        reward_l2: coefficient of `(c^2 + r^2) / 2`; not negative.

    Raises:
        ValueError: if a shape is not `(pairs,)`, the same for all, or a number is out of range.

    Example:
        >>> zeros = torch.zeros(2)
        >>> [round(loss, 4) for loss in bradley_terry_pair_losses(zeros, zeros).tolist()]
        [0.6931, 0.6931]
    """
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {label_smoothing}")
    for name, value in (("center_rewards", center_rewards), ("reward_l2", reward_l2)):
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    _check_shapes(chosen, rejected=rejected, margin=margin, label=label)
    c, r = _at_least_float32(chosen), _at_least_float32(rejected)
    z = beta * (c - r if margin is None else c - r - _at_least_float32(margin))
    p = torch.ones_like(z) if label is None else _at_least_float32(label)
    p = (1.0 - label_smoothing) * p + label_smoothing * (1.0 - p)
    losses = -p * logsigmoid(z) - (1.0 - p) * logsigmoid(-z)
    if center_rewards:
        losses = losses + center_rewards * (c + r).square()
    if reward_l2:
        losses = losses + reward_l2 * (c.square() + r.square()) / 2
    return losses


def configured_pair_losses(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    config: LossConfig,
    *,
    margin: Float[Tensor, " pairs"],
    label: Float[Tensor, " pairs"],
    scores: Float[Tensor, "pairs 2"],
) -> Float[Tensor, " pairs"]:
    """`bradley_terry_pair_losses`, or the loss that `loss.name` names, with a run's options.

    Margins are multiplied by `loss.margin_scale`. With `loss.score_range`, a share `loss.score_share` of it is replaced
    by `score_pair_losses`.
    """
    if config.score_range is not None:
        fitted = score_pair_losses(chosen, rejected, scores, score_range=config.score_range)
        if config.score_share == 1:
            return fitted
        plain = replace(config, score_range=None, score_share=1.0)
        of_pairs = configured_pair_losses(chosen, rejected, plain, margin=margin, label=label, scores=scores)
        return config.score_share * fitted + (1 - config.score_share) * of_pairs
    if config.name is not None:
        return loss_named(config.name)(chosen, rejected, margin=margin * config.margin_scale, label=label)
    return bradley_terry_pair_losses(
        chosen,
        rejected,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        margin=margin * config.margin_scale if config.margin_scale else None,
        label=label,
        center_rewards=config.center_rewards,
        reward_l2=config.reward_l2,
    )


def score_targets(scores: Float[Tensor, "*any"], score_range: Sequence[float]) -> Float[Tensor, "*any"]:
    """Rewards that scores ask for: the range mapped to -1 to 1.

    Example:
        >>> score_targets(torch.tensor([1.0, 3.0, 5.0]), [1, 5]).tolist()
        [-1.0, 0.0, 1.0]
    """
    low, high = score_range
    return (2 * scores - low - high) / (high - low)


def score_pair_losses(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    scores: Float[Tensor, "pairs 2"],
    *,
    score_range: Sequence[float],
) -> Float[Tensor, " pairs"]:
    """Mean squared error of the rewards of each pair's two responses on their scores.

    `((c - t(s_c))^2 + (r - t(s_r))^2) / 2` with `t(s) = (2 s - low - high) / (high - low)`: the regression of
    HelpSteer2 (Wang et al., 2024, arXiv:2406.08673, Sec. 3) on one attribute, whose scale is mapped to -1 to 1.

    Args:
        chosen: rewards of the preferred responses.
        rejected: rewards of the other responses.
        scores: scores of both.
        score_range: lowest and highest score of the scale.
    """
    targets = score_targets(_at_least_float32(scores), score_range)
    c, r = _at_least_float32(chosen), _at_least_float32(rejected)
    return ((c - targets[:, 0]).square() + (r - targets[:, 1]).square()) / 2


def bradley_terry_loss(
    chosen: Float[Tensor, " pairs"],
    rejected: Float[Tensor, " pairs"],
    *,
    beta: float = 1.0,
    label_smoothing: float = 0.0,
    margin: Float[Tensor, " pairs"] | None = None,
    label: Float[Tensor, " pairs"] | None = None,
    weight: Float[Tensor, " pairs"] | None = None,
    center_rewards: float = 0.0,
    reward_l2: float = 0.0,
) -> Float[Tensor, ""]:
    """Weighted mean of `bradley_terry_pair_losses`: `sum(w l) / sum(w)`.

    A pair of weight 2 is the same as the pair given twice, and the scale of all weights does not matter.

    Args:
        chosen: rewards of the preferred responses.
        rejected: rewards of the other responses, in the same order.
        beta: inverse temperature, positive.
        label_smoothing: probability that a label is flipped, in [0, 0.5).
        margin: reward by which `chosen` ought to lead.
        label: probability that `chosen` is the better one, in [0, 1].
        weight: number of pairs that each counts for, positive; none is 1.
        center_rewards: coefficient of the mean of `(c + r)^2`; not negative.
        reward_l2: coefficient of the mean of `(c^2 + r^2) / 2`; not negative.

    Raises:
        ValueError: if there are no pairs, a shape is not `(pairs,)`, or a number is out of range.

    Example:
        >>> round(float(bradley_terry_loss(torch.tensor([1.0]), torch.tensor([0.0]))), 6)
        0.313262
    """
    losses = bradley_terry_pair_losses(
        chosen,
        rejected,
        beta=beta,
        label_smoothing=label_smoothing,
        margin=margin,
        label=label,
        center_rewards=center_rewards,
        reward_l2=reward_l2,
    )
    _check_shapes(chosen, weight=weight)
    if losses.shape[0] == 0:
        raise ValueError("the mean loss needs at least one pair, got none")
    if weight is None:
        return losses.mean()
    w = _at_least_float32(weight)
    return (w * losses).sum() / w.sum()


def _at_least_float32(values: Tensor) -> Tensor:
    """The values in float32, or in float64 where they were float64."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _check_shapes(chosen: Tensor, **others: Tensor | None) -> None:
    if chosen.ndim != 1:
        raise ValueError(f"chosen must have shape (pairs,), got {tuple(chosen.shape)}")
    for name, other in others.items():
        if other is not None and other.shape != chosen.shape:
            raise ValueError(
                f"{name} must have the shape of chosen, {tuple(chosen.shape)}, got {tuple(other.shape)}; "
                "rewards are one number per response, so drop a trailing axis of 1"
            )
