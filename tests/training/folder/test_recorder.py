"""`metrics.csv` is complete, append-only and free of clocks."""

from __future__ import annotations

from pathlib import Path

from rm_optimizer.records.run_folder import read_rows
from rm_optimizer.training.loggers import COLUMNS, MetricsCSV


def record(folder: Path, steps: range, resume_step: int | None = None) -> MetricsCSV:
    recorder = MetricsCSV(folder, resume_step)
    for step in steps:
        recorder.log_metrics({"train/loss": 0.1 * step, "train/num_pairs": 4, "epoch": step / 10}, step=step)
        if step % 2 == 0:
            recorder.log_metrics({"val/accuracy": 0.5, "val/num_pairs": 9}, step=step)
    return recorder


def test_one_row_a_step_holds_both_stages(tmp_path: Path):
    record(tmp_path, range(1, 5)).finalize("success")
    rows = read_rows(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["eval_acc"] for row in rows] == ["", "0.5", "", "0.5"]
    assert rows[1]["eval_pairs"] == "9"
    assert float(rows[2]["train_loss"]) == 0.1 * 3
    assert list(rows[0]) == ["step", "epoch", *COLUMNS.values()]


def test_save_brings_the_present_step_to_disk(tmp_path: Path):
    recorder = record(tmp_path, range(1, 4))
    recorder.save()
    assert len(read_rows(tmp_path / "metrics.csv")) == 3
    recorder.finalize("success")


def test_resuming_drops_rows_after_the_checkpoint_and_gives_the_uninterrupted_bytes(tmp_path: Path):
    record(tmp_path / "whole", range(1, 9)).finalize("success")
    record(tmp_path / "cut", range(1, 7)).finalize("failed")
    with (tmp_path / "cut" / "metrics.csv").open("a") as file:
        file.write("7,0.7,torn")
    record(tmp_path / "cut", range(5, 9), resume_step=4).finalize("success")
    assert (tmp_path / "cut" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()


def test_a_new_run_replaces_an_old_file(tmp_path: Path):
    record(tmp_path, range(1, 9)).finalize("success")
    record(tmp_path, range(1, 3)).finalize("success")
    assert len(read_rows(tmp_path / "metrics.csv")) == 2


def test_what_a_saved_step_logs_later_joins_its_row(tmp_path: Path):
    recorder = MetricsCSV(tmp_path)
    for step in (1, 2):
        recorder.log_metrics({"train/loss": 0.5}, step=step)
        recorder.save()
        recorder.save()
        recorder.log_metrics({"val/accuracy": 0.5 + step / 10}, step=step)
    recorder.finalize("success")
    rows = read_rows(tmp_path / "metrics.csv")
    assert [(row["step"], row["train_loss"], row["eval_acc"]) for row in rows] == [
        ("1", "0.5", "0.6"),
        ("2", "0.5", "0.7"),
    ]


def test_resuming_with_other_columns_keeps_both(tmp_path: Path):
    first = MetricsCSV(tmp_path, None, {"a/x": "x"})
    first.log_metrics({"a/x": 1.0}, step=1)
    first.finalize("success")
    second = MetricsCSV(tmp_path, 1, {"a/num_pairs": "num_pairs"})
    second.log_metrics({"a/num_pairs": 2.0, "b/other": 3.0}, step=2)
    second.log_metrics({"b/other": 3.0}, step=3)
    second.finalize("success")
    assert (tmp_path / "metrics.csv").read_text() == "step,epoch,x,num_pairs\n1,,1.0,\n2,,,2\n"
