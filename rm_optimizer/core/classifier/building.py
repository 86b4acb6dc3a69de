"""Construction of a classifier with one label from its configuration, for training rewards."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from rm_optimizer.core.classifier.attention import choose_attention, drops_padding
from rm_optimizer.core.classifier.head import freeze_beside_text
from rm_optimizer.core.classifier.heads import OWN_TYPE, with_head, with_token_types
from rm_optimizer.core.classifier.limits import refuse_known
from rm_optimizer.errors import CheckpointError, ConfigError, NeedsImport, did_you_mean, needs_import
from rm_optimizer.records.randomness import keeping_random_state

COMPILERS = ("c++", "g++", "clang++", "cl")
"""C++ compilers that inductor looks for, for its CPU kernels and the launchers of its CUDA kernels."""
_log = logging.getLogger("rm_optimizer")
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


@dataclass(frozen=True)
class LoadOptions:
    """Options for building a classifier.

    Args:
        attn_implementation: `auto`, or an attention kernel by name.
        dropout: keep the dropout that the configuration has.
        seed: seed of layers that the checkpoint lacks.
        revision: hub revision.
        trust_remote_code: run modeling code that the checkpoint brings.
        dtype: type of the backbone's weights; the head is float32 or better.
        quantize: store the backbone's matrices in four bits; only for training a LoRA adapter on them.
        new_head: accept a source without a trained reward head and draw a new one, to train it.
    """

    attn_implementation: str = "auto"
    dropout: bool = False
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: torch.dtype = torch.float32
    quantize: bool = False
    new_head: bool = False


def read_config(location: str, options: LoadOptions) -> PretrainedConfig:
    """Configuration of a stored model; if it has another head, its backbone's with `reward_head`."""
    stored, _ = PretrainedConfig.get_config_dict(location, revision=options.revision)
    kind, trusted = stored.get("model_type"), options.trust_remote_code
    if kind not in CONFIG_MAPPING and kind != OWN_TYPE and "auto_map" in stored and not trusted:
        raise needs_import(location, f"{kind} has custom code, which runs only with trust_remote_code")
    if kind != OWN_TYPE:
        return AutoConfig.from_pretrained(location, revision=options.revision, trust_remote_code=trusted)
    own = {"model_type": stored["reward_head"]["model_type"]}
    kept = {name: value for name, value in stored.items() if name != "auto_map"}  # the same code is here
    return CONFIG_MAPPING[own["model_type"]].from_dict(kept | own, name_or_path=location)


def classifier_class(config: PretrainedConfig) -> Any:
    """`AutoModelForSequenceClassification`, or the classifier whose head or token types the configuration describes."""
    if (described := getattr(config, "reward_head", None)) is None:
        return AutoModelForSequenceClassification
    own = with_token_types if "separator" in described else with_head
    return own(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)])


def build_arguments(config: PretrainedConfig, options: LoadOptions) -> dict[str, Any]:
    """Arguments by which transformers builds a classifier: its configuration, set to one label, type and attention.

    Raises:
        CheckpointError: if the model cannot give one reward.
        ConfigError: if its rewards depend on their batch, or an option is unknown.
    """
    if config.is_encoder_decoder:
        raise CheckpointError(
            f"{config.model_type} is an encoder-decoder, which has no single place to read a reward from; "
            "use an encoder or a decoder"
        )
    brings_code = "AutoModelForSequenceClassification" in (getattr(config, "auto_map", None) or {})
    if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES and not brings_code:
        raise CheckpointError(
            f"transformers has no sequence classifier for {config.model_type}; use another base model"
        )
    is_classifier = any("ForSequenceClassification" in name for name in config.architectures or ())
    if is_classifier and config.num_labels != 1:
        is_pair = config.num_labels == 2
        raise (NeedsImport if is_pair else CheckpointError)(
            f"expected a checkpoint with one label, got a classifier with {config.num_labels} labels; "
            + ("import it with rm-opt import" if is_pair else "use its base model or a reward model")
        )
    refuse_known(config)
    if config.model_type == "xmod" and config.default_language is None:
        raise CheckpointError(
            "xmod reads a text with the layers of one language, and its configuration names none; set default_language "
            f"in its config.json to one of {', '.join(config.languages)}"
        )
    if getattr(config, "attention_type", None) == "block_sparse":
        config.attention_type = "original_full"  # BigBird would turn to it for good at the first short batch
    config.num_labels = 1
    if not options.dropout:
        disable_dropout(config)
    kernel = choose_attention(
        config, options.attn_implementation, options.dtype, trust_remote_code=options.trust_remote_code
    )
    return {"config": config, "dtype": options.dtype, "attn_implementation": kernel}


