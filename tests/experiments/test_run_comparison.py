"""Runs are compared on the pairs they share, paired by prompt and seed; what cannot be compared is named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.experiments.compared_runs import common_pairs, read_runs
from rm_optimizer.experiments.run_comparison import RunComparison, compare_runs
from rm_optimizer.reporting.comparison import print_comparison
from rm_optimizer.reporting.folder_page import folder_markdown, write_page


def compared(root: Path, *names: str) -> RunComparison:
    return compare_runs(read_runs([root / name for name in names]), num_bootstrap=200)


def value(comparison: RunComparison, arm: str, score: str) -> float:
    return next(item.estimate.value for item in comparison.differences if (item.arm, item.score) == (arm, score))


@pytest.mark.slow
def test_runs_that_differ_by_seed_form_an_arm_and_differences_are_paired(trained_runs):
    found = compared(trained_runs, "adamw", "muon")
    assert [(arm.name, arm.seeds) for arm in found.arms] == [("optimizer=adamw", (0, 1)), ("optimizer=muon", (0, 1))]
    assert (found.num_pairs, found.baseline) == (33, "optimizer=adamw")
    results = {run.name: run for run in read_runs([trained_runs / "adamw", trained_runs / "muon"]).runs}
    for run in found.runs:  # all pairs are common, so these are the run's own numbers
        assert run.scores["nll"].value == results[run.name].result.metrics.nll.value
        assert run.scores["accuracy"].value == results[run.name].result.metrics.accuracy.value
    for score in ("accuracy", "nll", "brier", "ece"):
        own = [[run.scores[score].value for run in found.runs if run.arm == arm.name] for arm in found.arms]
        assert found.arms[1].scores[score].value == pytest.approx(np.mean(own[1]))
        assert found.arms[1].deviations[score] == pytest.approx(np.std(own[1], ddof=1))
        assert value(found, "optimizer=muon", score) == pytest.approx(np.mean(own[1]) - np.mean(own[0]))
    assert {item.num_seeds for item in found.differences} == {2}
    assert found.arms[0].options["optimizer.name"] == "adamw"
    assert not any("different pairs" in note for note in found.notes)


def test_two_runs_have_intervals_over_prompts_and_are_told_so(trained_runs):
    found = compared(trained_runs, "adamw/0", "muon/1")
    difference = next(item for item in found.differences if item.score == "nll")
    assert difference.num_seeds == 1
    assert difference.estimate.low < difference.estimate.value < difference.estimate.high
    assert any("covers prompts alone" in note for note in found.notes)
    assert any("shares no seed with the baseline" in note for note in found.notes)


def test_only_common_pairs_count_and_their_number_is_told(trained_runs):
    found = compared(trained_runs, "adamw/0", "fewer")
    assert found.num_pairs == 20
    assert "the runs were validated on different pairs (20 to 33); 20 are common to all" in found.notes
    names = {run.name: run for run in read_runs([trained_runs / "adamw/0", trained_runs / "fewer"]).runs}
    assert found.runs[1].scores["nll"].value == names["fewer"].result.metrics.nll.value
    assert found.runs[0].scores["nll"].value != names["adamw/0"].result.metrics.nll.value


def test_a_run_compared_with_a_copy_of_itself_differs_by_nothing(trained_runs, tmp_path):
    shutil.copytree(trained_runs / "adamw/0", tmp_path / "again")
    found = compare_runs(read_runs([trained_runs / "adamw/0", tmp_path / "again"]), num_bootstrap=200)
    assert len(found.arms) == 2
    assert {(item.estimate.value, item.estimate.low, item.estimate.high) for item in found.differences} == {
        (0.0, 0.0, 0.0)
    }


def test_a_planted_difference_is_found_and_has_its_direction(trained_runs, planted):
    found = compare_runs(read_runs([trained_runs / "adamw/0", planted("better", lambda row: row["label"] * 3 - 1)]))
    verdicts = {item.score: item.verdict for item in found.differences}
    assert (verdicts["accuracy"], verdicts["nll"]) == ("better", "better")


def test_pairs_whose_label_differs_are_not_common(trained_runs, planted):
    runs = read_runs([trained_runs / "adamw/0", planted("relabeled", None, label=0.0)]).runs
    assert len(common_pairs(runs)) == 32


def test_a_pair_that_stands_twice_is_compared_twice(trained_runs):
    run = read_runs([trained_runs / "adamw/0", trained_runs / "adamw/1"]).runs[0]
    twice = replace(run, rewards=(*run.rewards, run.rewards[0]))
    assert len(common_pairs([twice, twice])) == len(run.rewards) + 1
    assert len(common_pairs([twice, run])) == len(run.rewards)


def test_the_result_is_read_back_and_its_rows_are_one_table(trained_runs):
    found = compared(trained_runs, "adamw", "muon", "fewer")
    assert RunComparison.from_json(found.to_json()) == found
    rows = found.rows()
    assert len({tuple(row) for row in rows}) == 1
    assert {row["level"] for row in rows} == {"run", "arm", "difference"}


def test_stored_runs_are_compared_without_torch(trained_runs, tmp_path):
    runs = [str(trained_runs / "adamw/0"), str(trained_runs / "muon/1")]
    argv = ["rm-opt", "compare", *runs, "--output", str(tmp_path / "out"), "--bootstrap", "50"]
    code = (
        f"import sys\nfrom rm_optimizer.interfaces.entry import main\nsys.argv = {argv}\n"
        "try:\n    main()\nfinally:\n    print({'torch', 'transformers', 'sklearn', 'sympy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    assert (tmp_path / "out" / "comparison.json").is_file()


@pytest.fixture
def planted(trained_runs: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copy of a run whose margins, or first label, are others, with the metrics that go with them."""

    def plant(name: str, margin: Callable[[dict[str, float]], float] | None, label: float = 1.0) -> Path:
        folder = tmp_path / name
        shutil.copytree(trained_runs / "adamw/0", folder)
        rows = [json.loads(line) for line in (folder / "pair_rewards.jsonl").read_text().splitlines()]
        if margin is not None:
            for row in rows:
                row["chosen"], row["rejected"] = margin(row), 0.0
        rows[0]["label"] = label
        (folder / "pair_rewards.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        content = json.loads((folder / "run.json").read_text())
        margins = np.array([row["chosen"] - row["rejected"] for row in rows])
        labels = np.array([row["label"] for row in rows])
        losses = labels * np.logaddexp(0, -margins) + (1 - labels) * np.logaddexp(0, margins)
        content["metrics"]["nll"]["value"] = float(losses.mean())
        (folder / "run.json").write_text(json.dumps(content))
        return folder

    return plant


def spoil(folder: Path, name: str, change: Callable[[str], str]) -> None:
    path = folder / name
    path.write_text(change(path.read_text()))


SPOILED: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "torn_result": (lambda run: spoil(run, "run.json", lambda text: text[:100]), DataError, "run.json is damaged"),
    "unfinished": (
        lambda run: (run / "run.json").unlink(),
        ConfigError,
        "it has not finished; finish it",
    ),
    "no_rewards": (lambda run: (run / "pair_rewards.jsonl").unlink(), DataError, "pair_rewards.jsonl is missing"),
    "torn_line": (
        lambda run: spoil(run, "pair_rewards.jsonl", lambda text: text[:-20]),
        DataError,
        "pair_rewards.jsonl, line 33, is not the rewards of a pair",
    ),
    "lines_lost": (
        lambda run: spoil(run, "pair_rewards.jsonl", lambda text: text.partition("\n")[2]),
        DataError,
        "holds 32 pairs, but the run was validated on 33",
    ),
    "a_text": (
        lambda run: spoil(
            run, "pair_rewards.jsonl", lambda text: text.replace('"chosen": ', '"chosen": "much", "c": ')
        ),
        DataError,
        "pair_rewards.jsonl is damaged",
    ),
    "not_finite": (
        lambda run: spoil(run, "pair_rewards.jsonl", lambda text: text.replace('"chosen": ', '"chosen": NaN, "c": ')),
        DataError,
        "pair_rewards.jsonl is damaged: chosen must be finite",
    ),
    "of_another_run": (
        lambda run: spoil(run, "pair_rewards.jsonl", lambda text: text.replace('"rejected": ', '"rejected": 1, "r": ')),
        DataError,
        "they are not of the same weights",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_damaged_run_is_refused_by_the_name_of_its_file(name, trained_runs, tmp_path):
    damage, error, says = SPOILED[name]
    shutil.copytree(trained_runs / "adamw/1", tmp_path / "run")
    damage(tmp_path / "run")
    with pytest.raises(error, match=says):
        read_runs([trained_runs / "adamw/0", tmp_path / "run"])


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["adamw/0"], "needs two finished runs or more, got 1"),
        (["adamw/0", "nowhere"], "nowhere', which is no folder"),
        (["adamw/0", "adamw/0/run.json"], "run.json', which is no folder"),
        (["adamw/0", "adamw"], "adamw/0' twice"),
        (["adamw/0", "adamw/0/best"], "adamw/0' twice"),
    ],
)
def test_what_is_no_pair_of_runs_is_refused(names, says, trained_runs):
    with pytest.raises(ConfigError, match=says):
        read_runs([trained_runs / name for name in names])


