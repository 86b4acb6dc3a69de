"""Export of a model with a proof that plain `transformers` gives the same rewards, before the folder is renamed."""

from __future__ import annotations

import json
import logging
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import safetensors
import tokenizers
import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import rm_optimizer
from rm_optimizer.core.classifier.adapters import has_adapter, import_peft
from rm_optimizer.core.classifier.attention import soft_cap
from rm_optimizer.core.classifier.quantization import computing_dtype, reading_arguments
from rm_optimizer.core.pairs.pair import Message, Prompt, as_messages
from rm_optimizer.core.storage.adapter_files import BaseModel, base_of, merged_model, write_adapter
from rm_optimizer.core.storage.certificate import DEFAULT_PROBE, TOLERANCE, ParityCertificate, certify
from rm_optimizer.core.storage.loading import quiet_transformers
from rm_optimizer.core.storage.model_files import DIGESTS, weight_digests
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.plan import length_batches, pad_sequences
from rm_optimizer.core.tokens.written_template import add_nothing_to_texts
from rm_optimizer.errors import CheckpointError
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.files import replacing_folder
from rm_optimizer.records.locations import EXPORT_FILE

FORMAT_VERSION = 1
"""Version of `export.json`; raised when a reader of the older form would misread it."""
MERGED_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2.0**-5, torch.bfloat16: 2.0**-2}
"""As `certificate.TOLERANCE`, where an adapter was merged.

`(W + s B A) x` rounds each weight once more than `W x + s B (A x)` and adds in another order, in every adapted layer;
the norms of most decoders compute in float32 in a float64 model too.
"""
_PROBE_TOKEN_BUDGET = 8192
_log = logging.getLogger("rm_optimizer")


