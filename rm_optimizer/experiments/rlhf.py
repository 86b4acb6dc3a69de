"""Reinforcement learning from preferences: reward models from pairs, then a policy optimized against them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.core.pairs.synthetic import Gold, PreferenceWorld
from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation.response_files import read_prompts
from rm_optimizer.records.locations import ENSEMBLE_FILE
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.rl_coupling.ensemble_folder import load_ensemble, reference_responses, save_ensemble
from rm_optimizer.rl_coupling.language_policies import require_language_model
from rm_optimizer.rl_coupling.policy_training import require_trl
from rm_optimizer.rl_coupling.rlhf import PolicyCheckpoint, RLHFResult, optimize_policy
from rm_optimizer.rl_coupling.trainer_rewards import serving
from rm_optimizer.rl_coupling.world_policy import WorldGold, save_world_policy
from rm_optimizer.schema.rlhf import WORLD, RLHFRunConfig
from rm_optimizer.training.data.run_data import load_data
from rm_optimizer.training.run import run_training

START_FOLDER = "start"
"""Folder of the world's language model, inside the folder of the run."""


def run_rlhf(
    config: RLHFRunConfig,
    *,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_checkpoint: Callable[[PolicyCheckpoint], None] = lambda checkpoint: None,
) -> RLHFResult:
    """Train reward models, unless some are given, and optimize a policy against them, in `config.output_dir`.

    The folder contains the reward models' run folders `reward-N`, `ensemble.json` if there are several, the world's
    policy in `start`, and the files of `optimize_policy`. A repeated call continues from these files.

    Args:
        config: the composed options.
        on_stage: function called with a sentence at the start of each stage.
        on_checkpoint: function called with each measured checkpoint of the policy.

    Raises:
        RMOptimizerError: for the reasons of `run_training` and `optimize_policy`; options and files are checked
            before anything is trained.
    """
    require_trl()
    options, folder = config.rlhf, Path(config.output_dir)
    if options.policy != WORLD:
        require_language_model(options.policy)
    trained, measured = _prompts(config)
    gold = _gold(config, [*trained, *measured])
    with _reward(config, folder, on_stage) as reward:
        policy = options.policy
        if policy == WORLD:
            on_stage("policy: a small language model fitted to the world's responses")
            policy = str(save_world_policy(_world(config), folder / START_FOLDER, seed=config.seed))
        on_stage(f"optimizing the policy by {options.algorithm.upper()}: {options.steps} steps")
        return optimize_policy(
            policy,
            reward,
            trained,
            measured,
            folder,
            options,
            gold=gold,
            seed=config.seed,
            num_bootstrap=config.training.num_bootstrap,
            on_checkpoint=on_checkpoint,
        )


def _world(config: RLHFRunConfig) -> PreferenceWorld:
    return PreferenceWorld(config.data.synthetic.seed, gold=Gold())


def _prompts(config: RLHFRunConfig) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts for training and other ones for measurements, of the file, the world or the pairs.

    Raises:
        ConfigError: if there are none, or too few.
    """
    num = config.rlhf.measured_prompts
    if config.rlhf.prompts is None and config.rlhf.policy != WORLD:
        if config.data.train is None:
            raise ConfigError("rlhf.prompts must name a file, or data.train pairs whose prompts to take; got neither")
        pairs = load_data(config)
        of_each = ({pair.prompt_id: pair.prompt for pair in part.pairs} for part in (pairs.train, pairs.val))
        trained, measured = (list(prompts.values()) for prompts in of_each)
        measured = measured[:num]
    else:
        name = config.rlhf.prompts
        texts: list[Prompt] = [*_world(config).prompts()] if name is None else [*read_prompts(Path(name))]
        trained, measured = texts[num:], texts[:num]
    if not trained:
        where = config.rlhf.prompts or "the pairs"
        raise ConfigError(
            f"rlhf.measured_prompts must leave prompts to train on, got {num} of the {len(measured)} in {where}"
        )
    return trained, measured


def _gold(config: RLHFRunConfig, prompts: Sequence[Prompt]) -> Scorer | None:
    """The gold scorer, or None without one.

    The world's scorer scores all prompts first, since it must have each of them.
    """
    name = config.rlhf.gold or (WORLD if config.rlhf.policy == WORLD else None)
    if name is None:
        return None
    if name != WORLD:
        return BradleyTerryRM.from_pretrained(name)
    gold = WorldGold(_world(config))
    gold.score(prompts, ["."] * len(prompts))
    return gold


@contextmanager
def _reward(config: RLHFRunConfig, folder: Path, on_stage: Callable[[str], None]) -> Iterator[Scorer]:
    """Context with the reward that is optimized, from the given models or from models that are trained now.

    Several models are an ensemble, standardized on responses of the validation pairs.
    """
    options, names = config.rlhf, list(config.rlhf.reward_models)
    for number in range(0 if names else options.members):  # a model that an earlier call trained is read
        run = folder / f"reward-{number}"
        on_stage(f"reward model {number + 1} of {options.members}: {run}")
        result = run_training(config.member(number, str(run)))
        on_stage(f"accuracy on validation: {result.metrics.accuracy}")
        names.append(result.export)
    if len(names) > 1:
        if config.data.train is None and options.policy != WORLD:
            raise ConfigError("several reward models are standardized on pairs; name some with data.train")
        data = load_data(config)
        ensemble = RewardModelEnsemble(names, aggregation=options.aggregation, penalty=options.penalty)
        save_ensemble(folder, names, ensemble.fit_reference(*reference_responses(data.val.pairs, seed=0)))
        yield ensemble
    elif (Path(names[0]) / ENSEMBLE_FILE).is_file():
        yield load_ensemble(Path(names[0]), aggregation=options.aggregation, penalty=options.penalty)
    else:
        model = BradleyTerryRM.from_pretrained(names[0])
        if options.server is None:
            yield model
        else:
            with serving(options.server, model, names[0], option="rlhf.server") as client:
                yield client
