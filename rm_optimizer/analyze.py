"""Hydra entry: `python -m rm_optimizer.analyze checkpoint=RUN landscape=density`.

The imports of an analysis are inside the functions. So help, errors about mistyped options and the processes that
share a grid, which import this module again, need neither Hydra nor torch.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rm_optimizer.errors import CheckpointError, ConfigError, DataError, Interrupted
from rm_optimizer.interfaces.exits import one_exit

if TYPE_CHECKING:
    from rm_optimizer.interfaces.command_line import CommandLine, Composed
    from rm_optimizer.landscape.analysis_context import AnalysisResult
    from rm_optimizer.landscape.series import WeightsByStep
    from rm_optimizer.records.run_folder import RunFolder
    from rm_optimizer.schema.landscape import AnalyzeConfig

OnProgress = Callable[[str, int, int | None, str], None]
"""Callback with the name of the current work, the amount done, the total amount if known, and a remark."""

log = logging.getLogger("rm_optimizer")


def main() -> None:
    """Check the command line, then run it; a user's mistake becomes one sentence and an exit code."""
    with one_exit():
        line, checked = check_command(sys.argv[1:])
        if checked is not None:
            checked.run(analyze)
        else:
            line.launch(analyze)


def read(arguments: Sequence[str]) -> CommandLine[AnalyzeConfig]:
    """The command line with the options that the named run recorded; options that the user typed come last and win.

    Args:
        arguments: options and flags in Hydra's form, without the program's name.

    Raises:
        ConfigError: if a flag or an override cannot be read.
    """
    from rm_optimizer.interfaces.command_line import CommandLine
    from rm_optimizer.records.recall import recalled
    from rm_optimizer.schema.landscape import AnalyzeConfig

    line = CommandLine.parse(arguments, AnalyzeConfig, "analyze")
    if line.only_tells:
        return line
    line.require_given_once()
    if named := [given for given in line.overrides if given.lstrip("+").startswith("hydra.run.dir=")]:
        folder = named[-1].partition("=")[2]
        raise ConfigError(f"rm-opt analyze writes into output_dir, not hydra.run.dir; give output_dir={folder}")
    return line.of([*recalled(line.overrides), *line.overrides])


def check_command(arguments: Sequence[str]) -> tuple[CommandLine[AnalyzeConfig], Composed[AnalyzeConfig] | None]:
    """Compose and check the options, without running them.

    Args:
        arguments: options and flags in Hydra's form, without the program's name.

    Returns:
        The command line, and the options of the analysis that will start; None if Hydra only prints.

    Raises:
        ConfigError: if a flag, group, option or value is unknown or out of range, or the folder cannot be written.
    """
    line = read(arguments)
    if line.only_tells:
        return line, None
    if not any(given.startswith("checkpoint=") for given in line.overrides) and line.flags.config_dir is None:
        raise ConfigError("a model to analyze must be given: --checkpoint RUN, or a folder, .ckpt or hub id")
    if line.flags.multirun:
        raise ConfigError("rm-opt analyze measures one thing of one model; start a command for each, not --multirun")
    composed = line.composed()
    return line, composed if line.runs_once else None


def analyze(options: AnalyzeConfig) -> Path:
    """Measure, print, write JSON, pictures and Parquet into `options.output_dir`, and return this folder.

    Args:
        options: the composed options, as `rm_optimizer.schema.typed` returns them.

    Raises:
        Interrupted: if the user stopped it; finished measurements are written, labeled as partial.
        CheckpointError: if the model cannot be loaded.
        DataError: if the pairs cannot be used.
        ConfigError: if an option does not fit the model, or the folder holds another analysis or is in use.
        TrainingDiverged: if the loss is not finite.
    """
    from rm_optimizer.records.files import held, write_text
    from rm_optimizer.records.ledger import stages
    from rm_optimizer.records.provenance import commit, machine, versions
    from rm_optimizer.records.run_folder import ANALYSIS_FILE, results_folder
    from rm_optimizer.reporting.landscape.results import draw_result, print_result
    from rm_optimizer.training.loggers import require_wandb_key

    require_wandb_key(options.logger)
    folder, kind = results_folder(options), options.landscape.type
    with held(folder, "analysis"):
        options = replace(options, output_dir=str(folder))
        try:
            with stages(shown=options.progress) as on_progress:
                finding = _measured(options, folder, on_progress)
        except KeyboardInterrupt:
            raise Interrupted("stopped before there was a result to write; the same command starts again") from None
        recorded = {"options": asdict(options), "commit": commit(), "versions": versions(), "machine": machine()}
        write_text(folder / ANALYSIS_FILE, json.dumps(recorded, indent=2, default=str) + "\n")
        state = "_partial" if finding.is_partial else ""
        write_text(folder / f"{kind}{state}.json", finding.to_json() + "\n")
        if not finding.is_partial:
            (folder / f"{kind}_partial.json").unlink(missing_ok=True)
        files = draw_result(finding.result, folder)
        _log(options, finding, folder, files)
        _draw_history(options, folder)
        print_result(f"{options.checkpoint}: {kind}{' (PARTIAL)' if finding.is_partial else ''}", finding.result)
        if finding.is_partial:
            again = "goes on from them" if finding.is_kept else "starts anew"
            raise Interrupted(f"stopped; partial results, labeled so, are in {folder}; the same command {again}")
        print(f"JSON, pictures and Parquet: {folder}")
    return folder


