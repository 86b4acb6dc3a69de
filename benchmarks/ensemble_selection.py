"""Ensembles against one model under label noise: gold reward of the best of many responses on synthetic worlds.

Each configuration is a world (seed, concave gold reward) and a number of training pairs, a quarter of whose labels are
flipped on top of the labeler's noise. Models are linear in words, in length and in facts beside the prompt's topic,
fitted by penalized Bradley-Terry likelihood. The single model is fitted to all pairs, each of the five members to a
bootstrap resample of them. The best of n responses is taken by the single model and by the ensemble's mean, minimum and
UWO (penalty 1), members standardized on responses of other prompts; `gold_member` is the mean over members on their
own. Gold rewards are gains in standard deviations within prompts under the policy. Numbers of pairs are averaged within
a world, and differences are paired, with Student's interval over worlds.

`auroc_disagreement` and `auroc_mahalanobis` tell the single model's best of n from responses of the training pairs.

    python benchmarks/ensemble_selection.py
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import expit, log_expit
from scipy.stats import rankdata

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.core.pairs.pair import Prompt
from rm_optimizer.core.pairs.synthetic import TOPICS, PreferenceWorld
from rm_optimizer.rl_coupling.best_of_n_curve import selected_means
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.rl_coupling.out_of_distribution import MahalanobisDetector
from rm_optimizer.rl_coupling.world_policy import WorldPolicy

FLIPPED = 0.25
MEMBERS = 5
RIDGE = 1.0
FACTS = sorted(fact for facts in TOPICS.values() for fact in facts)


class Features:
    """Feature vectors of conversations, each computed once."""

    def __init__(self, words: Sequence[str]) -> None:
        self.place = {word: index for index, word in enumerate(words)}
        self.known: dict[tuple[str, str], np.ndarray] = {}

    def __call__(self, prompt: str, response: str) -> np.ndarray:
        """Words, length and its square, and facts of the prompt's topic."""
        key = (prompt, response)
        if key not in self.known:
            found = np.zeros(len(self.place) + 2 + len(FACTS), dtype=np.float32)
            words = re.findall(r"\w+", response.lower())
            for word in words:
                if word in self.place:
                    found[self.place[word]] += 1
            found[len(self.place)] = len(words) / 20
            found[len(self.place) + 1] = (len(words) / 20) ** 2
            topic = next(topic for topic in TOPICS if topic in prompt)
            for index, fact in enumerate(FACTS):
                found[len(self.place) + 2 + index] = fact in words and fact in TOPICS[topic]
            self.known[key] = found
        return self.known[key]

    def rows(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> np.ndarray:
        """Feature vectors of several conversations."""
        return np.stack([self(str(prompt), text) for prompt, text in zip(prompts, responses, strict=True)])


class LinearModel(Scorer):
    """Reward that is linear in the features, fitted to differences of pairs."""

    def __init__(self, features: Features, differences: np.ndarray) -> None:
        self.features = features

        def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
            margins = differences @ weights
            gradient = -expit(-margins) @ differences + RIDGE * weights
            return float(-log_expit(margins).sum() + RIDGE / 2 * weights @ weights), gradient

        self.weights = minimize(loss, np.zeros(differences.shape[1]), jac=True, method="L-BFGS-B").x

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> torch.Tensor:
        """Rewards of the responses."""
        return torch.from_numpy(self.features.rows(prompts, responses) @ self.weights)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=12)
    parser.add_argument("--pairs", type=int, nargs="+", default=[200, 600])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--samples", type=int, default=1024)
    args = parser.parse_args(arguments)
    rows = [[configuration(seed, num, args.prompts, args.samples) for num in args.pairs] for seed in range(args.worlds)]
    print(f"{args.worlds} worlds by {len(args.pairs)} numbers of pairs, best of {args.samples}, {args.prompts} prompts")
    columns = {name: np.array([np.mean([own[name] for own in row]) for row in rows]) for name in rows[0][0]}
    for name, values in columns.items():
        print(f"{name}: {student_mean(values)}")
    for name in ("mean", "min", "uwo"):
        for other in ("single", "member"):
            print(f"{name}_less_{other}: {student_mean(columns[f'gold_{name}'] - columns[f'gold_{other}'])}")


