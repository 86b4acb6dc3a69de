"""LoRA through peft, with a reward head that always trains.

peft inserts its layers into the classifier and does not wrap it. The model keeps its class, its forward pass, its
head's name and its backbone. So pooling, prefix sharing and the optimizer's roles work as for any other model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rm_optimizer.core.classifier.head import head_side_modules, keep_exact, parts_beside_text, require_trainable_head
from rm_optimizer.core.classifier.quantization import is_quantized, parameter_size
from rm_optimizer.errors import ConfigError
from rm_optimizer.records.randomness import keeping_random_state
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind

if TYPE_CHECKING:
    from peft import LoraConfig


ADAPTER_NAME = "default"
"""peft's name for the one adapter a reward model has."""
_ROUTERS = ("gate", "router")
_WITHOUT_GRADIENT = re.compile(r"indexer|w2e_query|e2w_query|e2e_query|layout_.*|dt_proj")
"""Parts of names of layers whose factors get no gradient.

They choose keys (DeepSeek-V3.2), read entities (LUKE) or boxes (LiLT), or only their weight is used (Mamba).
"""
_KEEPS_BASE = (True, False, "gaussian", "orthogonal")
"""Initializations of the factors that do not change the frozen weights; all others do."""
_EXACT = (
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode r target_modules "
    "exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save init_lora_weights "
    "layers_to_transform layers_pattern rank_pattern alpha_pattern loftq_config eva_config corda_config lora_ga_config "
    "use_dora target_parameters runtime_config"
)
"""Settings of peft (read in 0.21) with which the adapted matrix stays the frozen one and a product, summed."""


def import_peft() -> ModuleType:
    """The peft library, imported only for models with an adapter, since the import is slow."""
    return import_module("peft")


def has_adapter(model: PreTrainedModel) -> bool:
    """True if the classifier has LoRA layers."""
    return ADAPTER_NAME in getattr(model, "peft_config", {})


def has_untrained_adapter(model: PreTrainedModel) -> bool:
    """True if the classifier has LoRA layers and every factor B is zero, as before the first step."""
    factors = [value for name, value in model.named_parameters() if ".lora_B." in name]
    return bool(factors) and not any(value.any() for value in factors)


def lora_config(model: PreTrainedModel) -> LoraConfig:
    """Complete peft configuration of an adapted classifier; plain peft restores the head from it too."""
    return model.peft_config[ADAPTER_NAME]


def add_adapter(model: PreTrainedModel, config: AdapterConfig | LoraConfig, *, seed: int) -> str | None:
    """Freeze the backbone and add trainable low-rank factors to its matrices (Hu et al., 2021).

    The reward head and every other module between backbone and reward (pooler, dense, norm), which a base checkpoint
    may lack, are trained in full and saved with the factors, in float32. Factors A are drawn from the seed, and factors
    B are zero, so that the rewards are the base's own before the first step.

    Args:
        model: the classifier, changed in place; its mode stays.
        config: options of this package, or peft's own `LoraConfig`. A copy of the latter gets the task, the head-side
            modules among those to save and not among the targets, and the default targets if it has none.
        seed: seed of the factors.

    Returns:
        Sentence on the trainable parameters; None with `kind=none`, which changes nothing.

    Raises:
        ConfigError: if the model has an adapter already, a target names no layer, or the configuration asks for what
            could not be saved exactly.
    """
    if isinstance(config, AdapterConfig) and config.kind == AdapterKind.none:
        return None
    if isinstance(config, AdapterConfig) and config.kind == AdapterKind.qlora and not is_quantized(model):
        raise ConfigError(
            "adapter=qlora needs a base with weights to store in four bits; set model.path=MODEL, or take adapter=lora"
        )
    attach(model, prepared_config(model, config), seed=seed)
    return trainable_parameters(model)