def test_a_folder_without_runs_is_refused(trained_runs, tmp_path):
    with pytest.raises(ConfigError, match=r"holds neither options\.json nor run\.json"):
        read_runs([trained_runs / "adamw", tmp_path])


def test_runs_without_a_common_pair_are_refused(trained_runs):
    with pytest.raises(ConfigError, match="other has no validation pair in common with the 2 runs before it"):
        compared(trained_runs, "adamw", "other")


def test_an_unfinished_run_of_a_sweep_is_left_out_and_told(trained_runs, tmp_path):
    shutil.copytree(trained_runs / "muon", tmp_path / "sweep")
    shutil.copytree(trained_runs / "adamw/0", tmp_path / "sweep/10")
    (tmp_path / "sweep/10/run.json").unlink()
    found = read_runs([tmp_path / "sweep"])
    assert [run.result.seed for run in found.runs] == [0, 1]
    assert found.left_out == (f"{tmp_path / 'sweep/10'} has not finished and is left out",)


def test_a_sweep_without_a_finished_run_is_refused_with_the_reason(trained_runs, tmp_path):
    shutil.copytree(trained_runs / "adamw/0", tmp_path / "sweep/0")
    (tmp_path / "sweep/0/run.json").unlink()
    with pytest.raises(ConfigError, match=r"two finished runs or more, got 0; .*sweep/0 has not finished"):
        read_runs([tmp_path / "sweep"])


