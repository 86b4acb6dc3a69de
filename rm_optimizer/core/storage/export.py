"""Export of a model with a proof that plain `transformers` gives the same rewards, before the folder is renamed."""

from __future__ import annotations

import json
import logging
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors
import tokenizers
import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

import rm_optimizer
from rm_optimizer.core.classifier import heads
from rm_optimizer.core.classifier.adapters import has_adapter, import_peft
from rm_optimizer.core.classifier.attention import soft_cap
from rm_optimizer.core.classifier.heads import OWN_TYPE
from rm_optimizer.core.classifier.pooling import plain_logits, pooling_head_of
from rm_optimizer.core.classifier.quantization import computing_dtype, dtype_name, keep_packing, reading_arguments
from rm_optimizer.core.classifier.scoring import ClassifierRewardModel
from rm_optimizer.core.pairs.pair import Message, Prompt, as_messages
from rm_optimizer.core.storage.adapter_files import BaseModel, base_of, merged_model, write_adapter
from rm_optimizer.core.storage.certificate import DEFAULT_PROBE, TOLERANCE, ParityCertificate, ProbeScore, certify
from rm_optimizer.core.storage.loading import quiet_transformers
from rm_optimizer.core.storage.model_files import DIGESTS, weight_digests
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.padding import pad_sequences
from rm_optimizer.core.tokens.plan import length_batches
from rm_optimizer.core.tokens.written_template import add_nothing_to_texts, plain_agreement
from rm_optimizer.errors import CheckpointError
from rm_optimizer.records.codec import json_values
from rm_optimizer.records.files import replacing_folder
from rm_optimizer.records.locations import CODE_FILE, EXPORT_FILE

FORMAT_VERSION = 1
"""Version of `export.json`; raised when a reader of the older form would misread it."""
MERGED_TOLERANCE = {"float64": 1e-5, "float32": 1e-4, "float16": 2.0**-5, "bfloat16": 2.0**-2}
"""As `certificate.TOLERANCE`, where an adapter was merged.

`(W + s B A) x` rounds each weight once more than `W x + s B (A x)` and adds in another order, in every adapted layer;
the norms of most decoders compute in float32 in a float64 model too.
"""
_PROBE_TOKEN_BUDGET = 8192
_log = logging.getLogger("rm_optimizer")


def save_export(
    reward_model: ClassifierRewardModel,
    folder: Path,
    *,
    probe: Sequence[tuple[Prompt, str]] | None = None,
    statistics: Mapping[str, Any] | None = None,
    beside: Sequence[Path] = (),
    settings: Mapping[str, Any] = MappingProxyType({}),
    base: BaseModel | None = None,
) -> ParityCertificate:
    """Write weights, configuration, tokenizer and `export.json`; see `BradleyTerryRM.save_pretrained`.

    The files are written next to the folder, reloaded by plain `transformers`, compared, and only then renamed.
    `settings` are further entries of `config.json` for other projects. With a `base`, the adapter alone is written.

    Raises:
        CheckpointError: if the folder cannot be written, or the reloaded model scores otherwise.
    """
    model = reward_model.model
    with replacing_export(folder) as aside:
        if base is not None:
            write_adapter(model, aside)
        else:
            (merged_model(model) if has_adapter(model) else model).save_pretrained(aside)
            changes = dict(settings)
            if soft_cap(model.config) is not None:  # plain transformers would take a kernel that leaves it out
                changes["attn_implementation"] = "eager"
            if (name := pooling_head_of(model)) is not None:  # vLLM refuses a class that it does not know
                changes["architectures"] = [f"{type(model).__name__}WithPoolingHead"]
                _log.warning("plain transformers has no pooling head '%s' and reads other rewards", name)
            if (described := getattr(model.config, "reward_head", None)) is not None:
                changes |= _own_code(model, described, aside)
            if changes:
                file = aside / "config.json"
                config = json.loads(file.read_text(encoding="utf-8")) | changes
                file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        reward_model.tokenizer.save_pretrained(aside)
        for file in beside:
            shutil.copyfile(file, aside / file.name)
        stored, reloaded = stored_renderer(reward_model, aside), _reloaded(model, aside, base)
        certificate = certified(reward_model, stored, reloaded, probe=probe, is_merged=base is None)
        record = {
            "format_version": FORMAT_VERSION,
            "architecture": type(model).__name__,
            "dtype": certificate.dtype,
            "identity": reward_model.identity(),
            "reward_statistics": None if statistics is None else dict(statistics),
            "certificate": json_values(certificate),
            "versions": {"rm_optimizer": rm_optimizer.__version__, "python": platform.python_version()}
            | {library.__name__: library.__version__ for library in (torch, transformers, tokenizers, safetensors)},
            **({} if base is None else {"base": json_values(base)}),
            DIGESTS: weight_digests(aside),
            "plain_rendering": _renders_plainly(reward_model, aside, stored, certificate),
        }
        text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
        (aside / EXPORT_FILE).write_text(text + "\n", encoding="utf-8")
    return certificate


