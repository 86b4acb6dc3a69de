"""How well influences predict retraining, and find a planted annotator and a leaked pair.

Worlds of synthetic preferences and `model=tiny`. `FOLDER` keeps each finished model's numbers, so that the same command
continues after a stop. The last lines are, averaged over worlds:

- `lds_NAME`: linear datamodeling score over models trained on halves by the same recipe, with its interval, of `blame`
  (damping by its rule), of all checkpoints averaged, of few projected columns, of gradient products, of the words alone
  and of random numbers; `lds_ceiling`: of models trained on the same halves in another order;
- `blame_less_words`: the difference by world;
- `gradients_a_pair`, and `seconds_by_training`, the time of `blame` over that of one training;
- `annotator_auroc`: one of ten annotators prefers length; its rank among the ten by the sum of influences on the reward
  for a repeated sentence, `annotator_found` (p < 0.05) and `clean_suspects`, the share of plantings in which another
  annotator has p < 0.05;
- `leak_first`: plantings in which a copy of a held-out pair in training is the first pair that raised its margin.
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

from rm_optimizer import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.pairs.synthetic import PreferenceWorld
from rm_optimizer.data_efficiency.blame import Half, datamodeling_score
from rm_optimizer.data_efficiency.influence import BlameTarget, blame, word_influence
from rm_optimizer.records.codec import from_values, json_values
from rm_optimizer.records.ledger import open_ledger
from rm_optimizer.records.orders import PairOrder, epoch_order
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.rl_coupling.readiness.features import with_repeated_sentence
from rm_optimizer.training.run import train_reward_model

NUM_HELD_OUT = 200
SMALL = 0.05
"""Memory in GiB that the projected influences get."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--worlds", type=int, default=3, help="worlds of the score")
    parser.add_argument("--pairs", type=int, default=2000, help="training pairs of a world")
    parser.add_argument("--epochs", type=float, default=2, help="passes over them")
    parser.add_argument("--halves", type=int, default=24, help="models trained on halves of a world's pairs")
    parser.add_argument("--plantings", type=int, default=20, help="worlds with a planted annotator and a planted leak")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    worlds = [score_of_world(given, seed) for seed in range(given.worlds)]
    plantings = pieces(given.folder / "plantings.jsonl", given.plantings, lambda seed: planted(given.folder, seed))
    for name in worlds[0]["scores"] if worlds else ():
        each = [world["scores"][name] for world in worlds]
        print(
            f"lds_{name}: {np.mean([one['value'] for one in each]):.3f}" + "".join(f" {_interval(one)}" for one in each)
        )
    for name in ("ceiling", "blame_less_words", "gradients_a_pair", "seconds_by_training") if worlds else ():
        print(f"{name}: " + " ".join(f"{world[name]:.3f}" for world in worlds))
    if plantings:
        print(f"annotator_auroc: {np.mean([one['auroc'] for one in plantings]):.3f}")
        print(f"annotator_found: {np.mean([one['p_value'] < 0.05 for one in plantings]):.3f}")
        print(f"clean_suspects: {np.mean([one['has_other'] for one in plantings]):.3f}")
        print(f"leak_first: {np.mean([one['is_leak_first'] for one in plantings]):.3f}")


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


def trained(folder: Path, pairs: Sequence[PreferencePair], val: Any, epochs: float, order: int = 0) -> BradleyTerryRM:
    """A model trained on the pairs, which are shuffled by `order`; the folder keeps the run."""
    shuffle = PairOrder(f"order-{order}", lambda epoch: epoch_order(len(pairs), order, epoch))
    every = {"training.checkpoint_every": max(1, int(epochs * len(pairs) / 32 / 5)), "training.keep_checkpoints": 6}
    train_reward_model("tiny", "adamw", pairs, epochs, val=val, order=shuffle, output_dir=folder, options=every)
    return BradleyTerryRM.from_pretrained(folder / "best")


def margins(model: BradleyTerryRM, pairs: Sequence[PreferencePair]) -> list[float]:
    groups = model.score_groups([pair.prompt for pair in pairs], [(pair.chosen, pair.rejected) for pair in pairs])
    return [float(group[0] - group[1]) for group in groups]


def score_of_world(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Scores of all methods in a world."""
    world = PreferenceWorld(seed).pairs(given.pairs, NUM_HELD_OUT)
    stem = f"{seed}-{given.pairs}-{given.epochs:g}"

    def half(number: int, order: int) -> Half:
        rows = np.sort(np.random.default_rng([seed, number]).permutation(given.pairs)[: given.pairs // 2]).tolist()
        run = given.folder / f"half-{seed}"
        shutil.rmtree(run, ignore_errors=True)
        found = margins(trained(run, [world.train[row] for row in rows], world.val, given.epochs, order), world.val)
        shutil.rmtree(run)
        return Half(rows, found)

    halves, again = (
        [
            from_values(Half, piece)
            for piece in pieces(
                given.folder / f"halves-{stem}-{order}.jsonl", count, lambda number, order=order: half(number, order)
            )
        ]
        for order, count in ((0, given.halves), (1, max(4, given.halves // 2)))
    )

    def scored(_: int) -> dict[str, Any]:
        run = given.folder / f"whole-{stem}"
        shutil.rmtree(run, ignore_errors=True)
        start = time.perf_counter()
        model = trained(run, world.train, world.val, given.epochs)
        training = time.perf_counter() - start
        target = BlameTarget("margins", world.val)
        start, options = time.perf_counter(), {"held_out": world.val, "halves": halves}
        passes: list[int] = []
        found = blame(model, world.train, target, on_progress=lambda done, _: passes.append(done), **options)
        spent = time.perf_counter() - start
        checkpoints = map(BradleyTerryRM.from_pretrained, RunFolder(run).checkpoints.values())
        random = np.random.default_rng(seed).normal(size=(given.pairs, NUM_HELD_OUT))
        scores = {
            "blame": found.validated,
            "checkpoints": blame(checkpoints, world.train, target, **options).validated,
            "projected": blame(model, world.train, target, memory_gib=SMALL, **options).validated,
            "product": blame(model, world.train, target, damping=1e4, halves=halves).validated,
            "words": datamodeling_score(word_influence(world.train, world.val), halves),
            "random": datamodeling_score(random, halves),
        }
        shutil.rmtree(run)
        return {
            "scores": scores,
            "ceiling": _ceiling(halves, again),
            "blame_less_words": scores["blame"].value - scores["words"].value,
            "gradients_a_pair": len(passes) / (given.pairs + NUM_HELD_OUT),
            "seconds_by_training": spent / training,
        }

    return dict(pieces(given.folder / f"scores-{stem}.jsonl", 1, scored)[0])


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
    shutil.rmtree(run, ignore_errors=True)
    model = trained(run, train, world.val[4:], 4)  # without the pairs of the leaked prompt
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
