"""The page of a run: one file, the same bytes for the same folder, a word for every piece that is missing."""

import csv
import html
import json
import re
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from rm_optimizer.errors import DataError
from rm_optimizer.interfaces.cli import app
from rm_optimizer.landscape.surface.grid import Slice, Surface
from rm_optimizer.reporting.folder_page import run_document, write_page
from rm_optimizer.reporting.html import answer, bullets, page, paragraph, table
from rm_optimizer.rl_coupling.ensemble import EnsembleReference
from rm_optimizer.rl_coupling.ensemble_folder import save_ensemble
from rm_optimizer.training.folder.record import RunResult
from tests.browser import NEEDS_AXE, NEEDS_BROWSER, assert_accessible, assert_sound, opened_browser
from tests.reporting.test_landscape_plots import SLICE, SURFACE


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "best"))


def text_of(page: str) -> str:
    """The page without its pictures."""
    return re.sub(r"base64,[^\"]*", "", page)


def test_the_same_folder_gives_the_same_bytes(trained: Path, copied: Path):
    assert run_document(trained).html() == run_document(trained).html()
    assert len(run_document(trained).html()) < 2_000_000
    assert "Accuracy" in text_of(run_document(copied).html())


def test_nothing_is_loaded_from_elsewhere_and_no_text_of_the_data_becomes_markup(trained: Path):
    page = text_of(run_document(trained).html())
    assert "http" not in page
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    drawings = re.findall(r'<svg class="drawing" role="img" aria-label="([^"]*)"', page)
    assert len(drawings) == 4
    assert all("Horizontal axis: " in words and "Vertical axis: " in words for words in drawings)


