"""`rm-opt blame`: the training pairs, sources and annotators that taught a model something."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Context, Option

from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.interfaces.exits import rank
from rm_optimizer.interfaces.field_flags import refuse_unread
from rm_optimizer.interfaces.inputs import PairOptions, SavedModel, joined_rank
from rm_optimizer.interfaces.outputs import filling, made_folder
from rm_optimizer.schema.checks import require

if TYPE_CHECKING:
    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.pairs.pair import PreferencePair
    from rm_optimizer.core.tokens.dataset import PreferenceDataset
    from rm_optimizer.data_efficiency.blame import Half
    from rm_optimizer.data_efficiency.influence import BlameTarget
    from rm_optimizer.records.run_folder import RunFolder
    from rm_optimizer.schema import TrainConfig


def blame(
    context: Context,
    checkpoint: Annotated[
        list[str], Argument(help="Run folder, or any saved model with --data; influences of several are averaged.")
    ],
    pair_options: PairOptions,
    data: Annotated[list[str] | None, Option("--data", "-d", help="Training pairs; default: the run's.")] = None,
    val: Annotated[
        list[str] | None, Option("--data-val", help="Pairs not trained on; default without --data: the run's.")
    ] = None,
    pair: Annotated[str | None, Option("--pair", help="Explain the margins of the pairs in this file.")] = None,
    subset: Annotated[
        str | None, Option("--subset", help="Explain the validation pairs of this subset or source alone.")
    ] = None,
    edit: Annotated[
        str | None,
        Option("--edit", help="Explain the reward for an edit: length, list, bold, paragraphs or courtesy."),
    ] = None,
    of: Annotated[
        Literal["margin", "loss", "eigenvector"],
        Option("--of", help="Number to explain; eigenvector is the curvature's first."),
    ] = "margin",
    by: Annotated[
        list[str] | None, Option("--by", help="Column that groups training pairs; default: source, subset, annotator.")
    ] = None,
    output: Annotated[Path | None, Option("--output", help="Folder of the results; default: RUN/blame.")] = None,
    all_checkpoints: Annotated[
        bool, Option("--all-checkpoints", help="Average over all checkpoints that the run kept.")
    ] = False,
    validate: Annotated[
        int, Option("--validate", min=0, help="Number of models to train on halves of the pairs; 4 or more.")
    ] = 0,
    params: Annotated[str, Option("--params", help="Parameters: trainable, head, lora, or a pattern.")] = "trainable",
    damping: Annotated[
        float | None, Option("--damping", help="Share of the largest eigenvalue; default: by the held-out loss.")
    ] = None,
    memory_gib: Annotated[float, Option("--memory-gib", help="Most memory for gradients.")] = 4.0,
    max_length: Annotated[int | None, Option("--max-length", min=8, help="Longest sequence in tokens.")] = None,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of projection, halves and shuffles.")] = 0,
) -> None:
    """Find the training pairs, sources and annotators that taught a model something.

    Without a target, the mean margin of the validation pairs is explained. The folder of results holds blame.json,
    influence.parquet and a page. The same command continues after a stop.
    """
    from rm_optimizer.records.run_folder import RunFolder
    from rm_optimizer.schema import LossConfig

    folders = [RunFolder.of(name) for name in checkpoint]
    runs = [run for run in folders if run is not None]
    _refuse_conflicts(context, folders)
    saved = [SavedModel(name, max_length) for name in checkpoint]
    is_first = not (own_rank := joined_rank())
    if validate and own_rank is not None:
        raise ConfigError("--validate trains in one process; leave torchrun or --validate out")
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE") and own_rank is not None:
        raise ConfigError("rm-opt blame shares gradients between the processes of one machine, got several machines")

    from rm_optimizer.data_efficiency.influence import blame as measure
    from rm_optimizer.landscape.operators.parameters import select_parameters
    from rm_optimizer.records.ledger import progress
    from rm_optimizer.reporting.blame import print_blame, write_blame
    from rm_optimizer.training.preparation import freeze

    config, read, aside = _run_pairs(runs, reads_pairs=not data) if runs else (None, None, None)
    read = pair_options.load(data) if data else read
    aside = pair_options.load(val) if val else aside
    assert read is not None, "refused above"
    explained = pair_options.load(pair) if pair is not None else aside
    target = _target(() if explained is None else explained.pairs, pair, subset, edit, of)
    if all_checkpoints:
        saved = [replace(saved[0], checkpoint=str(path)) for each in runs for path in each.checkpoints.values()]
    if output is not None:
        folder = made_folder(output)
    else:
        folder = runs[0].path / "blame"
        folder.mkdir(exist_ok=True)

    frozen = None if config is None else config.model.freeze

    def loaded(source: SavedModel) -> BradleyTerryRM:
        """A model whose parameters are trainable as in the run."""
        model = source.load()
        if frozen is not None:
            freeze(model, frozen)
        return model

    model = loaded(saved[0])
    select_parameters(model, params)
    train = read.accepted_by(model.renderer).pairs
    held_out = () if aside is None else aside.accepted_by(model.renderer).pairs
    with filling(folder), progress("gradients", "pairs") as show:
        halves: Sequence[Half] = ()
        if validate and config is not None:
            halves = _halves(config, model, train, held_out, target, validate, folder, seed)
        found = measure(
            chain([model], map(loaded, saved[1:])),
            train,
            target,
            held_out=held_out,
            loss=LossConfig() if config is None else config.loss,
            params=params,
            columns=by,
            damping=damping,
            memory_gib=memory_gib,
            halves=halves,
            folder=folder,
            seed=seed,
            on_progress=show if is_first else lambda done, total: None,
        )
    if not is_first:
        return
    page = write_blame(found, folder)
    for left in folder.glob("gradients-*.npy"):
        left.unlink()
    print_blame(found)
    print(f"results: {page}")


def _refuse_conflicts(context: Context, folders: Sequence[RunFolder | None]) -> None:
    """Refuse options out of range, models that have no mean, and options that models outside of run folders need."""
    given = context.params
    outside = [name for name, run in zip(given["checkpoint"], folders, strict=True) if run is None]
    _refuse_mixture(given, outside, [run for run in folders if run is not None])
    of, validate = given["of"], given["validate"]
    needs = [
        f"--{name.replace('_', '-')} needs a run folder" for name in ("all_checkpoints", "validate") if given[name]
    ]
    needs += [] if given["data"] else ["--data must name the training pairs"]
    needs += [] if given["output"] else ["--output must name a folder for the results"]
    if outside and needs:
        raise ConfigError(f"{needs[0]}, since {outside[0]} is in no run folder")
    require(not 0 < validate < 4, "--validate", "be 0 or at least 4", validate)
    named = [f"--{name}" for name in ("pair", "subset", "edit") if given[name] is not None]
    named += [] if of == "margin" else [f"--of {of}"]
    if len(named) > 1 and (of != "loss" or "--edit" in named or len(named) > 2):
        raise ConfigError(f"give one target at a time, got {' and '.join(named)}")
    if validate and given["data"] and not given["val"]:
        raise ConfigError("--validate needs --data-val beside --data, since the halves are chosen by these pairs")
    if validate and of == "eigenvector":
        raise ConfigError("--validate needs a target of pairs, which --of eigenvector is not; leave one out")
    for name in ("damping", "memory_gib"):
        require(given[name] is None or given[name] > 0, f"--{name.replace('_', '-')}", "be positive", given[name])
    if not (given["data"] or given["val"] or given["pair"]):
        refuse_unread(context, "without --data, --data-val or --pair", *PairOptions.__dataclass_fields__)


def _refuse_mixture(given: Mapping[str, Any], outside: Sequence[str], runs: Sequence[RunFolder]) -> None:
    """Refuse models that are named twice, and runs of different options or without checkpoints."""
    from rm_optimizer.records.locations import resolve_source
    from rm_optimizer.records.run_options import BY_CONTENT, changed_options

    if outside and runs:
        raise ConfigError(
            f"{runs[0].path} is a run and {outside[0]} is in no run folder, so that its loss is not known; name runs "
            "alone, or saved models alone"
        )
    for run in runs:
        if given["all_checkpoints"] and not run.checkpoints:
            raise ConfigError(f"--all-checkpoints needs checkpoints, and {run.path} holds none; leave one of them out")
        if changed := changed_options(runs[0].options, run.options, *BY_CONTENT, "seed"):
            raise ConfigError(
                f"influences are averaged over runs that differ only in the seed, but {run.path} and {runs[0].path} "
                f"differ in {', '.join(changed)}; leave one of them out"
            )
    if given["all_checkpoints"]:
        sources = [str(run.path) for run in runs]
    else:
        sources = [resolve_source(name).location for name in given["checkpoint"]]
    places = [Path(source).resolve() for source in sources]
    if twice := [source for source, place in zip(sources, places, strict=True) if places.count(place) > 1]:
        kind = "model" if outside else "run"
        raise ConfigError(f"each {kind} must be named once, but {twice[0]} is named twice; leave one of them out")


def _run_pairs(
    runs: Sequence[RunFolder], *, reads_pairs: bool
) -> tuple[TrainConfig, PreferenceDataset | None, PreferenceDataset | None]:
    """Options of the first run, and the training and validation pairs of all runs if they are to be read."""
    from rm_optimizer.core.tokens.splits import load_training_data
    from rm_optimizer.experiments.training_trials import config_of
    from rm_optimizer.landscape.measured_loss import require_trained_pairs
    from rm_optimizer.records.recall import recorded_sources

    sources = recorded_sources(runs[0]) if reads_pairs else {}
    config = config_of({**runs[0].options, "data": {**runs[0].options["data"], **sources}})
    if not reads_pairs:
        return config, None, None
    trained = load_training_data(config.data)
    for run in runs:
        require_trained_pairs(run, trained, config.data)
    for note in (*trained.train.notes, *trained.val.notes) if rank() == 0 else ():
        print(note)
    return config, trained.train, trained.val


def _target(
    pairs: Sequence[PreferencePair],
    file: str | None,
    subset: str | None,
    edit: str | None,
    of: Any,
) -> BlameTarget:
    """The number to explain.

    Raises:
        ConfigError: if the edit is unknown.
        DataError: if there are no pairs for it.
    """
    from rm_optimizer.core.pairs.pair import PreferencePair
    from rm_optimizer.data_efficiency.influence import BlameTarget
    from rm_optimizer.rl_coupling.readiness.features import EDITS, with_repeated_sentence

    if of == "eigenvector":
        return BlameTarget("the curvature's first eigenvector", (), of)
    if not pairs:
        raise DataError("there are no pairs to explain; name some with --data-val or --pair")
    if file is not None:
        return BlameTarget(f"{of} of the pairs in {file}", pairs, of)
    if subset is not None:
        named = [each for each in pairs if subset in (each.metadata.get("subset"), each.metadata.get("source"))]
        if not named:
            known = sorted({str(each.metadata.get("subset", each.metadata.get("source"))) for each in pairs})
            raise DataError(f"--subset {subset}: no validation pair is of it; there are {', '.join(known[:8])}")
        return BlameTarget(f"mean {of} of {len(named):,} pairs of {subset}", named, of)
    if edit is not None:
        edits = {"length": with_repeated_sentence, **EDITS}
        require(edit in edits, "--edit", f"be one of {', '.join(edits)}", edit)
        texts = {(each.prompt_id, each.chosen): each for each in pairs if isinstance(each.chosen, str)}
        edited = [
            PreferencePair(each.prompt, changed, each.chosen)
            for each in texts.values()
            if (changed := edits[edit](each.chosen)) != each.chosen
        ]
        if not edited:
            raise DataError(f"--edit {edit} changes no chosen response of the validation pairs")
        return BlameTarget(f"reward for the edit '{edit}', over {len(edited):,} responses", edited)
    return BlameTarget(f"mean {of} of {len(pairs):,} validation pairs", pairs, of)


def _halves(
    config: TrainConfig,
    model: BradleyTerryRM,
    train: Sequence[PreferencePair],
    held_out: Sequence[PreferencePair],
    target: BlameTarget,
    count: int,
    folder: Path,
    seed: int,
) -> list[Half]:
    """Models trained on random halves by the run's recipe, with their margins of the target; a log keeps them."""
    import shutil

    from torch import Tensor

    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.pairs.pair import digest
    from rm_optimizer.data_efficiency.blame import Half
    from rm_optimizer.records.codec import from_values
    from rm_optimizer.records.ledger import open_ledger
    from rm_optimizer.records.orders import random_positions
    from rm_optimizer.records.run_options import BY_CONTENT, decisive_options, options_of
    from rm_optimizer.training.preparation import from_start
    from rm_optimizer.training.run import quiet, train_reward_model

    recipe, work = decisive_options(options_of(config), *BY_CONTENT), folder / "half"
    config = from_start(config, model, folder)
    pairs = [[pair.to_dict() for pair in some] for some in (train, held_out, target.pairs)]
    identity = digest([recipe, Path(str(config.model.path)).name, *pairs, seed])
    config = replace(quiet(config, in_memory=True), output_dir=str(work))
    prompts, responses = zip(*((pair.prompt, (pair.chosen, pair.rejected)) for pair in target.pairs), strict=True)
    with open_ledger(folder / f"halves-{identity}.jsonl", identity, other="other halves") as log:
        done = [from_values(Half, value) for value in log.values()]
        for number in range(len(done), count):
            print(f"half {number + 1} of {count}", flush=True)
            rows = random_positions(len(train), len(train) // 2, [seed, 11, number]).tolist()
            shutil.rmtree(work, ignore_errors=True)
            result = train_reward_model(config, data_path=[train[row] for row in rows], val=held_out or None)
            rewards = BradleyTerryRM.from_pretrained(str(result)).score_groups(prompts, responses)
            shutil.rmtree(work)
            half = Half(rows, [chosen - rejected for chosen, rejected in map(Tensor.tolist, rewards)])
            log.append(half)
            done.append(half)
    return done[:count]