def build(config: PretrainedConfig, options: LoadOptions) -> PreTrainedModel:
    """The classifier at its random start, as `finished` returns it."""
    arguments = build_arguments(config, options)
    with keeping_random_state(seed=options.seed):
        model = new_classifier(trust_remote_code=options.trust_remote_code, **arguments)
    return finished(model, options)


def new_classifier(config: PretrainedConfig, *, trust_remote_code: bool = False, **arguments: Any) -> PreTrainedModel:
    """The classifier of a configuration, with the head that it describes."""
    if (made := classifier_class(config)) is AutoModelForSequenceClassification:
        arguments["trust_remote_code"] = trust_remote_code
        return made.from_config(config, **arguments)
    model: PreTrainedModel = made._from_config(config, **arguments)
    return model


def finished(model: PreTrainedModel, options: LoadOptions) -> PreTrainedModel:
    """The classifier in evaluation mode, without dropout unless it is kept, and frozen where no text reaches."""
    for module in () if options.dropout else model.modules():
        if isinstance(module, _MODULES):  # also where a model writes the probability in its code
            module.p = 0.0
    freeze_beside_text(model)
    return model.eval()


def build_model(
    architecture: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, options: LoadOptions
) -> PreTrainedModel:
    """A classifier at its random start, as wide in its vocabulary as the tokenizer.

    Args:
        architecture: `model_type` and fields of that type's configuration.
        tokenizer: gives the vocabulary's size and the special tokens' ids.
        options: options for building it.

    Raises:
        ConfigError: if the type or a field is unknown, or the fields do not fit each other.
    """
    fields = dict(architecture)
    kind = str(fields.pop("model_type", ""))
    try:
        if kind not in CONFIG_MAPPING:
            raise ConfigError(did_you_mean("model.architecture.model_type", kind, CONFIG_MAPPING.keys()))
        default = CONFIG_MAPPING[kind]()
        for name in fields:
            if not hasattr(default, name):
                unknown = did_you_mean(f"{kind} field in model.architecture", name, default.to_dict())
                raise ConfigError(f"{unknown}; '~model.architecture.{name}' leaves out a preset's field")
        names = (f"{role}_token_id" for role in ("pad", "bos", "eos", "cls", "sep"))
        known = {name: getattr(tokenizer, name) for name in names if hasattr(default, name)}
        known = {name: value for name, value in known.items() if value is not None or getattr(default, name) is None}
        return build(AutoConfig.for_model(kind, **({"vocab_size": len(tokenizer)} | known | fields)), options)
    except (ValueError, ImportError, StrictDataclassError) as error:
        raise ConfigError(f"model.architecture does not describe a model: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """Line of an exception's text with its cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if isinstance(error, StrictDataclassError) else lines[0]


def compile_backbone(model: PreTrainedModel, *, backend: str = "inductor") -> None:
    """Compile the backbone in place, for all sizes; names of parameters and exports do not change.

    The layers between embedding and head become fused kernels at the first pass of each kind (training or evaluation,
    shared prompts or padding, one row or several). A new size needs no new kernel, since numbers of rows and tokens are
    symbolic. Rewards and gradients change by rounding, since fused kernels round in another order. The head and the
    pooling are not compiled. Reference: Ansel et al., 2024, https://doi.org/10.1145/3620665.3640366.

    Args:
        model: the model, after its adapter was added.
        backend: `torch.compile`'s backend.

    Raises:
        ConfigError: if inductor has no C++ compiler to build its kernels with.
    """
    if backend == "inductor" and not any(map(shutil.which, (os.environ.get("CXX", COMPILERS[0]), *COMPILERS))):
        raise ConfigError(
            f"hardware.compile=true needs a C++ compiler, found none of {', '.join(COMPILERS)} on the PATH; "
            "install one, or set hardware.compile=false (from Python, compile_model=False)"
        )
    # DDP's splitting of graphs at its buckets refuses higher-order operators: checkpointed layers, FlexAttention.
    torch._dynamo.config.optimize_ddp = False
    if drops_padding(model):  # the number of tokens in each sequence would be part of the graph
        model.set_attn_implementation("sdpa")
    model.base_model.compile(backend=backend, dynamic=True)
    _log.info("the backbone is compiled at its first passes, which take longer")