def diverged(run: Path) -> Path:
    (run / "run.json").unlink()
    (run / "diverged.json").write_text(json.dumps({"error": "the loss became nan at step 2"}))
    return run


def test_diverged_runs_stay_in_the_table_as_diverged_and_are_in_no_mean(trained_runs, tmp_path):
    shutil.copytree(trained_runs / "muon", tmp_path / "sweep/muon")
    shutil.copytree(trained_runs / "adamw", tmp_path / "sweep/adamw")
    shutil.copytree(trained_runs / "fewer", tmp_path / "sweep/fewer")
    for run in ("adamw/1", "fewer"):
        diverged(tmp_path / "sweep" / run)
    found = compare_runs(read_runs([tmp_path / "sweep"]), num_bootstrap=0)
    assert found.arms[0].seeds == (0,)
    assert [(run.name, run.seed) for run in found.diverged] == [("adamw/1", 1), ("fewer", 0)]
    assert found.diverged[0].arm == found.arms[0].name
    assert found.diverged[1].arm not in {arm.name for arm in found.arms}
    assert "adamw/1 diverged and is in no mean: the loss became nan at step 2" in found.notes
    assert [row["run"] for row in found.rows() if row["score"] == "diverged"] == ["adamw/1", "fewer"]
    assert RunComparison.from_json(found.to_json()) == found
    console = Console(record=True, width=200)
    print_comparison(found, console)
    assert console.export_text().count("diverged") == 4


def test_a_diverged_run_is_never_told_to_be_finished(trained_runs, tmp_path):
    shutil.copytree(trained_runs / "adamw/0", tmp_path / "run")
    with pytest.raises(ConfigError, match=r"needs two finished runs or more, got 1; .*; .*/run diverged$"):
        read_runs([trained_runs / "adamw/0", diverged(tmp_path / "run")])
    with pytest.raises(DataError, match="a run that diverged, so it has no page: the loss became nan at step 2"):
        write_page(tmp_path / "run")


def test_a_folder_of_runs_has_a_page_and_markdown_with_their_comparison(trained_runs, tmp_path):
    page = write_page(trained_runs / "adamw", tmp_path / "one")
    assert "<strong>One arm, 2 runs</strong>" in page.read_text(encoding="utf-8")
    runs = shutil.copytree(trained_runs / "adamw", tmp_path / "runs" / "adamw").parent
    shutil.copytree(trained_runs / "muon", runs / "muon")
    page = write_page(runs)
    names = {file.name for file in page.parent.iterdir()}
    assert names == {
        "index.html",
        *(f"{name}.{kind}" for name in ("curves", "differences") for kind in ("csv", "png", "svg")),
        *("verdicts.csv", "scores.csv", "options.csv", "cost.csv"),
    }
    text = page.read_text(encoding="utf-8")
    assert "<h1>Comparison of 4 runs</h1>" in text
    assert "optimizer=muon" in text
    assert "the best weights were chosen on these pairs" in text.lower()
    assert "| arm | run | seed | accuracy | NLL | Brier | ECE |" in folder_markdown(runs)
