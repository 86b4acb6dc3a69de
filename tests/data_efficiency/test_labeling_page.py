"""The labeling page in a real browser: keys, undo, hostile and long texts, small screens, a server that is gone."""

from __future__ import annotations

import numpy as np
import pytest

from rm_optimizer import Message, PreferencePair
from rm_optimizer.data_efficiency.labeling_page import open_answer_log
from rm_optimizer.data_efficiency.questions import questions_of, read_answers, read_questions, write_questions
from tests.browser import IS_INSTALLED, opened_browser
from tests.data_efficiency.test_labeling import served

pytestmark = pytest.mark.skipif(
    not IS_INSTALLED, reason="needs chromium and chromedriver (apt-get install chromium-driver)"
)

HOSTILE = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
LONG = "A long line without end, " * 400
TALK = (Message("user", "Hi there"), Message("assistant", "Hello!"), Message("user", f"And this? {HOSTILE}"))
PAIRS = [
    PreferencePair(TALK, HOSTILE, "plain", label=0.5),
    PreferencePair("Explain & justify", LONG, "w" * 3000, label=0.5),
    *(PreferencePair(f"ask {n}", f"good {n}", f"bad {n}", label=0.5) for n in range(3)),
]
DONE = "return document.getElementById('progress').value"
STATUS = "return document.getElementById('status').textContent"


@pytest.fixture(scope="module")
def browser():
    with opened_browser() as found:
        yield found


@pytest.fixture
def ask(tmp_path):
    path = tmp_path / "to_label.csv"
    write_questions(questions_of(PAIRS, np.arange(len(PAIRS)), seed=0), path)
    return path


def shown(browser, part: str) -> str:
    return browser.run(f"return document.getElementById('{part}').textContent")


def test_a_person_answers_by_keyboard_takes_back_and_finishes(browser, ask):
    with served(ask) as server:
        browser.screen(1280, 800, "light")
        browser.open(server.url)
        browser.wait("return document.getElementById('count').textContent", "0 of 5")
        first = server.log.current
        assert (shown(browser, "a"), shown(browser, "b")) == (first.response_a, first.response_b)
        assert HOSTILE in shown(browser, "prompt")
        assert browser.run("return document.title") == "Label pairs"
        for number, key in enumerate("atbs", start=1):
            browser.keys(key)
            browser.wait(DONE, number)
        browser.keys("u")
        browser.wait(DONE, 3)
        assert browser.run(STATUS) == "Taken back"
        browser.run("document.querySelector('[data-answer=B]').click()")
        browser.wait(DONE, 4)
        browser.keys("a")
        browser.wait("return document.getElementById('message').hidden", False)
        assert "every answer is saved" in shown(browser, "message")
        assert browser.errors() == []
    found = read_answers(ask)
    assert (found.num_answers, found.num_skipped, found.pairs[0].chosen) == (5, 0, first.response_a)


def test_names_long_texts_and_small_screens(browser, ask):
    with served(ask) as server:
        server.log.answer(server.log.current.pair_id, "skip")
        for width, height, scheme in ((390, 844, "dark"), (1280, 800, "light")):
            browser.screen(width, height, scheme)
            browser.open("about:blank")
            browser.open(server.url)
            browser.wait(DONE, 1)
            assert browser.run("return document.documentElement.scrollWidth") <= width
            for part in ("a", "b"):
                size = browser.run(
                    f"const e = document.getElementById('{part}'); return [e.scrollHeight, e.clientHeight]"
                )
                assert size[1] <= 0.5 * height + 1
            is_seen = (
                "const r = document.getElementById('choices').getBoundingClientRect(); return r.bottom <= innerHeight"
            )
            assert browser.run(is_seen)
        names = [
            "Answered questions",
            "Prompt",
            "Response A",
            "Response B",
            "A is better",
            "Tie",
            "B is better",
            "Skip",
        ]
        assert browser.names() == [*names, "Undo the last answer"]


def test_an_answer_without_a_server_is_said_and_asked_again(browser, ask):
    with served(ask) as server:
        browser.open(server.url)
        browser.wait("return document.getElementById('a').textContent !== ''", True)
        before = shown(browser, "a")
        server.socket.close()
        server.shutdown()
        server.server_close()
        refused = "() => Promise.reject(new TypeError('Failed to fetch'))"
        browser.run(f"window.fetch = {refused}")  # the port may be another's by now
        browser.keys("a")
        browser.wait("return document.getElementById('status').classList.contains('bad')", True)
        assert browser.run(STATUS).startswith("Not saved")
        assert (shown(browser, "a"), browser.run(DONE)) == (before, 0)
    with open_answer_log(ask, [question for question, _ in read_questions(ask)]) as log:
        assert log.num_answered == 0
