"""Flags of the inputs of a command: preference pairs, and the model that scores them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import yaml  # type: ignore[import-untyped]
from typer import Argument, Context, Option

from rm_optimizer.errors import ConfigError
from rm_optimizer.records.locations import resolve_source
from rm_optimizer.schema.checks import require, require_once
from rm_optimizer.schema.data import DataConfig, ReadOptions, Spelling, read_config
from rm_optimizer.training.processes import launched_processes

if TYPE_CHECKING:
    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.tokens.dataset import PreferenceDataset

_log = logging.getLogger("rm_optimizer")
RayWorkers: TypeAlias = Annotated[
    int | None,
    Option("--ray", metavar="N", min=1, help="Score by N workers on Ray, with the same rewards for any N."),
]
"""Option of commands that score on Ray."""
TokenBudget: TypeAlias = Annotated[
    int, Option("--token-budget", min=1, help="Most tokens in one forward pass, padding included.")
]


@dataclass(frozen=True)
class PairOptions:
    """Options of every command that reads pairs, each with its flag and help."""

    format: Annotated[
        str, Option("--format", help="Row format: auto, explicit, hh, messages, lists, winner or kwise.")
    ] = DataConfig.format
    columns: Annotated[
        list[str], Option("--columns", metavar="OURS=THEIRS", help="Map a column name; may be repeated.")
    ] = field(default_factory=list)
    on_bad_row: Annotated[str, Option("--on-bad-row", help="Action for a bad row: error or drop.")] = (
        DataConfig.on_bad_row.value
    )
    winner: Annotated[
        str | None,
        Option("--winner", metavar="FIRST,SECOND,TIE", help="Values of the winner column; | separates alternatives."),
    ] = None
    layout: Annotated[
        str | None, Option("--layout", metavar="NAME", help="Layout of the rows: a published one, or a YAML file.")
    ] = None
    max_bad_share: Annotated[
        float, Option("--max-bad-share", min=0, max=1, help="Largest share of a file's rows to drop as bad.")
    ] = DataConfig.max_bad_share
    kwise_rule: Annotated[
        str, Option("--kwise-rule", help="Pairs of a list of responses: all, all_and_ties, best_worst or adjacent.")
    ] = DataConfig.kwise_rule.value
    label: Annotated[
        float, Option("--label", min=0, max=1, help="P(chosen > rejected) for rows without a label; 0.5 for ties.")
    ] = 1.0

    def load(self, source: str | Sequence[str], *, shows_layouts: bool = True) -> PreferenceDataset:
        """Read one source, or several as one data set, each an argument of `PreferenceDataset`.

        Args:
            source: the source or sources.
            shows_layouts: log the first pair of each layout that the rows have.

        Raises:
            ConfigError: if a flag's value is unknown, or a file is named twice.
            DataError: if the source cannot be used.
        """
        from rm_optimizer.core.rows.readers import require_files, source_files

        options = self.reading()
        sources = [source_options(each) for each in ([source] if isinstance(source, str) else source)]
        paths = [str(each["path"]) for each in sources]
        for name in paths:
            require_files(name)
        files = (file for name in paths for part in source_files(name) for file in part.files)
        require_once("--data", "file", files)
        from rm_optimizer.core.tokens.audit import layout_examples  # takes a second
        from rm_optimizer.core.tokens.dataset import load_pairs

        with Spelling.flags.used():
            data = load_pairs([{"label": self.label, **each} for each in sources], options)
        for note in (*data.notes, *(layout_examples(data) if shows_layouts else ())):
            _log.warning(note)
        return data

    def reading(self) -> DataConfig:
        """Options of reading rows.

        Raises:
            ConfigError: if a flag's value is unknown.
        """
        given = {name: value for name, value in vars(self).items() if name in ReadOptions.__annotations__}
        given |= {"columns": self.column_mapping(), "layout": spelled(self.layout)}
        return read_config("rm-opt", cast(ReadOptions, given), Spelling.flags)

    def bad_rows(self) -> DataConfig:
        """The treatment of bad rows alone.

        Raises:
            ConfigError: if a flag's value is unknown.
        """
        options: ReadOptions = {"on_bad_row": self.on_bad_row, "max_bad_share": self.max_bad_share}
        return read_config("rm-opt", options, Spelling.flags)

    def load_splits(
        self, sources: Sequence[str], named: str, *, shows_layouts: bool = True
    ) -> dict[str, PreferenceDataset]:
        """Read each source as a data set, keyed by its file name, or by the whole source if two names are equal.

        Raises:
            ConfigError: if a source is named twice.
        """
        require_once(named, "source", sources)
        names = [Path(source_options(source)["path"]).name or source for source in sources]
        keys = names if len(set(names)) == len(names) else sources
        return {key: self.load(each, shows_layouts=shows_layouts) for key, each in zip(keys, sources, strict=True)}

    def column_mapping(self) -> dict[str, str | list[str] | None] | None:
        """Mapping `{ours: theirs}`, or None if no column is mapped.

        `OURS=null` leaves a column out, and `OURS=[A, B]` reads several as a list.

        Raises:
            ConfigError: if an item is not `OURS=THEIRS`.
        """
        items = [item.partition("=") for item in self.columns]
        for ours, equals, theirs in items:
            if not (ours and equals and theirs):
                raise ConfigError(f"--columns takes OURS=THEIRS, such as prompt=question, got '{ours}{equals}{theirs}'")
        return {ours: _theirs(text) for ours, _, text in items} or None


def spelled(option: str | None) -> Any:
    """The mapping that a text in braces spells; any other text itself.

    Raises:
        ConfigError: if the text in braces is no mapping.
    """
    try:
        return yaml.safe_load(option) if option is not None and option.startswith("{") else option
    except yaml.YAMLError as error:
        raise ConfigError(f"expected a mapping such as {{path: a.csv, weight: 2}}, got '{option}'") from error


def source_options(text: str) -> dict[str, Any]:
    """Options of one source: its path alone, or a mapping as in `data.train`, such as `{path: a.csv, weight: 2}`."""
    found = spelled(text)
    if isinstance(found, str):
        return {"path": found}
    is_named = isinstance(found.get("path"), str)
    require(is_named, "a source in braces", "name its path, as {path: a.csv, weight: 2}", f"'{text}'")
    return dict(found)


def _theirs(text: str) -> str | list[str] | None:
    if text.startswith("[") and text.endswith("]"):
        return [name.strip() for name in text[1:-1].split(",")]
    return None if text == "null" else text


@dataclass(frozen=True)
class TokenizedPairOptions(PairOptions):
    """Options of a command that turns all of its pairs into tokens."""

    over_long: Annotated[
        str, Option("--over-long", help="Pairs longer than the length limit: truncate, drop or refuse.")
    ] = DataConfig.over_long.value


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
    dtype: Annotated[
        str | None, Option("--dtype", help="Type of the weights: float32, which is the default, bfloat16 or float16.")
    ] = None

    def __post_init__(self) -> None:
        """Refuse a path that does not exist before torch is imported, which takes seconds."""
        if not Path(self.checkpoint).expanduser().is_dir():
            resolve_source(self.checkpoint)

    def load(self, seed: int = 0, device: str | None = None) -> BradleyTerryRM:
        """Load the model on a device; None takes this machine's accelerator.

        Raises:
            CheckpointError: if the model cannot be loaded.
            ConfigError: if the model cannot read so many tokens, or the input form is unknown or does not apply.
        """
        from rm_optimizer.core.model.reward_model import BradleyTerryRM

        try:
            model = BradleyTerryRM.from_pretrained(
                self.checkpoint, max_length=self.max_length, input_form=self.input_form, dtype=self.dtype, seed=seed
            )
        except (ConfigError, ValueError) as error:
            text = str(error)
            if self.input_form is not None and "input_form" in text:
                text = text.replace("input_form=", "--input-form ").replace("input_form", "--input-form")
                raise ConfigError(text) from error
            if self.max_length is None or "max_length" not in text:
                raise
            raise ConfigError(f"--{text.removeprefix('model.').replace('max_length', 'max-length', 1)}") from error
        found = devices()
        model.to(device or found[int(os.environ.get("LOCAL_RANK", 0)) % len(found)])
        return model

    def load_as(self, dtype: str | None) -> BradleyTerryRM:
        """Load the model with weights of a type."""
        return replace(self, dtype=dtype).load()


def follows(context: Context, loads: Sequence[Callable[[], Any]], other: int | None = None) -> bool:
    """True in a process of torchrun but the first, after it has computed all chunks that the first one dealt.

    Args:
        context: context of the command, whose end ends the other processes.
        loads: functions that load what the first process scores with, one after the other.
        other: workers that another option asks for; None or 0 for none.

    Raises:
        ConfigError: if another launcher started several processes, or there are also workers.
    """
    rank = joined_rank(other)
    if rank is None:
        return False
    from rm_optimizer.core.streaming.workers import end_chunks, follow_chunks, lead_chunks

    if rank:
        for load in loads:
            if not follow_chunks(load):
                break
        return True
    lead_chunks()
    context.call_on_close(end_chunks)
    return False


def joined_rank(other: int | None = None) -> int | None:
    """Rank of this process in the group of torchrun, which it joins; None if it was started alone.

    Args:
        other: workers that another option asks for; None or 0 for none.

    Raises:
        ConfigError: if another launcher started several processes, or there are also workers.
    """
    processes = launched_processes()
    if processes is None or (processes.world_size == 1 and processes.launcher != "torchrun"):
        return None
    if processes.launcher != "torchrun":
        raise ConfigError("expected one process, or several of torchrun, got tasks of SLURM; write srun torchrun …")
    if other:
        raise ConfigError("torchrun has started the processes that score; leave the option for workers on Ray out")
    from torch import distributed

    distributed.init_process_group("gloo", timeout=timedelta(days=1))  # the first one may read data for hours
    return processes.rank


def devices() -> list[str]:
    """Names of this machine's accelerators, or of its processor without one."""
    from rm_optimizer.records.accelerator import accelerators

    return [str(device) for device in accelerators()] or ["cpu"]


def length_note(model: BradleyTerryRM) -> str | None:
    """Sentence about a default length limit; None if the user or the model's training set the limit."""
    if not model.has_default_length:
        return None
    return (
        f"the model does not record the length it was trained at, so sequences are cut at {model.max_length} tokens; "
        "set another with --max-length"
    )


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
