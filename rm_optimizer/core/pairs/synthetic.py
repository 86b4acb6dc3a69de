"""A preference world with a known gold reward: English-looking prompts and responses, and a noisy labeler.

It serves the quick start, tests and over-optimization studies. Nothing is read from disk: prompts and responses
are filled-in templates, and `gold_reward` scores any response to one of the world's prompts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.schema.data import SyntheticConfig

TOPICS = {
    "astronomy": ("eyepieces", "moonlight", "nebulae", "telescopes"),
    "baking": ("gluten", "kneading", "sourdough", "yeast"),
    "chess": ("castling", "endgames", "gambits", "pawns"),
    "cycling": ("brakes", "helmets", "pedals", "tyres"),
    "gardening": ("compost", "mulch", "pruning", "seedlings"),
    "guitar": ("chords", "metronomes", "scales", "strumming"),
}
"""Each topic's facts; no fact belongs to two topics."""

TASKS = {
    "advise": "Give advice on {topic}",
    "discuss": "Discuss {topic}",
    "explain": "Explain {topic}",
    "plan": "Plan my {topic}",
    "teach": "Teach me {topic}",
}
CONTEXTS = (
    "after a long break",
    "after work",
    "at home",
    "before summer",
    "during winter",
    "for a friend",
    "for fun",
    "for my children",
    "for our club",
    "in a big city",
    "in a small flat",
    "on a small budget",
    "on weekends",
    "with a group",
    "with my family",
    "without a teacher",
)
CONSTRAINTS = {
    "none": "",
    "brief": "Keep it brief.",
    "example": "Give an example.",
    "thanks": "Say thanks.",
    "steps": "List the steps.",
}
PROMPTS_IN_ALL = len(TOPICS) * len(TASKS) * len(CONTEXTS) * len(CONSTRAINTS)

FACT_SENTENCES = (
    "Start with {fact}.",
    "In {topic}, start with {fact}.",
    "Good {topic} needs {fact}.",
    "For {topic}, do not forget {fact}.",
)
NEUTRAL = ("Here is what I would do.", "This is a common question.", "Good tools help.")
COURTEOUS = ("Many thanks for asking.", "My warm thanks for this.", "Accept my thanks and good luck.")
EXAMPLES = ("For example, my neighbour did so.", "One club is a good example.")
STEPS = ("The steps are to look and then to practise.", "There are two steps, to ask and to begin.")
RUDE = ("What a silly question.", "Anyone should know this.", "Do your own homework.", "Stop wasting my time.")
HEDGING = ("I might be wrong.", "It is hard to say.", "Perhaps, or perhaps not.")
RAMBLING = (
    "As I was saying, there is a lot one could say.",
    "That reminds me of something else, which I forget.",
    "At the end of the day, it is what it is.",
    "Life is full of such things, and so on.",
)

SENTENCE_COUNTS = (
    (NEUTRAL, (0.8, 0.2)),
    (COURTEOUS, (0.75, 0.25)),
    (EXAMPLES, (0.75, 0.25)),
    (STEPS, (0.8, 0.2)),
    (RUDE, (0.85, 0.15)),
    (HEDGING, (0.8, 0.15, 0.05)),
    (RAMBLING, (0.7, 0.25, 0.05)),
)
"""Probabilities that a response has 0, 1, 2 sentences of each kind, beside its facts."""

FACT_VALUE, FACT_DECAY = 8.0, 0.6
OFF_TOPIC_COST, CONSTRAINT_VALUE, RUDE_COST, HEDGE_COST, RAMBLING_COST = 0.5, 2.0, 2.0, 0.7, 1.0
BRIEF_WORDS, MOST_WORDS = 20, 60
PAIRS_PER_PROMPT = 2


@dataclass(frozen=True)
class SyntheticWorld:
    """Preference pairs of one seed, and what the best possible scorer reaches on them.

    Args:
        train: training pairs.
        val: validation pairs, on prompts that no training pair has.
        ceiling: accuracy of the gold reward on the labels of `val`, ties one half; below 1 where labels are noisy.
    """

    train: list[PreferencePair]
    val: list[PreferencePair]
    ceiling: float

    def gold(self, prompt: str, response: str) -> float:
        """The gold reward, `gold_reward`, in the labeler's units of noise."""
        return gold_reward(prompt, response)