@runtime_checkable
class Exportable(Protocol):
    """Interface of a reward model for an export: the classifier, its tokenizer and rendering, and its own rewards."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: ConversationRenderer

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def max_length(self) -> int:
        """Largest number of tokens of a sequence."""

    def identity(self) -> dict[str, Any]:
        """Description of the model for `export.json`."""

    def score(
        self, prompts: Sequence[Prompt], responses: Sequence[str], *, token_budget: int
    ) -> Float[Tensor, " sequences"]:
        """Reward of each response."""


def save_export(
    reward_model: Exportable,
    folder: Path,
    *,
    probe: Sequence[tuple[Prompt, str]] | None = None,
    statistics: Mapping[str, Any] | None = None,
    beside: Sequence[Path] = (),
) -> ParityCertificate:
    """Write weights, configuration, tokenizer and `export.json`; see `BradleyTerryRM.save_pretrained`.

    The files are written next to the folder, reloaded by plain `transformers`, compared, and only then renamed.

    Raises:
        CheckpointError: if the folder cannot be written, or the reloaded model scores otherwise.
    """
    tolerance = MERGED_TOLERANCE if has_adapter(reward_model.model) else TOLERANCE
    return _save(reward_model, folder, probe, statistics, _Form(_write_whole, _read_plain, dict, tolerance), beside)


def save_adapter(
    reward_model: Exportable,
    folder: Path,
    *,
    probe: Sequence[tuple[Prompt, str]] | None = None,
    statistics: Mapping[str, Any] | None = None,
) -> ParityCertificate:
    """Write the LoRA factors and head-side modules alone, in peft's format, with tokenizer and `export.json`.

    Before it is renamed, it is compared with plain peft's model of the base and these files, as in `save_export`.

    Args:
        reward_model: a model with an adapter.
        folder: folder of the export, which may replace an earlier export and nothing else.
        probe: prompts and responses to compare on; None takes a fixed set.
        statistics: statistics of the rewards on validation data (mean, std, …), JSON values.

    Raises:
        CheckpointError: if there is no adapter, its base cannot be loaded again, the folder cannot be written, or the
            reloaded model scores otherwise.
    """
    if not has_adapter(reward_model.model):
        raise CheckpointError("the model has no adapter to save; save the whole with save_pretrained")
    base = base_of(reward_model.model)
    form = _Form(write_adapter, partial(_read_adapted, base=base), lambda: {"base": json_values(base)}, TOLERANCE)
    return _save(reward_model, folder, probe, statistics, form)


@dataclass(frozen=True)
class _Form:
    """Form in which a model is stored, and read back without this package."""

    write: Callable[[PreTrainedModel, Path], None]
    read: Callable[[PreTrainedModel, Path], PreTrainedModel]
    record: Callable[[], dict[str, Any]]
    tolerance: Mapping[torch.dtype, float]


def _save(
    reward_model: Exportable,
    folder: Path,
    probe: Sequence[tuple[Prompt, str]] | None,
    statistics: Mapping[str, Any] | None,
    form: _Form,
    beside: Sequence[Path] = (),
) -> ParityCertificate:
    folder = folder.expanduser().resolve()
    is_export = folder.is_dir() and ((folder / EXPORT_FILE).is_file() or not any(folder.iterdir()))
    if folder.exists() and not is_export:
        raise CheckpointError(f"{folder} exists and is not an export of ours; choose a new folder or empty this one")
    try:
        with replacing_folder(folder) as aside, quiet_transformers():
            form.write(reward_model.model, aside)
            reward_model.tokenizer.save_pretrained(aside)
            for file in beside:
                shutil.copyfile(file, aside / file.name)
            certificate = _certified(reward_model, aside, DEFAULT_PROBE if probe is None else tuple(probe), form)
            record = _record(reward_model, certificate, statistics) | form.record() | {DIGESTS: weight_digests(aside)}
            record["plain_rendering"] = _renders_plainly(reward_model, aside, certificate)
            text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
            (aside / EXPORT_FILE).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"the model cannot be written to {folder}: {error}") from error
    return certificate


def _write_whole(model: PreTrainedModel, folder: Path) -> None:
    (merged_model(model) if has_adapter(model) else model).save_pretrained(folder)
    if soft_cap(model.config) is not None:  # plain transformers would take a kernel that leaves it out
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) | {"attn_implementation": "eager"}
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read_plain(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    has_code = hasattr(model.config, "auto_map")
    return AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=has_code)


def _read_adapted(model: PreTrainedModel, folder: Path, base: BaseModel) -> PreTrainedModel:
    attention = {} if soft_cap(model.config) is None else {"attn_implementation": "eager"}
    plain = AutoModelForSequenceClassification.from_pretrained(
        base.source,
        revision=base.revision,
        num_labels=1,
        dtype=model.dtype,
        trust_remote_code=hasattr(model.config, "auto_map"),
        **reading_arguments(model),
        **attention,
    )
    plain.config.get_text_config().pad_token_id = model.config.get_text_config().pad_token_id
    adapted: PreTrainedModel = import_peft().PeftModel.from_pretrained(plain, str(folder)).get_base_model()
    return adapted


@torch.inference_mode()
def _plain_rewards(
    model: PreTrainedModel, input_ids: Sequence[Sequence[int]], device: torch.device
) -> Float[Tensor, " sequences"]:
    """Rewards as the stored model's own forward pass computes them, on the CPU."""
    model = model.to(device).eval()
    pad = model.config.get_text_config().pad_token_id
    rewards = torch.zeros(len(input_ids), dtype=torch.float64)
    for batch in length_batches([len(ids) for ids in input_ids], _PROBE_TOKEN_BUDGET):
        ids, mask = pad_sequences([input_ids[i] for i in batch], pad)
        logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        rewards[batch] = logits.squeeze(-1).double().cpu()
    return rewards


def _stored_renderer(reward_model: Exportable, folder: Path) -> ConversationRenderer:
    """Renderer with the stored tokenizer, as plain `transformers` reads it."""
    renderer = reward_model.renderer
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=hasattr(reward_model.model.config, "auto_map"))
    return ConversationRenderer(tokenizer, renderer.max_length, renderer.render_fn)


