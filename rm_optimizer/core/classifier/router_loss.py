"""Balancing loss of a mixture of experts, from the router logits of a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from rm_optimizer.errors import ConfigError


class RouterBalance:
    """Balancing loss of the last forward pass with gradients, whose router logits it records.

    `E sum_e f_e P_e` over the `E` experts, with `f_e` the routed assignments to an expert for each token and `P_e` its
    mean router probability, over the tokens of all layers that are no padding (Fedus et al., 2021, arXiv:2101.03961,
    Eq. 4-6). The family's own function in `transformers` gives this value; balanced routing gives the number of
    experts for each token.

    Args:
        model: classifier, on whose routers it sets hooks.

    Raises:
        ConfigError: if its family has no experts, or `transformers` has no balancing loss for it.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        family = import_module(type(model).__module__)
        self._loss: Callable[..., Tensor] | None = getattr(family, "load_balancing_loss_func", None)
        recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
        kind = getattr(recorder, "target_class", None)
        if self._loss is None or kind is None:
            raise ConfigError(
                "model.router_aux_loss_coef needs a mixture of experts whose balancing loss is in transformers, such "
                f"as Mixtral, Qwen2-MoE, Qwen3-MoE or OLMoE; {type(model).__name__} is none"
            )
        config = model.config
        self._num_experts = getattr(config, "num_local_experts", None) or config.num_experts
        self._top_k, self._place = config.num_experts_per_tok, getattr(recorder, "index", 0)
        self._logits: list[Tensor] = []
        model.base_model.register_forward_pre_hook(self._begin)
        for module in model.base_model.modules():
            if isinstance(module, kind):
                module.register_forward_hook(self._keep)

    def _begin(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        self._logits.clear()  # checkpointed layers have run again since the last pass

    def _keep(self, module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            self._logits.append(output[self._place] if isinstance(output, tuple | list) else output)

    def loss(self, attention_mask: Int[Tensor, "sequences tokens"]) -> Float[Tensor, ""]:
        """The balancing loss of the last forward pass.

        Args:
            attention_mask: mask of its tokens, 0 for padding.
        """
        assert self._loss is not None, "refused when it was made"
        logits = tuple(each.reshape(-1, each.shape[-1]) for each in self._logits)
        return self._loss(logits, self._num_experts, self._top_k, attention_mask)
