"""Loading of a classifier from a folder, the hub or a checkpoint, with the input form that it reads."""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
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
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import extract_commit_hash

from rm_optimizer.core.classifier.adapters import attach, has_adapter, has_untrained_adapter, import_peft
from rm_optimizer.core.classifier.building import (
    LoadOptions,
    build,
    build_arguments,
    classifier_class,
    finished,
    read_config,
    reason_of,
)
from rm_optimizer.core.classifier.head import head_name, require_trained_head
from rm_optimizer.core.classifier.heads import token_types, with_token_types
from rm_optimizer.core.classifier.quantization import dtype_name, is_quantized, keep_packing, quantization_arguments
from rm_optimizer.core.classifier.scoring import ClassifierRewardModel
from rm_optimizer.core.storage.adapter_files import (
    BaseModel,
    adapter_tensor_names,
    describe_adapter,
    load_adapter,
    read_adapter_config,
    require_base,
)
from rm_optimizer.core.storage.certificate import ParityCertificate
from rm_optimizer.core.storage.model_files import (
    damage,
    find_source,
    read_record,
    require_archive,
    require_exported_weights,
)
from rm_optimizer.core.tokens.template_fields import stored_template
from rm_optimizer.core.tokens.tokenizer import TOKENIZER_FILE, read_otherwise
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import CheckpointError, ConfigError, did_you_mean, needs_import
from rm_optimizer.records.codec import from_values
from rm_optimizer.records.hub import restored_hub
from rm_optimizer.records.locations import ADAPTER_FILE, EXPORT_FILE, Source, SourceKind, resolve_source
from rm_optimizer.records.randomness import keeping_random_state

if TYPE_CHECKING:
    from peft import LoraConfig

PAYLOAD_KEY = "rm_optimizer"
"""The entry of a `.ckpt` file that makes it loadable as a reward model."""
WEIGHTS_PREFIX = "model.model."
"""Before the classifier's parameter names: the training module's `model` is a `BradleyTerryRM`, whose `model` it is."""


def checkpoint_payload(reward_model: ClassifierRewardModel, base: BaseModel | None = None) -> dict[str, Any]:
    """Payload of a `.ckpt` under `PAYLOAD_KEY`, from which `from_pretrained` reads the file.

    Configuration, class, tokenizer, adapter and identity are JSON values, safe under `torch.load(weights_only=True)`.
    The tokenizer's files are stored in base64, since some are binary.

    Args:
        reward_model: the model.
        base: base of its adapter, if the file holds the adapter alone.
    """
    model = reward_model.model
    with tempfile.TemporaryDirectory() as folder:
        reward_model.tokenizer.save_pretrained(folder)
        files = {file.name: base64.b64encode(file.read_bytes()).decode() for file in sorted(Path(folder).iterdir())}
    return {
        "config": json.loads(model.config.to_json_string(use_diff=False)),
        "architecture": {"class": type(model).__name__, "dtype": dtype_name(model.dtype)},
        "tokenizer_files": files,
        "adapter": describe_adapter(model, base),
        "export": json.loads(json.dumps(reward_model.identity())),
    }


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The payload of a `.ckpt` file and the classifier's weights by name, memory-mapped on the CPU.

    Raises:
        CheckpointError: if the file is damaged, needs code to load, or was not written by RM-Optimizer.
    """
    require_archive(Path(path))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        fault = "it is damaged; copy it again, or take another checkpoint of the run"
        if isinstance(error, pickle.UnpicklingError):
            fault = "it holds objects that only code could load, so RM-Optimizer did not write it"
        elif isinstance(error, PermissionError | FileNotFoundError):
            fault = str(error.strerror)
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {fault}") from error
    if not isinstance(content, dict) or PAYLOAD_KEY not in content or "state_dict" not in content:
        raise CheckpointError(f"{path} was not written by RM-Optimizer: it has no '{PAYLOAD_KEY}' entry")
    weights = {
        name.removeprefix(WEIGHTS_PREFIX): tensor
        for name, tensor in content["state_dict"].items()
        if name.startswith(WEIGHTS_PREFIX)
    }
    return content[PAYLOAD_KEY], weights


def load_weights(model: PreTrainedModel, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load a checkpoint's weights into a classifier, every one; the base of an adapter stored alone stays as read.

    Args:
        model: model of the architecture in `read_checkpoint`'s payload.
        weights: weights from `read_checkpoint`.
        path: the file, for the message.

    Raises:
        CheckpointError: if names are missing or unknown.
    """
    names = adapter_tensor_names(model) if has_adapter(model) else frozenset[str]()
    if is_quantized(model) or weights.keys() == names:
        weights = {name: value for name, value in weights.items() if name in names}
        missing, unknown = sorted(names - weights.keys()), list[str]()
        model.load_state_dict(weights, strict=False)
    else:
        missing, unknown = model.load_state_dict(weights, strict=False)
    if missing or unknown:
        examples = ", ".join([*missing, *unknown][:3])
        raise CheckpointError(
            f"{path} is damaged: {len(missing)} weights are missing and {len(unknown)} unknown, among them {examples}"
        )


_LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError, StrictDataclassError)

HARMLESS = re.compile(
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
        record: its `export.json`; empty for other people's models; `.ckpt` files have `identity` alone.
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
        ConfigError: if no floating type has the name.
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
        CheckpointError: if there is nothing, it is damaged, cannot give one reward, or lacks a trained reward head
            and `options.new_head` is false.
        ConfigError: if an option is unknown, or the architecture's rewards depend on their batch.
    """
    with restored_hub():
        loaded = _load(source, options)
    if not options.new_head:
        require_trained_head(loaded.model, loaded.drawn, source, loaded.unread)
        if getattr(loaded.model.config, "normalize_reward", False):  # as OpenRLHF stores it
            raise needs_import(
                source, "normalize_reward in its config.json subtracts a mean and divides by a deviation"
            )
        if not loaded.model.get_submodule(head_name(loaded.model)).weight.any():
            _log.warning("%s has a reward head of zeros, so every response gets the same reward; train it", source)
        if has_untrained_adapter(loaded.model):
            _log.warning("%s has an adapter that was not trained: all its lora_B are zero", source)
    return loaded


def _from_adapter(folder: Path, options: LoadOptions) -> LoadedModel:
    """A base and the adapter trained with it, which stays an adapter and trainable."""
    config, record = read_adapter_config(folder), read_record(folder)
    recorded = record.get("base", {})
    base = _base_of(config, recorded, options)
    try:
        has_tokenizer = (folder / "tokenizer_config.json").is_file()  # plain peft saves none
        tokenizer = AutoTokenizer.from_pretrained(folder) if has_tokenizer else base.tokenizer
        drawn = base.drawn - load_adapter(base.model, folder, config, recorded)
    except _LOAD_ERRORS as error:
        reason = damage(folder) or reason_of(error)
        raise CheckpointError(f"{folder} cannot be loaded as a LoRA adapter: {reason}") from error
    require_exported_weights(folder, record)
    return LoadedModel(base.model, tokenizer, False, record, drawn)


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
    arguments = build_arguments(read_config(source.location, options), options)
    if options.quantize:
        arguments |= quantization_arguments(arguments["config"], trust_remote_code=options.trust_remote_code)
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source.location, **origin)
    if found[1] and (difference := read_otherwise(tokenizer, found[1])):
        _log.warning("%s", difference)
    with keeping_random_state(seed=options.seed), quiet_transformers():
        model, report = classifier_class(arguments["config"]).from_pretrained(
            source.location, output_loading_info=True, ignore_mismatched_sizes=True, **origin, **arguments
        )
    if wrong := sorted(report["mismatched_keys"]):
        name, stored, expected = wrong[0]
        told = (
            f"it stores {len(wrong)} weights of another shape than {type(model).__name__} with its config.json has, "
            f"such as {name} of shape {[*stored]} in place of {[*expected]}"
        )
        if [each for each, *_ in wrong] == [f"{head_name(model)}.weight"]:
            raise needs_import(source.location, told)
        raise CheckpointError(f"{source.location} cannot be loaded: {told}; correct config.json")
    if source.kind is SourceKind.HUB:  # transformers 5.19 does not set it any more, and an adapter records it
        file = cached_file(source.location, CONFIG_NAME, revision=options.revision)
        model.config._commit_hash = extract_commit_hash(file, None)
    missing = set(report["missing_keys"])
    unread = {name for name in report["unexpected_keys"] if not HARMLESS.search(name)}
    if source.kind is SourceKind.FOLDER:
        unread |= {file.name for file in Path(source.location).glob("value_head.*")}
    is_fresh = f"{head_name(model)}.weight" in missing
    _require_backbone(model, missing, unread)
    refuse_unread(model, unread, is_fresh=is_fresh)
    if missing and options.new_head:
        _log.info("%s lacks %s: drawn from seed %d", source.location, ", ".join(sorted(missing)), options.seed)
    require_exported_weights(folder, record)
    model = keep_packing(finished(model, options))
    return LoadedModel(model, tokenizer, is_fresh, record, frozenset(missing), frozenset(unread))


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
        (Path(folder) / "config.json").write_text(json.dumps(payload["config"]), encoding="utf-8")
        for name, content in payload["tokenizer_files"].items():
            (Path(folder) / Path(name).name).write_bytes(base64.b64decode(content))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
    config.name_or_path = tokenizer.name_or_path = str(path)
    described = payload.get("adapter")
    if described is None:
        model = build(config, options)
    else:
        lora = import_peft().LoraConfig(**described["config"])
        base = described.get("base")  # earlier versions stored it in the file, unless it was in four bits
        is_apart = described["is_quantized"] or base
        model = _base_of(lora, described, options).model if is_apart else build(config, options)
        attach(model, lora, seed=options.seed)
        if base:
            require_base(model, weights, base, path)
    load_weights(model, weights, path)
    return LoadedModel(model, tokenizer, False, {"identity": payload["export"]})


def _require_backbone(model: PreTrainedModel, missing: set[str], unread: set[str]) -> None:
    backbone = f"{model.base_model_prefix}."
    lost = sorted(name for name in missing if name.startswith(backbone) and "pooler" not in name)
    if lost:
        told = f"it lacks {len(lost)} weights of the {type(model).__name__} backbone, among them {lost[0]}"
        if found := sorted(name for name in unread if name.endswith(lost[0].removeprefix(backbone))):
            raise needs_import(model.name_or_path, f"{told}, which it stores as {found[0]}")
        raise CheckpointError(f"{model.name_or_path} cannot be loaded: {told}")


def refuse_unread(model: PreTrainedModel, unread: Collection[str], *, is_fresh: bool) -> None:
    """Refuse stored weights that would change the reward; a fresh head replaces any other, but not a layer.

    Raises:
        CheckpointError: naming up to three of them.
    """
    backbone, own = model.base_model_prefix, {name for name, _ in model.base_model.named_children()}
    inside = {name for name in unread if name.removeprefix(f"{backbone}.").split(".")[0] in own}
    if lost := sorted(inside if is_fresh else unread):
        told = (
            f"it stores {len(lost)} weights that {type(model).__name__} with its config.json does not read, among them "
            f"{', '.join(lost[:3])}, so its rewards would differ from the saved model's"
        )
        if not inside:
            raise needs_import(model.name_or_path, told)
        raise CheckpointError(f"{model.name_or_path} cannot be loaded: {told}; correct config.json, or remove them")


def settle_input(
    loaded: LoadedModel, source: object, form: str | None, *, has_render_fn: bool, is_trained: bool
) -> None:
    """Adapt the tokenizer of a model without a recorded rendering to the input that it reads, or is trained on.

    Args:
        loaded: the model.
        source: path or hub id that it was loaded from, for messages.
        form: `plain` or `pair` for a trained model without a chat template; None takes `plain`, with a warning.
        has_render_fn: True if a function of the user renders the conversations.
        is_trained: True if the model has a trained reward head.

    Raises:
        ConfigError: if the form is unknown, not possible with the model, or not for it.
    """
    tokenizer = loaded.tokenizer
    if form is not None and (loaded.identity or has_render_fn or not is_trained or tokenizer.chat_template):
        raise ConfigError(
            f"input_form={form} is for reward models of others that have no chat template, but how {source} "
            "reads its input is known; leave the option out"
        )
    if loaded.identity or has_render_fn:
        return
    writer = TemplateWriter(tokenizer)
    if not is_trained:
        writer.write_for_training()
        return
    writer.write_as_read(form, source)
    if form == "pair":
        _settle_token_types(loaded.model, tokenizer)


def _settle_token_types(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a model derive the token types of text pairs, if it tells the texts apart by them; its template refuses SEP.

    Raises:
        ConfigError: if the tokenizer gives other types than those by the place of SEP.
    """
    pair = tokenizer("Name a color.", "Blue.", return_tensors="pt", return_token_type_ids=True)
    tables = [each.weight for name, each in model.named_modules() if name.endswith("token_type_embeddings")]
    if not (given := pair["token_type_ids"]).any() or not any((table != table[0]).any() for table in tables):
        return
    if "token_type_ids" not in tokenizer.model_input_names:
        _log.warning(
            "the model has token types, which this tokenizer does not give, so all are 0; if it was trained with them, "
            "as by transformers 4, add token_type_ids to model_input_names in tokenizer_config.json and load it again"
        )
        return
    if not torch.equal(given, token_types(pair["input_ids"], tokenizer.sep_token_id)):
        raise ConfigError(
            f"input_form='pair' is not possible with this tokenizer: its token types {given[0].tolist()} do not change "
            f"after {tokenizer.sep_token}, from which they are derived here"
        )
    model.config.reward_head = {"separator": tokenizer.sep_token_id}
    model.__class__ = with_token_types(type(model))
    refusal = stored_template("one_separator").replace("SEP", str(tokenizer.sep_token))
    tokenizer.chat_template = refusal + str(tokenizer.chat_template)
