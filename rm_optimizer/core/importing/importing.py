"""Import of a reward model of other software: its tensors, found and renamed, become one certified export."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, Unpack

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from rm_optimizer.core.classifier.building import LoadOptions, build_arguments, new_classifier
from rm_optimizer.core.classifier.head import OTHER_TASKS, head_name
from rm_optimizer.core.classifier.heads import OWN_TYPE
from rm_optimizer.core.classifier.pooling import pools_last_token
from rm_optimizer.core.importing.forms import (
    Choices,
    Head,
    as_llama,
    backbone_prefix,
    find_head,
    is_normalizer,
    normalization,
    one_reward,
)
from rm_optimizer.core.importing.stored import StoredModel, StoredTensor, has_other_weights, stored_model, write_weights
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.certificate import DEFAULT_PROBE, ParityCertificate
from rm_optimizer.core.storage.loading import HARMLESS, quiet_transformers
from rm_optimizer.core.tokens.template_fields import stored_template
from rm_optimizer.core.tokens.tokenizer import TOKENIZER_FILE, read_otherwise
from rm_optimizer.errors import CheckpointError, ConfigError
from rm_optimizer.records.codec import NOT_STORED, JsonRecord
from rm_optimizer.records.files import write_text
from rm_optimizer.records.locations import ADAPTER_FILE

IMPORT_FILE = "import.json"
"""File in an imported model that tells where it comes from and what was done to it."""
_TOKENIZER_FILES = ("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "chat_template", "spiece")
"""Starts of the names of a tokenizer's files."""
_CONSUMED = ("auto_map", "value_head_prefix", "normalize_reward", "mean", "std", "var", "do_normalize", "score_dim")
"""Settings that have no part in the imported model."""
_log = logging.getLogger("rm_optimizer")


class Reading(TypedDict, total=False):
    """Options of the imported model, as `BradleyTerryRM` takes them."""

    input_form: str | None
    max_length: int | None
    revision: str | None
    dtype: str | None


@dataclass(frozen=True, kw_only=True, repr=False)
class ImportedModel(JsonRecord, indent=2):
    """A reward model that was imported.

    Args:
        folder: folder of the certified model.
        source: where it comes from.
        form: form in which it was stored.
        head: stored names of the head's tensors.
        prefix: text before the backbone's names.
        normalization: what was folded into the head, in words; None if nothing.
        factor: factor of the stored head's output.
        constant: constant of the reward, the head's bias included, of a decoder's linear head.
        is_constant_kept: False if the constant was left out, so that rewards differ from the source's by it.
        appended: text that is put after each conversation.
        certificate: comparison of the folder with the model in memory.
    """

    form: str
    folder: str = ""
    source: str = ""
    head: tuple[str, ...] = ()
    prefix: str = ""
    normalization: str | None = None
    factor: float = 1.0
    constant: float = 0.0
    is_constant_kept: bool = True
    appended: str = ""
    certificate: ParityCertificate | None = field(default=None, metadata=NOT_STORED)

    def sentences(self) -> Iterator[str]:
        """Sentences on what was found and done."""
        yield f"read as {self.form}{f', stored as {chr(44).join(self.head[:2])}' if self.head else ''}"
        if self.normalization is not None:
            yield f"folded into the head: {self.normalization}"
        if self.constant:
            kept = "kept by code of the folder's own, modeling_reward.py, which vLLM does not run; --drop-constant"
            told = (
                f"{kept} leaves it out" if self.is_constant_kept else "left out: rewards differ by it from the source's"
            )
            yield f"constant of the reward, {self.constant:.6g}: {told}"
        if self.appended:
            yield f"each conversation ends with {self.appended!r}"
        if self.certificate is not None:
            yield f"imported: {self.folder}; reloaded rewards differ by up to {self.certificate.max_difference:.2g}"


