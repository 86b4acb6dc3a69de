"""Ensembles against one model under label noise, where a policy is trained by reinforcement learning.

Each configuration is a synthetic world (seed, concave gold reward) whose training labels are flipped with probability
0.25 on top of the labeler's noise. The single model and the five members are networks of one hidden layer, fitted to
all pairs and stopped by the loss on noisy validation pairs. They differ in the seed of weights and order, as the
members of `rm-opt ensemble train` do. Members are standardized on responses of other prompts.

The policy is a GRU over sentences, fitted once to the worlds' policy; facts take one of four forms at random. Policy
gradients normalized within groups (GRPO without penalty or clipping, one update a sample) move it by the single model,
and by mean, minimum and UWO (penalty 1) of the ensemble, from one start with the same seeds. Gold rewards are gains
over the start in standard deviations within prompts. `kl_3 … kl_12` are interpolated at that divergence in nats (the
mean log ratio on fresh samples, which is unbiased), and `final` is the mean of the last three measurements. Differences
are paired, with Student's interval over worlds.

`auroc_*` tell responses of the policy at a divergence of 12 nats, trained by the single model, from responses of the
training pairs; `auroc_start_*` do so with the responses of the policy at its start.

    python benchmarks/ensemble_rl.py --log ensemble_rl.jsonl
"""

from __future__ import annotations

import argparse
import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from ensemble_selection import FLIPPED, MEMBERS, Features, auroc
from scipy.spatial.distance import cdist
from torch import Tensor, nn

from rm_optimizer.core.base import Scorer
from rm_optimizer.core.metrics.intervals import student_mean
from rm_optimizer.core.pairs.pair import Prompt, digest
from rm_optimizer.core.pairs.synthetic import CONSTRAINTS, FACT_SENTENCES, TOPICS, PreferencePair, PreferenceWorld
from rm_optimizer.records.ledger import open_ledger
from rm_optimizer.rl_coupling.ensemble import RewardModelEnsemble
from rm_optimizer.rl_coupling.out_of_distribution import MahalanobisDetector
from rm_optimizer.rl_coupling.world_policy import WorldPolicy

ARMS = ("single", "mean", "min", "uwo")
DIVERGENCES = (3.0, 6.0, 12.0)
NUM_PAIRS = (400, 1600)
"""Training pairs; worlds take turns."""
TOPIC_OF = {fact: topic for topic, facts in TOPICS.items() for fact in facts}
MOST_SENTENCES = 16
GROUP, PROMPTS_AT_ONCE = 8, 16
EVERY = 3
NEIGHBORS = 10


