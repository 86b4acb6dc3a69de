"""A text where a list is meant is one text or refused with the argument's name, never its letters: all public names."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rm_optimizer import (
    PUBLIC_MODULES,
    AsyncRewardClient,
    BestOfNSampler,
    OptimizerComparison,
    RewardClient,
    RewardModelEnsemble,
    compose,
    typed,
)
from rm_optimizer.core.pairs.synthetic import PreferenceWorld
from rm_optimizer.data_efficiency import noise_ceiling
from rm_optimizer.errors import RMOptimizerError
from rm_optimizer.optim import build_optimizer
from rm_optimizer.rl_coupling import ScaledScorer, ScorerOracle, WorldGold
from tests.builders import tiny_reward_model
from tests.serving.engines import InProcessEngine, exported, options_of
from tests.serving.running import engine_running

BARE = re.compile(
    r"\b(Sequence|Iterable|Collection|Iterator|Set|list|set|frozenset)\[(str|Prompt)\]|tuple\[str, \.\.\.\]"
)
ALIASES = re.compile(r"\b(Texts|Prompts)\b")


def public_functions() -> Iterator[tuple[str, Callable[..., object]]]:
    """Public functions and methods by name, constructors included, except those of records that only we build."""
    seen = set[int]()
    for module in PUBLIC_MODULES:
        loaded = import_module(module)
        for name in loaded.__all__:
            value = getattr(loaded, name)
            if id(value) in seen:
                continue
            seen.add(id(value))
            if inspect.isfunction(value):
                yield name, value
            if not inspect.isclass(value):
                continue
            for part, method in inspect.getmembers(value, inspect.isfunction):
                is_ours = method.__module__.startswith("rm_optimizer")
                is_called = not part.startswith("_") or (part in ("__init__", "__call__") and not is_dataclass(value))
                if is_ours and is_called:
                    yield f"{name}.{part}", method


FOUND = {
    (name, parameter.name): text
    for name, function in public_functions()
    for parameter in inspect.signature(function).parameters.values()
    if not (text := str(parameter.annotation)).startswith("Callable") and (BARE.search(text) or ALIASES.search(text))
}
"""Parameters that take several texts, with their annotations."""


def test_the_aliases_mark_each_public_parameter_that_takes_several_texts():
    bare = {where: text for where, text in FOUND.items() if BARE.search(text)}
    assert {where: text for where, text in bare.items() if not re.search(r"\b(str|Prompt) \|", text)} == {}


P, R, S = "Explain chess.", "Start with the pawns.", "No."
WORLD = PreferenceWorld(3)
ASKED = WORLD.prompts()[0]


class Stub:
    """A policy that answers without a model."""

    identity = "stub"

    def respond(self, prompt: object, num_samples: int, seed: int) -> list[str]:
        return [f"{len(str(prompt))} {number}" for number in range(num_samples)]


class Blocking:
    """An asynchronous client, opened for each call."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            async with AsyncRewardClient(self.url) as client:
                return await getattr(client, method)(*arguments)

        return lambda *arguments: asyncio.run(call(*arguments))


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[SimpleNamespace]:
    folder = tmp_path_factory.mktemp("texts")
    model = exported("llama", folder / "model")
    engine = lambda: InProcessEngine(options_of(folder / "model", folder / "tokenizer"))  # noqa: E731
    with engine_running(engine) as server, RewardClient(server.url) as client:
        yield SimpleNamespace(
            model=model,
            client=client,
            asynchronous=Blocking(server.url),
            ensemble=RewardModelEnsemble([model, tiny_reward_model("llama", seed=1)], uncertainty_threshold=1.0),
            scaled=ScaledScorer(model, "raw", folder / "model"),
            gold=WorldGold(WORLD),
            oracle=ScorerOracle(model),
            sampler=BestOfNSampler(Stub(), model, 2),
            folder=folder,
        )


Call = Callable[[SimpleNamespace, Any], Any]


def of_scorer(name: str, attribute: str, *methods: str, prompt: str = P) -> dict[tuple[str, str], Call]:
    """Calls of a scorer's methods that take prompts and responses."""
    calls: dict[tuple[str, str], Call] = {}
    for method in methods:

        def of_prompts(world: SimpleNamespace, value: Any, method: str = method) -> Any:
            return getattr(getattr(world, attribute), method)(value, [R])

        def of_responses(world: SimpleNamespace, value: Any, method: str = method) -> Any:
            return getattr(getattr(world, attribute), method)(prompt, value)

        calls |= {(f"{name}.{method}", "prompts"): of_prompts, (f"{name}.{method}", "responses"): of_responses}

    def of_groups(world: SimpleNamespace, value: Any) -> Any:
        return getattr(world, attribute).score_groups(value, [[R, S]])

    def of_each(world: SimpleNamespace, value: Any) -> Any:
        return getattr(world, attribute).score_groups(prompt, value)

    groups = f"{name}.score_groups"
    return calls | {(groups, "prompts"): of_groups, (groups, "responses_of_each"): of_each}


