"""Readiness as table, picture and page: everything is there, escaped, and needs no other file."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.doctor.diagnosis import Check, Status
from rm_optimizer.records.files import write_text
from rm_optimizer.reporting.readiness import plot_readiness, print_readiness, readiness_page
from rm_optimizer.rl_coupling.readiness.report import (
    Algorithm,
    ProbeRecord,
    ReadinessSample,
    ReadinessVerdict,
    RLReadinessReport,
)
from rm_optimizer.rl_coupling.rl_readiness import RLReadinessScorer
from tests.browser import NEEDS_AXE, NEEDS_BROWSER, assert_accessible, assert_sound

PROBE = ProbeRecord(64, Estimate(0.91, 0.02, 64, 0.84, 0.95), 128, 120, 8, 256, "the interval is within ±0.05")
REPORT = RLReadinessReport(
    verdict=ReadinessVerdict.acceptable,
    score=Estimate(1.2, 0.3, 64, 0.6, 1.8),
    basis="predicted gold gain: 1.20 sd, above the median of the study's reward models",
    features={
        "accuracy": Estimate(0.75, 0.01, 900, 0.73, 0.77),
        "probe_64": PROBE.win_rate,
        "nll": Estimate(0.5, None, 900),
        "style_flips": Estimate(0.1, 0.01, 200, 0.08, 0.12),
        "style_flips_edit_bold": Estimate(0.2, 0.01, 200, 0.1, 0.3),
    },
    components={"probe_64": 0.4},
    recommendations=("watch <it> & stop early",),
    cautions=("the score is validated on synthetic gold-reward worlds with tiny policies",),
    algorithm=Algorithm.rloo_kl,
    gates=(
        Check("padding", Status.ok, 0.0, "", "0", "fine"),
        Check("dropout", Status.fail, 1.0, "", "0", "dropout is on"),
    ),
    probes=(PROBE,),
    unscored={"temperature": Estimate(1.1, None, 900)},
    sample=ReadinessSample(900, 64, 64, 376, "ab", "cd", 0, 12.0),
)
WORDS = (
    "model's pick of 64 preferred",
    "0.910 [0.840, 0.950]",
    "+0.40",
    "accuracy on labeled pairs",
    "temperature that calibrates",
    "128 of at most 256 questions, 120 answers, 8 left open",
    "900 labeled pairs, 64 prompts with 64 responses each, 376 comparisons by the oracle",
    "dropout is on",
    "acceptable with monitoring",
    "tiny policies",
)


class Text(HTMLParser):
    """Words of a page, the tags that were opened and closed, and the addresses that it loads."""

    def __init__(self, page):
        super().__init__()
        self.words, self.open, self.loaded = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "line", "circle"):
            self.open.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href") and not value.startswith("data:")]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.parametrize("words", WORDS)
def test_table_and_page_hold_every_number_and_reason(words):
    stream = io.StringIO()
    print_readiness(REPORT, "Readiness of m", Console(file=stream, width=250))
    assert words in stream.getvalue()
    assert words.lower() in re.sub(r"\s+", " ", "".join(Text(readiness_page(REPORT, "m")).words)).lower()


def test_page_is_whole_escaped_and_alone():
    page = readiness_page(REPORT, "<b>run</b>")
    text = Text(page)
    assert text.open == []
    assert text.loaded == []
    assert "&lt;b&gt;run&lt;/b&gt;" in page
    assert "<it>" not in page
    assert "http" not in page
    assert page == readiness_page(REPORT, "<b>run</b>")


@pytest.mark.parametrize("verdict", list(ReadinessVerdict))
def test_every_verdict_has_its_answer_and_picture(verdict):
    report = replace(REPORT, verdict=verdict)
    assert f"Verdict: {verdict}." in readiness_page(report, "m")
    assert plot_readiness(report).axes[0].get_title(loc="left").startswith(f"Readiness for rloo_kl: {verdict}")


def test_picture_has_a_dot_for_every_share_and_stays_in_its_frame():
    figure = plot_readiness(REPORT)
    (axes,) = figure.axes
    titles = [label.get_text() for label in axes.get_yticklabels()]
    assert titles == ["preferences turned by style", "accuracy on labeled pairs", "model's pick of 64 preferred"]
    figure.canvas.draw()
    width = figure.bbox.width
    assert all(text.get_window_extent().x1 <= width for text in (axes.texts[0], axes.title))


def test_a_report_of_given_numbers_and_an_empty_one_are_drawn_too():
    given = RLReadinessScorer().compute_score(0.87, 0.05, 1.2, 150)
    assert "0.87" in readiness_page(given, "m")
    plot_readiness(given)
    plot_readiness(replace(REPORT, features={}, unscored={}, probes=()))


@NEEDS_BROWSER
def test_the_page_fits_each_screen_and_loads_nothing(tmp_path):
    assert_sound(write_text(tmp_path / "readiness.html", readiness_page(REPORT, "m")))


@NEEDS_AXE
def test_the_page_is_accessible(tmp_path):
    assert_accessible(write_text(tmp_path / "readiness.html", readiness_page(REPORT, "m")))
