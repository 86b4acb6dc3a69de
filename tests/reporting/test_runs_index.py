"""The index of a folder of runs: what it lists, how fast, and that it shows nothing else to nobody else."""

import http.client
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rm_optimizer.experiments.study import planned_trial, publish
from rm_optimizer.interfaces.cli import app
from rm_optimizer.reporting.runs_index.index_page import as_address, as_name, sparkline
from rm_optimizer.reporting.runs_index.index_server import IndexServer
from rm_optimizer.reporting.runs_index.listing import DEEPEST, Listing
from tests.browser import NEEDS_AXE, NEEDS_BROWSER, SCREENS, opened_browser

NAMED = "a b#?%2F<i>"
ROWS = "return [...document.querySelectorAll('tbody tr')].filter(r => !r.hidden).map(r => r.cells[0].textContent)"


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    """Three runs, of which one has no result, and a study."""
    root = tmp_path / "runs"
    for place, (name, accuracy) in enumerate({NAMED: 0.7, "sweep/first": 0.6, "sweep/going": 0.5}.items()):
        run = shutil.copytree(trained, root / name, ignore=shutil.ignore_patterns("checkpoints", "best", "plots"))
        result = json.loads((run / "run.json").read_text())
        result["metrics"]["accuracy"] = {**result["metrics"]["accuracy"], "value": accuracy}
        result["seed"] = 10 - place
        (run / "run.json").write_text(json.dumps(result))
        os.utime(run / "run.json", (1e9 + place, 1e9 + place))
    (root / "sweep" / "going" / "run.json").unlink()
    publish(root / "study", "rm_optimizer.experiments.training_trial:measure", [planned_trial("one", {"number": 1})])
    return root


@contextmanager
def served(root: Path) -> Iterator[IndexServer]:
    with IndexServer(root) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def fetched(server: IndexServer, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_runs_and_studies_are_listed_with_their_numbers(runs: Path):
    listed = {entry.name: entry for entry in Listing(runs).look()}
    assert set(listed) == {NAMED, "sweep/first", "sweep/going", "study"}
    assert (listed[NAMED].accuracy.value, listed[NAMED].seed, listed[NAMED].state) == (0.7, 10, "finished")
    assert listed["sweep/going"].state == "no result, step 2"
    (runs / "sweep/going/diverged.json").write_text('{"error": "the loss became nan"}')
    assert next(entry for entry in Listing(runs).look() if entry.name == "sweep/going").state == "diverged, step 2"
    assert (listed["study"].is_run, listed["study"].state) == (False, "study, 0 of 1 trials")


def test_a_torn_result_a_collapsed_run_links_and_deep_folders_are_said(runs: Path):
    result = json.loads((runs / "sweep" / "first" / "run.json").read_text())
    result["metrics"]["collapse"]["collapsed"] = True
    (runs / "sweep" / "first" / "run.json").write_text(json.dumps(result))
    (runs / NAMED / "run.json").write_text("[")
    (runs / "link").symlink_to(runs / "sweep")
    (runs / "/".join("abcdefg"[: DEEPEST + 1])).mkdir(parents=True)
    listing = Listing(runs)
    listed = {entry.name: entry.state for entry in listing.look()}
    assert listed[NAMED] == "run.json is torn"
    assert listed["sweep/first"] == "finished, collapsed"
    assert listing.num_passed == 2
    (runs / NAMED / "run.json").write_text(json.dumps(result))
    assert {entry.name: entry.state for entry in listing.look()}[NAMED] == "finished, collapsed"


def test_a_sparkline_draws_the_evaluations(runs: Path, tmp_path: Path):
    assert "<polyline" in sparkline(runs / NAMED)
    (tmp_path / "metrics.csv").write_text("step,eval_loss\n0,0.7\n1,\n2,nan\n3,x\n")
    assert "<polyline" not in sparkline(tmp_path)
    assert "<polyline" not in sparkline(tmp_path / "gone")


@pytest.mark.parametrize("name", ["", NAMED, "sweep/first", "ä/β", os.fsdecode(b"\xff/x")])
def test_a_name_comes_back_from_its_address(name: str):
    assert "/" not in as_address(name)
    assert as_name(as_address(name)) == name


def test_only_the_address_with_its_token_is_answered_and_only_listed_folders(runs: Path):
    (runs.parent / "outside").mkdir()
    shutil.copytree(runs / NAMED, runs.parent / "outside" / "run")
    (runs / "linked").symlink_to(runs.parent / "outside" / "run")
    with served(runs) as server:
        token = server.token
        assert server.server_address[0] == "127.0.0.1"
        status, index = fetched(server, f"/{token}/")
        assert (status, "a b#?%2F&lt;i&gt;" in index, "<i>" in index) == (200, True, False)
        status, page = fetched(server, f"/{token}/folder/{as_address(NAMED)}/")
        assert (status, "All runs and studies" in page, "Learning curves" in page) == (200, True, True)
        assert fetched(server, f"/{token}/folder/{as_address('sweep/first')}/loss.svg")[1].startswith("<svg")
        assert "There is no page" in fetched(server, f"/{token}/folder/{as_address('sweep/going')}/")[1]
        for name in ("linked", "../outside/run", "..", str(runs / NAMED), "sweep"):
            assert fetched(server, f"/{token}/folder/{as_address(name)}/")[0] == 404
        for path in (
            "/",
            "/wrong/",
            f"/{token}",
            f"/{token}/../",
            f"/{token}/folder/{NAMED[:3].replace(' ', '')}/run.json",
        ):
            assert fetched(server, path)[0] in (403, 404)
        assert fetched(server, f"/{token}/", Host="evil.example")[0] == 403
        assert fetched(server, f"/{token}/", Origin="http://evil.example")[0] == 403
    assert not (runs / NAMED / "report").exists()


def test_a_thousand_runs_are_listed_in_about_a_second(runs: Path, tmp_path: Path):
    """A generous bound for machines under load; benchmarks/runs_index.py measures it."""
    many = tmp_path / "many"
    text = (runs / NAMED / "run.json").read_text()
    for number in range(1000):
        run = many / f"{number:04d}"
        run.mkdir(parents=True)
        (run / "run.json").write_text(text)
    with IndexServer(many) as server:
        before = time.process_time()
        page = server.index()
        assert time.process_time() - before < 3
        assert page.count("<tr>") == 1001


def test_the_command_refuses_what_it_cannot_list(tmp_path: Path):
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "gone"), "--serve"])
    assert (refused.exit_code, "is no folder" in refused.stderr) == (2, True)
    refused = CliRunner().invoke(app, ["report", str(tmp_path), "--serve", "--format", "md"])
    assert (refused.exit_code, "--serve writes no file" in refused.stderr) == (2, True)


