"""A classifier with one label and its tokenizer, from wherever they are stored, built for training rewards."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import extract_commit_hash

from rm_optimizer.core.classifier.adapters import attach, has_untrained_adapter
from rm_optimizer.core.classifier.building import LoadOptions, build, build_arguments, finished, reason_of
from rm_optimizer.core.classifier.head import head_name, require_trained_head
from rm_optimizer.core.classifier.quantization import quantization_arguments
from rm_optimizer.core.rows.hub import restored_hub
from rm_optimizer.core.storage.adapter_files import (
    StoredAdapter,
    described_config,
)
from rm_optimizer.core.storage.certificate import ParityCertificate
from rm_optimizer.core.storage.checkpoint import load_weights, read_checkpoint, write_description
from rm_optimizer.core.storage.export_record import read_record, require_exported_weights
from rm_optimizer.core.storage.model_files import find_source
from rm_optimizer.core.storage.torn_files import damage
from rm_optimizer.core.tokens.tokenizer import TOKENIZER_FILE, read_otherwise
from rm_optimizer.errors import CheckpointError, ConfigError, did_you_mean
from rm_optimizer.records.codec import from_values
from rm_optimizer.records.locations import ADAPTER_FILE, EXPORT_FILE, Source, SourceKind, resolve_source
from rm_optimizer.records.randomness import keeping_random_state

if TYPE_CHECKING:
    from peft import LoraConfig

_LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError, StrictDataclassError)

_HARMLESS = re.compile(
    r"(rotary_emb\.inv_freq|position_ids|token_type_ids|(attn|attention)\.(masked_)?bias)$|(^|\.)pooler\."
    r"|^(lm_head|embed_out|cls|generator_lm_head|generator_predictions|discriminator_predictions|lm_predictions"
    r"|mask_predictions|vocab_\w+|predictions|sop_classifier)\."
)
"""Stored weights that have no part in a reward: buffers made from the configuration, and heads of pretraining."""
_OWN_FILES = (EXPORT_FILE, TOKENIZER_FILE)
_IF_THERE = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
_log = logging.getLogger("rm_optimizer")


@dataclass(frozen=True)
class LoadedModel:
    """Model loaded from a source.

    Args:
        model: a classifier with one label, in evaluation mode.
        tokenizer: its tokenizer.
        is_head_fresh: True if the source had no head, so that the model's has its random initialization.
        record: its `export.json`; empty for other people's models, and for `.ckpt` files but for `identity`.
        drawn: names of the weights that the source lacks, so that they are at their random start.
        unread: names of the stored weights that the classifier has no place for.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    is_head_fresh: bool
    record: Mapping[str, Any] = field(default_factory=dict)
    drawn: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()

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
    with restored_hub():
        loaded = _load(source, options)
    if not options.new_head:
        require_trained_head(loaded.model, loaded.drawn, source, loaded.unread)
        if not loaded.model.get_submodule(head_name(loaded.model)).weight.any():
            _log.warning("%s has a reward head of zeros, so every response gets the same reward; train it", source)
        if has_untrained_adapter(loaded.model):
            _log.warning("%s has an adapter that was not trained: all its lora_B are zero", source)
    return loaded


def _from_adapter(folder: Path, options: LoadOptions) -> LoadedModel:
    """A base and the adapter trained beside it, which stays an adapter and trainable."""
    adapter = StoredAdapter.read(folder)
    base = _base_of(adapter.config, adapter.base, options)
    try:
        has_tokenizer = (adapter.folder / "tokenizer_config.json").is_file()  # plain peft saves none
        tokenizer = AutoTokenizer.from_pretrained(adapter.folder) if has_tokenizer else base.tokenizer
        drawn = base.drawn - adapter.load_into(base.model)
    except _LOAD_ERRORS as error:
        reason = damage(adapter.folder) or reason_of(error)
        raise CheckpointError(f"{adapter.folder} cannot be loaded as a LoRA adapter: {reason}") from error
    require_exported_weights(adapter.folder, adapter.record)
    return LoadedModel(base.model, tokenizer, False, adapter.record, drawn)


def _load(source: str | Path, options: LoadOptions) -> LoadedModel:
    found = find_source(source, options.revision)
    try:
        if found.kind is SourceKind.CHECKPOINT:
            return _from_checkpoint(Path(found.location), options)
        if found.kind is SourceKind.ADAPTER:
            return _from_adapter(Path(found.location), options)
        return _from_folder_or_hub(found, options)
    except torch.OutOfMemoryError:
        raise
    except _LOAD_ERRORS as error:
        reason = damage(Path(found.location)) if found.kind is SourceKind.FOLDER else None
        raise CheckpointError(f"{source} cannot be loaded as a reward model: {reason or reason_of(error)}") from error