class NetworkModel(Scorer):
    """Reward by a network of one hidden layer over words, length, facts of the topic, and the prompt.

    Args:
        features: features of conversations.
        train: chosen and rejected rows of the training pairs.
        val: chosen and rejected rows of the pairs that choose the epoch.
        seed: seed of weights and order.
    """

    def __init__(
        self, features: Inputs, train: tuple[Tensor, Tensor], val: tuple[Tensor, Tensor], seed: int, epochs: int = 40
    ) -> None:
        self.features = features
        generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(train[0].shape[1], 64), nn.ReLU())
            self.head = nn.Linear(64, 1)
        self.net = nn.Sequential(self.body, self.head)
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=2e-3, weight_decay=0.05)
        best, lowest = copy.deepcopy(self.net.state_dict()), math.inf
        for _ in range(epochs):
            for rows in torch.randperm(len(train[0]), generator=generator).split(64):
                optimizer.zero_grad()
                self._loss(train[0][rows], train[1][rows]).backward()
                optimizer.step()
            with torch.no_grad():
                loss = float(self._loss(*val))
            if loss < lowest:
                best, lowest = copy.deepcopy(self.net.state_dict()), loss
        self.net.load_state_dict(best)
        self.val_loss = lowest

    def _loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -nn.functional.logsigmoid(self.net(chosen) - self.net(rejected)).mean()

    @torch.no_grad()
    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Tensor:
        """Rewards of the responses."""
        rewards: Tensor = self.net(self.features.rows(prompts, responses)).squeeze(-1)
        return rewards

    @torch.no_grad()
    def hidden(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> np.ndarray:
        """Last hidden states of the responses."""
        found: np.ndarray = self.body(self.features.rows(prompts, responses)).double().numpy()
        return found


class Inputs:
    """Features of conversations, with topic and constraint of the prompt."""

    def __init__(self, words: Sequence[str]) -> None:
        self.own = Features(words)
        self.last: tuple[object, Tensor] = (None, torch.zeros(0))

    def rows(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Tensor:
        """Feature vectors, float32; those of the last call are kept for the next member."""
        key = (tuple(prompts), tuple(responses))
        if self.last[0] != key:
            self.last = (key, self._rows(prompts, responses))
        return self.last[1]

    def _rows(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> Tensor:
        places = [conditions(str(prompt)) for prompt in prompts]
        topics, constraints = (torch.tensor([place[kind] for place in places]) for kind in (0, 1))
        response = torch.from_numpy(self.own.rows(prompts, responses))
        one_hot = nn.functional.one_hot
        return torch.cat([response, one_hot(topics, len(TOPICS)), one_hot(constraints, len(CONSTRAINTS))], dim=1)


def conditions(prompt: str) -> tuple[int, int]:
    """Places of the prompt's topic and constraint."""
    topic = next(place for place, name in enumerate(TOPICS) if name in prompt)
    found = (place for place, text in enumerate(CONSTRAINTS.values()) if text and text in prompt)
    return topic, next(found, 0)


class SentencePolicy(nn.Module):
    """GRU that writes sentences of the worlds, given topic and constraint; token 0 ends a response.

    A sentence is a fact's name, put into one of its four forms as it is written out, or a text of its own.
    """

    def __init__(self, sentences: Sequence[str], hidden: int = 32) -> None:
        super().__init__()
        self.sentences = list(sentences)
        self.place = {text: place + 1 for place, text in enumerate(sentences)}
        self.hidden = hidden
        self.topic, self.constraint = nn.Embedding(len(TOPICS), hidden), nn.Embedding(len(CONSTRAINTS), hidden)
        self.word = nn.Embedding(len(sentences) + 1, hidden)
        self.cell = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, len(sentences) + 1)

    def start(self, prompts: Sequence[str]) -> Tensor:
        """First states, of shape (1, prompts, hidden)."""
        places = torch.tensor([conditions(prompt) for prompt in prompts])
        return torch.tanh(self.topic(places[:, 0]) + self.constraint(places[:, 1]))[None]

    def log_probs(self, prompts: Sequence[str], tokens: Tensor) -> Tensor:
        """Log-probability of each response, its end included."""
        before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], dim=1)
        states, _ = self.cell(self.word(before), self.start(prompts))
        every = self.out(states).log_softmax(-1).gather(2, tokens[..., None]).squeeze(-1)
        ended = (tokens == 0).cumsum(1) - (tokens == 0).long() > 0
        return (every * ~ended).sum(1)

    @torch.no_grad()
    def sample(self, prompts: Sequence[str], generator: torch.Generator) -> Tensor:
        """Responses as tokens, of shape (prompts, sentences); after the end all are 0."""
        state, token = self.start(prompts), torch.zeros(len(prompts), 1, dtype=torch.long)
        found, alive = [], torch.ones(len(prompts), 1, dtype=torch.bool)
        for step in range(MOST_SENTENCES):
            states, state = self.cell(self.word(token), state)
            logits = self.out(states[:, 0])
            if step == 0:
                logits[:, 0] = -math.inf  # a response has at least one sentence
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator) * alive
            alive &= token > 0
            found.append(token)
        return torch.cat(found, dim=1)

    def tokens(self, texts: Sequence[str]) -> Tensor:
        """Tokens of responses of the worlds."""
        found = torch.zeros(len(texts), MOST_SENTENCES, dtype=torch.long)
        for number, text in enumerate(texts):
            own = [self.place[sentence] for sentence in sentences_of(text)]
            found[number, : len(own)] = torch.tensor(own)
        return found

    @torch.no_grad()
    def surprise(self, prompts: Sequence[str], responses: Sequence[str]) -> np.ndarray:
        """Negative log-likelihood of each response in nats."""
        found: np.ndarray = -self.log_probs(prompts, self.tokens(responses)).double().numpy()
        return found

    def texts(self, tokens: Tensor, seed: int) -> list[str]:
        """Responses as text, with forms of the facts by the seed."""
        forms = np.random.default_rng([seed, 9]).integers(len(FACT_SENTENCES), size=tuple(tokens.shape)).tolist()
        return [
            " ".join(written(self.sentences[token - 1], form) for token, form in zip(*row, strict=True) if token)
            for row in zip(tokens.tolist(), forms, strict=True)
        ]


def written(sentence: str, form: int) -> str:
    """Sentence as text; a fact's name takes a form."""
    topic = TOPIC_OF.get(sentence)
    return sentence if topic is None else FACT_SENTENCES[form].format(topic=topic, fact=sentence)


def sentences_of(response: str) -> list[str]:
    """Sentences of a response: the fact that each names, or its text."""
    texts = [text.strip() for text in re.findall(r"[^.]+\.", response)][:MOST_SENTENCES]
    return [next((fact for fact in TOPIC_OF if re.search(rf"\b{fact}\b", text)), text) for text in texts]