@NEEDS_BROWSER
def test_the_index_sorts_filters_and_links_in_a_browser(runs: Path):
    with served(runs) as server, opened_browser() as browser:
        browser.open(server.url)
        newest_first = ["study", "sweep/going", "sweep/first", NAMED]
        assert browser.run(ROWS) in (newest_first, [*newest_first[1:2], "study", *newest_first[2:]])
        browser.run("document.querySelectorAll('thead button')[5].click()")
        assert browser.run(ROWS)[:2] == ["sweep/first", NAMED]
        browser.run("document.querySelectorAll('thead button')[5].click()")
        assert browser.run(ROWS)[:2] == [NAMED, "sweep/first"]
        assert browser.run("return document.querySelectorAll('thead th')[5].getAttribute('aria-sort')") == "descending"
        choose = (
            "const f = document.getElementById('filter'); f.value = 'sweep FIN'; f.dispatchEvent(new Event('input'))"
        )
        browser.run(choose)
        assert browser.run(ROWS) == ["sweep/first"]
        assert browser.run("return document.getElementById('count').textContent") == "1 of 4"
        browser.wait("return [...document.images].some(i => i.complete && i.naturalWidth > 0)", True)
        for width, scheme in SCREENS:
            browser.screen(width, 900, scheme)
            browser.open(server.url)
            assert browser.run("return document.documentElement.scrollWidth") <= width
        browser.run("document.querySelector('tbody tr:last-child a').click()")
        browser.wait("return document.title.startsWith('tiny, adamw')", True)
        browser.run("document.querySelector('main a').click()")
        browser.wait("return document.title.startsWith('Runs and studies in')", True)
        assert browser.errors() == []


@NEEDS_AXE
def test_the_index_is_accessible(runs: Path):
    with served(runs) as server, opened_browser() as browser:
        for width, scheme in ((390, "light"), (1280, "dark")):
            browser.screen(width, 900, scheme)
            browser.open(server.url)
            assert browser.violations() == []