def save_adapter(
    reward_model: ClassifierRewardModel, folder: Path, *, statistics: Mapping[str, Any] | None = None
) -> ParityCertificate:
    """Write the LoRA factors and head-side modules alone, in peft's format, with tokenizer and `export.json`.

    Before it is renamed, it is compared with plain peft's model of the base and these files, as in `save_export`.

    Args:
        reward_model: a model with an adapter.
        folder: folder of the export, which may replace an earlier export and nothing else.
        statistics: statistics of the rewards on validation data (mean, std, …), JSON values.

    Raises:
        CheckpointError: if there is no adapter, its base cannot be loaded again, the folder cannot be written, or the
            reloaded model scores otherwise.
    """
    if not has_adapter(reward_model.model):
        raise CheckpointError("the model has no adapter to save; save the whole with save_pretrained")
    return save_export(reward_model, folder, statistics=statistics, base=base_of(reward_model.model))


@contextmanager
def replacing_export(folder: Path) -> Iterator[Path]:
    """Folder that takes the place of an export after the block.

    Raises:
        CheckpointError: if the folder holds something that is no earlier export, or cannot be written.
    """
    folder = folder.expanduser().resolve()
    is_export = folder.is_dir() and ((folder / EXPORT_FILE).is_file() or not any(folder.iterdir()))
    if folder.exists() and not is_export:
        raise CheckpointError(f"{folder} exists and is not an export of ours; choose a new folder or empty this one")
    try:
        with replacing_folder(folder) as aside, quiet_transformers():
            yield aside
    except OSError as error:
        raise CheckpointError(f"the model cannot be written to {folder}: {error}") from error


def _own_code(model: PreTrainedModel, described: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Write code that no class of `transformers` has; return what it changes in `config.json`."""
    base = next(each for each in type(model).__mro__ if each.__module__.startswith("transformers."))
    config, module = type(model.config), Path(CODE_FILE).stem
    names = f"from transformers import {config.__name__}, {base.__name__}"
    own = heads.with_token_types if "separator" in described else heads.with_head
    classes = f"RewardConfig = with_own_type({config.__name__})\nRewardModel = {own.__name__}({base.__name__})"
    code = Path(heads.__file__).read_text(encoding="utf-8")
    (folder / CODE_FILE).write_text(f"{code}\n\n{names}  # noqa: E402\n\n{classes}\n", encoding="utf-8")
    auto_map = {"AutoConfig": f"{module}.RewardConfig", "AutoModelForSequenceClassification": f"{module}.RewardModel"}
    head = {**described, "model_type": model.config.model_type}
    return {"model_type": OWN_TYPE, "auto_map": auto_map, "architectures": ["RewardModel"], "reward_head": head}


def _reloaded(model: PreTrainedModel, folder: Path, base: BaseModel | None) -> PreTrainedModel:
    """The stored model as plain `transformers` reads it, or as plain peft reads it with its base."""
    has_code = hasattr(model.config, "auto_map") or hasattr(model.config, "reward_head")
    if base is None:
        return AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=has_code)
    attention = {} if soft_cap(model.config) is None else {"attn_implementation": "eager"}
    plain = AutoModelForSequenceClassification.from_pretrained(
        base.source,
        revision=base.revision,
        num_labels=1,
        dtype=model.dtype,
        trust_remote_code=has_code,
        **reading_arguments(model),
        **attention,
    )
    keep_packing(plain).config.pooling_head = pooling_head_of(model)
    plain.config.get_text_config().pad_token_id = model.config.get_text_config().pad_token_id
    adapted: PreTrainedModel = import_peft().PeftModel.from_pretrained(plain, str(folder)).get_base_model()
    return adapted


@torch.inference_mode()
def _plain_rewards(
    model: PreTrainedModel, input_ids: Sequence[Sequence[int]], device: torch.device
) -> Float[Tensor, " sequences"]:
    """Rewards as the stored model's own forward pass, or a registered pooling head, computes them, on the CPU."""
    model = model.to(device).eval()
    pad = model.config.get_text_config().pad_token_id
    rewards = torch.zeros(len(input_ids), dtype=torch.float64)
    for batch in length_batches([len(ids) for ids in input_ids], _PROBE_TOKEN_BUDGET):
        ids, mask = pad_sequences([input_ids[i] for i in batch], pad)
        logits = plain_logits(model, ids.to(device), mask.to(device))
        rewards[batch] = logits.squeeze(-1).double().cpu()
    return rewards


def stored_renderer(reward_model: ClassifierRewardModel, folder: Path) -> ConversationRenderer:
    """Renderer with the stored tokenizer, as plain `transformers` reads it."""
    renderer = reward_model.renderer
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=hasattr(reward_model.model.config, "auto_map"))
    return ConversationRenderer(tokenizer, renderer.max_length, renderer.render_fn)