def _measured(options: AnalyzeConfig, folder: Path, on_progress: OnProgress) -> AnalysisResult[Any]:
    from rm_optimizer.landscape import analysis
    from rm_optimizer.landscape.analysis_context import AnalysisContext, AnalysisInput, finite_loss
    from rm_optimizer.landscape.measured_loss import load_measured_loss, read_models
    from rm_optimizer.landscape.operators.single_pairs import pairs_digest
    from rm_optimizer.landscape.series import measure_between, measure_evolution, readers
    from rm_optimizer.records.run_folder import RunFolder
    from rm_optimizer.schema.landscape import AnalysisType

    kind, checkpoints, weights = options.landscape.type, dict[int, Path](), None
    run = RunFolder.of(options.checkpoint)
    if kind in (AnalysisType.trajectory, AnalysisType.evolution):
        if run is None:
            raise ConfigError(f"landscape={kind} needs a run folder with its checkpoints, got '{options.checkpoint}'")
        if not (checkpoints := run.checkpoints):
            raise ConfigError(
                f"landscape={kind} needs periodic checkpoints, and {run.path} has none; train with "
                "training.checkpoint_every=STEPS and training.keep_checkpoints=NUMBER"
            )
        weights = checkpoints[max(checkpoints)]
    else:
        weights = _unmerged(options.checkpoint)
    measured_loss = load_measured_loss(options, weights)
    log.info("loss %.6g over %s pairs", finite_loss(measured_loss), f"{measured_loss.sample.num_pairs:,}")
    params = measured_loss.params
    subject = AnalysisInput(
        checkpoint=options.checkpoint,
        step=_step(options.checkpoint, weights),
        data=f"{options.data.train or 'the synthetic world'} ({options.split})",
        pairs=pairs_digest(measured_loss.sample.batches),
        params=params if isinstance(params, str) else ", ".join(params),
    )
    context = AnalysisContext(measured_loss, options.landscape, folder, on_progress, subject)
    if kind == AnalysisType.trajectory:
        finding: AnalysisResult[Any] = analysis.measure_trajectory(context, checkpoints)
    elif kind == AnalysisType.evolution:
        assert run is not None, "its checkpoints were read"
        finding = measure_evolution(context, _start(run) | readers(checkpoints))
    elif kind == AnalysisType.between:
        given = [options.checkpoint, *options.landscape.others]
        models = read_models(given, [_unmerged(each) or each for each in given])
        steps = [_step(each, None) for each in given]
        named = [name if at is None else f"{name} at step {at:,}" for name, at in zip(models, steps, strict=True)]
        finding = measure_between(context, models, f"{', '.join(named)}; pairs of {subject.data}")
    else:
        finding = analysis.MEASURES.get(kind, analysis.measure_spectrum)(context)
    return replace(finding, subject=subject)


def _step(checkpoint: str, weights: Path | None) -> int | None:
    """Step of the weights, from a periodic checkpoint's name or of the run's best model; None without either."""
    from rm_optimizer.records.run_folder import RunFolder, checkpoint_step

    path, run = weights or Path(checkpoint).expanduser(), RunFolder.of(checkpoint)
    is_periodic = path.suffix == ".ckpt" and path.stem.startswith("step-")
    return checkpoint_step(path) if is_periodic else None if run is None else run.best_step


