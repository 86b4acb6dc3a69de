"""How well influences predict retraining, find a planted annotator and a leaked pair, and what removing pairs gains.

Worlds of synthetic preferences and `model=tiny`; with `--base`, samples of real pairs and the last layer of a known
model. `FOLDER` keeps the numbers of finished models, so that the same command continues after a stop. The last lines
are, averaged over worlds:

- `lds_NAME`: linear datamodeling score over models trained on halves by the same recipe from the same start, with its
  interval, of `blame` (damping by its rule), of all checkpoints averaged, of three orders of a run averaged, of
  gradient products, of the words alone and of random numbers; `lds_ceiling`: of models trained on
  the same halves in another order; `less_words`: scores above that of the words, by world with their intervals;
- `gradients_a_pair`, and `seconds_by_training`, the processor time of `blame` over that of one training;
- `annotator_auroc`: one of ten annotators prefers length; its rank among the ten by the sum of influences on the reward
  for a repeated sentence, `annotator_found` (p < 0.05) and `clean_suspects`, the share of plantings in which another
  annotator has p < 0.05;
- `leak_first`: plantings in which a copy of a held-out pair in training is the first pair that raised its margin;
- `removed_NAME`: accuracy and loss on other pairs after removing 5 % of the pairs, less those after removing 5 % at
  random, of the pairs that raise the held-out loss most by `blame`, of the least probable labels of `data clean`, and
  of none, with intervals over worlds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from rm_optimizer import BradleyTerryRM, compose
from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.core.pairs.pair import PreferencePair, conversation_groups
from rm_optimizer.core.pairs.synthetic import PreferenceWorld
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.data_efficiency.blame import Half, datamodeling_score
from rm_optimizer.data_efficiency.influence import BlameTarget, blame
from rm_optimizer.data_efficiency.margin_analysis import fixed_differences, held_out_chances, turned
from rm_optimizer.records.codec import from_values, json_values
from rm_optimizer.records.ledger import open_ledger
from rm_optimizer.records.orders import PairOrder, epoch_order, random_positions
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.rl_coupling.readiness.features import with_repeated_sentence
from rm_optimizer.schema import TrainConfig, typed
from rm_optimizer.training.preparation import freeze, from_start
from rm_optimizer.training.run import train_reward_model

NUM_HELD_OUT, NUM_REAL = 200, 60
"""Held-out pairs of a world and of real pairs."""
FROZEN = 5
"""Layers of a pretrained encoder that are not trained, and its embeddings."""
SHORT = 350
"""Most characters of a real pair's prompt and longer response."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--worlds", type=int, default=3, help="worlds of the score")
    parser.add_argument("--pairs", type=int, default=1000, help="training pairs of a world")
    parser.add_argument("--epochs", type=float, default=2, help="passes over them")
    parser.add_argument("--halves", type=int, default=12, help="models trained on halves of a world's pairs")
    parser.add_argument("--plantings", type=int, default=20, help="worlds with a planted annotator and a planted leak")
    parser.add_argument("--removals", type=int, default=4, help="worlds in which 5 %% of the pairs are removed")
    parser.add_argument("--base", help="pretrained encoder whose last layer is trained, in place of model=tiny")
    parser.add_argument("--real", type=Path, nargs=2, help="training and validation pairs for --base")
    given = parser.parse_args()
    if (given.base is None) != (given.real is None):
        parser.error("--base and --real go together")
    given.folder.mkdir(parents=True, exist_ok=True)
    worlds = [score_of_world(given, seed) for seed in range(given.worlds)]
    plantings = pieces(given.folder / "plantings.jsonl", given.plantings, lambda seed: planted(given.folder, seed))
    removals = pieces(given.folder / "removals.jsonl", given.removals, lambda seed: removed(given, seed))
    for name in worlds[0]["scores"] if worlds else ():
        each = [world["scores"][name] for world in worlds]
        print(
            f"lds_{name}: {np.mean([one['value'] for one in each]):.3f}" + "".join(f" {_interval(one)}" for one in each)
        )
    for name in worlds[0]["less_words"] if worlds else ():
        each = [world["less_words"][name] for world in worlds]
        print(f"less_words_{name}:" + "".join(f" {one['value']:.3f} {_interval(one)}" for one in each))
    for name in ("ceiling", "gradients_a_pair", "seconds_by_training") if worlds else ():
        print(f"{name}: " + " ".join(f"{world[name]:.3f}" for world in worlds))
    if plantings:
        print(f"annotator_auroc: {np.mean([one['auroc'] for one in plantings]):.3f}")
        print(f"annotator_found: {np.mean([one['p_value'] < 0.05 for one in plantings]):.3f}")
        print(f"clean_suspects: {np.mean([one['has_other'] for one in plantings]):.3f}")
        print(f"leak_first: {np.mean([one['is_leak_first'] for one in plantings]):.3f}")
    for name in ("blame", "clean", "none") if len(removals) > 1 else ():
        gains = [np.array([one[name][of] - one["random"][of] for one in removals]) for of in ("accuracy", "loss")]
        print(f"removed_{name}: accuracy {student_mean(gains[0]):.4f}, loss {student_mean(gains[1]):.4f}")


