"""Preference worlds with a known gold reward: English-looking prompts and responses, and a noisy labeler.

They serve the quick start, tests and studies of over-optimization. Nothing is read from disk: prompts and responses
are filled-in templates, and a world's `gold` scores any response to one of its prompts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np

from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.schema.composition import described
from rm_optimizer.schema.data import SyntheticConfig

_WORLD = described("world/synthetic.yaml")
TOPICS: Mapping[str, Sequence[str]] = {topic: tuple(facts) for topic, facts in _WORLD["topics"].items()}
"""Each topic's facts; no fact belongs to two topics."""
TASKS: Mapping[str, str] = _WORLD["tasks"]
CONTEXTS: tuple[str, ...] = tuple(_WORLD["contexts"])
CONSTRAINTS: Mapping[str, str] = _WORLD["constraints"]
PROMPTS_IN_ALL = len(TOPICS) * len(TASKS) * len(CONTEXTS) * len(CONSTRAINTS)
FACT_SENTENCES: tuple[str, ...] = tuple(_WORLD["fact_sentences"])
SENTENCES: Mapping[str, Sequence[str]] = {kind: tuple(texts) for kind, texts in _WORLD["sentences"].items()}
NEUTRAL, COURTEOUS, EXAMPLES, STEPS, RUDE, HEDGING, RAMBLING = SENTENCES.values()
SENTENCE_COUNTS = tuple((SENTENCES[kind], tuple(shares)) for kind, shares in _WORLD["counts"].items())
"""Probabilities that a response has 0, 1, 2 sentences of each kind, in addition to its facts."""

BRIEF_WORDS, MOST_WORDS = 20, 60
_FACTS = re.compile(rf"\b(?:{'|'.join(sorted(map(re.escape, chain(*TOPICS.values())), key=len, reverse=True))})\b")
PAIRS_PER_PROMPT = 2


@dataclass(frozen=True, kw_only=True)
class Gold:
    """Gold reward of a world: how good a response is, read off its text.

    ``v (1 - d^f) - o n_off + c m - u rude - h n_hedge - r n_ramble - q (w / 20)^2``, where `f` counts the different
    facts of the prompt's topic that the response names (so each further fact is worth less, and a repeated one
    nothing), `n_off` the different facts of other topics, `m` is 1 if the prompt sets a constraint and the response
    meets it (brief: at most 20 words), `rude` is 1 if it is rude, `n_hedge` and `n_ramble` count the different hedging
    and rambling phrases and `w` counts words. Facts and constraints make it a function of prompt and response
    together: no weighting of the response's words alone can equal it.

    Args:
        fact_value: v, the value of all facts that there could be.
        fact_decay: d, what each fact leaves of that value to the others, in (0, 1).
        off_topic_cost: o.
        constraint_value: c.
        rude_cost: u.
        hedge_cost: h.
        rambling_cost: r.
        length_cost: q; above 0, more of anything is worse in the end, so that a policy can over-optimize.

    Example:
        >>> gold = Gold()
        >>> gold("Can you explain chess?", "Start with endgames.")
        3.2
        >>> gold("Can you explain cycling?", "Start with endgames.")
        -0.5
    """

    fact_value: float = 8.0
    fact_decay: float = 0.6
    off_topic_cost: float = 0.5
    constraint_value: float = 2.0
    rude_cost: float = 2.0
    hedge_cost: float = 0.7
    rambling_cost: float = 1.0
    length_cost: float = 0.0

    @classmethod
    def drawn(cls, seed: int, *, concave: bool = False) -> Gold:
        """Gold reward with parameters drawn by a seed: each half to twice the default, the decay in [0.4, 0.8].

        Args:
            seed: not negative.
            concave: draw a cost of length too, half to twice 0.5.
        """
        typical = cls(length_cost=0.5 * concave)
        first, *draws = np.random.default_rng([seed, 3]).random(len(fields(cls))).tolist()
        names = [field.name for field in fields(cls) if field.name != "fact_decay"]
        halved = {name: getattr(typical, name) * 2 ** (2 * x - 1) for name, x in zip(names, draws, strict=True)}
        drawn = {name: round(value, 3) for name, value in halved.items()}
        return cls(**drawn, fact_decay=round(0.4 + 0.4 * first, 3))

    def __call__(self, prompt: str, response: str) -> float:
        """Reward of any text to a prompt of the worlds.

        Raises:
            ValueError: if the prompt names none of the worlds' topics.
        """
        named = set(_FACTS.findall(response.lower()))
        on_topic = len(named & set(TOPICS[_topic(prompt)]))
        reward = self.fact_value * (1.0 - self.fact_decay**on_topic) - self.off_topic_cost * (len(named) - on_topic)
        constraint = next((name for name, text in CONSTRAINTS.items() if text and text in prompt), "none")
        phrases = {"example": EXAMPLES, "thanks": COURTEOUS, "steps": STEPS}.get(constraint, ())
        is_brief = constraint == "brief" and len(response.split()) <= BRIEF_WORDS
        reward += self.constraint_value * (is_brief or _count(phrases, response) > 0)
        reward -= self.rude_cost * (_count(RUDE, response) > 0) + self.hedge_cost * _count(HEDGING, response)
        reward -= self.rambling_cost * _count(RAMBLING, response)
        return round(reward - self.length_cost * (len(response.split()) / BRIEF_WORDS) ** 2, 6)