def first_policy(num_responses: int, epochs: int) -> SentencePolicy:
    """The policy fitted to responses of the worlds' policy, by maximum likelihood."""
    world, rng = PreferenceWorld(0), np.random.default_rng(5)
    prompts = (world.prompts() * (num_responses // 1000))[:num_responses]
    responses = [world.sample_response(prompt, rng) for prompt in prompts]
    sentences = sorted({text for response in responses for text in sentences_of(response)})
    torch.manual_seed(0)
    policy = SentencePolicy(sentences)
    tokens = policy.tokens(responses)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(num_responses).split(256):
            optimizer.zero_grad()
            (-policy.log_probs([prompts[i] for i in rows.tolist()], tokens[rows]).mean()).backward()
            optimizer.step()
    return policy


def trained_policies(
    start: SentencePolicy,
    reward: Callable[[list[str], list[str]], Tensor],
    prompts: Sequence[str],
    steps: int,
    seed: int,
) -> list[SentencePolicy]:
    """Policies at every third step of group-normalized policy gradients, the start first."""
    policy, generator = copy.deepcopy(start), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    kept = [copy.deepcopy(policy)]
    for step in range(1, steps + 1):
        drawn = torch.randint(len(prompts), (PROMPTS_AT_ONCE,), generator=generator).tolist()
        asked = [prompts[i] for i in drawn for _ in range(GROUP)]
        tokens = policy.sample(asked, generator)
        rewards = reward(asked, policy.texts(tokens, seed + step)).double().reshape(-1, GROUP)
        apart = rewards - rewards.mean(1, keepdim=True)
        advantage = (apart / (rewards.std(1, keepdim=True) + 1e-4)).flatten().float()
        optimizer.zero_grad()
        (-(advantage * policy.log_probs(asked, tokens)).mean()).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % EVERY == 0:
            kept.append(copy.deepcopy(policy))
    return kept


@torch.no_grad()
def drawn(policy: SentencePolicy, start: SentencePolicy, asked: Sequence[str], seed: int) -> tuple[list[str], float]:
    """Fresh responses, and the divergence from the start in nats."""
    tokens = policy.sample(asked, torch.Generator().manual_seed(seed))
    ratio = policy.log_probs(asked, tokens) - start.log_probs(asked, tokens)
    return policy.texts(tokens, seed), float(ratio.mean())


def configuration(seed: int, start: SentencePolicy, steps: int) -> dict[str, float]:
    """Gold gains along the runs of all arms, and how well the policy's responses are told from training ones."""
    world, num_pairs = PreferenceWorld(seed, concave=True), NUM_PAIRS[seed % len(NUM_PAIRS)]
    rng = np.random.default_rng([seed, num_pairs])
    made = world.pairs(num_pairs, 400)
    words = {word for p in made.train for text in (p.chosen, p.rejected) for word in re.findall(r"\w+", text.lower())}
    features = Inputs(sorted(words))
    train, val = (flipped(features, pairs, rng) for pairs in (made.train, made.val))
    models = [NetworkModel(features, train, val, seed=100 * seed + k) for k in range(MEMBERS)]

    prompts = world.prompts()
    judged, reference, practice = prompts[:64], prompts[200:600], prompts[600:1600]
    policy = WorldPolicy(world)
    others = [policy.respond(prompt, 1, 1)[0] for prompt in reference]
    ensemble = RewardModelEnsemble(models)
    ensemble.fit_reference(reference, others)
    scorers: dict[str, Scorer] = {"single": models[0]}
    for arm in ARMS[1:]:
        scorers[arm] = RewardModelEnsemble(models, aggregation=arm, reference=ensemble.reference)

    asked = [prompt for prompt in judged for _ in range(4)]
    found: dict[str, float] = {"accuracy": accuracy(models[0], made.val)}
    for arm, scorer in scorers.items():
        kept = trained_policies(start, scorer.score, practice, steps, seed)
        texts, divergences = zip(*(drawn(p, start, asked, 7 + n) for n, p in enumerate(kept)), strict=True)
        gold = np.array([[world.gold(*row) for row in zip(asked, own, strict=True)] for own in texts])
        spread = np.sqrt(gold[0].reshape(-1, 4).var(axis=1, ddof=1).mean())
        gains = (gold.mean(axis=1) - gold[0].mean()) / spread
        grown = np.maximum.accumulate(divergences)
        found |= {f"final_{arm}": float(gains[-3:].mean()), f"peak_{arm}": float(gains.max())}
        found |= {f"kl_{kl:g}_{arm}": float(np.interp(kl, grown, gains, right=np.nan)) for kl in DIVERGENCES}
        found[f"divergence_{arm}"] = float(divergences[-1])
        if arm == "single":
            place = int(np.argmax(grown >= DIVERGENCES[-1])) or len(kept) - 1
            known = Reference(reference, others, made.train, ensemble, models, start)
            found |= known.separation(asked, texts[0], "start_", rng)
            found |= known.separation(asked, texts[place], "", rng)
            found["divergence_of_auroc"] = divergences[place]
    return found


def flipped(features: Inputs, pairs: Sequence[PreferencePair], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Rows of both sides of pairs, a share of which is exchanged."""
    prompts, is_flipped = [pair.prompt for pair in pairs], rng.random(len(pairs)) < FLIPPED
    sides = [
        [p.rejected if f else p.chosen for p, f in zip(pairs, is_flipped == turned, strict=True)] for turned in (1, 0)
    ]
    return features.rows(prompts, sides[0]), features.rows(prompts, sides[1])


def accuracy(model: NetworkModel, pairs: Sequence[PreferencePair]) -> float:
    """Share of pairs ordered as the gold reward orders them."""
    prompts = [pair.prompt for pair in pairs]
    margins = model.score(prompts, [p.chosen for p in pairs]) - model.score(prompts, [p.rejected for p in pairs])
    gold = np.array([pair.metadata["gold_margin"] for pair in pairs])
    return float(((margins.numpy() > 0) == (gold > 0))[gold != 0].mean())


@dataclass(frozen=True)
class Reference:
    """Responses that detectors of novelty are fitted to, training pairs to compare with, and what scores both."""

    prompts: Sequence[str]
    responses: Sequence[str]
    pairs: Sequence[PreferencePair]
    ensemble: RewardModelEnsemble
    models: Sequence[NetworkModel]
    start: SentencePolicy

    def separation(
        self, asked: Sequence[str], texts: Sequence[str], name: str, rng: np.random.Generator
    ) -> dict[str, float]:
        """AUROC of several scores of novelty: a policy's responses against responses of training pairs."""
        rows = [self.pairs[i] for i in rng.permutation(len(self.pairs))[:256]]
        trained = ([str(p.prompt) for p in rows], [p.chosen if k % 2 else p.rejected for k, p in enumerate(rows)])
        sides = ((asked, texts), trained)
        hidden = [model.hidden(self.prompts, self.responses) for model in self.models]
        own = [[model.hidden(*side) for model in self.models] for side in sides]
        detectors = [MahalanobisDetector(rows) for rows in hidden]
        joint, known = MahalanobisDetector(np.hstack(hidden)), normalized(hidden[0])
        scores = {
            "disagreement": [self.ensemble.detect_ood(*side).scores for side in sides],
            "mahalanobis": [detectors[0].distances(side[0]) for side in own],
            "mahalanobis_mean": [
                np.mean([d.distances(rows) for d, rows in zip(detectors, side, strict=True)], axis=0) for side in own
            ],
            "mahalanobis_joint": [joint.distances(np.hstack(side)) for side in own],
            "neighbors": [np.sort(cdist(normalized(side[0]), known), axis=1)[:, NEIGHBORS - 1] for side in own],
            "surprise": [self.start.surprise(*side) for side in sides],
            "reward": [self.models[0].score(*side).numpy() for side in sides],
            "length": [[len(text.split()) for text in side[1]] for side in sides],
        }
        return {f"auroc_{name}{key}": auroc(*map(np.array, both)) for key, both in scores.items()}


def normalized(rows: np.ndarray) -> np.ndarray:
    """Rows of length 1 (Sun et al., 2022, arXiv:2204.06507)."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--responses", type=int, default=6000, help="responses that the first policy is fitted to")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of that fit")
    parser.add_argument("--log", type=Path, default=Path("ensemble_rl.jsonl"), help="finished worlds; the call resumes")
    args = parser.parse_args(arguments)
    start = first_policy(args.responses, args.epochs)
    identity = digest([args.steps, args.responses, args.epochs, NUM_PAIRS, FLIPPED, MEMBERS])
    with open_ledger(args.log, identity, other="worlds of other sizes") as log:
        rows = list(log.values())
        for seed in range(len(rows), args.worlds):
            rows.append(configuration(seed, start, args.steps))
            log.append(rows[-1])
    rows = rows[: args.worlds]
    print(f"{args.worlds} worlds, {args.steps} steps, pairs {NUM_PAIRS} in turn, {FLIPPED:.0%} of the labels flipped")
    columns = {name: np.array([row[name] for row in rows], dtype=float) for name in rows[0]}
    for name, values in columns.items():
        report(name, values)
    for arm in ARMS[1:]:
        for kind in (*(f"kl_{kl:g}" for kl in DIVERGENCES), "final", "peak"):
            report(f"{kind}_{arm}_less_single", columns[f"{kind}_{arm}"] - columns[f"{kind}_single"])


def report(name: str, values: np.ndarray) -> None:
    """Print the mean over worlds in which there is a value."""
    known = values[~np.isnan(values)]
    left = f" ({len(known)} worlds)" if len(known) < len(values) else ""
    print(f"{name}: {student_mean(known) if len(known) > 1 else 'n/a'}{left}")


if __name__ == "__main__":
    main()
