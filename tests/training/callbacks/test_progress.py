"""Lines of progress where no terminal shows a bar."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import loggers, train_reward_model
from rm_optimizer.training.loggers import ProgressLines


def test_a_line_comes_at_most_once_a_minute(caplog: pytest.LogCaptureFixture):
    now = 0.0
    lines = ProgressLines(clock=lambda: now)
    with caplog.at_level(logging.INFO, "rm_optimizer"):
        for now in (1.0, 59.0, 60.5, 61.0, 119.0, 121.0):
            lines.evaluated(500, int(now))
    assert [record.message for record in caplog.records] == [
        "evaluation: 60 of 500 pairs",
        "evaluation: 121 of 500 pairs",
    ]


def test_without_a_terminal_a_run_logs_steps_evaluations_and_where_its_metrics_are(
    small_config: Callable[..., TrainConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr("rm_optimizer.training.fitting.ProgressLines", lambda: ProgressLines(seconds=0.0))
    with caplog.at_level(logging.INFO, "rm_optimizer"):
        train_reward_model(small_config(tmp_path, "training.progress=true", "training.max_steps=2"))
    assert f"the metrics of every step are in {tmp_path}/metrics.csv" in caplog.text
    assert "step 1 of 2: loss 0." in caplog.text
    assert "pairs/s" in caplog.text
    assert "evaluation: 33 of 33 pairs" in caplog.text


@pytest.mark.parametrize("has_widgets", [True, False])
def test_a_notebook_has_a_bar_only_with_the_widgets_that_draw_it(monkeypatch: pytest.MonkeyPatch, has_widgets: bool):
    monkeypatch.setattr(loggers, "Console", lambda: SimpleNamespace(is_terminal=False, is_jupyter=True))
    monkeypatch.setattr(loggers, "find_spec", lambda name: object() if has_widgets else None)
    assert loggers.shows_bars() is has_widgets