@dataclass(frozen=True)
class WorldPairs:
    """Preference pairs of a world, and what the best possible scorer reaches on them.

    Args:
        train: training pairs.
        val: validation pairs, on prompts that no training pair has.
        ceiling: accuracy of the gold reward on the labels of `val`, ties one half; below 1 where labels are noisy.
    """

    train: list[PreferencePair]
    val: list[PreferencePair]
    ceiling: float


class PreferenceWorld:
    """A world of a family by seed: prompts, a policy that answers them, a gold reward, and pairs that it labels.

    The same arguments give the same texts and labels under one version of NumPy.

    Args:
        seed: seed of texts, labels and of the gold reward's parameters, not negative.
        concave: True if length lowers the gold reward, so that a policy can over-optimize.
        gold: gold reward in place of one drawn by the seed.

    Example:
        >>> world = PreferenceWorld(1, concave=True)
        >>> prompt = world.prompts()[0]
        >>> response = world.sample_response(prompt, np.random.default_rng(0))
        >>> bool(world.gold(prompt, response) > world.gold(prompt, " ".join([response] * 9)))
        True
    """

    def __init__(self, seed: int = 0, *, concave: bool = False, gold: Gold | None = None) -> None:
        self.seed = seed
        self.gold = gold or Gold.drawn(seed, concave=concave)

    def prompts(self) -> list[str]:
        """All prompts in the seed's order, from whose start validation pairs are made and from whose end training."""
        return [_prompt(index)[0] for index in self._order()]

    def sample_response(self, prompt: str, generator: np.random.Generator) -> str:
        """A response of the policy that makes the pairs.

        Raises:
            ValueError: if the prompt names none of the worlds' topics.
        """
        return _response(_topic(prompt), generator)

    def pairs(self, num_train: int, num_val: int, *, noise: float = 1.0) -> WorldPairs:
        """Pairs of sampled responses and their noisy labels.

        The first response of two is preferred with probability `sigmoid((gold(a) - gold(b)) / noise)` (Bradley & Terry,
        1952). Training and validation draw from their own random streams, so a larger `num_train` keeps the validation
        pairs and adds to the training pairs that were there.

        Args:
            num_train: training pairs.
            num_val: validation pairs.
            noise: temperature of the labels, in units of the gold reward; 0 labels without error.
        """
        order = self._order()
        num_val_prompts = min(-(-num_val // PAIRS_PER_PROMPT), PROMPTS_IN_ALL // 2)
        val = self._draw(order[:num_val_prompts], num_val, noise, np.random.default_rng([self.seed, 1]))
        train = self._draw(order[num_val_prompts:][::-1], num_train, noise, np.random.default_rng([self.seed, 2]))
        margins = np.array([pair.metadata["gold_margin"] for pair in val])
        return WorldPairs(train, val, ceiling=float(np.mean((margins > 0) + 0.5 * (margins == 0))))

    def _order(self) -> list[int]:
        return [int(index) for index in np.random.default_rng([self.seed, 0]).permutation(PROMPTS_IN_ALL)]

    def _draw(
        self, indices: Sequence[int], num_pairs: int, noise: float, generator: np.random.Generator
    ) -> list[PreferencePair]:
        prompts = [_prompt(index) for index in indices]
        pairs = []
        for number in range(num_pairs):
            prompt, task = prompts[number // PAIRS_PER_PROMPT % len(prompts)]
            first, second = self.sample_response(prompt, generator), self.sample_response(prompt, generator)
            while second == first:
                second = self.sample_response(prompt, generator)
            margin = self.gold(prompt, first) - self.gold(prompt, second)
            # The limit without noise; equal rewards are still a coin's toss.
            sign = float(np.sign(margin)) if noise == 0.0 else np.tanh(0.5 * margin / noise)
            first_wins = generator.random() < 0.5 * (1.0 + sign)
            chosen, rejected = (first, second) if first_wins else (second, first)
            gold_margin = round(margin if first_wins else -margin, 6)
            metadata = {"source": "synthetic", "subset": task, "gold_margin": gold_margin}
            pairs.append(PreferencePair(prompt, chosen, rejected, metadata=metadata))
        return pairs


def synthetic_world(config: SyntheticConfig) -> WorldPairs:
    """Pairs of the world of the quick start: texts and labels by `config.seed`, the gold reward always `Gold()`."""
    return PreferenceWorld(config.seed, gold=Gold()).pairs(config.num_train, config.num_val, noise=config.noise)


def _topic(prompt: str) -> str:
    for topic in TOPICS:
        if topic in prompt:
            return topic
    raise ValueError(f"the prompt must name one of the synthetic world's topics, got {prompt!r}")


def _count(sentences: Sequence[str], response: str) -> int:
    return sum(sentence in response for sentence in sentences)


def _prompt(index: int) -> tuple[str, str]:
    """Text and task of the prompt at `index` of the grid of all prompts."""
    sizes = (len(TOPICS), len(TASKS), len(CONTEXTS), len(CONSTRAINTS))
    topic_at, task_at, context_at, constraint_at = np.unravel_index(index, sizes)
    topic, task = list(TOPICS)[topic_at], list(TASKS)[task_at]
    question = f"I do {topic} {CONTEXTS[context_at]}. {TASKS[task].format(topic=topic)}."
    return f"{question} {list(CONSTRAINTS.values())[constraint_at]}".strip(), task


def _response(topic: str, generator: np.random.Generator) -> str:
    """A candidate: sentences of every kind in random number and order, independent of the prompt's task."""
    other = _draw([name for name in TOPICS if name != topic], 1, generator)[0]
    main, aside = (topic, other) if generator.random() < 0.5 else (other, topic)
    sentences = _fact_sentences(main, int(generator.integers(0, 5)), generator)
    sentences += _fact_sentences(aside, int(generator.random() < 0.2), generator)
    for kind, probabilities in SENTENCE_COUNTS:
        sentences += _draw(kind, int(generator.choice(len(probabilities), p=probabilities)), generator)
    sentences = _draw(sentences, len(sentences), generator) or [NEUTRAL[0]]
    while len(" ".join(sentences).split()) > MOST_WORDS:
        sentences.pop()
    return " ".join(sentences)


def _fact_sentences(topic: str, count: int, generator: np.random.Generator) -> list[str]:
    facts, forms = _draw(TOPICS[topic], count, generator), generator.integers(0, len(FACT_SENTENCES), count)
    return [FACT_SENTENCES[form].format(topic=topic, fact=fact) for form, fact in zip(forms, facts, strict=True)]


def _draw(items: Sequence[str], count: int, generator: np.random.Generator) -> list[str]:
    """`count` different items in random order."""
    return [items[i] for i in generator.permutation(len(items))[:count]]
