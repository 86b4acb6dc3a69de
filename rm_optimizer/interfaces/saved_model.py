"""The model that a command scores with, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from rm_optimizer.errors import ConfigError

if TYPE_CHECKING:
    from rm_optimizer.core.model.reward_model import BradleyTerryRM


@dataclass(frozen=True)
class SavedModel:
    """Options of a saved reward model, each with its flag and help."""

    checkpoint: Annotated[str, Argument(help="Hub id, exported folder, run folder or Lightning .ckpt.")]
    max_length: Annotated[
        int | None, Option("--max-length", min=8, help="Longest sequence in tokens; the rest is cut.")
    ] = None
    input_form: Annotated[
        str | None,
        Option("--input-form", help="Input form of a third-party model without a chat template: plain or pair."),
    ] = None

    def load(self, seed: int = 0) -> BradleyTerryRM:
        """Load the model on this machine's accelerator.

        Raises:
            CheckpointError: if the model cannot be loaded.
            ConfigError: if the model cannot read so many tokens, or the input form is unknown or does not apply.
        """
        import torch

        from rm_optimizer.core.model.reward_model import BradleyTerryRM

        try:
            model = BradleyTerryRM.from_pretrained(
                self.checkpoint, max_length=self.max_length, input_form=self.input_form, seed=seed
            )
        except (ConfigError, ValueError) as error:
            text = str(error)
            if self.input_form is not None and "input_form" in text:
                text = text.replace("input_form=", "--input-form ").replace("input_form", "--input-form")
                raise ConfigError(text) from error
            if self.max_length is None or "max_length" not in text:
                raise
            raise ConfigError(f"--{text.removeprefix('model.').replace('max_length', 'max-length', 1)}") from error
        if torch.cuda.is_available():
            model.to("cuda")
        return model


def length_note(model: BradleyTerryRM) -> str | None:
    """Sentence about a default length limit; None if the user or the model's training set the limit."""
    if not model.has_default_length:
        return None
    return (
        f"the model does not record the length it was trained at, so sequences are cut at {model.max_length} tokens; "
        "set another with --max-length"
    )


def notes_on(model: BradleyTerryRM, num: int, num_prompt_cut: int, num_response_cut: int) -> list[str]:
    """Sentences about text that a model's rewards leave out; counts as in `cut_notes`."""
    notes = cut_notes(f"{model.max_length} tokens", num, num_prompt_cut, num_response_cut)
    note = length_note(model)
    return notes if note is None else [*notes, note]


def cut_notes(where: str, num: int, num_prompt_cut: int, num_response_cut: int) -> list[str]:
    """List of one sentence about cut sequences; empty if none was cut.

    Args:
        where: description of the lengths at which sequences were cut.
        num: number of responses.
        num_prompt_cut: number of responses whose prompt lost tokens.
        num_response_cut: number of responses that lost tokens themselves.
    """
    if not num_prompt_cut and not num_response_cut:
        return []
    return [
        f"cut at {where}: the prompts of {num_prompt_cut:,} of {num:,} responses lost their beginning, "
        f"{num_response_cut:,} responses lost their end; raise --max-length if the model can read more"
    ]