def certified(
    reward_model: ClassifierRewardModel,
    stored: ConversationRenderer,
    reloaded: PreTrainedModel,
    *,
    probe: Sequence[tuple[Prompt, str]] | None = None,
    is_merged: bool = True,
) -> ParityCertificate:
    """Comparison of a model in memory with its files.

    Args:
        reward_model: the model.
        stored: renderer with the stored tokenizer.
        reloaded: the stored model, read by plain `transformers`.
        probe: prompts and responses; None takes the built-in ones.
        is_merged: True if an adapter of the model is merged in the files.

    Raises:
        CheckpointError: if the stored tokenizer gives other tokens, or the files other rewards.
    """
    probe = DEFAULT_PROBE if probe is None else probe
    model, prompts, responses = reward_model.model, [prompt for prompt, _ in probe], [text for _, text in probe]
    ids = [encoding.ids for encoding in reward_model.renderer.encode_batch(prompts, responses)]
    if [encoding.ids for encoding in stored.encode_batch(prompts, responses)] != ids:
        raise CheckpointError(
            f"the tokenizer does not survive saving: reloaded by transformers as {type(stored.tokenizer).__name__} it "
            "gives other tokens; use the tokenizer class that belongs to the model"
        )
    device = reward_model.device
    with torch.autocast(device.type, enabled=False):
        rewards = reward_model.score(prompts, responses, token_budget=_PROBE_TOKEN_BUDGET).tolist()
        plain = _plain_rewards(reloaded, ids, device).tolist()
    dtype = dtype_name(computing_dtype(model))
    tolerance = (MERGED_TOLERANCE if is_merged and has_adapter(model) else TOLERANCE)[dtype]
    scores = tuple(map(ProbeScore, prompts, responses, ids, rewards, plain))
    certificate = certify(scores, tolerance=tolerance, dtype=dtype, device=device.type)
    if not certificate.is_passed:
        is_half = dtype in ("float16", "bfloat16")
        raise CheckpointError(
            f"the export does not score as the model does: rewards differ by up to {certificate.max_difference:.3g} "
            f"on the probe, allowed is {certificate.tolerance:.3g} times max(1, |reward|); nothing was written"
            + (f"; rounding to {certificate.dtype} alone can do that: export it with float32 weights" * is_half)
        )
    return certificate


def _renders_plainly(
    reward_model: ClassifierRewardModel, folder: Path, stored: ConversationRenderer, certificate: ParityCertificate
) -> bool:
    """True if plain `apply_chat_template` of the stored tokenizer gives the certified tokens; otherwise it warns.

    The stored tokenizer then adds nothing to a single text, so that a pipeline reads `tokenize=False` right too.
    """
    scores = certificate.scores
    read = [(*as_messages(score.prompt), Message("assistant", score.response)) for score in scores]

    def agreement(plain: ConversationRenderer) -> tuple[bool, bool]:
        if plain.template_hash != reward_model.renderer.template_hash:
            return False, False
        return plain_agreement(read, [score.input_ids for score in scores], reward_model.max_length, plain.tokenizer)

    renders, is_text_read = agreement(stored)
    files = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if renders and not is_text_read and files[0].is_file():
        before = [file.read_bytes() for file in files]
        add_nothing_to_texts(*files, reward_model.tokenizer.model_input_names)
        is_text_read = all(agreement(stored_renderer(reward_model, folder)))
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