def _interval(estimate: dict[str, float]) -> str:
    return f"[{estimate['low']:.3f}, {estimate['high']:.3f}]"


def pieces(path: Path, count: int, measure: Callable[[int], Any]) -> list[Any]:
    """Measured pieces as JSON values, those of an earlier call among them."""
    with open_ledger(path, "blame", other="another benchmark") as log:
        done = list(log.values())
        for number in range(len(done), count):
            done.append(json.loads(json.dumps(json_values(measure(number)))))
            log.append(done[-1])
            print(f"{path.name}: {number + 1} of {count}", flush=True)
    return done[:count]


def recipe(given: argparse.Namespace, epochs: float, pairs: int) -> TrainConfig:
    """Options of all trainings."""
    model = ["model=tiny"]
    if given.base:
        model = [f"model.path={given.base}", "model.max_length=64", f"model.freeze={FROZEN}", "optimizer.lr=3e-4"]
        model += ["training.eval_at_start=false", "training.evals_per_epoch=1"]
    every = max(1, int(epochs * pairs / 32 / 3))
    kept = [f"training.checkpoint_every={every}", "training.keep_checkpoints=3", "logger.tensorboard=false"]
    options = [*model, f"training.epochs={epochs}", "batching.batch_size=32", *kept, "output_dir=."]
    return typed(compose(options), TrainConfig)


def trained(
    config: TrainConfig, folder: Path, pairs: Sequence[PreferencePair], val: Any, order: int = 0
) -> BradleyTerryRM:
    """A model trained on the pairs, which are shuffled by `order`; the folder keeps the run."""
    shutil.rmtree(folder, ignore_errors=True)
    shuffle = PairOrder(f"order-{order}", lambda epoch: epoch_order(len(pairs), order, epoch))
    train_reward_model(replace(config, output_dir=str(folder)), data_path=pairs, val=val, order=shuffle)
    return loaded(config, folder / "best")


def loaded(config: TrainConfig, source: Path) -> BradleyTerryRM:
    model = BradleyTerryRM.from_pretrained(source)
    if config.model.freeze is not None:
        freeze(model, config.model.freeze)
    return model


def margins(model: BradleyTerryRM, pairs: Sequence[PreferencePair]) -> list[float]:
    groups = model.score_groups([pair.prompt for pair in pairs], [(pair.chosen, pair.rejected) for pair in pairs])
    return [float(group[0] - group[1]) for group in groups]


def pairs_of(given: argparse.Namespace, seed: int) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """Training and held-out pairs of a world, or short real ones drawn by the seed."""
    if not given.base:
        world = PreferenceWorld(seed).pairs(given.pairs, NUM_HELD_OUT)
        return world.train, world.val
    drawn = []
    for path, count in zip(given.real, (given.pairs, NUM_REAL), strict=True):
        pairs = PreferenceDataset(str(path)).pairs
        short = [pair for pair in pairs if max(len(pair.chosen), len(pair.rejected)) + len(pair.prompt) <= SHORT]
        drawn.append([short[place] for place in random_positions(len(short), count, seed)])
    return drawn[0], drawn[1]