def synthetic_world(config: SyntheticConfig) -> SyntheticWorld:
    """The world of `config.seed`: the same options give the same texts and labels under one version of NumPy.

    Two candidate responses are drawn for each pair; the first is preferred with probability
    `sigmoid((gold(a) - gold(b)) / noise)` (Bradley & Terry, 1952). Training and validation draw from their own random
    streams, so a larger `num_train` keeps the validation pairs and adds to the training pairs that were there.

    Args:
        config: numbers of pairs, labeling noise and seed.
    """
    order = [int(index) for index in np.random.default_rng([config.seed, 0]).permutation(PROMPTS_IN_ALL)]
    num_val_prompts = min(-(-config.num_val // PAIRS_PER_PROMPT), PROMPTS_IN_ALL // 2)
    val = _pairs(order[:num_val_prompts], config.num_val, config.noise, np.random.default_rng([config.seed, 1]))
    train_order = order[num_val_prompts:][::-1]
    train = _pairs(train_order, config.num_train, config.noise, np.random.default_rng([config.seed, 2]))
    margins = np.array([pair.metadata["gold_margin"] for pair in val])
    return SyntheticWorld(train, val, ceiling=float(np.mean((margins > 0) + 0.5 * (margins == 0))))


def gold_reward(prompt: str, response: str) -> float:
    """How good a response is, read off its text.

    `8 (1 - 0.6^f) - 0.5 o + 2 c - 2 u - 0.7 h - r`, where `f` counts the different facts of the prompt's topic that
    the response names (so each further fact is worth less, and a repeated one nothing), `o` the different facts of
    other topics, `c` is 1 if the prompt sets a constraint and the response meets it (brief: at most 20 words), `u` is
    1 if it is rude, `h` and `r` count the different hedging and rambling phrases. Facts and constraints make it a
    function of prompt and response together: no weighting of the response's words alone can equal it.

    Args:
        prompt: a prompt of this world.
        response: any text.

    Raises:
        ValueError: if the prompt names none of the world's topics.

    Example:
        >>> gold_reward("Can you explain chess?", "Start with endgames.")
        3.2
        >>> gold_reward("Can you explain cycling?", "Start with endgames.")
        -0.5
    """
    topic = next((topic for topic in TOPICS if topic in prompt), None)
    if topic is None:
        raise ValueError(f"the prompt must name one of the synthetic world's topics, got {prompt!r}")
    named = set(_fact_pattern().findall(response.lower()))
    on_topic = len(named & set(TOPICS[topic]))
    reward = FACT_VALUE * (1.0 - FACT_DECAY**on_topic) - OFF_TOPIC_COST * (len(named) - on_topic)
    reward += CONSTRAINT_VALUE * _meets_constraint(prompt, response)
    reward -= RUDE_COST * (_count(RUDE, response) > 0) + HEDGE_COST * _count(HEDGING, response)
    return round(reward - RAMBLING_COST * _count(RAMBLING, response), 6)


@cache
def _fact_pattern() -> re.Pattern[str]:
    facts = sorted(itertools.chain.from_iterable(TOPICS.values()), key=len, reverse=True)
    return re.compile(rf"\b(?:{'|'.join(re.escape(fact) for fact in facts)})\b")


def _meets_constraint(prompt: str, response: str) -> bool:
    constraint = next((name for name, text in CONSTRAINTS.items() if text and text in prompt), "none")
    phrases = {"example": EXAMPLES, "thanks": COURTEOUS, "steps": STEPS}
    if constraint == "brief":
        return len(response.split()) <= BRIEF_WORDS
    return constraint in phrases and _count(phrases[constraint], response) > 0


def _count(sentences: Sequence[str], response: str) -> int:
    return sum(sentence in response for sentence in sentences)


def _pairs(
    prompt_indices: Sequence[int], num_pairs: int, noise: float, generator: np.random.Generator
) -> list[PreferencePair]:
    prompts = [_prompt(index) for index in prompt_indices]
    chosen_prompts = (prompts[i // PAIRS_PER_PROMPT % len(prompts)] for i in range(num_pairs))
    return [_pair(prompt, task, topic, noise, generator) for prompt, task, topic in chosen_prompts]


def _prompt(index: int) -> tuple[str, str, str]:
    """Text, task and topic of the prompt at `index` of the grid of all prompts."""
    sizes = (len(TOPICS), len(TASKS), len(CONTEXTS), len(CONSTRAINTS))
    topic_at, task_at, context_at, constraint_at = np.unravel_index(index, sizes)
    topic, task = list(TOPICS)[topic_at], list(TASKS)[task_at]
    question = f"I do {topic} {CONTEXTS[context_at]}. {TASKS[task].format(topic=topic)}."
    return f"{question} {list(CONSTRAINTS.values())[constraint_at]}".strip(), task, topic


def _pair(prompt: str, task: str, topic: str, noise: float, generator: np.random.Generator) -> PreferencePair:
    first, second = _response(topic, generator), _response(topic, generator)
    while second == first:
        second = _response(topic, generator)
    margin = gold_reward(prompt, first) - gold_reward(prompt, second)
    first_wins = generator.random() < _win_probability(margin, noise)
    chosen, rejected = (first, second) if first_wins else (second, first)
    gold_margin = round(margin if first_wins else -margin, 6)
    metadata = {"source": "synthetic", "subset": task, "gold_margin": gold_margin}
    return PreferencePair(prompt, chosen, rejected, metadata=metadata)


def _win_probability(margin: float, noise: float) -> float:
    """`sigmoid(margin / noise)` and its limit at no noise, where equal rewards are still a coin's toss."""
    if noise == 0.0:
        return 0.5 * (1.0 + float(np.sign(margin)))
    return float(0.5 * (1.0 + np.tanh(0.5 * margin / noise)))


def _response(topic: str, generator: np.random.Generator) -> str:
    """A candidate: sentences of every kind in random number and order, drawn alike whatever the prompt asks for."""
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