def prepared_config(model: PreTrainedModel, config: AdapterConfig | LoraConfig) -> LoraConfig:
    """Configuration for peft: the user's choices and the needs of a reward model.

    Raises:
        ConfigError: if a target names no layer, or the configuration asks for what could not be saved exactly.
    """
    if isinstance(config, AdapterConfig):
        wanted = import_peft().LoraConfig(
            r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=config.targets
        )
    else:
        wanted = copy.deepcopy(config)
    require_exact(wanted)
    head_side, beside = head_side_modules(model), parts_beside_text(model)
    wanted.task_type = import_peft().TaskType.SEQ_CLS
    wanted.modules_to_save = sorted({*(wanted.modules_to_save or ()), *head_side})
    linear = {name: module for name, module in model.named_modules() if _is_linear(module)}
    targets: Any = wanted.target_modules
    if targets is None or targets == "all-linear":
        picked = _default_targets(model, linear, beside)
        targets = {name.rpartition(".")[2] for name in picked}
        others = [name for name in linear if name not in picked]
    else:
        others = [name for name in linear if is_under(name, (*head_side, *beside))]
        inside = [name for name, _ in model.named_modules() if name not in others and not is_under(name, beside)]
        # A regular expression names all layers at once, and peft raises an error if none fits.
        listed = () if isinstance(targets, str) else targets
        unknown = [target for target in listed if not any(_ends(name, [target]) for name in inside)]
        if unknown:
            raise ConfigError(_unknown_targets(linear.keys() - others, ", ".join(sorted(unknown))))
    # Exclude the linear layers that a target would match by mistake.
    wrong = others if isinstance(targets, str) else [name for name in others if _ends(name, targets)]
    given: Any = wanted.exclude_modules
    if wrong and isinstance(given, str):
        wanted.exclude_modules = "|".join([f"(?:{given})", *(name.replace(".", r"\.") for name in wrong)])
    elif wrong:
        wanted.exclude_modules = {*(given or ()), *wrong}
    wanted.target_modules = targets
    # GPT-2's `Conv1D` stores its matrix transposed.
    kinds = {type(module).__name__ == "Conv1D" for module in linear.values() if not hasattr(module, "out_features")}
    wanted.fan_in_fan_out = bool(kinds) and all(kinds)
    # The folder or hub commit from which the base can be loaded again; a `.ckpt` or a random start has none.
    source = Path(model.name_or_path).expanduser()
    is_folder = bool(model.name_or_path) and source.is_dir()
    origin = str(source.resolve()) if is_folder else model.name_or_path
    wanted.base_model_name_or_path = None if source.is_file() or not origin else origin
    wanted.revision = None if is_folder else getattr(model.config, "_commit_hash", None)
    return wanted


