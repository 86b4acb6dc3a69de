"""`rm-opt readiness`: estimate if a reward model is good enough to optimize a policy with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Context, Exit, Option

from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.interfaces.commands.policy_options import PolicyOptions, load_judge, require_other
from rm_optimizer.interfaces.field_flags import refuse_unread
from rm_optimizer.interfaces.inputs import SavedModel, TokenizedPairOptions
from rm_optimizer.interfaces.outputs import filling, made_folder
from rm_optimizer.schema.checks import require
from rm_optimizer.schema.rlhf import WORLD

if TYPE_CHECKING:
    from rm_optimizer.core.model.reward_model import BradleyTerryRM
    from rm_optimizer.core.pairs.pair import Prompt
    from rm_optimizer.core.tokens.dataset import PreferenceDataset
    from rm_optimizer.rl_coupling.readiness.measurement import ReadinessOptions
    from rm_optimizer.rl_coupling.readiness.probe import Oracle, ResponsePool

REPORT, PICTURE, PAGE = "readiness.json", "readiness.png", "readiness.html"
"""Files of the result, next to the model."""
WITHOUT_A_RUN = Path("outputs", "readiness")
"""Folder of the results for a model that is not a local folder."""
PROMPTS = 64
"""Default limit on the prompts that the policy answers."""


@dataclass(frozen=True)
class OracleFlags:
    """Options of the oracle that judges responses, each with its flag and help."""

    gold: Annotated[str | None, Option("--gold", help="Oracle: a reward model trained on other pairs, or `world`.")] = (
        None
    )
    comparisons: Annotated[
        Path | None, Option("--comparisons", help="Oracle: file of --ask with people's answers.")
    ] = None
    ask: Annotated[Path | None, Option("--ask", help="Write the probe's questions to this file, for rm-opt label.")] = (
        None
    )

    def check(self, context: Context, responses: PolicyOptions) -> None:
        """Refuse options that do not go together or that nothing reads.

        Raises:
            ConfigError: naming them.
            DataError: if the answers cannot be read.
        """
        from rm_optimizer.data_efficiency.questions import read_answers, require_question_file
        from rm_optimizer.evaluation.score_file import require_new

        flags = {"--gold": self.gold, "--comparisons": self.comparisons, "--ask": self.ask}
        named = [flag for flag, value in flags.items() if value is not None]
        if named[:2] == ["--gold", "--comparisons"]:
            raise ConfigError("give one oracle: --gold MODEL, or --comparisons FILE")
        if named and responses.policy is None and responses.completions is None:
            raise ConfigError(
                f"{named[0]} is about a policy's responses; add --policy MODEL, or --completions FILE of saved ones"
            )
        responses.check(context, "n")
        if not named:
            refuse_unread(context, "without an oracle or --ask", "labels", "precision")
        if self.ask is not None:
            require_question_file(self.ask, "--ask")
            require_new(self.ask)
        if self.comparisons is not None:
            read_answers(self.comparisons)

    def load(self, model: BradleyTerryRM, prompts: Sequence[Prompt]) -> Oracle | None:
        """Load the oracle; None if none is named.

        Raises:
            ConfigError: if the oracle is the model in question.
            DataError: if the answers cannot be read, or there are none.
        """
        from rm_optimizer.data_efficiency.questions import read_answers
        from rm_optimizer.rl_coupling.readiness.probe import Comparisons, ScorerOracle

        if self.comparisons is not None:
            return Comparisons(read_answers(self.comparisons).pairs)
        if self.gold is None:
            return None
        judge = load_judge(self.gold, prompts)
        require_other(judge, model)
        return ScorerOracle(judge, is_exact=self.gold == WORLD)


@dataclass(frozen=True)
class SizeFlags:
    """Use of the model and sizes of the measurement, each with its flag and help."""

    algorithm: Annotated[
        Literal["bon", "rloo_kl", "ppo_kl", "grpo"], Option("--algorithm", help="Use of the model.")
    ] = "rloo_kl"
    n: Annotated[
        int | None,
        Option("--n", min=2, help="Responses for each prompt; default: as the probes need, at least 64."),
    ] = None
    labels: Annotated[int, Option("--labels", min=1, help="Most comparisons in a probe.")] = 256
    precision: Annotated[float, Option("--precision", help="Half width of the interval at which a probe ends.")] = 0.05
    ceiling: Annotated[
        float | None, Option("--ceiling", help="Accuracy of an expert on the same labels; default: from votes.")
    ] = None
    max_pairs: Annotated[int, Option("--max-pairs", min=2, help="Most labeled pairs to score.")] = 2000
    bootstrap: Annotated[int, Option("--bootstrap", min=0, help="Bootstrap resamples for the intervals.")] = 1000
    seed: Annotated[int, Option("--seed", min=0, help="Seed of responses, questions and resamples.")] = 0

    def options(self) -> ReadinessOptions:
        """The flags as options of the measurement.

        Raises:
            ConfigError: naming a flag that is out of its range.
        """
        from rm_optimizer.rl_coupling.readiness.measurement import ReadinessOptions, usual_samples
        from rm_optimizer.rl_coupling.readiness.probe import StoppingRule

        require(0 < self.precision < 0.5, "--precision", "lie in (0, 0.5)", self.precision)
        require(self.ceiling is None or 0.5 < self.ceiling <= 1, "--ceiling", "lie in (0.5, 1]", self.ceiling)
        return ReadinessOptions(
            num_samples=self.n or usual_samples(self.algorithm),
            rule=StoppingRule(self.labels, precision=self.precision),
            max_pairs=self.max_pairs,
            ceiling=self.ceiling,
            num_bootstrap=self.bootstrap,
            seed=self.seed,
        )


def readiness(
    context: Context,
    saved: SavedModel,
    pair_options: TokenizedPairOptions,
    responses: PolicyOptions,
    oracle: OracleFlags,
    sizes: SizeFlags,
    sources: Annotated[
        list[str], Option("--data", "-d", help="Labeled pairs; may be repeated. Default: the run's validation pairs.")
    ] = [],  # noqa: B006
    ensemble: Annotated[
        Path | None, Option("--ensemble", help="Folder of an ensemble whose disagreement is reported.")
    ] = None,
    output: Annotated[Path | None, Option("--output", help="Folder of the results; default: the model's.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Also write the report to this JSON file.")] = None,
) -> None:
    """Estimate if a reward model is fit to optimize a policy.

    Reports the evidence and the next step. The main measurement is a probe: how often is the response that the model
    picks among many preferred to another? An oracle answers: a gold reward, another reward model, or people (--ask
    FILE, rm-opt label FILE, then --comparisons FILE). Exits with 4 if a check of the model fails. Repeat a stopped
    command to continue it.
    """
    options = sizes.options()
    oracle.check(context, responses)
    from rm_optimizer.core.storage.model_files import TrainedPairs
    from rm_optimizer.data_efficiency.votes import votes_of
    from rm_optimizer.doctor.diagnosis import FAILED_EXIT_CODE
    from rm_optimizer.interfaces.outputs import printed_beside, write_json
    from rm_optimizer.records.files import write_text
    from rm_optimizer.records.ledger import stages
    from rm_optimizer.records.run_folder import RunFolder
    from rm_optimizer.reporting.figures import save_figure
    from rm_optimizer.reporting.readiness import plot_readiness, print_readiness, readiness_page
    from rm_optimizer.rl_coupling.ensemble_folder import load_ensemble
    from rm_optimizer.rl_coupling.readiness.measurement import measure_readiness

    members = None
    if ensemble is not None:
        members = load_ensemble(ensemble, load=lambda source: replace(saved, checkpoint=source).load())
    data = pair_options.load(sources) if sources else _validation_pairs(saved.checkpoint)
    model = saved.load()
    data = data.accepted_by(model.renderer)
    votes = None if options.ceiling is not None else votes_of(data.pairs)
    if votes is not None and votes.ceiling is not None and votes.ceiling.majority_ceiling > 0.5:
        options = replace(options, ceiling=min(votes.ceiling.majority_ceiling, 1.0))
    run = RunFolder.of(saved.checkpoint)
    rows = [] if run is None else run.metrics(run.best_step)
    curvature = [row["curvature_top_eigenvalue"] for row in rows if row.get("curvature_top_eigenvalue")]
    path = Path(saved.checkpoint).expanduser()
    if run is not None:
        beside = run.path / "readiness"
    elif path.exists():
        beside = (path if path.is_dir() else path.parent) / "readiness"
    else:
        beside = WITHOUT_A_RUN / saved.checkpoint.replace("/", "--")
    folder = made_folder(output or beside)
    with filling(folder):
        pool = _pool(model, data, responses, options, folder)
        if oracle.ask is not None and pool is not None:
            _write_questions(pool, sizes.algorithm, options, oracle.ask)
        judge = oracle.load(model, [] if pool is None else pool.prompts)
        with stages() as on_stage:
            report = measure_readiness(
                model,
                data,
                pool,
                judge,
                algorithm=sizes.algorithm,
                options=options,
                trained=TrainedPairs.recorded(saved.checkpoint),
                ensemble=members,
                top_eigenvalue=float(curvature[-1]) if curvature else None,
                on_stage=on_stage,
            )
    write_text(folder / REPORT, report.to_json() + "\n")
    save_figure(plot_readiness(report), folder / PICTURE)
    write_text(folder / PAGE, readiness_page(report, saved.checkpoint))
    with printed_beside(json_file):
        print_readiness(report, f"Readiness of {saved.checkpoint} for {sizes.algorithm}")
        print(f"page, picture and numbers: {folder / PAGE}")
        if oracle.ask is not None:
            print(f"rm-opt label {oracle.ask} asks the questions; then repeat with --comparisons {oracle.ask}")
    write_json(json_file, report.to_json())
    raise Exit(FAILED_EXIT_CODE if report.failed_gates else 0)


def _validation_pairs(checkpoint: str) -> PreferenceDataset:
    """Validation pairs of the run that a checkpoint belongs to.

    Raises:
        ConfigError: if it belongs to no run, or to one with streamed pairs.
        DataError: if the pairs are no longer the run's.
    """
    from rm_optimizer.core.tokens.splits import load_training_data
    from rm_optimizer.records.codec import from_values
    from rm_optimizer.records.run_folder import RunFolder
    from rm_optimizer.schema.data import DataConfig, Streaming

    run = RunFolder.of(checkpoint)
    identity = None if run is None else run.identity
    if run is None or identity is None or not identity.sources:
        raise ConfigError(f"--data must name labeled pairs, for {checkpoint} is in no run folder that records its own")
    config = from_values(DataConfig, {**run.options["data"], **identity.sources})
    if config.streaming != Streaming.off:
        raise ConfigError(f"--data must name labeled pairs, for the run in {run.path} read its own as a stream")
    found = load_training_data(config).val
    if found.fingerprint != identity.val_fingerprint:
        raise DataError(
            f"the validation pairs of the run in {run.path} are no longer those that it was evaluated on; bring them "
            "back, or name pairs with --data"
        )
    return found


def _pool(
    model: BradleyTerryRM, data: PreferenceDataset, responses: PolicyOptions, options: ReadinessOptions, folder: Path
) -> ResponsePool | None:
    """Responses of the policy or the completions, ranked and kept in a file of the folder; None without either."""
    from rm_optimizer.core.model.identity import scorer_digest
    from rm_optimizer.core.pairs.pair import digest, prompt_id
    from rm_optimizer.records.ledger import progress
    from rm_optimizer.rl_coupling.policy_simulation import BestOfNSampler, rank_file, read_ranked
    from rm_optimizer.rl_coupling.readiness.probe import ResponsePool

    def kept(*identity: object) -> Path:
        return folder / f"responses-{digest([scorer_digest(model), *identity])}.jsonl"

    if (source := responses.completions) is not None:
        file = kept(hashlib.sha256(source.read_bytes()).hexdigest())
        if not file.exists():
            with progress("ranking", "prompts") as show:
                rank_file(model, source, file, on_progress=show)
    elif responses.policy is not None:
        most = responses.num_prompts or PROMPTS
        of_pairs = list({pair.prompt_id: pair.prompt for pair in data.pairs}.values())
        reads = responses.prompts is not None or responses.policy == WORLD
        prompts = responses.read_prompts(most) if reads else of_pairs[:most]
        policy = responses.load()
        assert options.num_samples is not None, "the flags decide it"
        file = kept(policy.identity, options.num_samples, options.seed, [prompt_id(prompt) for prompt in prompts])
        if not file.exists():
            with progress("drawing responses", "prompts") as show:
                sampler = BestOfNSampler(policy, model, options.num_samples, seed=options.seed)
                sampler.sample_to_file(prompts, file, on_progress=show)
    else:
        return None
    return ResponsePool.of(read_ranked(file)[0])


def _write_questions(pool: ResponsePool, algorithm: str, options: ReadinessOptions, path: Path) -> None:
    """Write the questions of all probes, in the order in which the probe reads their answers."""
    import numpy as np

    from rm_optimizer.core.pairs.pair import PreferencePair
    from rm_optimizer.data_efficiency.questions import asked_once, questions_of, write_questions
    from rm_optimizer.rl_coupling.readiness.measurement import probe_sizes
    from rm_optimizer.rl_coupling.readiness.probe import probe_questions

    if not np.ptp(pool.rewards, axis=1).any():
        raise DataError(
            "the model gives equal rewards to all responses of each prompt, so its picks are random and there is "
            "nothing to ask"
        )
    found = []
    for n in probe_sizes(algorithm, pool.rewards.shape[1]):
        asked = probe_questions(pool.rewards, n, options.rule.max_questions, seed=options.seed)
        for row, pick, other in zip(asked.prompt, *pool.sides(asked), strict=True):
            if pick != other:
                found.append(PreferencePair(pool.prompts[row], pick, other))
    pairs = [*asked_once(found).values()]
    if not pairs:
        raise DataError("the policy's responses to each prompt are all equal, so there is nothing to ask")
    write_questions(questions_of(pairs, np.arange(len(pairs)), seed=options.seed), path)
