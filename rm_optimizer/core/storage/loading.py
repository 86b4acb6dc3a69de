"""A classifier with one label and its tokenizer, from wherever they are stored, built for training rewards."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from rm_optimizer.core.classifier.adapters import attach
from rm_optimizer.core.classifier.attention import choose_attention
from rm_optimizer.core.classifier.batch_dependence import refuse_known
from rm_optimizer.core.classifier.dropout import disable_dropout, disable_dropout_modules
from rm_optimizer.core.classifier.head import head_name, require_trained_head
from rm_optimizer.core.classifier.modalities import freeze_beside_text
from rm_optimizer.core.classifier.quantization import is_quantized, quantization_arguments
from rm_optimizer.core.storage.adapter_files import (
    adapter_folder,
    adapter_tensor_names,
    described_config,
    is_saved,
    load_adapter,
    read_config,
)
from rm_optimizer.core.storage.certificate import ParityCertificate
from rm_optimizer.core.storage.checkpoint import read_checkpoint, write_description
from rm_optimizer.core.storage.export_record import read_record, require_exported_weights
from rm_optimizer.core.storage.model_files import find_source
from rm_optimizer.core.storage.torn_files import damage
from rm_optimizer.errors import CheckpointError, ConfigError, did_you_mean
from rm_optimizer.records.codec import from_values
from rm_optimizer.records.locations import EXPORT_FILE, Source, SourceKind
from rm_optimizer.records.randomness import keeping_random_state

if TYPE_CHECKING:
    from peft import LoraConfig

_LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError, StrictDataclassError)

_log = logging.getLogger("rm_optimizer")


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
        quantize: store the backbone's matrices in four bits; only for training a LoRA adapter beside them.
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


@dataclass(frozen=True)
class LoadedModel:
    """Model loaded from a source.

    Args:
        model: a classifier with one label, in evaluation mode.
        tokenizer: its tokenizer.
        is_head_fresh: True if the source had no head, so that the model's has its random initialization.
        record: its `export.json`; empty for other people's models, and for `.ckpt` files but for `identity`.
        drawn: names of the weights that the source lacks, so that they are at their random start.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    is_head_fresh: bool
    record: Mapping[str, Any] = field(default_factory=dict)
    drawn: frozenset[str] = frozenset()

    @property
    def identity(self) -> Mapping[str, Any]:
        """Recorded rendering, padding and head; empty for a model saved by other software."""
        identity: Mapping[str, Any] = self.record.get("identity", {})
        beta = (self.record.get("reward_statistics") or {}).get("beta")  # where exports had it before identities did
        return identity if beta is None else {"beta": beta, **identity}

    @property
    def certificate(self) -> ParityCertificate | None:
        """The rewards it was certified with; None where none are recorded."""
        stored = self.record.get("certificate")
        return None if stored is None else from_values(ParityCertificate, stored)


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    """A floating type from its name; None is float32.

    Raises:
        ConfigError: if the name is not that of a floating type.
    """
    names = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is None:
        return torch.float32
    if isinstance(dtype, str) and dtype not in names:
        raise ConfigError(did_you_mean("dtype", dtype, names))
    return names[dtype] if isinstance(dtype, str) else dtype


def load_model(source: str | Path, options: LoadOptions) -> LoadedModel:
    """Read a classifier and its tokenizer from a hub id, a folder, a run folder or a `.ckpt` file.

    Raises:
        CheckpointError: if there is nothing, it is torn, it cannot give one reward, or it lacks a trained reward head
            and `options.new_head` is false.
        ConfigError: if an option is unknown, or the architecture's rewards depend on their batch.
    """
    loaded = _load(source, options)
    if not options.new_head:
        require_trained_head(loaded.model, loaded.drawn, source)
    return loaded


def _load(source: str | Path, options: LoadOptions) -> LoadedModel:
    adapter = adapter_folder(source)
    if adapter is not None:
        return _from_adapter(adapter, options)
    found = find_source(source, options.revision)
    try:
        if found.kind is SourceKind.CHECKPOINT:
            return _from_checkpoint(Path(found.location), options)
        return _from_folder_or_hub(found, options)
    except torch.OutOfMemoryError:
        raise
    except _LOAD_ERRORS as error:
        reason = damage(Path(found.location)) if found.kind is SourceKind.FOLDER else None
        raise CheckpointError(f"{source} cannot be loaded as a reward model: {reason or _reason(error)}") from error