def import_reward_model(
    source: str | Path,
    folder: str | Path,
    *,
    base: str | Path | None = None,
    head: str | None = None,
    logit: str | None = None,
    activation: str | None = None,
    marker: str | None = None,
    drop_constant: bool = False,
    template: str | Path | None = None,
    append: str | None = None,
    trust_remote_code: bool = False,
    **loading: Unpack[Reading],
) -> ImportedModel:
    """Bring a reward model of other software into a certified folder, with the same rewards.

    The form is found by names and shapes of the stored tensors. A linear head becomes a plain classifier's, with
    bias, mean and deviation folded in. Any other head, and a constant that a decoder's classifier has no place for,
    becomes a folder with its own code (`modeling_reward.py`). Modeling code of the source never runs.

    Args:
        source: folder or hub id of the model: safetensors, torch's files, a distributed checkpoint, or an adapter.
        folder: folder to write.
        base: folder or hub id of configuration and tokenizer, for weights alone; None takes the source.
        head: start of the names of the head that is meant, where several are stored.
        logit: reward of a classifier with two labels: `difference` (the second less the first), `0` or `1`.
        activation: function between the layers of a head of several, where the files do not tell it.
        marker: text that opens the answer, where a gated head reads the prompt.
        drop_constant: leave a decoder's constant out, so that rewards differ from the source's by it and the folder is
            a plain classifier; preferences stay the same.
        template: chat template that the model was trained with, as text or a file; None takes the tokenizer's.
        append: text after each conversation that does not end with it; None takes the form's own.
        trust_remote_code: run the code of the source's tokenizer, once; the written folder does not need it.
        loading: `input_form`, `max_length`, `revision` and `dtype`, as `BradleyTerryRM` takes them.

    Returns:
        What was found and folded, with the certificate.

    Raises:
        CheckpointError: if the source cannot be read, or a stored tensor has no place in the imported model.
        ConfigError: if the files leave something open that no option tells.
    """
    given = [option for option, value in locals().items() if value not in (None, False)]
    target, name = Path(folder).expanduser(), str(source)
    if (path := Path(name).expanduser() / ADAPTER_FILE).is_file() and not has_other_weights(path.parent):
        if unread := [option for option in given if option not in ("source", "folder", "loading")]:
            raise ConfigError(f"an adapter of peft with its head is read as it is; leave out {', '.join(unread)}")
        record = ImportedModel(folder=str(target), source=name, form="an adapter of peft with its head")
        return _saved(BradleyTerryRM.from_pretrained(name, **loading), record)
    with stored_model(name, None if base is None else str(base), loading.pop("revision", None)) as found:
        stored = as_llama(found)
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=target.parent, prefix=".import-") as work:
            staging = Path(work)
            config = _plain_config(stored)
            config.save_pretrained(staging)
            tokenizer = _tokenizer(stored.base, staging, trust_remote_code=trust_remote_code)
            marks = None if marker is None else tokenizer(marker, add_special_tokens=False)["input_ids"]
            choices = Choices(head=head, logit=logit, activation=activation, marker=marks)
            record = replace(
                _stage(stored, config, staging, choices, drop_constant=drop_constant), folder=str(target), source=name
            )
            if template is not None:
                tokenizer.chat_template = _text(template)
            if not tokenizer.chat_template and loading.get("input_form") is None:
                raise ConfigError(
                    f"{source} has no chat template, so the files do not tell how a conversation becomes text; give "
                    "the template of its model card with --template FILE, or name --input-form plain or pair"
                )
            stripped, appended = _ending(stored.config, tokenizer) if append is None else ("", append)
            if appended:
                words = {"@stripped@": stripped, "@end@": appended.strip(), "@appended@": appended}
                wrapped = stored_template("appending", **words)
                tokenizer.chat_template = wrapped.replace("@template@", str(tokenizer.chat_template))
            tokenizer.save_pretrained(staging)
            try:
                model = BradleyTerryRM.from_pretrained(staging, **loading)
                if "separator" in getattr(model.model.config, "reward_head", {}):
                    record = replace(record, form=f"{record.form} of text pairs, told apart by token types")
                _require_read_end(record, model, tokenizer.pad_token_id)
                return _saved(model, replace(record, appended=appended))
            except (CheckpointError, ConfigError) as error:
                raise type(error)(str(error).replace(str(staging), name)) from error


def _saved(model: BradleyTerryRM, record: ImportedModel) -> ImportedModel:
    with TemporaryDirectory() as work:
        write_text(Path(work) / IMPORT_FILE, record.to_json() + "\n")
        certificate = model.save_pretrained(record.folder, beside=[Path(work) / IMPORT_FILE])
    return replace(record, certificate=certificate)