def _from_folder_or_hub(source: Source, options: LoadOptions) -> LoadedModel:
    origin = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    found = [cached_file(source.location, name, revision=options.revision, **_IF_THERE) for name in _OWN_FILES]
    folder = Path(found[0]).parent if found[0] else Path(os.devnull)
    record = read_record(folder)
    arguments = build_arguments(AutoConfig.from_pretrained(source.location, **origin), options)
    if options.quantize:
        arguments |= quantization_arguments(arguments["config"], trust_remote_code=options.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(source.location, **origin)
    if found[1] and (difference := read_otherwise(tokenizer, found[1])):
        _log.warning("%s", difference)
    with keeping_random_state(seed=options.seed), quiet_transformers():
        model, report = AutoModelForSequenceClassification.from_pretrained(
            source.location, output_loading_info=True, ignore_mismatched_sizes=True, **origin, **arguments
        )
    if wrong := sorted(report["mismatched_keys"]):
        name, stored, expected = wrong[0]
        raise CheckpointError(
            f"{source.location} stores {len(wrong)} weights of another shape than {type(model).__name__} with its "
            f"config.json has, such as {name} of shape {[*stored]} in place of {[*expected]}; correct config.json"
        )
    if source.kind is SourceKind.HUB:  # transformers 5.19 does not set it any more, and an adapter records it
        file = cached_file(source.location, CONFIG_NAME, revision=options.revision)
        model.config._commit_hash = extract_commit_hash(file, None)
    missing = set(report["missing_keys"])
    unread = {name for name in report["unexpected_keys"] if not _HARMLESS.search(name)}
    if source.kind is SourceKind.FOLDER:
        unread |= {file.name for file in Path(source.location).glob("value_head.*")}
    is_fresh = f"{head_name(model)}.weight" in missing
    _require_backbone(model, missing, unread)
    refuse_unread(model, unread, is_fresh=is_fresh)
    if missing and options.new_head:
        _log.info("%s lacks %s: drawn from seed %d", source.location, ", ".join(sorted(missing)), options.seed)
    require_exported_weights(folder, record)
    return LoadedModel(finished(model, options), tokenizer, is_fresh, record, frozenset(missing), frozenset(unread))


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


def _base_of(config: LoraConfig, recorded: Mapping[str, Any], options: LoadOptions) -> LoadedModel:
    """The base that an adapter's configuration names, in four bits where the options or the record of it say so."""
    source = config.base_model_name_or_path
    if resolve_source(source).kind is SourceKind.ADAPTER:
        raise CheckpointError(
            f"an adapter needs a whole model as its base, but {source} is an adapter too; merge that into its "
            f"own base, and name the merged folder as base_model_name_or_path in {ADAPTER_FILE}"
        )
    quantize = options.quantize or bool(recorded.get("is_quantized"))
    return _load(source, replace(options, revision=config.revision, quantize=quantize, new_head=True))


def _from_checkpoint(path: Path, options: LoadOptions) -> LoadedModel:
    payload, weights = read_checkpoint(path)
    with tempfile.TemporaryDirectory() as folder:
        write_description(payload, Path(folder))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    config.name_or_path = tokenizer.name_or_path = str(path)
    described = payload.get("adapter")
    if described is None:
        model = build(config, options)
    else:
        lora = described_config(described)
        # A base in four bits is read from its own source.
        model = _base_of(lora, described, options).model if described["is_quantized"] else build(config, options)
        attach(model, lora, seed=options.seed)
    load_weights(model, weights, path)
    return LoadedModel(model, tokenizer, False, {"identity": payload["export"]})


def _require_backbone(model: PreTrainedModel, missing: set[str], unread: set[str]) -> None:
    backbone = f"{model.base_model_prefix}."
    lost = sorted(name for name in missing if name.startswith(backbone) and "pooler" not in name)
    if lost:
        before = sorted({name[: name.index(lost[0])] for name in unread if name.endswith(lost[0])})
        stored = f"; it is stored as {before[0]}{lost[0]}, so rename its weights without {before[0]}" if before else ""
        raise CheckpointError(
            f"{model.name_or_path} lacks {len(lost)} weights of the {type(model).__name__} backbone, "
            f"among them {lost[0]}{stored}"
        )


def refuse_unread(model: PreTrainedModel, unread: Collection[str], *, is_fresh: bool) -> None:
    """Refuse stored weights that would change the reward; a fresh head replaces any other, but not a layer.

    Raises:
        CheckpointError: naming up to three of them.
    """
    backbone, own = model.base_model_prefix, {name for name, _ in model.base_model.named_children()}
    inside = {name for name in unread if name.removeprefix(f"{backbone}.").split(".")[0] in own}
    if lost := sorted(inside if is_fresh else unread):
        raise CheckpointError(
            f"{model.name_or_path} stores {len(lost)} weights that {type(model).__name__} with its config.json does not"
            f" read, among them {', '.join(lost[:3])}, so its rewards would not be those of the saved model; correct "
            "config.json, or remove these weights if they have no part in the reward"
        )
