"""Each trial of a study is measured once, whatever is killed; failures are told apart from results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from rm_optimizer.errors import ConfigError, Interrupted
from rm_optimizer.experiments import cost, trial
from rm_optimizer.experiments.study import PLAN_FILE, Study, StudyPlan, planned_trial, publish
from rm_optimizer.experiments.training_trials import config_of, train, training_trial
from rm_optimizer.experiments.trial import InlineExecutor, ProcessExecutor, RayExecutor
from rm_optimizer.interfaces.cli import app
from rm_optimizer.records.provenance import num_cores
from rm_optimizer.records.run_options import options_of
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS
from tests.builders import beside_world
from tests.logged import wandb_records
from tests.training.conftest import SMALL

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's task, here and in the processes of trials."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(BENCHMARKS), str(BENCHMARKS.parent)]))


def study_of(folder: Path, *numbers: int, task: str = "study_faults:measure") -> Study:
    publish(folder, task, [planned_trial(f"n={n}", {"number": n, "seconds": 0.0}) for n in numbers])
    return Study(folder)


def outcomes(study: Study) -> dict[str, object]:
    return {row["label"]: (row["state"], row.get("value")) for row in study.rows()}


def test_a_plan_is_fixed(tmp_path):
    study = study_of(tmp_path, 1, 2)
    assert publish(tmp_path, "study_faults:measure", study.plan.trials[::-1]) == study.plan
    with pytest.raises(ConfigError, match="holds another study, of 2 trials"):
        study_of(tmp_path, 1, 2, 3)
    more = [*study.plan.trials, planned_trial("n=3", {"number": 3, "seconds": 0.0})]
    assert [trial.label for trial in publish(tmp_path, study.plan.task, more, extends=True).trials] == [
        "n=1",
        "n=2",
        "n=3",
    ]
    with pytest.raises(ConfigError, match="two trials have the same options: 'n=1' and 'n=1'"):
        study_of(tmp_path / "twice", 1, 1)


def test_a_folder_without_a_whole_plan_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no study"):
        StudyPlan.read(tmp_path)
    (tmp_path / PLAN_FILE).write_text('{"task":')
    with pytest.raises(ConfigError, match="is damaged"):
        StudyPlan.read(tmp_path)


def test_finished_trials_are_read_a_diverged_one_is_a_result_and_an_error_is_repeated(tmp_path):
    study, ended = study_of(tmp_path, 1, 7, 11), []
    state = study.run(InlineExecutor(), on_trial=lambda planned, result: ended.append((planned.label, result)))
    assert state.counts == {"finished": 2, "diverged": 1}
    assert state.is_done
    attempts = {label: result.attempts for label, result in ended}
    assert attempts == {"n=1": 1, "n=7": 1, "n=11": 2}  # 11 met a full disk first
    assert next(result.error for label, result in ended if label == "n=7") == "the loss became nan in step 3"
    again = []
    assert study.run(InlineExecutor(), on_trial=lambda *each: again.append(each)) == state
    assert again == []
    assert not list(tmp_path.glob("trials/*/failure.json"))


def test_a_trial_that_keeps_failing_is_left_until_it_is_retried(tmp_path):
    study = study_of(tmp_path, 1, task="study_faults:nothing")
    state = study.run(InlineExecutor(), retries=2)
    assert state.counts == {"failed": 1}
    (name,) = state.errors
    assert "has no attribute 'nothing'" in state.errors[name]
    failure = json.loads((tmp_path / "trials" / name / "failure.json").read_text())
    assert (failure["attempts"], "Traceback" in failure["traceback"]) == (3, True)
    study.run(InlineExecutor(), retries=2)
    assert json.loads((tmp_path / "trials" / name / "failure.json").read_text()) == failure
    assert study.forget_failures() == 1
    assert study.status().counts == {"waiting": 1}


def test_a_process_that_ends_without_a_word_is_a_failed_attempt(tmp_path, monkeypatch):
    study = study_of(tmp_path, 1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "rm_optimizer.py").write_text("print('its last words', flush=True); raise SystemExit(3)")
    state = study.run(ProcessExecutor(1, 1), retries=1)
    assert state.counts == {"failed": 1}
    (error,) = state.errors.values()
    assert "ended with exit code 3" in error
    assert Path(error.rpartition("is in ")[2]).read_text() == "its last words\n" * 2  # of two attempts


def test_a_trial_of_another_process_is_waited_for_and_one_of_a_dead_process_is_measured(tmp_path):
    study = study_of(tmp_path, 1)
    trial = study.trial(study.plan.trials[0])
    held = f"import fcntl, sys; file = open({str(trial.folder / 'claim')!r}, 'a+'); fcntl.flock(file, fcntl.LOCK_EX)"
    trial.folder.mkdir(parents=True)
    code = f"{held}; print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert study.status().counts == {"running": 1}
        assert [row["state"] for row in study.rows()] == ["running"]
        assert trial.measure() == 75
        holder.kill()
    assert study.status().counts == {"waiting": 1}
    assert study.run(InlineExecutor()).counts == {"finished": 1}
    (trial.folder / "result.json").unlink()
    assert [trial.measure(), trial.measure()] == [0, 0]  # the second finds it finished


def test_processes_give_the_results_of_this_one(tmp_path):
    numbers = (1, 2, 7, 11)
    inline, processes = study_of(tmp_path / "inline", *numbers), study_of(tmp_path / "process", *numbers)
    inline.run(InlineExecutor())
    state = processes.run(ProcessExecutor(2, 1))
    assert state.is_done
    assert outcomes(processes) == outcomes(inline)


@pytest.mark.slow
def test_ray_gives_the_results_of_this_process(tmp_path):
    inline, cluster = study_of(tmp_path / "inline", 1, 7, 11), study_of(tmp_path / "ray", 1, 7, 11)
    inline.run(InlineExecutor())
    assert cluster.run(RayExecutor(threads=1)).is_done
    assert outcomes(cluster) == outcomes(inline)


@pytest.mark.parametrize(
    ("threads", "says"),
    [
        (2, r"a machine with 1 GPU for a trial, and Ray has none; an empty CUDA_VISIBLE_DEVICES lets"),
        (8, r"a machine with 8 cores and 1 GPU for a trial, and Ray has none; a higher --workers"),
    ],
)
def test_the_lacking_resource_of_a_trial_on_ray_is_named(threads: int, says: str, monkeypatch):
    node = {"Alive": True, "Resources": {"CPU": 4.0, **({"GPU": 2.0} if threads == 8 else {})}}
    given: dict[str, int] = {}
    monkeypatch.setattr(
        trial, "connected_ray", lambda address, **local: given.update(local) or SimpleNamespace(nodes=lambda: [node])
    )
    with pytest.raises(ConfigError, match=says):
        RayExecutor(threads, gpus=1.0)
    assert given == {"num_cpus": num_cores()}, "a trial never has more cores than Ray on this machine"


@pytest.mark.slow
def test_two_ray_nodes_share_a_study_and_give_the_results_of_this_process(tmp_path):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    numbers = (1, 2, 3, 7, 11)
    inline, shared = study_of(tmp_path / "inline", *numbers), study_of(tmp_path / "ray", *numbers)
    inline.run(InlineExecutor())
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        executor = RayExecutor(threads=1, address=cluster.address)
        assert executor.slots == 2
        with pytest.raises(ConfigError, match="needs a machine with 2 cores for a trial"):
            RayExecutor(threads=2, address=cluster.address)
        assert shared.run(executor).is_done
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert outcomes(shared) == outcomes(inline)


def test_a_stop_ends_the_driver_and_the_same_call_goes_on(tmp_path, monkeypatch):
    study = study_of(tmp_path, 1, 2, 3)
    import study_faults  # type: ignore[import-not-found]

    measure = study_faults.measure

    def stop(spec, folder):
        if spec["number"] == 2:
            raise KeyboardInterrupt
        return measure(spec, folder)

    monkeypatch.setattr(study_faults, "measure", stop)
    with pytest.raises(Interrupted, match="the same command goes on"):
        study.run(InlineExecutor())
    assert study.status().counts == {"finished": 1, "waiting": 2}
    monkeypatch.setattr(study_faults, "measure", measure)
    assert study.run(InlineExecutor()).is_done


def test_a_damaged_result_is_named(tmp_path):
    study = study_of(tmp_path, 1)
    study.run(InlineExecutor())
    file = study.trial(study.plan.trials[0]).folder / "result.json"
    file.write_text(file.read_text()[:30])
    assert study.status().counts == {"damaged": 1}
    assert "result.json is damaged" in next(iter(study.status().errors.values()))
    with pytest.raises(ConfigError, match=r"result\.json is damaged"):
        study.run(InlineExecutor())


@pytest.mark.slow
def test_random_kills_lose_no_trial_and_repeat_none(capsys):
    import study_faults

    study_faults.main(["--trials", "14", "--seconds", "0.1", "--workers", "2"])
    lines = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert (lines["trials_lost"], lines["trials_repeated"], lines["results_equal"]) == ("0", "0", "True")


@pytest.mark.parametrize("optimizer", OPTIMIZER_OPTIONS)
def test_options_survive_their_plan(optimizer):
    config = typed(
        compose([f"optimizer={optimizer}", "experiment=lora_r16", "model=qwen", "output_dir=."]), TrainConfig
    )
    trial = training_trial("one", config)
    again = config_of(json.loads(json.dumps(trial.spec))["options"])
    assert options_of(again) == options_of(config)
    assert training_trial("two", again).name == trial.name


@pytest.mark.slow
def test_a_study_of_training_runs_is_planned_run_and_reported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> str:
        done = CliRunner().invoke(app, ["compare", *words])
        assert done.exit_code == 0, done.output
        return done.output

    assert "2 trials" in command("plan", "study", *SMALL, "seed=0", "optimizer=adamw,muon", "logger=wandb")
    assert "2 waiting" in command("status", "study")
    assert "[2/2] optimizer=muon: finished" in command("run", "study", "--executor", "inline")
    assert "paired by prompt and seed" in command("report", "study")
    files = {path.name for path in Path("study/report").iterdir()}
    assert files == {"comparison.json", "comparison.parquet", "trials.parquet", "curves.png", "differences.png"}
    assert "failed trials to run again: 0" in command("retry", "study", "--executor", "inline")
    runs = [wandb_records(folder, "run")[0] for folder in Path("study/trials").glob("*/work/run")]
    assert {(run.run_group, run.display_name) for run in runs} == {
        ("study", "optimizer=adamw"),
        ("study", "optimizer=muon"),
    }


def test_a_command_that_is_also_a_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    done = CliRunner().invoke(app, ["compare", "run", "other"])
    assert (done.exit_code, "write ./run for the folder" in done.stderr) == (2, True)


def test_a_trial_is_named_by_its_pairs_and_refuses_others_under_the_same_path(tmp_path):
    lines = [json.dumps({"prompt": f"{i}", "chosen": "a", "rejected": "b"}) + "\n" for i in range(3)]
    first, copy = tmp_path / "pairs.jsonl", tmp_path / "copy.jsonl"
    for path in (first, copy):
        path.write_text("".join(lines))

    def planned(path: Path):
        given = beside_world(SMALL, [f"data.train={path}", "output_dir=unused"])
        return training_trial("one", typed(compose(given), TrainConfig))

    trial = planned(first)
    assert planned(copy).name == trial.name
    first.write_text("".join(lines[:2]))
    assert planned(first).name != trial.name
    with pytest.raises(ConfigError, match=r"data\.train holds other pairs than when the study was planned"):
        train(trial.spec, tmp_path)


def test_steps_are_those_of_a_run_where_their_product_with_the_epochs_is_rounded_up():
    def steps(epochs: float) -> int:
        options = [f"training.epochs={epochs}", "batching.batch_size=8", "output_dir=OUTPUT"]
        return cost.steps_of(typed(compose(options), TrainConfig), 80)

    assert [steps(epochs) for epochs in (1, 1.1, 1.15, 0.01)] == [10, 11, 12, 1]


def test_the_cost_of_a_plan_grows_with_steps_pairs_and_passes(monkeypatch):
    def measured(config: TrainConfig, callbacks: list[Any]) -> None:
        assert config.training.max_steps == 3
        callbacks[0].steps, callbacks[0].steps_per_epoch, callbacks[0].evaluating = [9.0, 2.0, 3.0], 10, 8.0

    monkeypatch.setattr(cost, "run_training", measured)
    base = ["training.epochs=2", "batching.batch_size=8", "training.evals_per_epoch=1", "output_dir=OUTPUT"]

    def hours(*more: str) -> float:
        configs = [typed(compose([*base, *options]), TrainConfig) for options in ((), *([more] if more else []))]
        return cost.study_cost(configs).hours

    first = (20 * 2.0 + 3 * 4.0) / 3600  # steps, then two evaluations and a last one
    assert hours() == pytest.approx(first)
    assert hours("training.epochs=4") - first == pytest.approx((40 * 2.0 + 5 * 4.0) / 3600)
    assert hours("batching.batch_size=16") - first == pytest.approx(first)
    assert hours("training.evals_per_epoch=null") - first == pytest.approx((20 * 2.0 * 1.2 + 4.0) / 3600)
    assert hours("optimizer=sam") - first == pytest.approx((20 * 4.0 + 3 * 4.0) / 3600)
    assert (
        str(cost.StudyCost(runs=2, step_seconds=0.5, hours=first))
        == "2 runs, about 1 min one after another, at 0.5 s a step"
    )
