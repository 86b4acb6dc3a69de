"""The labeling page's answers: on the disk at once, for one process, and for its own page alone."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import signal
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from typer.testing import CliRunner

from rm_optimizer import PreferencePair
from rm_optimizer.data_efficiency.labeling_page import PageServer, open_answer_log
from rm_optimizer.data_efficiency.questions import questions_of, read_answers, read_questions, write_questions
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.interfaces.cli import app

PAIRS = [PreferencePair(f"ask {n}", f"good {n}", f"bad {n}", label=0.5) for n in range(6)]


@pytest.fixture
def ask(tmp_path):
    path = tmp_path / "ask.csv"
    write_questions(questions_of(PAIRS, np.arange(6), seed=0), path)
    return path


def opened(path, seed: int = 0):
    return open_answer_log(path, [question for question, _ in read_questions(path)], seed=seed)


def answer(log, word: str):
    question = log.current
    log.answer(question.pair_id, word)
    return question


def test_answers_are_kept_one_by_one_and_read_beside_their_questions(ask):
    with opened(ask) as log:
        shown = [answer(log, word) for word in ("A", "B", "tie", "skip", "A")]
        log.undo()
        assert (log.num_answered, log.current) == (4, shown[4])
    with opened(ask) as log:  # the next process
        assert (log.num_answered, log.current) == (4, shown[4])
        log.undo()
        assert log.current == shown[3]
    found = read_answers(ask)
    assert read_answers(ask.with_suffix(".labels.jsonl")).pairs == found.pairs
    assert [pair.label for pair in found.pairs] == [1.0, 1.0, 0.5]
    assert found.pairs[0].chosen == shown[0].response_a
    assert found.pairs[1].chosen == shown[1].response_b
    assert (found.num_answers, found.num_skipped, found.num_open) == (3, 0, 3)


def test_the_seed_puts_either_response_first_and_the_side_is_measured(ask):
    firsts = set()
    for seed in range(8):
        with opened(ask, seed) as log:
            firsts.add(log.current.response_a)
    assert firsts == {"good 0", "bad 0"}
    with opened(ask) as log:
        assert log.first_share is None
        for word in ("A", "A", "B", "tie", "A"):
            answer(log, word)
        share = log.first_share
    assert (share.value, share.num_samples) == (0.75, 4)
    assert share.low < 0.5 < share.high


def test_what_a_kill_tore_was_never_confirmed(ask):
    with opened(ask) as log:
        answer(log, "A")
    path = ask.with_suffix(".labels.jsonl")
    with path.open("ab") as file:
        file.write(b'{"pair_id": "12')
    assert read_answers(ask).num_answers == 1
    with opened(ask) as log:
        assert log.num_answered == 1
        answer(log, "B")
    assert read_answers(path).num_answers == 2


def test_answers_belong_to_their_questions_and_to_one_process(ask):
    with opened(ask) as log:
        answer(log, "A")
        result = CliRunner().invoke(app, ["label", str(ask)])
        assert result.exit_code == 2
        assert "another process is writing it" in result.stderr
    write_questions(questions_of(PAIRS[1:], np.arange(5), seed=0), ask)
    with pytest.raises(DataError, match="holds the answers to other questions; move it away"), opened(ask):
        pass


def test_answers_in_the_file_itself_are_not_asked_and_change_no_identity(ask):
    with opened(ask) as log:
        first = answer(log, "A")
    answered = {question.pair_id for question, _ in read_questions(ask)[:3]}
    with open_answer_log(ask, [question for question, _ in read_questions(ask)], answered=answered) as log:
        assert (log.num_questions, log.num_answered) == (4, 1)  # the first one stays, since it was answered here
        assert log.current.pair_id not in answered | {first.pair_id}


@pytest.mark.parametrize(("word", "message"), [("C", "label must be one of A, B, tie, skip"), ("", "label must be")])
def test_what_is_no_answer_is_not_kept(ask, word, message):
    with opened(ask) as log:
        with pytest.raises(DataError, match=message):
            answer(log, word)
        with pytest.raises(DataError, match="answered in another window"):
            log.answer("0" * 16, "A")
        with pytest.raises(DataError, match="no answer to take back"):
            log.undo()
    assert not ask.with_suffix(".labels.jsonl").exists()


@contextmanager
def served(path):
    with opened(path) as log, PageServer(log, path.name) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def request(port: int, method: str, path: str, body=None, **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    content = None if body is None else json.dumps(body)
    kind = {} if body is None else {"Content-Type": "application/json"}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, content, kind | names)
    response = connection.getresponse()
    found = response.read()
    connection.close()
    return response, json.loads(found) if response.headers["Content-Type"] == "application/json" else found.decode()


def test_the_page_alone_reads_questions_and_gives_answers(ask):
    with served(ask) as server:
        port, token = server.server_port, server.token
        response, page = request(port, "GET", "/")
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert token not in page
        _, state = request(port, "GET", "/state", X_Label_Token=token)
        given = {"pair_id": state["question"]["pair_id"], "label": "A"}
        own = {"X_Label_Token": token}
        for headers in (
            {},
            {"X_Label_Token": "wrong"},
            own | {"Origin": "https://example.com"},
            own | {"Origin": "null"},
            own | {"Host": "example.com"},
            own | {"Content_Type": "text/plain"},
        ):
            response, found = request(port, "POST", "/answer", given, **headers)
            assert response.status == 403, headers
            assert set(found) == {"error"}
        assert request(port, "GET", "/state")[0].status == 403
        assert server.log.num_answered == 0
        _, found = request(port, "POST", "/answer", given, **own, Origin=f"http://127.0.0.1:{port}")
        assert found["num_answered"] == 1
        response, found = request(port, "POST", "/answer", given, **own)
        assert (response.status, found["num_answered"]) == (409, 1)
        assert "answered in another window" in found["error"]
        assert request(port, "POST", "/undo", {}, **own)[1]["question"] == state["question"]
        with pytest.raises(ConfigError, match=rf"--port {port} cannot be used \(Address already in use\)"):
            PageServer(server.log, "ask.csv", port)


def _serve(path, address):
    with served(path) as server:
        address.send((server.server_port, server.token))
        signal.pause()


def test_a_confirmed_answer_outlives_a_killed_server(ask):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(ask, there))
    process.start()
    try:
        assert here.poll(30)
        port, token = here.recv()
        _, state = request(port, "GET", "/state", X_Label_Token=token)
        given = {"pair_id": state["question"]["pair_id"], "label": "B"}
        request(port, "POST", "/answer", given, X_Label_Token=token)
    finally:
        process.kill()
        process.join()
    found = read_answers(ask)
    assert [pair.chosen for pair in found.pairs] == [state["question"]["response_b"]]
