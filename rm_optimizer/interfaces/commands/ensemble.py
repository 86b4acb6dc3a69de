"""`rm-opt ensemble`: one scorer from several reward models, trained or given, that measures their disagreement."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

from rm_optimizer.interfaces.inputs import PairOptions, SavedModel
from rm_optimizer.schema.checks import require, require_once

if TYPE_CHECKING:
    from rm_optimizer.core.pairs.pair import PreferencePair
    from rm_optimizer.schema import TrainConfig

Output = Annotated[Path, Option("--output", help="Folder of the ensemble.")]
Rate = Annotated[
    float, Option("--false-positive-rate", help="Largest share of reference responses to flag as uncertain.")
]


def ensemble_train(
    ctx: Context,
    output: Output,
    seeds: Annotated[int, Option("--seeds", min=2, help="Number of members, trained with seed=0, 1, ….")] = 5,
    false_positive_rate: Rate = 0.05,
) -> None:
    """Train one reward model for each seed, and join them.

    Repeat a stopped command to continue it. Options of the runs are written name=value, as for `rm-opt train`. All runs
    have the same pairs and differ only in the seed. The validation pairs are the reference. Each member's run folder is
    OUTPUT/seed-N. With adapter=lora and model.path=MODEL the members are the adapters OUTPUT/seed-N/adapter, which
    share that model in memory.
    """
    from rm_optimizer.experiments.training_trials import require_shared
    from rm_optimizer.interfaces.command_line import checked
    from rm_optimizer.records.quoting import in_quotes
    from rm_optimizer.schema import TrainConfig

    require(0 < false_positive_rate < 1, "--false-positive-rate", "lie in (0, 1)", false_positive_rate)
    folder = "members are trained in folders of --output"
    owned = {"seed": "members differ in it", "hydra.run.dir": folder, "output_dir": folder}
    require_shared(ctx.args, owned, "rm-opt ensemble train")
    folders = [output / f"seed-{seed}" for seed in range(seeds)]
    resumes = any(item.lstrip("+").startswith("resume=") for item in ctx.args)
    own = list(ctx.args) if resumes else [*ctx.args, "resume=auto"]
    runs = [[*own, f"seed={seed}", f"hydra.run.dir={in_quotes(str(folder))}"] for seed, folder in enumerate(folders)]
    configs = [checked(overrides, TrainConfig) for overrides in runs]
    for seed, overrides in enumerate(runs):
        print(f"member {seed + 1} of {seeds}: {folders[seed]}", flush=True)
        code = subprocess.run([sys.executable, "-P", "-m", "rm_optimizer.train", *overrides], check=False).returncode
        if code:
            sys.exit(code)
    from rm_optimizer.training.data.run_data import load_data

    members = [_member(folder, config) for folder, config in zip(folders, configs, strict=True)]
    _join(members, load_data(configs[0]).val.pairs, output, false_positive_rate, SavedModel(members[0]))


def ensemble_join(
    models: Annotated[list[str], Argument(help="Reward models: hub ids, folders, run folders or .ckpt files.")],
    sources: Annotated[
        list[str], Option("--data", "-d", help="Reference pairs, preferably not trained on; may be repeated.")
    ],
    output: Output,
    pair_options: PairOptions,
    false_positive_rate: Rate = 0.05,
    max_length: Annotated[int | None, Option("--max-length", min=8, help="Longest sequence in tokens.")] = None,
) -> None:
    """Join reward models into an ensemble. Reference pairs set their scales and the threshold of uncertainty."""
    require(0 < false_positive_rate < 1, "--false-positive-rate", "lie in (0, 1)", false_positive_rate)
    require(len(models) > 1, "MODELS", "name at least 2 models", len(models))
    require_once("MODELS", "model", models)
    pairs = pair_options.load(sources).pairs
    _join(models, pairs, output, false_positive_rate, SavedModel(models[0], max_length=max_length))


def _member(run: Path, config: TrainConfig) -> str:
    """Path of a run's adapter if its base can be loaded again, else of the whole model."""
    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.storage.export import save_adapter
    from rm_optimizer.core.storage.model_files import read_record
    from rm_optimizer.records.run_folder import RunFolder
    from rm_optimizer.schema.adapters import AdapterKind

    path = config.model.path
    if config.adapter.kind == AdapterKind.none or path is None or Path(path).expanduser().is_file():
        return str(run / "best")
    model = BradleyTerryRM.from_pretrained(RunFolder(run).best_checkpoint)
    save_adapter(model, run / "adapter", statistics=read_record(run / "best").get("reward_statistics"))
    return str(run / "adapter")


def _join(members: Sequence[str], pairs: Sequence[PreferencePair], output: Path, rate: float, how: SavedModel) -> None:
    """Fit the reference of the members and write the ensemble."""
    from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
    from rm_optimizer.rl_coupling.ensemble_folder import reference_responses, save_ensemble

    ensemble = RewardModelEnsemble(members, load=lambda source: replace(how, checkpoint=source).load())
    reference = ensemble.fit_reference(*reference_responses(pairs, seed=0), false_positive_rate=rate)
    written = save_ensemble(output, members, reference)
    print(f"{len(members)} members, standardized on {reference.num_responses} responses: {written}")
    print(
        f"a response is uncertain where its standardized rewards spread by more than {reference.threshold:.3f} "
        f"(at most {rate:.0%} of responses like these)"
    )