def score_of_world(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Scores of all methods in a world."""
    train, val = pairs_of(given, seed)
    stem = f"{seed}-{given.pairs}-{given.epochs:g}-{Path(given.base).name if given.base else 'tiny'}"
    run, config = given.folder / f"whole-{stem}", recipe(given, given.epochs, given.pairs)
    model = loaded(config, run / "best") if (run / "best").exists() else trained(config, run, train, val)
    same = from_start(config, model, given.folder)

    def half(number: int, order: int) -> Half:
        rows = np.sort(np.random.default_rng([seed, number]).permutation(len(train))[: len(train) // 2]).tolist()
        own = given.folder / f"half-{stem}"
        found = margins(trained(same, own, [train[row] for row in rows], val, order), val)
        shutil.rmtree(own)
        return Half(rows, found)

    halves, again = (
        [
            from_values(Half, piece)
            for piece in pieces(
                given.folder / f"halves-{stem}-{order}.jsonl", count, lambda number, order=order: half(number, order)
            )
        ]
        for order, count in ((0, given.halves), (1, max(4, given.halves // 3)))
    )

    def scored(_: int) -> dict[str, Any]:
        start = time.process_time()
        others = [
            trained(same, given.folder / f"other-{stem}-{order}", train, val, order)
            for order in ((1,) if given.base else (1, 2))
        ]
        training = (time.process_time() - start) / len(others)
        target = BlameTarget("margins", val)
        start, options = time.process_time(), {"held_out": val, "halves": halves}
        passes: list[int] = []
        found = blame(model, train, target, on_progress=lambda done, _: passes.append(done), **options)
        spent = time.process_time() - start
        checkpoints = (loaded(config, path) for path in RunFolder(run).checkpoints.values())
        random = np.random.default_rng(seed).normal(size=(len(train), len(val)))
        by_method = {
            "blame": found,
            "checkpoints": blame(checkpoints, train, target, **options),
            "runs": blame([model, *others], train, target, **options),
            "product": blame(model, train, target, damping=1e4, halves=halves),
        }
        return {
            "scores": {name: one.validated for name, one in by_method.items()}
            | {"words": found.words_score, "random": datamodeling_score(random, halves)},
            "less_words": {name: one.above_words for name, one in by_method.items()},
            "ceiling": _ceiling(halves, again),
            "gradients_a_pair": len(passes) / (len(train) + len(val)),
            "seconds_by_training": spent / training,
        }

    return dict(pieces(given.folder / f"scores-{stem}.jsonl", 1, scored)[0])


def removed(given: argparse.Namespace, seed: int, num_pairs: int = 1000) -> dict[str, Any]:
    """Accuracy and loss on 400 other pairs after removing 5 % of the training pairs by each rule."""
    world = PreferenceWorld(seed).pairs(num_pairs, NUM_HELD_OUT + 400)
    val, test = world.val[:NUM_HELD_OUT], world.val[NUM_HELD_OUT:]
    run, config = given.folder / f"removed-{seed}", recipe(argparse.Namespace(base=None), given.epochs, num_pairs)
    config = replace(config, training=replace(config.training, eval_at_start=False, evals_per_epoch=1))
    model = trained(config, run, world.train, val)
    found = blame(model, world.train, BlameTarget("loss", val, "loss"), held_out=val)
    differences, turn = turned(fixed_differences(PreferenceDataset(world.train), None), seed)
    groups = np.array(conversation_groups([pair.prompt for pair in world.train]))
    chances = held_out_chances(differences, turn, groups, seed=seed).confidence
    orders = {
        "blame": np.argsort(-found.influence),
        "clean": np.argsort(chances),
        "random": np.random.default_rng(seed).permutation(num_pairs),
    }
    same = from_start(config, model, given.folder)
    result = {}
    for name, rows in {**orders, "none": np.arange(0)}.items():
        kept = np.delete(np.arange(num_pairs), rows[: num_pairs // 20])
        seen = np.array(margins(trained(same, run, [world.train[row] for row in kept], val), test))
        result[name] = {"accuracy": float((seen > 0).mean()), "loss": float(np.logaddexp(0, -seen).mean())}
    shutil.rmtree(run)
    return result


def _ceiling(halves: Sequence[Half], again: Sequence[Half]) -> float:
    """Score of a perfect prediction of the mean over orders: the root of the rank correlation of two orders."""
    first, second = (np.array([half.margins for half in part]) for part in (halves[: len(again)], again))
    same = [spearmanr(one, two).statistic for one, two in zip(first.T, second.T, strict=True)]
    return max(float(np.mean(same)), 0.0) ** 0.5


def planted(folder: Path, seed: int, num_pairs: int = 1000) -> dict[str, Any]:
    """One of ten annotators prefers length, and a held-out pair stands in training."""
    world, rng = PreferenceWorld(seed).pairs(num_pairs, NUM_HELD_OUT), np.random.default_rng(seed)
    who, names = int(rng.integers(10)), rng.integers(10, size=num_pairs).tolist()
    train = [
        replace(
            pair,
            chosen=pair.rejected if name == who and len(pair.rejected) > len(pair.chosen) else pair.chosen,
            rejected=pair.chosen if name == who and len(pair.rejected) > len(pair.chosen) else pair.rejected,
            metadata={"annotator": str(name)},
        )
        for pair, name in zip(world.train, names, strict=True)
    ]
    place = int(rng.integers(num_pairs))
    train[place] = replace(world.val[0], metadata=train[place].metadata)
    run = folder / f"planted-{seed}"
    tiny = recipe(argparse.Namespace(base=None), 4, num_pairs)
    model = trained(tiny, run, train, world.val[4:])  # without the pairs of the leaked prompt
    shutil.rmtree(run)
    longer = [replace(pair, chosen=with_repeated_sentence(pair.chosen), rejected=pair.chosen) for pair in world.val]
    found = blame(model, train, BlameTarget("length", longer), held_out=world.val[4:])
    groups = {group.name: group for group in found.groups}
    others = [group.total.value for name, group in groups.items() if name != str(who)]
    margin = blame(model, train, world.val[0], held_out=world.val[4:])
    return {
        "auroc": float(np.mean([groups[str(who)].total.value > other for other in others])),
        "p_value": groups[str(who)].p_value,
        "has_other": any(group.p_value < 0.05 for name, group in groups.items() if name != str(who)),
        "is_leak_first": margin.raised[0].row == place + 1,
    }


if __name__ == "__main__":
    main()
