"""Dropout off by default: two passes over the same tokens give the same reward."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

_WORDS = ("dropout", "pdrop", "layerdrop")
_MODULES = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def disable_dropout(config: PretrainedConfig) -> None:
    """Set every dropout probability of the configuration to 0, nested configurations included.

    Before the model is built, this also turns off dropout that attention calls as a function, which is not a module. A
    reward that depends on a random mask is a noisy label (Ziegler et al., 2019,
    https://arxiv.org/abs/1909.08593, train their models without dropout).
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            disable_dropout(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and any(word in name for word in _WORDS):
            setattr(config, name, type(value)(0))


def disable_dropout_modules(model: nn.Module) -> None:
    """Set the probability of every dropout module to 0, for models that write it in their code."""
    for module in model.modules():
        if isinstance(module, _MODULES):
            module.p = 0.0
