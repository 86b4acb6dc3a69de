"""A saved reward model on this machine, for the commands that score with it."""

from __future__ import annotations

import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import ConfigError


def load_local(checkpoint: str, *, max_length: int | None, input_form: str | None, seed: int = 0) -> BradleyTerryRM:
    """The model of a checkpoint on this machine's accelerator.

    Args:
        checkpoint: anything `BradleyTerryRM.from_pretrained` loads.
        max_length: the value of `--max-length`; None takes the stored number, or the model's.
        input_form: the value of `--input-form`; None where it was not given.
        seed: seed of what the model draws.

    Raises:
        CheckpointError: if the model cannot be loaded.
        ConfigError: if the model cannot read so many tokens, or `input_form` is unknown or not for it.
    """
    try:
        model = BradleyTerryRM.from_pretrained(checkpoint, max_length=max_length, input_form=input_form, seed=seed)
    except (ConfigError, ValueError) as error:
        if input_form is not None and "input_form" in str(error):
            text = str(error).replace("input_form=", "--input-form ").replace("input_form", "--input-form")
            raise ConfigError(text) from error
        if max_length is None or "max_length" not in str(error):
            raise
        raise ConfigError(f"--{str(error).removeprefix('model.').replace('max_length', 'max-length', 1)}") from error
    if torch.cuda.is_available():
        model.to("cuda")
    return model


def length_note(model: BradleyTerryRM) -> str | None:
    """A sentence on a length limit that nobody chose; None where the user or the model's training did."""
    if not model.has_default_length:
        return None
    return (
        f"the model does not record the length it was trained at, so sequences are cut at {model.max_length} tokens; "
        "set another with --max-length"
    )