def _stage(
    stored: StoredModel, config: PretrainedConfig, staging: Path, choices: Choices, *, drop_constant: bool
) -> ImportedModel:
    """Write configuration and weights of the classifier, the head's own settings included."""
    with torch.device("meta"):
        skeleton = new_classifier(**build_arguments(copy.deepcopy(config), LoadOptions()))
    backbone, is_decoder = f"{skeleton.base_model_prefix}.", pools_last_token(skeleton)
    tensors = {name.replace("_orig_mod.", ""): each for name, each in stored.tensors.items()}
    prefix = backbone_prefix(tensors, [*skeleton.base_model.state_dict()])
    parts = {name for name, _ in skeleton.base_model.named_children()}
    inside = {name for name in tensors if name.startswith(prefix) and name[len(prefix) :].split(".")[0] in parts}
    outer = prefix.removesuffix(backbone)
    rest = {name.removeprefix(outer): each for name, each in tensors.items() if name not in inside}
    rest = {name: each for name, each in rest.items() if not HARMLESS.search(name)}
    copies = {name[len(prefix) :]: tensors[name] for name in inside}
    rest = {name: each for name, each in rest.items() if not _is_copy(name, each, copies)}
    factor, constant, origin = normalization(stored.config, rest)
    if is_decoder:
        head = find_head(stored, rest, config.get_text_config().hidden_size, choices).scaled(factor, constant)
        settings, weights = _settled(head, drop_constant=drop_constant)
        if settings is not None:
            config.reward_head = settings
        is_linear = len(head.layers) == 1
        if drop_constant and not is_linear:
            raise ConfigError(f"drop_constant is for a linear head, and this is {head.form}; leave it out")
        record = ImportedModel(form=head.form, head=head.names, constant=float(head.layers[0][1]) if is_linear else 0.0)
        record = replace(record, is_constant_kept=not drop_constant or not record.constant)
    else:
        architectures = stored.config.get("architectures") or [type(skeleton).__name__]
        if any(task in name for task in OTHER_TASKS for name in architectures):
            raise CheckpointError(f"it was saved as {architectures[0]}, whose output is no reward of a whole response")
        weights = _own_head(skeleton, rest, factor, constant, choices.logit)
        record = ImportedModel(form="a classifier's head", head=tuple(rest))
    config.architectures = [type(skeleton).__name__]
    config.save_pretrained(staging)
    moved = ((backbone + name[len(prefix) :], tensors[name].read()) for name in sorted(inside))
    write_weights(staging, chain(moved, ((name, value.float()) for name, value in weights.items())))
    return replace(record, prefix=prefix, normalization=origin, factor=factor)


def _is_copy(name: str, tensor: StoredTensor, backbone: Mapping[str, StoredTensor]) -> bool:
    """True for a second copy of a tensor of the backbone, which Starling's checkpoint has of each."""
    parts = name.split(".")
    found = (backbone.get(".".join(parts[i:])) for i in range(len(parts)))
    return any(each is not None and torch.equal(each.read(), tensor.read()) for each in found)