def attach(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
    """Add a prepared configuration's layers to a classifier, freeze the backbone and unfreeze the modules to save.

    Args:
        model: changed in place; its mode stays.
        config: result of `prepared_config`, or a stored configuration; not mutated.
        seed: seed of the factors.

    Raises:
        ConfigError: if the model has an adapter already, or no layer has a target's name.
    """
    training = model.training
    if has_adapter(model):
        raise ConfigError(
            "the model carries a LoRA adapter already; train that on with adapter=none, or export the model, "
            "which merges it, and start from the export"
        )
    injected = copy.deepcopy(config)
    injected.modules_to_save, injected.inference_mode = None, False
    with keeping_random_state(seed=seed):
        try:
            import_peft().inject_adapter_in_model(injected, model, ADAPTER_NAME)
        except ValueError as error:
            targets = config.target_modules
            got = targets if isinstance(targets, str) else ", ".join(sorted(targets or ()))
            excluded = (*head_side_modules(model), *parts_beside_text(model))
            layers = [name for name, module in model.named_modules() if _is_linear(module)]
            usable = [name for name in layers if not is_under(name, excluded)]
            raise ConfigError(_unknown_targets(usable, got)) from error
    stored = copy.deepcopy(injected)  # as PEFT completed it; its layers keep the other one
    stored.modules_to_save = config.modules_to_save
    model.peft_config = {ADAPTER_NAME: stored}
    for name, parameter in model.named_parameters():
        if ADAPTER_NAME in name.split(".") and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()  # small updates would be lost to rounding
    for name in saved_modules(model):
        keep_exact(model.get_submodule(name).requires_grad_(True))
    model.train(training)
    require_trainable_head(model)


def saved_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Dotted names of the modules that an adapted classifier trains and saves in full."""
    beside = parts_beside_text(model)
    named = modules_named(model, lora_config(model).modules_to_save or ())
    return tuple(name for name in named if not is_under(name, beside))


def modules_named(model: PreTrainedModel, wanted: Collection[str]) -> tuple[str, ...]:
    """Dotted names of the outermost modules whose names end in one of the wanted texts, as peft reads them."""
    names = [name for name, _ in model.named_modules() if name.endswith(tuple(wanted))]
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def trainable_parameters(model: PreTrainedModel) -> str:
    """Numbers of the parameters that train in a classifier with an adapter, and of all, a weight in four bits once."""
    sizes = {name: (parameter_size(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()}
    adapter = sum(size for name, (size, trains) in sizes.items() if trains and ADAPTER_NAME in name.split("."))
    trainable, total = sum(size for size, trains in sizes.values() if trains), sum(size for size, _ in sizes.values())
    parts = f"{adapter:,} in LoRA factors, {trainable - adapter:,} in the reward head and other parts"
    return f"trains {trainable:,} of {total:,} parameters ({100 * trainable / total:.2f} %): {parts}"


def _ends(name: str, keys: Collection[str]) -> bool:
    """True if a dotted name ends in one of the keys."""
    return any(f".{name}".endswith(f".{key}") for key in keys)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _unknown_targets(usable: Collection[str], got: str) -> str:
    known = ", ".join(sorted({name.rpartition(".")[2] for name in usable}))
    return f"adapter.targets must name linear layers of the backbone, got {got}; known: {known}"


def _default_targets(model: PreTrainedModel, linear: dict[str, nn.Module], beside: Collection[str]) -> set[str]:
    """Attention and MLP matrices of every family: the linear layers in the text's numbered blocks, without routers."""
    backbone = f"{model.base_model_prefix}."
    picked = {
        name
        for name, module in linear.items()
        if name.startswith(backbone)
        and not is_under(name, beside)
        and any(part.isdigit() for part in name.split("."))
        and name.rpartition(".")[2] not in _ROUTERS
        and not name.rpartition(".")[2].isdigit()
        and not any(_WITHOUT_GRADIENT.fullmatch(part) for part in name.split("."))
        and getattr(module, "out_features", 2) > 1
    }
    if not picked:
        raise ConfigError(
            f"adapter.targets must name the layers to adapt of {type(model).__name__}, "
            "whose backbone has no linear layer in numbered blocks"
        )
    return picked


def require_exact(config: LoraConfig, stored: Path | None = None) -> None:
    """Refuse a configuration whose adapter is no sum of a frozen matrix and a product, so that it cannot be merged.

    Args:
        config: the configuration.
        stored: its file; None for a new adapter, whose factors must also start without a change of the frozen weights.

    Raises:
        ConfigError: naming the setting.
    """
    default, where = type(config)(), "LoraConfig." if stored is None else f"{stored}: "
    refused = {
        "init_lora_weights": stored is None and config.init_lora_weights not in _KEEPS_BASE,
        "modules_to_save": isinstance(config.modules_to_save, str),
    }
    for name, value in vars(config).items():
        if refused.get(name, name not in _EXACT.split()) and value != getattr(default, name, None):
            raise ConfigError(
                f"{where}{name} must be left at its default for a reward model, got {value!r}: "
                "such an adapter could not be saved and merged exactly"
            )


def is_under(name: str, modules: Collection[str]) -> bool:
    """True if a parameter or module is one of these modules, or inside one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)
