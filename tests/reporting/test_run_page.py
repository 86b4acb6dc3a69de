"""The page of a run: one file, the same bytes for the same folder, a word for every piece that is missing."""

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rm_optimizer.errors import DataError
from rm_optimizer.interfaces.cli import app
from rm_optimizer.reporting.pages.run_page import run_page, write_run_page
from tests.browser import IS_INSTALLED, opened_browser


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "best"))


def text_of(page: str) -> str:
    """The page without its pictures."""
    return re.sub(r"base64,[^\"]*", "", page)


def test_the_same_folder_gives_the_same_bytes(trained: Path, copied: Path) -> None:
    assert run_page(trained) == run_page(trained)
    assert len(run_page(trained)) < 2_000_000
    assert "Accuracy" in text_of(run_page(copied))


def test_nothing_is_loaded_from_elsewhere_and_no_text_of_the_data_becomes_markup(trained: Path) -> None:
    page = text_of(run_page(trained))
    assert "http" not in page
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    images = re.findall(r"<img ([^>]*)>", page)
    assert len(images) >= 4
    assert all(re.match(r'alt="[^"]{10,}" src="data:image', image) for image in images)


def test_the_command_of_the_run_stands_on_its_page(trained: Path) -> None:
    assert "rm-opt train model=tiny optimizer=adamw schedule=cosine hardware=cpu" in run_page(trained)
    assert "training.max_steps=2" in run_page(trained)


def test_missing_and_torn_pieces_are_named(copied: Path) -> None:
    (copied / "pair_rewards.jsonl").write_text('{"pair_id": ')
    (copied / "metrics.csv").unlink()
    (copied / "doctor.json").write_text("[")
    (copied / "readiness").mkdir()
    (copied / "readiness" / "readiness.json").write_text("{}")
    missing = text_of(run_page(copied)).partition("<h2>Missing</h2>")[2]
    for name in ("metrics.csv is missing", "pair_rewards.jsonl is missing or torn", "doctor.json is torn"):
        assert name in missing
    assert "readiness.json is torn" in missing
    assert "rm-opt analyze" in missing


@pytest.mark.parametrize("result", [None, "{"])
def test_a_folder_without_a_finished_run_is_refused(copied: Path, result: str | None) -> None:
    if result is None:
        (copied / "run.json").unlink()
    else:
        (copied / "run.json").write_text(result)
    with pytest.raises(DataError, match=r"holds a run that has no result yet \(run\.json is missing or torn\)"):
        write_run_page(copied)
    assert not (copied / "report").exists()


def test_the_command_writes_a_page_or_prints_markdown(copied: Path, tmp_path: Path) -> None:
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
    assert (refused.exit_code, "rm-opt compare report" in refused.stderr) == (2, True)


@pytest.mark.skipif(not IS_INSTALLED, reason="needs chromium and chromedriver (apt-get install chromium-driver)")
def test_nothing_overflows_on_phone_or_wide_screen_and_the_console_stays_empty(trained: Path, tmp_path: Path) -> None:
    page = write_run_page(trained, tmp_path)
    loaded = "return performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length"
    with opened_browser() as browser:
        for width, scheme in ((390, "light"), (390, "dark"), (1280, "light"), (1920, "dark")):
            browser.screen(width, 900, scheme)
            browser.open(page.as_uri())
            assert browser.run("return document.documentElement.scrollWidth") <= width
            assert browser.run("return [...document.images].every(i => i.complete && i.naturalWidth > 0)")
            assert browser.run(loaded) == 0
        assert "Each source, the largest first" in browser.names()
        assert browser.errors() == []
