"""Writing a model so that plain `transformers` scores it alike, and proving it before the folder takes its name."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import tokenizers
import torch
import transformers
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as hf_logging

import rm_optimizer
from rm_optimizer.core.base import Prompt
from rm_optimizer.core.batching import length_batches, pad_sequences
from rm_optimizer.core.certificate import DEFAULT_PROBE, ParityCertificate, certify
from rm_optimizer.core.chat import ConversationRenderer
from rm_optimizer.core.sources import EXPORT_FILE
from rm_optimizer.errors import CheckpointError

if TYPE_CHECKING:
    from rm_optimizer.core.reward_model import BradleyTerryRM

FORMAT_VERSION = 1
"""Version of `export.json`; raised when a reader of the older form would misread it."""
_PROBE_TOKEN_BUDGET = 8192


def save_export(
    reward_model: BradleyTerryRM,
    folder: Path,
    *,
    probe: Sequence[tuple[Prompt, str]] | None = None,
    statistics: Mapping[str, Any] | None = None,
) -> ParityCertificate:
    """Write weights, configuration, tokenizer and `export.json`; see `BradleyTerryRM.save_pretrained`.

    The files are written beside the folder, reloaded by plain `transformers`, compared, and only then renamed.

    Raises:
        CheckpointError: if the folder cannot be written, or the reloaded model scores otherwise.
    """
    try:
        with _written_aside(folder) as aside, _no_progress_bars():
            reward_model.model.save_pretrained(aside)
            reward_model.tokenizer.save_pretrained(aside)
            certificate = _certified(reward_model, aside, DEFAULT_PROBE if probe is None else tuple(probe))
            record = _record(reward_model, certificate, statistics)
            text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
            (aside / EXPORT_FILE).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"the model cannot be written to {folder}: {error}") from error
    return certificate


def read_certificate(folder: str | Path) -> ParityCertificate:
    """The parity certificate of an export.

    Raises:
        CheckpointError: if the folder has none.
    """
    path = Path(folder) / EXPORT_FILE
    try:
        return ParityCertificate.from_json(json.loads(path.read_text(encoding="utf-8"))["certificate"])
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"no parity certificate in {path}; export the model with save_pretrained") from error


@torch.inference_mode()
def plain_rewards(
    folder: str | Path, input_ids: Sequence[Sequence[int]], *, device: torch.device, trust_remote_code: bool = False
) -> Float[Tensor, " sequences"]:
    """Rewards as plain `transformers` computes them from the files of a folder, on the CPU.

    Args:
        folder: an exported model.
        input_ids: token ids of each sequence.
        device: where to compute.
        trust_remote_code: run modelling code that the folder names.
    """
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=trust_remote_code)
    model = model.to(device).eval()
    pad = model.config.get_text_config().pad_token_id
    rewards = torch.zeros(len(input_ids), dtype=torch.float64)
    for batch in length_batches([len(ids) for ids in input_ids], _PROBE_TOKEN_BUDGET):
        ids, mask = pad_sequences([input_ids[i] for i in batch], pad)
        logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        rewards[batch] = logits.squeeze(-1).double().cpu()
    return rewards


def _certified(reward_model: BradleyTerryRM, folder: Path, probe: Sequence[tuple[Prompt, str]]) -> ParityCertificate:
    prompts, responses = [prompt for prompt, _ in probe], [response for _, response in probe]
    renderer = reward_model.renderer
    ids = [encoding.ids for encoding in renderer.encode_batch(prompts, responses)]
    has_code = hasattr(reward_model.model.config, "auto_map")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=has_code)
    again = ConversationRenderer(tokenizer, renderer.max_length, renderer.render_fn)
    if [encoding.ids for encoding in again.encode_batch(prompts, responses)] != ids:
        raise CheckpointError(
            f"the tokenizer does not survive saving: reloaded by transformers as {type(tokenizer).__name__} it gives "
            "other tokens; use the tokenizer class that belongs to the model"
        )
    device = reward_model.device
    with torch.autocast(device.type, enabled=False):
        rewards = reward_model.score(prompts, responses, token_budget=_PROBE_TOKEN_BUDGET)
        reloaded = plain_rewards(folder, ids, device=device, trust_remote_code=has_code)
    certificate = certify(probe, ids, rewards, reloaded, dtype=reward_model.model.dtype, device=device)
    if not certificate.is_passed:
        raise CheckpointError(
            f"the export does not score as the model does: rewards differ by up to {certificate.max_difference:.3g} "
            f"on the probe, allowed is {certificate.tolerance:.3g} times max(1, |reward|); nothing was written"
        )
    return certificate


def _record(
    reward_model: BradleyTerryRM, certificate: ParityCertificate, statistics: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "architecture": type(reward_model.model).__name__,
        "dtype": certificate.dtype,
        "identity": reward_model.identity(),
        "reward_statistics": None if statistics is None else dict(statistics),
        "certificate": certificate.to_json(),
        "versions": {
            "rm_optimizer": rm_optimizer.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "safetensors": safetensors.__version__,
        },
    }


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep `transformers`' bars for writing and loading out of a training run's own display."""
    was_enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            hf_logging.enable_progress_bar()


@contextmanager
def _written_aside(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that takes its name when the block ends well, and vanishes when it does not."""
    folder = folder.expanduser().resolve()
    if folder.exists() and not _is_replaceable(folder):
        raise CheckpointError(f"{folder} exists and is not an export of ours; choose a new folder or empty this one")
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.writing")
    earlier = folder.with_name(f".{folder.name}.{os.getpid()}.earlier")
    try:
        aside.mkdir(parents=True)
        yield aside
        if folder.exists():
            os.replace(folder, earlier)
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(earlier, ignore_errors=True)


def _is_replaceable(folder: Path) -> bool:
    return folder.is_dir() and ((folder / EXPORT_FILE).is_file() or not any(folder.iterdir()))
