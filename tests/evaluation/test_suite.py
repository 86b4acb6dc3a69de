"""Suites read what a user gives, refuse what they would misread, score each response once and claim no false lead."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair, pair_fingerprints
from rm_optimizer.core.storage.model_files import TRAINED_PAIRS_FILE, TrainedPairs
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.evaluation.saved_model import ResponseScorer
from rm_optimizer.evaluation.suite import Suite, published_suites, read_suite
from rm_optimizer.evaluation.suite_scores import (
    SUITE_FILE,
    SuiteCredits,
    SuiteResult,
    SuiteScores,
    score_on_suite,
    suite_result,
)
from rm_optimizer.interfaces import inputs
from rm_optimizer.interfaces.cli import app
from rm_optimizer.reporting.suite import stored_results
from rm_optimizer.schema.data import DataConfig, OnBadRow
from tests.builders import narrow_reward_model

GROUPS = ("a", "b", "c")
ROWS = [
    {"prompt": f"Say {i}", "chosen": f"{i} it is", "rejected": f"no {i} at all", "subset": GROUPS[i % 3]}
    for i in range(12)
]
MINE: dict[str, Any] = {
    "source": "here",
    "sets": {"main": {"path": "pairs.jsonl", "layout": {"format": "explicit"}, "group": ["subset"], "rows": 12}},
    "score": "mean",
    "average": {"mean": {"mean": ["a", "b", "c"]}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("mine.yaml").write_text(yaml.safe_dump(MINE))
    return tmp_path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = []
    for seed in (0, 1):
        model = narrow_reward_model(row["chosen"] for row in ROWS)
        generator = np.random.default_rng(seed)
        for parameter in model.parameters():
            parameter.data += parameter.data.new_tensor(0.3 * generator.normal(size=parameter.shape))
        found.append(str(tmp_path_factory.mktemp("models") / f"m{seed}"))
        model.save_pretrained(found[-1])
    return found


def rm_opt(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout if code == 0 else result.stderr


@pytest.mark.parametrize("name", published_suites())
def test_published_suites_are_read_and_name_their_rule(name: str):
    suite = Suite.of(name)
    assert suite.source
    assert suite.score in suite.average
    assert all(parts for parts in map(suite.leaves_of, suite.average))


@pytest.mark.slow
def test_models_on_a_suite_of_the_user(folder: Path, models: list[str], monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    score = BradleyTerryRM.score_encoded
    monkeypatch.setattr(
        BradleyTerryRM, "score_encoded", lambda self, found, **kw: seen.append(len(found)) or score(self, found, **kw)
    )
    printed = rm_opt("evaluate", *models, "--suite", "mine.yaml", "--output", "found", "--bootstrap", "50")
    assert "mean is its official number" in printed
    assert seen == [24, 24]  # each different response once for each model
    result = SuiteResult.from_json(Path("found", SUITE_FILE).read_text())
    assert [model.name for model in result.models] == [*models, "longer wins", "random"]
    longer = result.models[2]
    assert longer.scores["mean"].value == 0.0  # every rejected response is the longer one
    assert [*result.models[0].scores] == ["mean", "a", "b", "c"]
    assert {path.name for path in Path("found").rglob("*.*") if not path.name.startswith(".")} == {
        "suite.json",
        "suite.parquet",
        "suite.png",
    }
    items = read_suite(Suite.of("mine.yaml"), [], DataConfig())
    model = BradleyTerryRM.from_pretrained(models[0])
    again, _ = score_on_suite(model, models[0], items, ResponseScorer(token_budget=64, folder=Path("found")))
    assert seen == [24, 24]  # the rewards are kept
    assert again == replace(result.models[0], scores={})


def test_several_devices_score_several_models_at_once(folder: Path, models: list[str], monkeypatch: pytest.MonkeyPatch):
    command = ("evaluate", *models, "--suite", "mine.yaml", "--bootstrap", "50", "--output")
    rm_opt(*command, "one")
    both, score = Barrier(2), BradleyTerryRM.score_encoded
    monkeypatch.setattr(inputs, "devices", lambda: ["cpu", "cpu"])
    monkeypatch.setattr(
        BradleyTerryRM, "score_encoded", lambda *given, **options: (both.wait(60), score(*given, **options))[1]
    )
    rm_opt(*command, "two")
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    rm_opt(*command, "task")
    for name in ("two", "task"):
        assert Path(name, SUITE_FILE).read_text() == Path("one", SUITE_FILE).read_text()


def result_of(*names: str, rows: Sequence[dict[str, Any]] = ROWS, folder: str) -> SuiteResult:
    """Result of models that prefer long responses, or short ones if their name is short, stored in a folder."""
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    items = read_suite(Suite.of("mine.yaml"), ["rows.jsonl"], DataConfig())
    signs = [-1 if name == "short" else 1 for name in names]
    found = [
        (SuiteScores(name, is_model=True, max_length=8), items.credits(lambda key, sign=sign: sign * len(key[1])))
        for name, sign in zip(names, signs, strict=True)
    ]
    result = suite_result(items, found, num_bootstrap=1000, seed=0)
    Path(folder).mkdir(parents=True)
    result.write(Path(folder))
    return result


def test_a_leaderboard_compares_stored_results_and_refuses_other_rows(folder: Path):
    for name in ("long", "short"):
        result_of(name, folder=f"all/{name}")
    (joined,) = stored_results(folder / "all")
    together = result_of("long", "short", folder="together")
    assert sorted(joined.models, key=lambda model: model.name) == sorted(together.models, key=lambda model: model.name)
    assert {*joined.differences} == {*together.differences}
    assert joined.leads == together.leads != ()
    assert (len(joined.differences), len(joined.leads)) == (5, 1)
    assert SuiteResult.from_json(Path("together/suite.json").read_text()) == together
    result_of("long", rows=ROWS[1:], folder="all/2")
    assert "has other rows or rules of mine" in rm_opt("leaderboard", "all", code=2)
    result_of("short", folder="all/3").credits.write(Path("all/2/suite.parquet"))  # of a stopped, later evaluation
    assert "all/2/suite.parquet is missing or damaged" in rm_opt("leaderboard", "all/2", code=2)
    Path("all/2/suite.parquet").unlink()
    assert "suite.parquet is missing or damaged" in rm_opt("leaderboard", "all", code=2)
    Path("all/2/suite.json").write_text("{")
    assert "suite.json is damaged" in rm_opt("leaderboard", "all", code=2)
    assert "there is no result" in rm_opt("leaderboard", "all/none", code=2)


@pytest.mark.slow
def test_pages_of_results_show_every_model(folder: Path):
    for number in range(2):
        result_of(f"model {number}", folder=f"all/{number}")
    printed = rm_opt("leaderboard", "all")
    assert "model 0" in printed
    assert "model 1" in printed
    assert "2 models on 1 suite" in Path("all/report/index.html").read_text()
    assert "mine: model 0 has 0.000" in rm_opt("report", "all/0", "--format", "md")


def test_rows_that_are_missing_and_pairs_trained_on_are_said(folder: Path, models: list[str]):
    pairs = [PreferencePair(row["prompt"], row["chosen"], row["rejected"]) for row in ROWS[:5]]
    TrainedPairs.of(pair_fingerprints(pairs)).write(Path(models[1]) / TRAINED_PAIRS_FILE)
    result = result_of("m", rows=[row for row in ROWS if row["subset"] != "b"], folder="found")
    assert "incomplete: 8 of 12 rows of set main" in result.notes
    assert "incomplete: the score lacks b" in result.notes
    items = read_suite(Suite.of("mine.yaml"), ["rows.jsonl"], DataConfig())
    model = BradleyTerryRM.from_pretrained(models[1], max_length=8)
    facts, _ = score_on_suite(model, models[1], items, ResponseScorer(token_budget=64, folder=Path("found")))
    assert facts.trained_on is not None
    assert (facts.trained_on.num_pairs, facts.trained_on.num_prompts) == (3, 3)
    assert (facts.max_length, facts.num_response_cut) == (8, 8)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--suite", "rewardbenhc"], "did you mean 'rewardbench'"),
        (["--suite", "none.yaml"], "none.yaml: the suite cannot be read"),
        (
            ["--suite", "ifrewardbench"],
            "set main is not on the hub; give --data main=FILE, from https://github.com/thu",
        ),
        (["--suite", "hhh", "--data", "pairs.jsonl"], "--data must be SET=FILE, with SET one of harmless"),
        (["--suite", "mine.yaml", "--format", "hh"], "--format has no effect with --suite"),
        (["--suite", "mine.yaml", "--by", "subset"], "--by has no effect with --suite"),
        (["--suite", "rmbench", "--data", "pairs.jsonl"], "the rows fit the format explicit"),
        (["--data", "pairs.jsonl"], "several models need --suite NAME"),
        (["random", "--suite", "mine.yaml"], "each model must be named once, and none longer wins, random, group"),
        (["one", "--suite", "mine.yaml"], "each model must be named once"),
        (["--suite", "mine.yaml", "--on-bad-row", "skip"], "--on-bad-row"),
    ],
)
def test_a_mistake_is_one_sentence(folder: Path, arguments: list[str], reason: str):
    said = rm_opt("evaluate", "one", "two", *arguments, "--output", "found", code=2)
    assert reason in said
    assert not Path("found").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sorce": "x"}, "did you mean 'source'"),
        ({"average": {"mean": {"median": ["a"]}}}, "must be one of mean, pool and sum"),
        ({"average": {"mean": {"mean": []}}}, "must be one of mean, pool and sum"),
        ({"sets": {"main": {"path": "pairs.jsonl", "rule": "pair"}}}, "did you mean 'pairs'"),
        ({"sets": {"main": {"pth": "pairs.jsonl"}}}, "did you mean 'path'"),
        ({"sets": ["pairs.jsonl"]}, "sets must be a mapping"),
        ({"sets": {"main": "pairs.jsonl"}}, "set main must be a mapping, got 'pairs.jsonl'"),
        ({"sets": {"main": {"group": "subset"}}}, "set main: group must be a list, got 'subset'"),
        ({"sets": {"main": {"path": 3}}}, "set main: path must be text or a list, got 3"),
        ({"sets": {"main": {"rows": "12"}}}, "set main: rows must be a number"),
        ({"sets": {"main": {"tie": "maybe"}}}, "'maybe' is not a valid Tie"),
        ({"sets": None}, "cannot be read"),
        ({"average": {"mean": {"mean": {"a": 0}}}}, "with positive weights; got {'mean': {'a': 0}}"),
        ({"average": {"mean": {"mean": ["mean"]}}}, "average mean must be .* of averages above it"),
        ({"average": {"b": {"mean": ["mean"]}, "mean": {"mean": ["a"]}}}, "average b must be .* averages above it"),
        ({"score": None}, "cannot be read"),
        ({"average": {}, "score": "a", "per": ["x"]}, "per needs a score among its averages, got a"),
    ],
)
def test_a_suite_that_is_written_wrongly_is_refused(folder: Path, change: dict[str, Any], reason: str):
    values = {key: value for key, value in (MINE | change).items() if value is not None}
    Path("bad.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    with pytest.raises(ConfigError, match=reason):
        Suite.of("bad.yaml")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"score": "best"}, "suite x: best needs rows of best; there are rows of a, b, c"),
        ({"average": {"mean": {"mean": ["d"]}}}, "mean needs rows of d"),
        (
            {"sets": {"main": MINE["sets"]["main"] | {"rule": "matrix"}}},
            "line 1: expected two chosen responses or more",
        ),
        ({"sets": {"main": MINE["sets"]["main"] | {"rule": "ties"}}}, "line 1: expected an id ref:N"),
    ],
)
def test_rows_that_give_no_score_are_refused_before_a_model_is_loaded(folder: Path, change: Any, reason: str):
    with pytest.raises(DataError, match=reason):
        read_suite(Suite.from_values(MINE | change | {"name": "x"}), [], DataConfig())


def test_bad_rows_stop_or_are_counted(folder: Path):
    suite = Suite.of("mine.yaml")
    Path("pairs.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*ROWS[:10], ROWS[10] | {"chosen": " "}, ROWS[11] | {"chosen": 3}])
    )
    with pytest.raises(DataError, match="line 12: chosen must be text, got int"):
        read_suite(suite, [], DataConfig())
    items = read_suite(suite, [], DataConfig(on_bad_row=OnBadRow.drop))
    assert len(items.items) == 11
    assert "1 bad rows of pairs.jsonl are not scored: chosen must be text" in items.notes
    assert "1 responses are blank and are scored as such" in items.notes  # a benchmark counts them
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    with pytest.raises(DataError, match="the column subset, which holds the group, is missing"):
        read_suite(suite, [], DataConfig())


def of_credits(values: dict[str, np.ndarray], groups: np.ndarray, suite: Suite) -> SuiteCredits:
    return SuiteCredits(suite, tuple(groups.tolist()), tuple(map(str, range(len(groups)))), values)


def many_groups(num: int) -> Suite:
    names = [f"g{i}" for i in range(num)]
    return Suite.from_values(MINE | {"name": "x", "average": {"mean": {"mean": names}}})


@pytest.mark.slow
def test_intervals_of_scores_and_differences_cover_the_truth():
    """Three groups of 40, 60 and 120 prompts and two models of accuracy 0.6 to 0.9, drawn 600 times."""
    suite, rng, covered = Suite.from_values(MINE | {"name": "x"}), np.random.default_rng(0), []
    sizes, truth = (40, 60, 120), {"m": (0.6, 0.75, 0.9), "n": (0.7, 0.7, 0.8)}
    groups = np.repeat(GROUPS, sizes)
    for _ in range(600):
        values = {name: rng.binomial(1, np.repeat(rates, sizes)).astype(float) for name, rates in truth.items()}
        table = of_credits(values, groups, suite)
        right = {name: float(np.mean(rates)) for name, rates in truth.items()}
        found = [
            (table.estimate("mean", "m", num_bootstrap=400, seed=0), right["m"]),
            (table.estimate("mean", "m", "n", num_bootstrap=400, seed=0), right["m"] - right["n"]),
            (table.estimate("c", "m", num_bootstrap=400, seed=0), 0.9),
        ]
        covered.append([each.low <= value <= each.high for each, value in found])
    shares = np.mean(covered, axis=0)
    assert (shares >= 0.93 - 0.02).all(), shares
    assert (shares <= 0.97 + 0.02).all(), shares
    assert 0.93 <= shares.mean() <= 0.97


@pytest.mark.slow
def test_no_model_is_said_to_lead_in_one_of_23_groups_more_often_than_stated():
    """Three equal models on groups of 28 to 150 prompts, as in RewardBench: at most 5 % of results claim any lead."""
    suite, rng, claims = many_groups(23), np.random.default_rng(0), 0
    groups = np.repeat([f"g{i}" for i in range(23)], np.linspace(28, 150, 23).astype(int))
    models = [SuiteScores(name, is_model=True) for name in ("k", "l", "m")]
    for _ in range(300):
        shared = rng.normal(size=len(groups))  # prompts are easy or hard for all models alike
        values = {each.name: (shared + rng.normal(size=len(groups)) > -0.8).astype(float) for each in models}
        table = of_credits(values, groups, suite)
        scored = [
            SuiteScores(each.name, True, {name: Estimate(table.estimate(name, each.name, num_bootstrap=0, seed=0).value,
                                                         None, 1) for name in table.names})
            for each in models
        ]  # fmt: skip
        claims += bool(table.leads(scored))
    assert claims / 300 <= 0.05 + 2 * 0.0126


def test_a_real_lead_is_found_and_equal_models_have_none(folder: Path):
    suite, rng = many_groups(4), np.random.default_rng(0)
    groups = np.repeat([f"g{i}" for i in range(4)], 200)
    better = rng.binomial(1, 0.9, 800).astype(float)
    worse = np.where(groups == "g2", rng.binomial(1, 0.4, 800), better)
    table = of_credits({"b": better, "w": worse}, groups, suite)
    scored = [
        SuiteScores(name, True, {each: table.estimate(each, name, num_bootstrap=0, seed=0) for each in table.names})
        for name in ("w", "b")
    ]
    assert {(lead.group, lead.model) for lead in table.leads(scored)} == {("g2", "b"), ("mean", "b")}
    (pair,) = table.differences(scored, num_bootstrap=100, seed=0)
    assert (pair.first, pair.second) == ("b", "w")
    assert pair.p_value == pair.holm_p < 1e-6
    assert pair.difference.value == pytest.approx((better - worse)[groups == "g2"].mean() / 4)


def test_random_is_a_mean_over_draws(folder: Path):
    items = read_suite(Suite.of("mine.yaml"), [], DataConfig())
    facts = (SuiteScores("m", is_model=True), items.credits(lambda key: float(len(key[1]))))
    result = suite_result(items, [facts], num_bootstrap=20, seed=0)
    values = {model.name: model.scores["mean"].value for model in result.models}
    assert values["m"] == values["longer wins"] == 0.0
    assert values["random"] == pytest.approx(0.5, abs=0.13)  # 192 draws of a pair