CALLS: dict[tuple[str, str], Call] = {
    **of_scorer("RewardClient", "client", "score", "score_versioned"),
    **of_scorer("AsyncRewardClient", "asynchronous", "score", "score_versioned"),
    **of_scorer("BradleyTerryRM", "model", "score", "encode", "tokenize"),
    **of_scorer(
        "RewardModelEnsemble",
        "ensemble",
        *(
            "score",
            "member_rewards",
            "predict_batch",
            "predict_counted",
            "score_counted",
            "fit_reference",
        ),
    ),
    **of_scorer("ScaledScorer", "scaled", "score"),
    **of_scorer("WorldGold", "gold", "score", prompt=ASKED),
    ("RewardModelEnsemble.predict_margins", "prompts"): lambda w, v: w.ensemble.predict_margins(v, [R], [S]),
    ("RewardModelEnsemble.predict_margins", "responses_a"): lambda w, v: w.ensemble.predict_margins(P, v, [S]),
    ("RewardModelEnsemble.predict_margins", "responses_b"): lambda w, v: w.ensemble.predict_margins(P, [R], v),
    ("RewardModelEnsemble.detect_ood", "prompts"): lambda w, v: w.ensemble.detect_ood(v, [R]),
    ("RewardModelEnsemble.detect_ood", "responses"): lambda w, v: flags(w.ensemble.detect_ood(P, v)),
    ("BestOfNSampler.sample", "prompts"): lambda w, v: w.sampler.sample(v),
    ("BestOfNSampler.sample_to_file", "prompts"): lambda w, v: written(w, v),
    ("ScorerOracle.as_rater", "prompts"): lambda w, v: w.oracle.as_rater(v, [[R, S]])._scale,
    ("ScorerOracle.as_rater", "responses_of_each"): lambda w, v: w.oracle.as_rater(P, v),
    ("ScorerOracle.prefer", "prompts"): lambda w, v: w.oracle.prefer(v, [R], [S]),
    ("ScorerOracle.prefer", "first"): lambda w, v: w.oracle.prefer([P], v, [S]),
    ("ScorerOracle.prefer", "second"): lambda w, v: w.oracle.prefer([P], [R], v),
    ("noise_ceiling", "prompts"): lambda w, v: noise_ceiling(np.array([3.0]), np.array([1.0]), v, num_bootstrap=10),
    ("build_optimizer", "head_names"): lambda w, v: roles(w, v),
    ("compose", "overrides"): lambda w, v: compose(v).training.epochs,
    ("OptimizerComparison.__init__", "optimizers"): lambda w, v: OptimizerComparison("tiny", "a.jsonl", v),
    ("OptimizerComparison.__init__", "overrides"): lambda w, v: (
        OptimizerComparison("tiny", "a.jsonl", overrides=v).options
    ),
}
NOT_CALLED = {
    "Scorer": "abstract",
    "BaseRewardModel": "abstract",
    "measure_readiness": "needs a policy and minutes",
    "optimize_policy": "trains",
    "RayPreferenceDataset": "starts Ray",
    "HessianAnalyzer": "refuses prompts beside pairs",
    "evaluate_checkpoint": "writes a folder",
    "evaluate_model": "writes a folder",
}
"""Names whose parameters are marked, and not called here."""
TEXT = {"head_names": "score.weight", "overrides": "training.epochs=2", "optimizers": "adamw"}


def written(world: SimpleNamespace, prompts: Any) -> str:
    path = world.folder / f"{len(list(world.folder.iterdir()))}.jsonl"
    world.sampler.sample_to_file(prompts, path)
    return path.read_text()


def flags(found: Any) -> list[bool]:
    return [found] if isinstance(found, bool) else list(found.is_ood)


def roles(world: SimpleNamespace, head_names: Any) -> list[int]:
    config = typed(compose(["model=tiny", "optimizer=adamw"])).optimizer
    optimizer = build_optimizer(world.model, config, head_names=head_names)
    return [len(group["params"]) for group in optimizer.param_groups]


def plain(value: Any) -> Any:
    """A result as plain values that are equal where the results are."""
    if isinstance(value, Tensor | np.ndarray):
        return [round(float(number), 4) for number in np.asarray(torch.as_tensor(value).cpu()).ravel()]
    if is_dataclass(value) and not isinstance(value, type):
        return [plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def outcome(world: SimpleNamespace, where: tuple[str, str], value: Any) -> Any:
    try:
        return plain(CALLS[where](world, value))
    except (TypeError, ValueError, RMOptimizerError) as error:
        return f"{type(error).__name__}: {error}"


def test_the_table_has_each_of_these_parameters():
    assert set(CALLS) | {where for where in FOUND if where[0].partition(".")[0] in NOT_CALLED} == set(FOUND)


@pytest.mark.parametrize("where", sorted(CALLS), ids=lambda where: "-".join(where))
def test_one_text_is_a_list_of_one_or_is_refused_by_the_parameters_name(world, where):
    name, parameter = where
    prompt = ASKED if name.startswith("WorldGold") else P
    text = TEXT.get(parameter, prompt if parameter == "prompts" else R)
    one, listed = (outcome(world, where, value) for value in (text, [text]))
    if flat(one) != flat(listed):  # one number is the only entry of a list
        assert all(isinstance(each, str) and parameter in each for each in (one, listed)), (one, listed)


def flat(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    return [each for part in value for each in flat(part)] if isinstance(value, list) else [value]