def build_model(
    architecture: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, options: LoadOptions
) -> LoadedModel:
    """A classifier at its random start, as wide in its vocabulary as the tokenizer.

    Args:
        architecture: `model_type` and fields of that type's configuration.
        tokenizer: gives the vocabulary's size and the special tokens' ids.
        options: options for building it.

    Raises:
        ConfigError: if the type or a field is unknown, or the fields do not fit each other.
    """
    try:
        config = _config_from_fields(architecture, tokenizer)
        return LoadedModel(_build(_prepared(config, options), options), tokenizer, is_head_fresh=True)
    except (ValueError, ImportError, StrictDataclassError) as error:
        raise ConfigError(f"model.architecture does not describe a model: {_reason(error)}") from error


def _config_from_fields(architecture: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    fields = dict(architecture)
    kind = str(fields.pop("model_type", ""))
    if kind not in CONFIG_MAPPING:
        raise ConfigError(did_you_mean("model.architecture.model_type", kind, CONFIG_MAPPING.keys()))
    default = CONFIG_MAPPING[kind]()
    for name in fields:
        if not hasattr(default, name):
            raise ConfigError(did_you_mean(f"{kind} field in model.architecture", name, default.to_dict()))
    names = (f"{role}_token_id" for role in ("pad", "bos", "eos", "cls", "sep"))
    known = {name: getattr(tokenizer, name) for name in names if hasattr(default, name)}
    known = {name: value for name, value in known.items() if value is not None or getattr(default, name) is None}
    return AutoConfig.for_model(kind, **({"vocab_size": len(tokenizer)} | known | fields))


def _reason(error: Exception) -> str:
    """Line of an exception's text with its cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1] if isinstance(error, StrictDataclassError) else lines[0]


def _from_folder_or_hub(source: Source, options: LoadOptions) -> LoadedModel:
    origin = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    config = _prepared(AutoConfig.from_pretrained(source.location, **origin), options)
    tokenizer = AutoTokenizer.from_pretrained(source.location, **origin)
    with keeping_random_state(seed=options.seed), quiet_transformers():
        model, report = AutoModelForSequenceClassification.from_pretrained(
            source.location,
            config=config,
            dtype=options.dtype,
            attn_implementation=_attention(config, options),
            output_loading_info=True,
            **origin,
            **_quantization(config, options),
        )
    missing = set(report["missing_keys"])
    _require_backbone(model, missing)
    if missing and options.new_head:
        _log.info("%s lacks %s: drawn from seed %d", source.location, ", ".join(sorted(missing)), options.seed)
    is_fresh = f"{head_name(model)}.weight" in missing
    folder = _record_folder(source, options)
    record = read_record(folder)
    require_exported_weights(folder, record)
    return LoadedModel(_finished(model, options), tokenizer, is_fresh, record, frozenset(missing))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars, notes and table of missing weights off the terminal in the block."""
    before, had_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if had_bars:
            transformers_logging.enable_progress_bar()


def _from_adapter(folder: Path, options: LoadOptions) -> LoadedModel:
    """A base and the adapter trained beside it, which stays an adapter and trainable."""
    config, record = read_config(folder), read_record(folder)
    recorded_base = record.get("base", {})
    base = load_model(config.base_model_name_or_path, _base_options(config, recorded_base, options))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        load_adapter(base.model, folder, config, recorded_base)
        drawn = frozenset(name for name in base.drawn if not is_saved(base.model, name))
    except _LOAD_ERRORS as error:
        reason = damage(folder) or _reason(error)
        raise CheckpointError(f"{folder} cannot be loaded as a LoRA adapter: {reason}") from error
    require_exported_weights(folder, record)
    return LoadedModel(base.model, tokenizer, False, record, drawn)


def _base_options(config: LoraConfig, recorded_base: Mapping[str, Any], options: LoadOptions) -> LoadOptions:
    quantize = options.quantize or bool(recorded_base.get("is_quantized"))
    return replace(options, revision=config.revision, quantize=quantize, new_head=True)


def _from_checkpoint(path: Path, options: LoadOptions) -> LoadedModel:
    payload, weights = read_checkpoint(path)
    with tempfile.TemporaryDirectory() as folder:
        write_description(payload, Path(folder))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    config.name_or_path = tokenizer.name_or_path = str(path)
    model = _checkpoint_model(payload, _prepared(config, options), options)
    load_weights(model, weights, path)
    return LoadedModel(model, tokenizer, False, {"identity": payload["export"]})


def _checkpoint_model(payload: Mapping[str, Any], config: PretrainedConfig, options: LoadOptions) -> PreTrainedModel:
    """The classifier of a `.ckpt`, with its adapter if it has one; a base in four bits is read from its own source."""
    adapter = payload.get("adapter")
    if adapter is None:
        return _build(config, options)
    lora = described_config(adapter)
    if adapter["is_quantized"]:
        model = load_model(lora.base_model_name_or_path, _base_options(lora, adapter, options)).model
    else:
        model = _build(config, options)
    attach(model, lora, seed=options.seed)
    return model


def load_weights(model: PreTrainedModel, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load a checkpoint's weights into a classifier, every one of them; a base in four bits stays as it was read.

    Args:
        model: as `read_checkpoint`'s payload describes it.
        weights: as `read_checkpoint` gives them.
        path: the file, for the message.

    Raises:
        CheckpointError: if names are missing or unknown.
    """
    if is_quantized(model):
        names = adapter_tensor_names(model)
        weights = {name: value for name, value in weights.items() if name in names}
        missing, unknown = sorted(names - weights.keys()), list[str]()
        model.load_state_dict(weights, strict=False)
    else:
        missing, unknown = model.load_state_dict(weights, strict=False)
    if missing or unknown:
        examples = ", ".join([*missing, *unknown][:3])
        raise CheckpointError(
            f"{path} is torn: {len(missing)} weights are missing and {len(unknown)} unknown, among them {examples}"
        )


def _prepared(config: PretrainedConfig, options: LoadOptions) -> PretrainedConfig:
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
        raise CheckpointError(
            f"expected a checkpoint with one label, got a classifier with {config.num_labels} labels; "
            "use its base model or a reward model"
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
    return config


def _build(config: PretrainedConfig, options: LoadOptions) -> PreTrainedModel:
    with keeping_random_state(seed=options.seed):
        model = AutoModelForSequenceClassification.from_config(
            config,
            dtype=options.dtype,
            attn_implementation=_attention(config, options),
            trust_remote_code=options.trust_remote_code,
        )
    return _finished(model, options)


def _finished(model: PreTrainedModel, options: LoadOptions) -> PreTrainedModel:
    if not options.dropout:
        disable_dropout_modules(model)
    freeze_beside_text(model)
    return model.eval()


def _attention(config: PretrainedConfig, options: LoadOptions) -> str:
    return choose_attention(
        config, options.attn_implementation, options.dtype, trust_remote_code=options.trust_remote_code
    )


def _require_backbone(model: PreTrainedModel, missing: set[str]) -> None:
    backbone = f"{model.base_model_prefix}."
    lost = sorted(name for name in missing if name.startswith(backbone) and "pooler" not in name)
    if lost:
        raise CheckpointError(
            f"{model.name_or_path} lacks {len(lost)} weights of the {type(model).__name__} backbone, "
            f"among them {lost[0]}"
        )


def _quantization(config: PretrainedConfig, options: LoadOptions) -> dict[str, Any]:
    if not options.quantize:
        return {}
    return quantization_arguments(config, trust_remote_code=options.trust_remote_code)


def _record_folder(source: Source, options: LoadOptions) -> Path:
    """The folder that may hold an `export.json`: a hub id's is where its files were fetched to."""
    if source.kind is SourceKind.FOLDER:
        return Path(source.location)
    found = cached_file(
        source.location,
        EXPORT_FILE,
        revision=options.revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found).parent if found else Path(os.devnull)