def configuration(seed: int, num_pairs: int, num_prompts: int, num_samples: int) -> dict[str, float]:
    """Gold gains of the best of n by each scorer, and how well the selected responses are told from training ones."""
    world = PreferenceWorld(seed, concave=True)
    rng = np.random.default_rng([seed, num_pairs])
    pairs = world.pairs(num_pairs, 400).train
    texts = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
    words = sorted({word for text in texts for word in re.findall(r"\w+", text.lower())})
    features = Features(words)
    prompts = [pair.prompt for pair in pairs]
    differences = features.rows(prompts, [p.chosen for p in pairs]) - features.rows(
        prompts, [p.rejected for p in pairs]
    )
    differences = differences.astype(np.float64) * np.where(rng.random(num_pairs) < FLIPPED, -1.0, 1.0)[:, None]
    single = LinearModel(features, differences)
    members = [LinearModel(features, differences[rng.integers(num_pairs, size=num_pairs)]) for _ in range(MEMBERS)]

    asked = world.prompts()
    policy = WorldPolicy(world)
    reference = asked[num_prompts : num_prompts + 200]
    others = [policy.respond(prompt, 1, 1)[0] for prompt in reference]
    pool = [policy.respond(prompt, num_samples, 0) for prompt in asked[:num_prompts]]
    flat = [prompt for prompt in asked[:num_prompts] for _ in range(num_samples)]
    answers = [text for row in pool for text in row]
    shape = (num_prompts, num_samples)
    gold = np.array([world.gold(prompt, text) for prompt, text in zip(flat, answers, strict=True)]).reshape(shape)
    spread = np.sqrt(gold.var(axis=1, ddof=1).mean())

    def gain(rewards: np.ndarray) -> float:
        first, last = selected_means(rewards.reshape(shape), [gold], [1, num_samples])[0].mean(axis=0)
        return float((last - first) / spread)

    proxy = single.score(flat, answers).numpy()
    found = {"gold_single": gain(proxy)}
    ensemble = RewardModelEnsemble(members)
    ensemble.fit_reference(reference, others)
    for name in ("mean", "min", "uwo"):
        combined = RewardModelEnsemble(members, aggregation=name, reference=ensemble.reference)
        found[f"gold_{name}"] = gain(combined.score(flat, answers).double().numpy())
    found["gold_member"] = float(np.mean([gain(row) for row in ensemble.member_rewards(flat, answers)]))
    found["gold_best"] = float((gold.max(axis=1) - gold.mean(axis=1)).mean() / spread)

    best = [row[index] for row, index in zip(pool, proxy.reshape(shape).argmax(axis=1), strict=True)]
    drawn = rng.permutation(num_pairs)[:200]
    trained = [pairs[index].chosen if index % 2 else pairs[index].rejected for index in drawn]
    trained_prompts = [pairs[index].prompt for index in drawn]
    disagreement = [
        np.array(ensemble.detect_ood(*side).scores)
        for side in ((asked[:num_prompts], best), (trained_prompts, trained))
    ]
    detector = MahalanobisDetector(features.rows(reference, others))
    distances = [
        detector.distances(features.rows(*side)) for side in ((asked[:num_prompts], best), (trained_prompts, trained))
    ]
    return found | {"auroc_disagreement": auroc(*disagreement), "auroc_mahalanobis": auroc(*distances)}


def auroc(positive: np.ndarray, negative: np.ndarray) -> float:
    """Probability that a positive score exceeds a negative one, ties one half."""
    ranks = rankdata(np.concatenate([positive, negative]))[: len(positive)]
    return float((ranks.sum() - len(positive) * (len(positive) + 1) / 2) / (len(positive) * len(negative)))


if __name__ == "__main__":
    main()