def _tokenizer(base: Path, staging: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The model's tokenizer, read with a configuration that names no code; its code only fills its files.

    Raises:
        CheckpointError: if it cannot be read, or only by its own code.
    """
    for file in base.iterdir():
        is_code = trust_remote_code and file.suffix == ".py"
        if file.name.startswith(_TOKENIZER_FILES) or file.suffix == ".model" or is_code:
            shutil.copyfile(file, staging / file.name)
    settings = staging / "tokenizer_config.json"
    brings_code = settings.is_file() and "auto_map" in json.loads(settings.read_text(encoding="utf-8"))
    if brings_code and not trust_remote_code:
        raise CheckpointError(
            f"the tokenizer in {base} is custom code; read it, then pass --trust-remote-code to run it once"
        )
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(staging, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).replace(str(staging), str(base)).splitlines()[0]
        raise CheckpointError(f"the tokenizer in {base} cannot be read: {reason}") from error
    return _without_code(tokenizer, base) if brings_code else tokenizer


def _without_code(tokenizer: PreTrainedTokenizerBase, base: Path) -> PreTrainedTokenizerBase:
    """The same tokenizer as `tokenizer.json` describes it, for a folder that needs no code.

    Raises:
        CheckpointError: if its code does something that no such file describes.
    """
    name, backend, file = type(tokenizer).__name__, getattr(tokenizer, "backend_tokenizer", None), base / TOKENIZER_FILE
    difference = read_otherwise(tokenizer, file) if file.is_file() else None
    if difference is not None:  # transformers 5 rebuilds a tokenizer whose class has a constructor
        _log.warning("%s; the ids of the file are taken", difference)
        backend = Tokenizer.from_file(str(file))
    if backend is None:
        raise CheckpointError(f"{name} in {base} tokenizes in Python alone; name a base with tokenizer.json by --base")
    plain = PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(backend), **tokenizer.special_tokens_map)
    plain.chat_template = tokenizer.chat_template
    texts = [text for pair in DEFAULT_PROBE for text in pair if isinstance(text, str)]
    if difference is None and any(plain(text)["input_ids"] != tokenizer(text)["input_ids"] for text in texts):
        raise CheckpointError(f"{name} in {base} gives other ids than its tokenizer.json; name another by --base")
    return plain


def _plain_config(stored: StoredModel) -> PretrainedConfig:
    """The configuration of a classifier with one label, without the settings of the form it was stored in.

    Raises:
        CheckpointError: if the backbone's architecture is not one of `transformers`.
    """
    kind = stored.config["model_type"]
    if kind == OWN_TYPE:
        raise CheckpointError(f"{stored.folder} was imported before; rm-opt export writes it in another type")
    if kind not in CONFIG_MAPPING or CONFIG_MAPPING[kind] not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise CheckpointError(
            f"its backbone {kind} has no classifier in transformers; only InternLM2 is converted to one that has"
        )
    kept = {name: value for name, value in stored.config.items() if name not in _CONSUMED}
    return CONFIG_MAPPING[kind].from_dict({**kept, "num_labels": 1, "id2label": {0: "reward"}})


def _settled(head: Head, *, drop_constant: bool) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Settings of a separate head, None for a plain linear one, and its weights by name."""
    layers = head.layers
    if head.gate:
        (objectives, _), *gate, (total, _) = layers
        weights = {"score.objectives.weight": objectives, "score.total.weight": total} | _named("score.gate", gate)
        return {"sizes": _sizes(gate), **head.gate}, weights
    if len(layers) > 1:
        return {"sizes": _sizes(layers), "activation": head.activation}, _named("score", layers)
    (weight, bias), *_ = layers
    if drop_constant or not bias:
        return None, {"score.weight": weight}
    return {"sizes": _sizes(layers), "activation": head.activation}, {"score.weight": weight, "score.bias": bias}


def _sizes(layers: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    return [layers[0][0].shape[1], *(len(weight) for weight, _ in layers)]


def _named(stem: str, layers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Layers under the names that they have in a sequence with an activation after each."""
    kinds = ("weight", "bias")
    return {
        f"{stem}.{2 * i}.{kind}": value
        for i, layer in enumerate(layers)
        for kind, value in zip(kinds, layer, strict=True)
    }


def _own_head(
    skeleton: PreTrainedModel, rest: Mapping[str, StoredTensor], factor: float, constant: float, logit: str | None
) -> dict[str, Tensor]:
    """The head of a classifier whose class defines one, such as an encoder's, with one scaled output."""
    final = head_name(skeleton)
    if lost := sorted({f"{final}.{kind}" for kind in ("weight", "bias")} - rest.keys()):
        raise CheckpointError(
            f"{type(skeleton).__name__} reads its reward through {final}, and {lost[0]} is not stored; a head of "
            "another form is read on decoders alone"
        )
    weights = {name: each.read() for name, each in rest.items() if not is_normalizer(name)}
    weight, bias = one_reward(weights[f"{final}.weight"].double(), weights[f"{final}.bias"].double(), logit)
    return weights | {f"{final}.weight": factor * weight, f"{final}.bias": factor * bias + constant}


def _text(template: str | Path) -> str:
    path = Path(template)
    is_file = isinstance(template, Path) or ("{" not in template and path.is_file())
    try:
        return path.read_text(encoding="utf-8") if is_file else str(template)
    except OSError as error:
        raise ConfigError(f"the template {path} cannot be read: {error.strerror}") from error


def _ending(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Characters that a form strips from a conversation's end, and the text that it puts there; empty for none.

    OpenRLHF's data sets end in a blank and EOS, InternLM2's in the token whose state is read.
    """
    if {"normalize_reward", "value_head_prefix"} & config.keys() and tokenizer.eos_token is not None:
        return "\n", f" {tokenizer.eos_token}"
    read = config.get("reward_token_id")
    return "", "" if read is None else str(tokenizer.convert_ids_to_tokens(read))


def _require_read_end(record: ImportedModel, model: BradleyTerryRM, pad_id: int | None) -> None:
    """Refuse conversations that end with the pad id where the form reads the token before the first pad.

    Raises:
        ConfigError: if they do.
    """
    (encoding,) = model.encode(["a"], ["b"])
    # DeepSpeed-Chat's and Starling's `v_head` next to `rwtransformer` or `transformer`.
    reads_before_pad = record.head == ("v_head.weight",) and record.prefix.endswith("transformer.")
    if reads_before_pad and encoding.ids[-1] == pad_id:
        raise ConfigError(
            f"this form reads the token before the first pad, and its conversations end with the pad token "
            f"{model.tokenizer.convert_ids_to_tokens(pad_id)}; give --template without it"
        )