def _start(run: RunFolder) -> WeightsByStep:
    """Reader of a run's starting weights, at step 0; empty with a warning if they cannot be built again."""
    from rm_optimizer.records.codec import from_values
    from rm_optimizer.schema.data import DataConfig
    from rm_optimizer.training.preparation import starting_weights

    sources = run.identity.sources if run.identity is not None else {}
    try:
        weights = starting_weights(run.options, from_values(DataConfig, {**run.options["data"], **sources}))
    except (CheckpointError, DataError) as error:
        log.warning("step 0 is left out, since the model before training cannot be built again: %s", error)
        return {}
    return {0: lambda: weights}


def _unmerged(checkpoint: str) -> Path | None:
    """Path of a run's best weights with a separate adapter, which is merged in `best/`; None for other models.

    Raises:
        CheckpointError: if the run no longer has these weights.
        ConfigError: if the weights are four-bit.
    """
    from rm_optimizer.records.run_folder import RunFolder
    from rm_optimizer.schema.adapters import AdapterKind

    run = RunFolder.of(checkpoint)
    if run is None or run.path != Path(checkpoint).expanduser():
        return None
    adapter = run.options.get("adapter", {}).get("kind", AdapterKind.none)
    if adapter == AdapterKind.none:
        return None
    merged = f"checkpoint={run.path}/best measures the merged model"
    if adapter == AdapterKind.qlora:
        raise ConfigError(f"{run.path}: four-bit weights (adapter=qlora) cannot be differentiated twice; {merged}")
    path = run.best_checkpoint
    if not path.is_file():
        raise CheckpointError(f"{path}, which held the run's adapter apart from its base, is missing; {merged}")
    return path


def _log(options: AnalyzeConfig, finding: AnalysisResult[Any], folder: Path, files: Sequence[Path]) -> None:
    """Log the numbers, eigenvalues, pictures and tables of a result to TensorBoard and W&B, at its step."""
    import numpy as np
    import pyarrow.parquet as pq

    from rm_optimizer.landscape.series import Evolution
    from rm_optimizer.landscape.spectrum import HessianSpectrum
    from rm_optimizer.records.run_options import options_of
    from rm_optimizer.reporting.landscape.results import scalars_of
    from rm_optimizer.training.loggers import log_figure, log_histogram, log_table, open_loggers

    if not (options.logger.tensorboard or options.logger.wandb):
        return
    result, kind = finding.result, options.landscape.type
    step = (finding.subject.step if finding.subject else None) or 0
    is_along = isinstance(result, Evolution)
    by_step = dict(zip(result.steps, result.spectra, strict=True)) if is_along else {step: result}
    overlaps = dict(zip(result.steps, result.overlaps, strict=True)) if is_along else {}
    with open_loggers(options.logger, folder, options_of(options)) as loggers:
        for at, measured in by_step.items():
            numbers = scalars_of(measured)
            if (overlap := overlaps.get(at)) is not None:
                numbers["subspace_overlap"] = overlap
            for logger in loggers:
                logger.log_metrics({f"{kind}/{name}": value for name, value in numbers.items()}, at)
            if isinstance(measured, HessianSpectrum):
                log_histogram(loggers, f"{kind}/eigenvalues", np.array(measured.eigenvalues), at)
        for path in files:
            if path.suffix == ".png":
                log_figure(loggers, f"{kind}/{path.stem}", path, max(by_step))
            elif path.suffix == ".parquet":
                log_table(loggers, f"{kind}/{path.stem}_table", pq.read_table(path).to_pylist(), max(by_step))
        for logger in loggers:
            logger.finalize("success")


def _draw_history(options: AnalyzeConfig, folder: Path) -> None:
    """Draw the curvature that the run measured during training, next to the Hessian's spectrum."""
    from rm_optimizer.records.run_folder import RunFolder
    from rm_optimizer.reporting.landscape.results import draw_training_curvature
    from rm_optimizer.reporting.run_report import curvature_caption, has_training_curvature
    from rm_optimizer.schema.landscape import AnalysisType

    run = RunFolder.of(options.checkpoint)
    if run is None or options.landscape.type not in (AnalysisType.hessian, AnalysisType.density):
        return
    history = run.metrics()
    if has_training_curvature(history):
        draw_training_curvature(history, folder, f"{curvature_caption(run)}; {run.path}")


if __name__ == "__main__":
    main()