def test_figures_and_tables_stand_beside_the_page_and_take_its_colors(trained: Path, tmp_path: Path):
    first, again = (write_page(trained, tmp_path / name).parent for name in ("first", "again"))
    names = sorted(path.name for path in first.iterdir())
    drawn = {
        f"{name}.{kind}" for name in ("accuracy", "loss", "margins", "reliability") for kind in ("csv", "png", "svg")
    }
    assert set(names) == {"index.html", "result.csv", "by_source.csv", *drawn}
    assert all((first / name).read_bytes() == (again / name).read_bytes() for name in names)
    with (first / "reliability.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    whole = [row for row in rows if row["series"] == "model, 95% interval"]
    result = RunResult.read(trained)
    assert result is not None
    bins = result.metrics.reliability
    assert [float(row["y"]) for row in whole] == [item.frequency for item in bins]
    assert [float(row["low"]) for row in whole] == [item.frequency_low for item in bins]
    page = (first / "index.html").read_text(encoding="utf-8")
    assert "stroke: var(--ink)" in page
    assert "#222222" not in page


def test_the_command_of_the_run_is_on_its_page_as_it_was_typed(copied: Path):
    assert "trains it again" not in run_document(copied).html()  # a run from Python has none
    typed = ["model=tiny", "data.val='my pairs.jsonl'", "output_dir=x", "seed=3"]
    (copied / ".hydra").mkdir()
    OmegaConf.save(OmegaConf.create(typed), copied / ".hydra" / "overrides.yaml")
    page = html.unescape(run_document(copied).html())
    assert """rm-opt train model=tiny "data.val='my pairs.jsonl'" seed=3<""" in page


def test_marks_of_direction_are_shown_and_change_nothing_around_them(copied: Path):
    name = "\u202edesrever"
    result = json.loads((copied / "run.json").read_text(encoding="utf-8"))
    groups = result["metrics"]["groups"]["source"]
    groups[name] = groups.pop(next(iter(groups)))
    (copied / "run.json").write_text(json.dumps(result), encoding="utf-8")
    page = run_document(copied).html()
    assert name not in page
    assert "\\u202edesrever" in page


def test_many_sources_show_the_twenty_largest_and_the_rest_on_a_click(copied: Path, tmp_path: Path):
    result = json.loads((copied / "run.json").read_text(encoding="utf-8"))
    groups = result["metrics"]["groups"]
    groups["source"] = {f"source {n}": next(iter(groups["source"].values())) for n in range(50)}
    (copied / "run.json").write_text(json.dumps(result), encoding="utf-8")
    page = write_page(copied, tmp_path).read_text(encoding="utf-8")
    shown, _, rest = page.partition("<details><summary>30 more</summary>")
    assert (shown.count(">source "), rest.count(">source ")) == (20, 30)
    with (tmp_path / "by_source.csv").open(encoding="utf-8", newline="") as file:
        assert len(list(csv.DictReader(file))) == 50


def test_missing_and_torn_pieces_are_named(copied: Path):
    (copied / "pair_rewards.jsonl").write_text('{"pair_id": ')
    (copied / "metrics.csv").unlink()
    (copied / "doctor.json").write_text("[")
    (copied / "readiness").mkdir()
    (copied / "readiness" / "readiness.json").write_text("{}")
    missing = text_of(run_document(copied).html()).partition("<h2>Missing</h2>")[2]
    for name in ("metrics.csv is missing", "pair_rewards.jsonl is missing or damaged", "doctor.json is damaged"):
        assert name in missing
    assert "readiness.json is damaged" in missing
    assert f"rm-opt analyze {copied} --type hessian" in missing


@pytest.mark.parametrize(("result", "is_fixed"), [pytest.param(SLICE, False, marks=pytest.mark.slow), (SURFACE, True)])
def test_an_analysis_is_drawn_from_its_stored_result(copied: Path, result: Slice | Surface, *, is_fixed: bool):
    kind = "surface" if is_fixed else "slices"
    folder = copied / "landscape" / f"{kind}-2"
    folder.mkdir(parents=True)
    (folder / f"{kind}.json").write_text(result.to_json())
    page = write_page(copied).read_text(encoding="utf-8").partition("<h2>Loss landscape</h2>")[2]
    assert re.findall(r'<svg class="(drawing[^"]*)"', page)[0] == ("drawing fixed" if is_fixed else "drawing")
    assert f"({kind}-2)</figcaption>" in page
    assert f"Numbers of {kind}-2" in page
    with (copied / "report" / f"landscape_{kind}-2_{kind}.csv").open(encoding="utf-8", newline="") as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == [row["loss"] for row in result.rows()]


def test_an_ensemble_of_the_run_shows_its_members_and_where_they_agree(copied: Path):
    other = shutil.copytree(copied, copied.parent / "other")
    reference = EnsembleReference((0.0, 1.5), (1.0, 2.0), 0.25, 0.05, 40)
    for folder in (copied / "ensemble", other / "ensemble"):
        save_ensemble(folder, [str(copied), str(other)], reference)
    rows = [json.loads(line) for line in (other / "pair_rewards.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows[:20]:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    (other / "pair_rewards.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = text_of(write_page(copied).read_text(encoding="utf-8"))
    tied = sum(row["chosen"] == row["rejected"] for row in rows[:20])
    assert f"All 2 members order {40 + tied} of the 60 validation pairs in the same way." in page
    assert "spread by more than 0.250: at most 5% of responses" in page
    assert (copied / "report" / "ensemble.csv").read_text().splitlines()[1].startswith("this run,")
    (copied / "ensemble" / "ensemble.json").write_text("{")
    assert "ensemble: ensemble.json is damaged" in run_document(copied).html()


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("metrics.csv", b"step,train_loss\n0,abc\n", "metrics.csv is damaged"),
        ("metrics.csv", b"step,train_loss\n\xff,1\n", "metrics.csv is damaged"),
        ("metrics.csv", b"step,eval_loss,eval_acc\n0,0.7,0.5\n", "metrics.csv ends at step 0 of 2"),
        ("pair_rewards.jsonl", b"", "pair_rewards.jsonl holds 0 of 60 pairs"),
        ("pair_rewards.jsonl", None, "pair_rewards.jsonl holds 1 of 60 pairs"),
        ("landscape/slices/slices.json", b"{", "landscape/slices/slices.json is damaged"),
        ("landscape/hessian/lanczos.json", b"{}", "hessian has no result yet"),
    ],
)
def test_a_file_cut_short_or_damaged_is_named(copied: Path, file: str, content: bytes | None, expected: str):
    damaged = copied / file
    damaged.parent.mkdir(parents=True, exist_ok=True)
    damaged.write_bytes(damaged.read_bytes().splitlines()[0] if content is None else content)
    shown = run_document(copied).html()
    assert expected in text_of(shown).partition("<h2>Missing</h2>")[2]


@pytest.mark.parametrize("result", [None, "{"])
def test_a_folder_without_a_finished_run_is_refused(copied: Path, result: str | None):
    if result is None:
        (copied / "run.json").unlink()
    else:
        (copied / "run.json").write_text(result)
    with pytest.raises(DataError, match=r"holds a run that has no result yet \(run\.json is missing or damaged\)"):
        write_page(copied)
    assert not (copied / "report").exists()


def test_the_command_writes_a_page_or_prints_markdown(copied: Path, tmp_path: Path):
    done = CliRunner().invoke(app, ["report", str(copied), "--output", str(tmp_path / "page")])
    assert (done.exit_code, done.stdout.startswith("page: ")) == (0, True), done.output
    assert (tmp_path / "page" / "index.html").read_text(encoding="utf-8").endswith("</html>\n")
    done = CliRunner().invoke(app, ["report", str(copied), "--format", "md"])
    assert "## Known weaknesses" in done.stdout
    assert "secret_place" not in done.stdout
    refused = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (refused.exit_code, "holds no run" in refused.stderr) == (2, True)
    (tmp_path / "plan.json").write_text("{}")
    refused = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (refused.exit_code, "plan.json is damaged" in refused.stderr) == (2, True)


@NEEDS_BROWSER
def test_nothing_overflows_on_phone_or_wide_screen_and_the_console_stays_empty(trained: Path, tmp_path: Path):
    page = write_page(trained, tmp_path)
    assert_sound(page)
    with opened_browser() as browser:
        browser.open(page.as_uri())
        assert "Each source, the largest first" in browser.names()


@NEEDS_AXE
def test_the_page_of_a_run_is_accessible(copied: Path, tmp_path: Path):
    for name, result in (("slices", SLICE), ("surface", SURFACE)):
        (copied / "landscape" / name).mkdir(parents=True)
        (copied / "landscape" / name / f"{name}.json").write_text(result.to_json())
    assert_accessible(write_page(copied, tmp_path))


@NEEDS_BROWSER
def test_a_long_name_leaves_room_for_the_numbers(tmp_path: Path):
    file = tmp_path / "index.html"
    file.write_text(page("Long", [table("Names", ("name", "value"), [("x" * 300, "1"), ("y", "2")])]), encoding="utf-8")
    with opened_browser() as browser:
        browser.screen(1280, 900, "light")
        browser.open(file.as_uri())
        assert browser.run("return document.querySelector('table').scrollWidth") <= 1000


@NEEDS_BROWSER
def test_a_long_path_in_a_sentence_breaks_on_a_phone(tmp_path: Path):
    path = "model.path=/" + "a_folder/" * 20
    file = tmp_path / "index.html"
    file.write_text(page("Long", [answer("open", path, path), paragraph(path), bullets([path])]), encoding="utf-8")
    with opened_browser() as browser:
        browser.screen(390, 900, "light")
        browser.open(file.as_uri())
        assert browser.run("return document.documentElement.scrollWidth") <= 390
