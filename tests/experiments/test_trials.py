"""A trial is measured once, whole or not at all, in a folder that its options name."""

from __future__ import annotations

from pathlib import Path

import pytest

from rm_optimizer.experiments.trials import run_trial, trial_folder

SPEC = {"optimizer": {"name": "muon", "lr": 3e-4}, "seed": 0, "path": Path("data/pairs.parquet")}


def test_a_finished_trial_is_read_not_measured_again(tmp_path):
    def measure(folder: Path) -> dict[str, float]:
        folder.mkdir(parents=True)
        (folder / "weights").write_text("1")
        return {"accuracy": 0.7}

    first = run_trial(tmp_path, SPEC, measure)
    again = run_trial(tmp_path, SPEC, lambda folder: pytest.fail("measured again"))
    assert again == first
    assert first.result == {"accuracy": 0.7}
    assert (first.folder / "weights").is_file()


def test_a_trial_that_fails_leaves_no_result_and_begins_anew(tmp_path):
    def killed(folder: Path) -> dict[str, float]:
        folder.mkdir(parents=True)
        (folder / "half").write_text("1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trial(tmp_path, SPEC, killed)
    seen = []
    trial = run_trial(tmp_path, SPEC, lambda folder: seen.append(folder.exists()) or {"accuracy": 0.5})
    assert (seen, trial.result) == ([False], {"accuracy": 0.5})
    assert [file.name for file in trial.folder.iterdir()] == ["result.json"]


def test_the_folder_is_named_by_the_options_whatever_their_order(tmp_path):
    assert trial_folder(tmp_path, dict(reversed(SPEC.items()))) == trial_folder(tmp_path, SPEC)
    others = [SPEC | {"seed": 1}, SPEC | {"optimizer": {"name": "muon", "lr": 1e-3}}, SPEC | {"path": Path("b")}]
    assert len({trial_folder(tmp_path, spec) for spec in (SPEC, *others)}) == 4
