"""A comparison of optimizers tunes each alike, runs paired seeds on equal terms, and goes on where it stopped."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.optim import Optimizer
from typer.testing import CliRunner

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import ConfigError, TrainingDiverged
from rm_optimizer.experiments.optimizer_comparison import arm_trial, setting, stages
from rm_optimizer.experiments.optimizer_comparison.findings import ComparisonFindings, across_datasets, findings
from rm_optimizer.experiments.optimizer_comparison.setting import Frozen, chosen_rate, next_rate, pairs_file, rate_grid
from rm_optimizer.experiments.optimizer_comparison.stages import Stages, freeze
from rm_optimizer.experiments.study import Study
from rm_optimizer.experiments.trial import InlineExecutor
from rm_optimizer.interfaces.cli import app
from rm_optimizer.landscape import OptimizerComparison
from rm_optimizer.optim import build_optimizer
from rm_optimizer.reporting.folder_page import write_page
from rm_optimizer.reporting.optimizer_comparison import comparison_document, findings_document
from rm_optimizer.schema.data import SyntheticConfig
from rm_optimizer.training import lightning_module
from tests.browser import NEEDS_AXE, NEEDS_BROWSER, assert_accessible, assert_sound, opened_browser
from tests.training.conftest import SMALL

SHARED = [option for option in SMALL if option.startswith(("hardware.", "hardware=", "model.", "batching."))]
OPTIONS = [*SHARED, "batching.batch_size=8", "training.evals_per_epoch=1"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of synthetic pairs."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [pair.to_dict() for pair in synthetic_world(SyntheticConfig(num_train=160, num_val=2)).train]
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "metadata"}) + "\n" for row in rows))
    return path


def comparison(file: Path, folder: Path, *optimizers: str, **given: Any) -> OptimizerComparison:
    sizes = {"pairs": 24, "val_pairs": 12, "test_pairs": 12, "curvature_pairs": 4} | given
    return OptimizerComparison(
        model_name="tiny",
        data_path=file,
        optimizers=optimizers or ("adamw", "sgd"),
        num_seeds=2,
        rates=3,
        output_dir=folder,
        overrides=OPTIONS,
        executor="inline",
        **sizes,
    )


@pytest.fixture(scope="module")
def finished(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[OptimizerComparison, ComparisonFindings]:
    """A finished comparison of two optimizers, as the tutorial runs one."""
    run = comparison(pairs, tmp_path_factory.mktemp("comparison") / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setting, "next_rate", lambda scores, grid: None)  # edges are tested without training
        return run, run.run_experiment()


def test_every_arm_gets_as_many_rates_and_the_same_seeds_weights_and_order(finished):
    run, found = finished
    study = Study(run.folder)
    for arm in found.arms:
        tuned = {point.rate for point in found.rates if point.arm == arm.name}
        assert len(tuned) == 3
        assert arm.seeds == (0, 1)
        assert {point.seed for point in found.rates} == {1000}
    values = [study.trial(planned).result.values for planned in study.plan.trials if planned.spec["stage"] == "final"]
    by_seed = {
        value["seed"]: {(v["order"], v["initial"]) for v in values if v["seed"] == value["seed"]} for value in values
    }
    assert [len(each) for each in by_seed.values()] == [1, 1]
    assert by_seed[0] != by_seed[1]


def test_tuning_never_reads_the_test_pairs_whose_prompts_nothing_else_has(finished):
    run, _ = finished
    for planned in Study(run.folder).plan.trials:
        assert ("test" in planned.spec["scored"]) == (planned.spec["stage"] == "final")
    prompts = [
        set(PreferenceDataset(str(pairs_file(run.folder, part))).prompt_ids) for part in ("train", "val", "test")
    ]
    assert not (prompts[0] & prompts[1])
    assert not (prompts[0] & prompts[2])
    assert not (prompts[1] & prompts[2])


def test_a_finished_comparison_is_read_not_repeated(finished, pairs, monkeypatch):
    run, found = finished

    def trained(*args: object, **options: object) -> None:
        raise AssertionError("a finished run was repeated")

    monkeypatch.setattr(arm_trial, "run_training", trained)
    monkeypatch.setattr(setting, "next_rate", lambda scores, grid: None)
    again = comparison(pairs, run.folder).run_experiment()
    assert again.to_json() == found.to_json()
    assert ComparisonFindings.from_json(found.to_json()).to_json() == found.to_json()
    for command in ("run", "status", "report"):  # as of any study
        done = CliRunner().invoke(app, ["compare", command, str(run.folder)])
        assert done.exit_code == 0, done.output


def test_costs_are_measured(finished):
    _, found = finished
    means = {arm.name: arm.means for arm in found.arms}
    assert means["adamw"]["passes_per_step"] == 1
    assert means["adamw"]["state_bytes"] > 1.9 * means["sgd"]["state_bytes"] > 0
    assert all(value["tokens"] == means["sgd"]["tokens"] > 0 for value in means.values())
    assert all(0 < value["step_seconds"] <= value["train_seconds"] < 600 for value in means.values())
    assert all(value["top_eigenvalue"] > 0 and value["trace_standard_error"] >= 0 for value in means.values())


def test_the_report_has_tables_pictures_and_methods(finished, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run, found = finished
    text = run.generate_report()
    names = {path.name for path in text.parent.iterdir()}
    assert {"report.md", "findings.json", "trials.parquet", "index.html"} <= names
    shown = re.findall(r"\]\((\w+\.png)\)", text.read_text())
    assert {"rates.png", "curves.png", "reliability.png"} <= set(shown) <= names
    assert found.frozen.digest in text.read_text()
    printed = capsys.readouterr().out
    assert "NLL − reference" in printed
    assert "note: fewer than 5 seeds" in printed


def test_other_options_and_other_pairs_need_another_folder_and_more_seeds_do_not(finished, pairs):
    run, _ = finished
    with pytest.raises(ConfigError, match="holds a comparison with other optimizers; choose another --output"):
        _ = comparison(pairs, run.folder, "adamw", "lion").frozen
    with pytest.raises(ConfigError, match="holds a comparison with other pairs;"):
        _ = comparison(pairs, run.folder, pairs=16).frozen


def elsewhere(found: ComparisonFindings, pairs: str, better: float, **options: Any) -> ComparisonFindings:
    """The findings as if they came from other test pairs, with AdamW better by so much."""
    frozen = found.frozen
    frozen = replace(
        frozen, fingerprints=frozen.fingerprints | {"test": pairs}, options=replace(frozen.options, **options)
    )
    arms = [replace(arm, per_seed={"nll": (0.6, 0.7), "accuracy": (0.5, 0.6)}) for arm in found.arms]
    arms[0] = replace(arms[0], per_seed={"nll": (0.6 - better, 0.7 - better), "accuracy": (0.5 + better, 0.6 + better)})
    return replace(found, frozen=frozen, arms=tuple(arms))


def test_several_data_sets_are_aggregated(finished):
    found = finished[1]
    adamw, sgd = across_datasets([elsewhere(found, name, 0.2) for name in "abc"]).arms
    assert (adamw.name, sgd.name, adamw.improvement) == ("adamw", "sgd", None)
    assert (adamw.accuracy.value, sgd.accuracy.value) == (pytest.approx(0.75), pytest.approx(0.55))
    assert (sgd.improvement.value, sgd.improvement.high) == (0.0, 0.0)
    (_, even) = across_datasets([elsewhere(found, name, 0.0) for name in "abc"]).arms
    assert even.improvement.value == 0.5


def test_what_is_no_set_of_data_sets_is_refused(finished, tmp_path):
    found, folder = finished[1], str(finished[0].folder)
    with pytest.raises(ConfigError, match="different test pairs"):
        across_datasets([elsewhere(found, name, 0.0) for name in "aab"])
    with pytest.raises(ConfigError, match="the same reference, got adamw and sgd"):
        across_datasets([elsewhere(found, "a", 0.0), elsewhere(found, "b", 0.0, reference="sgd")])
    with pytest.raises(ConfigError, match="at least 3 data sets, got 1"):
        across_datasets([found])
    done = CliRunner().invoke(app, ["compare", "across", folder])
    assert done.exit_code == 2
    assert "at least 3 data sets" in done.stderr


def graded(spec: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A trial that trains nothing: its NLL is the distance of its rate from the optimum, in decades."""
    if spec["rate"] > 1.0:
        raise TrainingDiverged("the loss became nan")
    half = spec["options"]["optimizer"].get("adamw_lr") if spec["arm"] == "muon" else None
    return {"val_nll": abs(math.log10(spec["rate"] / 3e-5)), "val_accuracy": 0.5, "half": half}