def _certified(
    reward_model: Exportable, folder: Path, probe: Sequence[tuple[Prompt, str]], form: _Form
) -> ParityCertificate:
    prompts, responses = [prompt for prompt, _ in probe], [response for _, response in probe]
    renderer = reward_model.renderer
    ids = [encoding.ids for encoding in renderer.encode_batch(prompts, responses)]
    stored = _stored_renderer(reward_model, folder)
    if [encoding.ids for encoding in stored.encode_batch(prompts, responses)] != ids:
        raise CheckpointError(
            f"the tokenizer does not survive saving: reloaded by transformers as {type(stored.tokenizer).__name__} it "
            "gives other tokens; use the tokenizer class that belongs to the model"
        )
    device = reward_model.device
    with torch.autocast(device.type, enabled=False):
        rewards = reward_model.score(prompts, responses, token_budget=_PROBE_TOKEN_BUDGET)
        reloaded = _plain_rewards(form.read(reward_model.model, folder), ids, device)
    dtype = computing_dtype(reward_model.model)
    compared = certify(probe, ids, rewards, reloaded, dtype=dtype, device=device)
    certificate = replace(compared, tolerance=form.tolerance[dtype])
    if not certificate.is_passed:
        is_half = dtype in (torch.float16, torch.bfloat16)
        raise CheckpointError(
            f"the export does not score as the model does: rewards differ by up to {certificate.max_difference:.3g} "
            f"on the probe, allowed is {certificate.tolerance:.3g} times max(1, |reward|); nothing was written"
            + (f"; rounding to {certificate.dtype} alone can do that: export it with float32 weights" * is_half)
        )
    return certificate


def _plain_agreement(reward_model: Exportable, folder: Path, certificate: ParityCertificate) -> tuple[bool, bool]:
    """True if plain `apply_chat_template` gives the certified tokens, and if a pipeline reads them off its text."""
    stored = _stored_renderer(reward_model, folder)
    tokenizer, write = stored.tokenizer, stored.tokenizer.apply_chat_template
    as_tokens = as_text = bool(tokenizer.chat_template) and stored.template_hash == reward_model.renderer.template_hash
    for score in certificate.scores if as_tokens else ():
        if len(score.input_ids) < reward_model.max_length:
            turns = [turn.to_dict() for turn in (*as_messages(score.prompt), Message("assistant", score.response))]
            as_tokens &= tuple(write(turns, tokenize=True, return_dict=True)["input_ids"]) == score.input_ids
            as_text &= tuple(tokenizer(str(write(turns, tokenize=False)))["input_ids"]) == score.input_ids
    return as_tokens, as_text


def _renders_plainly(reward_model: Exportable, folder: Path, certificate: ParityCertificate) -> bool:
    """True if plain `apply_chat_template` of the stored tokenizer gives the certified tokens; otherwise it warns.

    The stored tokenizer then adds nothing to a single text, so that a pipeline reads `tokenize=False` right too.
    """
    renders, is_text_read = _plain_agreement(reward_model, folder, certificate)
    files = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if renders and not is_text_read and files[0].is_file():
        before = [file.read_bytes() for file in files]
        add_nothing_to_texts(*files, reward_model.tokenizer.model_input_names)
        is_text_read = all(_plain_agreement(reward_model, folder, certificate))
        for file, content in () if is_text_read else zip(files, before, strict=True):
            file.write_bytes(content)
    if not is_text_read and reward_model.renderer.kind != "custom":
        _log.warning(
            "%s of the exported tokenizer gives other tokens than the model reads, which end with %r; %s",
            "the text of apply_chat_template(..., tokenize=False)" if renders else "apply_chat_template",
            reward_model.tokenizer.decode(list(certificate.scores[0].input_ids[-2:])),
            "tokenize it with add_special_tokens=False, which a text-classification pipeline does not"
            if renders
            else "render with BradleyTerryRM.from_pretrained(...).renderer, or through rm-opt serve",
        )
    return renders


def _record(
    reward_model: Exportable, certificate: ParityCertificate, statistics: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "architecture": type(reward_model.model).__name__,
        "dtype": certificate.dtype,
        "identity": reward_model.identity(),
        "reward_statistics": None if statistics is None else dict(statistics),
        "certificate": json_values(certificate),
        "versions": {"rm_optimizer": rm_optimizer.__version__, "python": platform.python_version()}
        | {library.__name__: library.__version__ for library in (torch, transformers, tokenizers, safetensors)},
    }