@pytest.fixture
def untrained(pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    """Stages of a comparison whose trials are `graded`."""
    monkeypatch.setattr(stages, "TASK", f"{__name__}:graded")
    options = comparison(pairs, tmp_path / "out", "adamw", "muon", "sgd").options
    freeze(options, tmp_path / "out")
    return Stages(tmp_path / "out")


def test_stages_follow_from_finished_trials(untrained):
    first = untrained.trials()
    assert {trial.spec["arm"] for trial in first} == {"adamw", "sgd"}, "muon waits for AdamW's rate"
    assert untrained.num_planned == 3 * (3 + 2)
    known: list[int] = []
    status = untrained.run(InlineExecutor(), on_stage=known.append)
    assert status.is_done
    adamw, sgd, muon = (untrained.tuned(arm).chosen for arm in ("adamw", "sgd", "muon"))
    assert adamw is not None
    assert (adamw.rate, adamw.at_edge, adamw.extra) == (pytest.approx(3.16e-5, rel=0.01), True, 2)
    assert sgd is not None
    assert sgd.at_edge
    assert muon is not None
    assert known[0] == 6
    assert known[-1] == 3 * (3 + 2) + 2 + sgd.extra + muon.extra
    finals = untrained.trials()[-6:]
    halves = {trial.spec["options"]["optimizer"]["adamw_lr"] for trial in finals if trial.spec["arm"] == "muon"}
    assert halves == {adamw.rate}
    assert [trial.label.rpartition(" ")[2] for trial in finals] == ["0", "0", "0", "1", "1", "1"]


def test_names_of_trials_do_not_depend_on_the_place_of_the_folder(untrained, tmp_path):
    before = [trial.name for trial in untrained.trials()]
    untrained.folder.rename(tmp_path / "moved")
    assert [trial.name for trial in Stages(tmp_path / "moved").trials()] == before


def test_an_arm_that_saw_another_order_is_no_pair(finished, tmp_path, monkeypatch):
    run, _ = finished
    planned = Study(run.folder).plan.trials[-1]
    path = Study(run.folder).trial(planned).folder / "result.json"
    text = path.read_text()
    try:
        path.write_text(text.replace(json.loads(text)["values"]["order"], "0" * 16))
        with pytest.raises(ConfigError, match=r"order of the pairs of .*, seed 1, differ from the other optimizers"):
            findings(run.folder)
    finally:
        path.write_text(text)


def test_an_arm_that_is_another_optimizer_is_refused(pairs, tmp_path, monkeypatch):
    options = comparison(pairs, tmp_path / "out", "adamw", "lion").options
    trial = arm_trial.arm_trial(
        freeze(options, tmp_path / "out"), tmp_path / "out", "tune", "lion", 1e-4, 0, adamw_lr=None
    )

    def built(model: BradleyTerryRM, config: object, **given: Any) -> Optimizer:
        optimizer = build_optimizer(model, options.config("sgd").optimizer, **given)
        for group in optimizer.param_groups:
            group["algorithm"] = "lion"
        return optimizer

    monkeypatch.setattr(lightning_module, "build_optimizer", built)
    with pytest.raises(ConfigError, match="optimizer=lion did not take its own first step"):
        arm_trial.train_and_judge(trial.spec, tmp_path)


def test_what_would_hide_the_first_step_of_an_optimizer_is_refused(pairs, tmp_path):
    options = comparison(pairs, tmp_path / "out").options
    refused = {
        ("model=custom", "model.path=base", "model.dtype=bfloat16"): "checks the first step of each optimizer",
        ("hardware.devices=2",): r"runs each trial on one device, got hardware\.devices=2",
    }
    for overrides, says in refused.items():
        with pytest.raises(ConfigError, match=says):
            replace(options, overrides=overrides).config("adamw")


def test_rates_are_half_decades_and_an_edge_is_extended_twice_at_most():
    grid = rate_grid(1e-4, 5)
    assert grid == (1e-5, 3.16e-5, 1e-4, 3.16e-4, 1e-3)
    scores = dict(zip(grid, (0.6, 0.61, 0.62, 0.63, 0.7), strict=True))
    assert next_rate(scores, len(grid)) == 3.16e-6
    assert next_rate(scores | {3.16e-6: 0.65}, len(grid)) is None
    twice = scores | {3.16e-6: 0.59, 1e-6: 0.58}
    assert next_rate(twice, len(grid)) is None
    assert chosen_rate(twice, len(grid)).at_edge
    assert next_rate(scores | {1e-3: 0.5}, len(grid)) == 3.16e-3
    assert chosen_rate(dict.fromkeys(grid, math.inf), len(grid)).rate is None
    assert next_rate(dict.fromkeys(grid, math.inf), len(grid)) is None


def test_a_damaged_setting_is_named(tmp_path):
    (tmp_path / "frozen.json").write_text("{")
    with pytest.raises(ConfigError, match=r"frozen\.json is damaged; start the comparison in another folder"):
        Frozen.read(tmp_path)


@pytest.mark.slow
def test_the_page_of_a_comparison_begins_with_its_cautions_and_shows_every_seed(finished, tmp_path):
    run, found = finished
    folder = shutil.copytree(run.folder, tmp_path / "study")
    document = comparison_document(folder)
    whole = write_page(folder, tmp_path / "page").read_bytes()
    page = re.sub(r'base64,[^"]*', "", whole.decode())
    assert page.index(found.warnings[0][1:]) < page.index("<h2>Verdicts</h2>")
    for arm in found.arms:
        for seed in arm.seeds:
            assert f'<th scope="row">{arm.name}</th><td>{seed}</td>' in page
    assert "explains none of them" in page
    assert "http" not in page
    assert {"reliability.png", "sharpness.csv"} <= {each.name for each in (tmp_path / "page").iterdir()}
    assert write_page(folder, tmp_path / "again").read_bytes() == whole
    done = CliRunner().invoke(app, ["report", str(folder), "--format", "md"])
    assert done.exit_code == 0, done.output
    assert done.stdout == document.markdown()
    assert done.stdout.startswith("# Comparison of adamw, sgd\n\n**")
    assert "| arm | seed | NLL | accuracy | top eigenvalue |" in done.stdout


def final_trial(folder: Path, arm: str, seed: int) -> Path:
    study = Study(folder)
    by_label = {re.sub(r", lr [^,]*", "", each.label): study.trial(each).folder for each in study.plan.trials}
    return by_label[f"final {arm}, seed {seed}"]


@pytest.mark.parametrize("file", ["work/curve.json", "work/margins.npz", "result.json"])
@pytest.mark.parametrize("is_cut", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_final_run_that_cannot_be_read_is_left_out_and_named(finished, tmp_path, file, is_cut):
    folder = shutil.copytree(finished[0].folder, tmp_path / "study")
    damaged = final_trial(folder, "sgd", 1) / file
    if is_cut:
        damaged.write_bytes(damaged.read_bytes()[:20])
    else:
        damaged.unlink()
    found = findings(folder)
    assert {arm.name: arm.seeds for arm in found.arms} == {"adamw": (0, 1), "sgd": (0,)}
    assert not found.verdicts
    is_waiting = file == "result.json" and not is_cut
    assert any(file in warning and "left out" in warning for warning in found.warnings) != is_waiting
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    assert "Left out, final sgd" in (folder / "report" / "index.html").read_text(encoding="utf-8") or is_waiting


def test_a_comparison_without_a_finished_final_run_shows_its_trials(finished, tmp_path):
    folder = shutil.copytree(finished[0].folder, tmp_path / "study")
    for seed in (0, 1):
        (final_trial(folder, "sgd", seed) / "result.json").unlink()
    text = comparison_document(folder).markdown()
    assert "**No result yet.** No final run of sgd is finished yet" in text
    assert "10 trials: 8 finished, 2 waiting." in text


@NEEDS_BROWSER
def test_the_page_of_a_comparison_fits_each_screen_and_loads_nothing(finished, tmp_path):
    assert_sound(write_page(finished[0].folder, tmp_path))


@NEEDS_BROWSER
def test_the_page_of_fifty_trials_is_small_and_drawn_within_a_second(finished, tmp_path):
    """Five optimizers with five rates and five seeds each, and forty evaluations a seed."""
    found = finished[1]
    whole, rows = found.arms[0], [{"label": "one", "state": "finished"}] * 50
    points = whole.curves[0].points[:1] * 40
    points = tuple(replace(point, step=at, seconds=0.1 * at, nll=0.7 - 0.001 * at) for at, point in enumerate(points))
    arms = [
        replace(
            whole,
            name=name,
            seeds=tuple(range(5)),
            per_seed={score: (values[0],) * 5 for score, values in whole.per_seed.items()},
            reliability=whole.reliability[:1] * 5,
            curves=(replace(whole.curves[0], points=points),) * 5,
        )
        for name in ("adamw", "adam", "sgd", "muon", "lion")
    ]
    first = found.rates[0]
    rates = [replace(first, arm=arm.name, rate=first.rate * 3**k) for arm in arms for k in range(5)]
    verdicts = [replace(item, arm=arm.name) for arm in arms[1:] for item in found.verdicts]
    larger = replace(found, arms=tuple(arms), rates=tuple(rates), verdicts=tuple(verdicts))
    page = findings_document(larger, rows).write(tmp_path)
    assert page.stat().st_size <= 2_000_000
    painted = "return performance.getEntriesByName('first-contentful-paint').map(e => e.startTime)[0] || 0"
    with opened_browser() as browser:
        browser.screen(1280, 900, "light")
        browser.open(page.as_uri())
        browser.wait(f"return (() => {{ {painted} }})() > 0", True)
        assert browser.run(painted) <= 1000


@NEEDS_AXE
def test_the_page_of_a_comparison_is_accessible(finished, tmp_path):
    assert_accessible(write_page(finished[0].folder, tmp_path))
