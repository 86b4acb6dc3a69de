"""`rm-opt analyze` from a trained run to its tables, JSON, pictures and Parquet."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from rm_optimizer import analyze as entry
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import CheckpointError, ConfigError, DataError, Interrupted, TrainingDiverged
from rm_optimizer.interfaces.cli import app
from rm_optimizer.interfaces.command_line import checked
from rm_optimizer.landscape import series
from rm_optimizer.landscape.layers import LayerCurvature
from rm_optimizer.landscape.series import BetweenModels, Evolution
from rm_optimizer.landscape.solvers.lanczos import lanczos
from rm_optimizer.landscape.spectrum import HessianSpectrum, summarize
from rm_optimizer.landscape.surface.grid import Slice, Surface, Trajectory
from rm_optimizer.records.run_folder import RunFolder, results_folder
from rm_optimizer.reporting.landscape.results import scalars_of
from rm_optimizer.reporting.landscape.runs import plot_evolution
from rm_optimizer.reporting.run_report import curvature_caption
from rm_optimizer.schema import TrainConfig, compose, typed
from rm_optimizer.schema.landscape import AnalyzeConfig
from rm_optimizer.training import train_reward_model
from tests.logged import wandb_history, wandb_records

SMALL = [
    "hardware=cpu",
    "hardware.num_threads=1",
    "model.architecture.hidden_size=16",
    "model.architecture.intermediate_size=32",
    "model.architecture.num_hidden_layers=1",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=2",
    "model.vocab_size=300",
    "model.max_length=96",
    "data.synthetic.num_train=48",
    "data.synthetic.num_val=8",
    "batching.batch_size=16",
    "batching.micro_token_budget=2048",
    "training.evals_per_epoch=1",
    "training.checkpoint_every=1",
    "training.keep_checkpoints=9",
    "training.num_bootstrap=100",
    "training.progress=false",
    "logger.tensorboard=false",
]
QUICK = ["landscape.num_pairs=8", "progress=false"]


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analyzed") / "run"
    train_reward_model(typed(compose([*SMALL, f"output_dir={folder}"]), TrainConfig))
    return folder


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analyzed") / "lora"
    options = ["adapter=lora_r8", "data.synthetic.num_train=16", "data.synthetic.num_val=4", f"output_dir={folder}"]
    train_reward_model(typed(compose([*SMALL, *options]), TrainConfig))
    return folder


def analyzed(checkpoint: str | Path, *overrides: str, quick: list[str] = QUICK) -> Path:
    arguments = entry.read([f"checkpoint='{checkpoint}'", *quick, *overrides]).overrides
    return entry.analyze(checked(arguments, AnalyzeConfig, name="analyze"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_slices_end_in_the_run_folder_with_the_trained_loss_in_the_middle(run_dir, capsys):
    folder = analyzed(run_dir, "landscape=slices", "landscape.num_points=3", "landscape.num_directions=2")
    assert folder == run_dir / "landscape" / "slices"
    assert {"slices.json", "slices.png", "slices.svg", "slices.parquet", "analysis.json"} <= names(folder)
    result = Slice.from_json((folder / "slices.json").read_text())
    spectrum = analyzed(run_dir, "landscape=gauss_newton", "landscape.top_k=2")
    written = json.loads((spectrum / "gauss_newton.json").read_text())
    assert (written["schema_version"], written["analysis"]["checkpoint"]) == (1, str(run_dir))
    assert written["analysis"]["step"] == json.loads((run_dir / "run.json").read_text())["best_step"]
    gauss_newton = HessianSpectrum.from_json(json.dumps(written))
    assert gauss_newton.by_pair is not None
    assert sum(each.share for each in gauss_newton.by_pair.heaviest) == pytest.approx(1)  # all eight pairs
    assert f"step {written['analysis']['step']}; pairs of" in gauss_newton.source
    loss = gauss_newton.loss
    assert [line[1].loss for line in result.points] == pytest.approx([loss, loss], abs=1e-6)
    assert result.measured.num_pairs == 8
    assert len(pq.read_table(folder / "slices.parquet")) == 6
    recorded = json.loads((folder / "analysis.json").read_text())
    assert recorded["options"]["data"]["synthetic"]["num_train"] == 48
    printed = capsys.readouterr().out
    assert "loss at the weights" in printed
    assert "pair 1 by share of largest 1" in printed
    assert str(folder) in printed.replace("\n", "")


@pytest.mark.parametrize("kind", ["hessian", "gauss_newton"])
def test_each_largest_eigenvalue_is_printed_beside_its_cross_fitted_value(kind, run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    options = ["landscape.method=lanczos", "landscape.top_k=3", "landscape.num_probes=2", "landscape.params=head"]
    folder = analyzed(run_dir, f"landscape={kind}", *options, f"output_dir={tmp_path / 'out'}")
    result = HessianSpectrum.from_json((folder / f"{kind}.json").read_text())
    printed = capsys.readouterr().out.splitlines()
    largest = [line for line in printed if any(f"largest {rank} " in line and "±" in line for rank in (1, 2, 3))]
    assert result.cross_fit is not None
    for line, value, crossed in zip(largest, result.eigenvalues[:3], result.cross_fit.values, strict=True):
        assert f"{value:.5g} ± " in line
        assert f"cross-fitted {crossed:.3g}" in line
    reasons = [line for line in printed if "not cross-fitted" in line]
    assert len(reasons) == (kind == "hessian")
    assert all("smallest: only the largest are" in line for line in reasons)


def test_changed_pairs_of_the_run_are_refused(run_dir, tmp_path):
    moved = Path(shutil.copytree(run_dir, tmp_path / "run"))
    identity = json.loads((moved / "identity.json").read_text())
    (moved / "identity.json").write_text(json.dumps({**identity, "train_fingerprint": "0" * 16}))
    with pytest.raises(DataError, match=r"pairs of data\.train are not those that the run in .* was trained on"):
        analyzed(moved, "landscape=slices", f"output_dir={tmp_path / 'mine'}")
    assert not (tmp_path / "mine").exists()


def test_hessian_gives_eigenvalues_of_both_ends(run_dir, capsys):
    folder = analyzed(run_dir / "best", "landscape.top_k=2", "landscape.num_probes=2", "landscape.params=head")
    result = HessianSpectrum.from_json((folder / "hessian.json").read_text())
    assert (result.matrix, result.params, result.num_pairs, len(result.eigenvalues)) == ("hessian", "head", 8, 4)
    assert result.eigenvalues == tuple(sorted(result.eigenvalues, reverse=True))
    assert {"spectrum.png", "spectrum.svg", "spectrum.parquet"} <= names(folder)
    printed = capsys.readouterr().out
    assert all(place in printed for place in ("largest 1", "largest 2", "smallest 2", "smallest 1"))
    rows = pq.read_table(folder / "spectrum.parquet").to_pylist()
    assert [(row["end"], row["rank"]) for row in rows] == [
        ("largest", 1),
        ("largest", 2),
        ("smallest", 2),
        ("smallest", 1),
    ]


def test_density_has_a_curve_beside_its_eigenvalues(run_dir):
    folder = analyzed(
        run_dir, "landscape=density", "landscape.top_k=2", "landscape.num_probes=2", "landscape.params=head"
    )
    result = HessianSpectrum.from_json((folder / "density.json").read_text())
    assert result.density is not None
    assert result.cross_fit is not None
    assert len(result.cross_fit.values) == 2
    written = json.loads((folder / "quantities.json").read_text())
    assert written.pop("status") == "complete"
    known = {name: quantity["estimate"] and quantity["estimate"]["value"] for name, quantity in written.items()}
    assert known == {name: quantity.value for name, quantity in summarize(result).items()}
    assert all(quantity["estimate"] or quantity["reason"] for quantity in written.values())
    assert {"density.png", "density.parquet", "spectrum.png"} <= names(folder)


def test_the_curvature_of_the_run_itself_is_captioned_with_its_own_pairs_and_seed(run_dir):
    assert curvature_caption(RunFolder(run_dir)) == "n = 32 training pairs; seed 0"


def test_the_fisher_matrix_and_one_end_of_the_hessian_are_asked_for_by_options(run_dir):
    folder = analyzed(run_dir, "landscape=fisher")
    result = HessianSpectrum.from_json((folder / "fisher.json").read_text())
    assert (result.matrix, result.method, len(result.eigenvalues)) == ("fisher", "gauss_newton_exact", 8)
    asked = ["landscape.which=smallest", "landscape.product=reverse", "landscape.memory_gib=1"]
    quick = ["landscape.num_sampled=0", "landscape.num_probes=2", "landscape.tolerance=0.1", "landscape.top_k=1"]
    folder = analyzed(run_dir, "landscape=hessian", *asked, *quick)
    result = HessianSpectrum.from_json((folder / "hessian.json").read_text())
    assert (result.num_top, result.num_bottom, result.product) == (0, 1, "reverse")


def test_shares_of_the_smallest_eigenvalue_are_not_called_those_of_the_largest(run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    asked = ["landscape.which=smallest", "landscape.top_k=2", "landscape.num_probes=2", "landscape.tolerance=0.1"]
    folder = analyzed(run_dir, "landscape=hessian", *asked, f"output_dir={tmp_path}")
    printed = capsys.readouterr().out
    assert "pair 1 by share of smallest 2" in printed
    assert "of largest 1" not in printed
    result = HessianSpectrum.from_json((folder / "hessian.json").read_text())
    assert "eigenvalue_largest" not in scalars_of(result)


def test_layers_go_from_the_input_to_the_head(run_dir):
    folder = analyzed(run_dir, "landscape=layers", "landscape.num_probes=2")
    result = LayerCurvature.from_json((folder / "layers.json").read_text())
    assert [(block.block, block.hessian_top) for block in result.blocks] == [
        ("embeddings", None),
        ("layer 1", None),
        ("output", None),
    ]
    assert {"layers.png", "layers.parquet", "layers.csv"} <= names(folder)


def test_wandb_and_tensorboard_hold_numbers_eigenvalues_pictures_and_tables(run_dir, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = analyzed(run_dir, "landscape=gauss_newton", "logger=wandb", "logger.name=ends", f"output_dir={tmp_path}")
    again = [f"checkpoint='{run_dir}'", *QUICK, "landscape=gauss_newton", f"output_dir={tmp_path}"]
    assert (
        results_folder(checked(entry.read(again).overrides, AnalyzeConfig, name="analyze")) == folder
    )  # not another one
    result = HessianSpectrum.from_json((folder / "gauss_newton.json").read_text())
    step = json.loads((folder / "gauss_newton.json").read_text())["analysis"]["step"]
    table = pq.read_table(folder / "spectrum.parquet").to_pylist()

    assert wandb_records(folder, "run")[0].display_name == "ends"
    history = wandb_history(folder)
    [numbers] = [row for row in history if "gauss_newton/trace" in row]
    assert numbers["gauss_newton/trace"] == pytest.approx(result.trace.value)
    assert numbers["gauss_newton/eigenvalue_largest"] == pytest.approx(result.eigenvalues[0])
    assert numbers["trainer/global_step"] == step
    [bins] = [row["gauss_newton/eigenvalues/values"] for row in history if "gauss_newton/eigenvalues/values" in row]
    assert sum(bins) == len(result.eigenvalues)
    [files] = folder.glob("wandb/offline-run-*/files")
    [picture] = [row["gauss_newton/spectrum/filenames"] for row in history if "gauss_newton/spectrum/filenames" in row]
    assert (files / picture[0]).read_bytes() == (folder / "spectrum.png").read_bytes()
    [stored] = files.rglob("*spectrum_table*.json")
    content = json.loads(stored.read_text())
    assert content["columns"] == list(table[0])
    assert [row[content["columns"].index("eigenvalue")] for row in content["data"]] == pytest.approx(result.eigenvalues)

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    [trace] = events.Scalars("gauss_newton/trace")
    assert (trace.step, trace.value) == (step, pytest.approx(result.trace.value))
    [drawn] = events.Histograms("gauss_newton/eigenvalues")
    assert drawn.histogram_value.num == len(result.eigenvalues)
    assert events.Images("gauss_newton/spectrum")[0].step == step
    [text] = events.Tensors("gauss_newton/spectrum_table/text_summary")
    assert text.tensor_proto.string_val[0].decode().count("\n") == 1 + len(table)


def test_a_trajectory_ends_at_the_last_checkpoint(run_dir):
    folder = analyzed(run_dir, "landscape=trajectory", "landscape.num_points=3")
    result = Trajectory.from_json((folder / "trajectory.json").read_text())
    assert result.steps == (1, 2, 3)
    assert result.coordinates[-1] == pytest.approx((0.0, 0.0), abs=1e-6)
    assert {"trajectory.png", "trajectory.parquet", "contour.png", "surface.png", "surface.parquet"} <= names(folder)


def test_evolution_measures_every_checkpoint_and_the_start_and_goes_on_after_a_stop(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    options = [
        "landscape=evolution",
        "landscape.params=head",
        "landscape.top_k=2",
        "landscape.num_sampled=0",
        "split=val",
    ]
    load, calls = series.load_weights, list[str]()

    def stops_at_the_third(model: object, weights: object, path: Path) -> None:
        calls.append(str(path))
        if len(calls) == 3:
            raise KeyboardInterrupt
        load(model, weights, path)

    monkeypatch.setattr(series, "load_weights", stops_at_the_third)
    with pytest.raises(Interrupted, match="the same command goes on from them"):
        analyzed(run_dir, *options)
    (run_dir / "landscape" / "evolution" / "analysis.json").unlink()  # as after a kill
    with pytest.raises(DataError, match="holds a measurement of other weights, pairs or options"):
        analyzed(run_dir, *options, "landscape.which=largest")
    folder = analyzed(run_dir, *options)
    assert calls == ["step 0", "step 1", "step 2", "step 2", "step 3"]
    found = Evolution.from_json((folder / "evolution.json").read_text())
    assert (found.steps, found.missing) == ((0, 1, 2, 3), ())
    assert found.source == f"{run_dir}; pairs of the synthetic world (val)"
    figure = plot_evolution(found)
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert "largest 2" in legend
    assert "pairs of the synthetic world (val)" in " ".join(t.get_text() for t in figure.axes[0].texts)
    assert found.overlaps[0] is None
    assert all(0 <= overlap <= 1 + 1e-6 for overlap in found.overlaps[1:])
    evaluated = {int(row["step"]): float(row["eval_nll"]) for row in RunFolder(run_dir).metrics() if row["eval_nll"]}
    measured = {step: found.spectra[found.steps.index(step)].loss for step in evaluated}
    assert measured == pytest.approx(evaluated, rel=1e-5)
    assert 0 in evaluated
    alone = analyzed(
        run_dir / "checkpoints" / "step-00000002.ckpt", "landscape.method=full", *options[1:2], "split=val"
    )
    whole = HessianSpectrum.from_json((alone / "hessian.json").read_text())
    assert found.spectra[2].eigenvalues[:2] == pytest.approx(whole.eigenvalues[:2], rel=1e-3)
    assert {"evolution.png", "evolution.svg", "evolution.parquet", "evolution.csv"} <= names(folder)
    assert not [*folder.glob("vectors*")]


def test_an_evolution_that_was_killed_is_not_mixed_with_another_end_of_the_spectrum(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small = ["landscape.params=head", "landscape.top_k=2", "landscape.num_sampled=0", f"output_dir={tmp_path}"]
    with monkeypatch.context() as patch:
        patch.setattr(series, "load_weights", lambda model, weights, path: kill_at(path, "step 1"))
        with pytest.raises(MemoryError):
            analyzed(run_dir, "landscape=evolution", *small)
    with pytest.raises(DataError, match="holds a measurement of other weights, pairs or options"):
        analyzed(run_dir, "landscape=evolution", "landscape.which=largest", *small)


def kill_at(path: Path, step: str) -> None:
    """A stop after which nothing else is written, as a kill is."""
    if str(path) == step:
        raise MemoryError


def test_between_two_models_lie_a_barrier_and_an_overlap(run_dir: Path):
    others = sorted((run_dir / "checkpoints").glob("step-0000000[12].ckpt"))
    small = ["landscape.params=head", "landscape.top_k=2", "landscape.num_sampled=0", "landscape.num_points=3"]
    named = ", ".join(f"'{path}'" for path in others)
    folder = analyzed(run_dir, "landscape=between", f"landscape.others=[{named}]", *small)
    found = BetweenModels.from_json((folder / "between.json").read_text())
    assert found.names == ("run", "step-00000001", "step-00000002")
    assert [(path.first, path.second) for path in found.paths] == [(0, 1), (0, 2), (1, 2)]
    for path in found.paths:
        ends = [found.spectra[path.first].loss, found.spectra[path.second].loss]
        assert [path.losses[0], path.losses[-1]] == pytest.approx(ends, rel=1e-5)
        assert path.barrier.value == pytest.approx(max(path.losses) - max(ends), abs=1e-6)
    assert all(overlap is not None and 0 <= overlap <= 1 + 1e-6 for overlap in found.overlaps)
    assert {"between.png", "between.parquet", "between.csv", "paths.parquet"} <= names(folder)
    best = RunFolder(run_dir).best_step
    assert found.source.startswith(f"run at step {best}, step-00000001 at step 1, step-00000002 at step 2; pairs of ")
    with pytest.raises(ConfigError, match=r"add landscape\.others=\[RUN, …\]"):
        analyzed(run_dir, "landscape=between", "landscape.params=head")


def test_new_weights_under_the_path_of_another_model_are_measured_anew(run_dir: Path, tmp_path: Path):
    first, second = sorted((run_dir / "checkpoints").glob("step-0000000[12].ckpt"))
    small = ["landscape.params=head", "landscape.top_k=1", "landscape.num_sampled=0", "landscape.num_points=3"]
    other = tmp_path / "lr0.1 ü" / "other.ckpt"
    other.parent.mkdir()
    command = [run_dir, "landscape=between", f"landscape.others=['{other}']", f"output_dir={tmp_path / 'out'}", *small]

    def losses() -> list[float]:
        found = BetweenModels.from_json((analyzed(*command) / "between.json").read_text())
        assert found.names == ("run", "other")
        return [spectrum.loss for spectrum in found.spectra]

    shutil.copy(first, other)
    before = losses()
    shutil.copy(second, other)
    after = losses()
    assert after[0] == before[0]
    assert after[1] != pytest.approx(before[1], rel=1e-4)


@pytest.mark.slow
def test_a_run_with_an_adapter_is_measured_over_what_it_trained(lora_run, tmp_path):
    options = ["landscape.top_k=1", "landscape.num_probes=2", "landscape.tolerance=0.1"]
    trained = json.loads((lora_run / "run.json").read_text())["parameters"]
    spectra = {}
    for params in ("trainable", "lora", "head"):
        folder = analyzed(lora_run, *options, f"landscape.params={params}", f"output_dir={tmp_path / params}")
        spectra[params] = HessianSpectrum.from_json((folder / "hessian.json").read_text())
    merged = BradleyTerryRM.from_pretrained(lora_run / "best")
    assert spectra["trainable"].num_parameters == trained < sum(p.numel() for p in merged.parameters())
    assert spectra["lora"].num_parameters == trained - spectra["head"].num_parameters
    folder = analyzed(lora_run / "best", *options, "landscape.params=head", f"output_dir={tmp_path / 'best'}")
    exported = HessianSpectrum.from_json((folder / "hessian.json").read_text())
    assert exported.loss == pytest.approx(spectra["trainable"].loss, rel=1e-5)  # float32: the same function


def test_an_adapter_that_is_gone_is_said_with_what_is_left(lora_run, tmp_path):
    shutil.copytree(lora_run, tmp_path / "run", ignore=shutil.ignore_patterns("*.ckpt"))
    with pytest.raises(CheckpointError, match=r"best\.ckpt, which held .*/best measures the merged model"):
        analyzed(tmp_path / "run", f"output_dir={tmp_path / 'out'}")


def test_ctrl_c_leaves_a_labeled_part_and_the_same_command_completes_it(run_dir, tmp_path, monkeypatch):
    options = ["landscape=surface", "landscape.num_points=3", f"output_dir={tmp_path}"]
    with monkeypatch.context() as patch:
        patch.setattr("rm_optimizer.landscape.analysis_context.AnalysisContext.on_point", stop_after(4))
        with pytest.raises(Interrupted, match="partial results, labeled so, are in") as caught:
            analyzed(run_dir, *options)
    assert caught.value.exit_code == 130
    assert Surface.from_json((tmp_path / "surface_partial.json").read_text()).num_missing == 5
    before = (tmp_path / "points.jsonl").read_text().splitlines()
    analyzed(run_dir, *options)
    assert (tmp_path / "points.jsonl").read_text().splitlines()[:5] == before
    assert Surface.from_json((tmp_path / "surface.json").read_text()).num_missing == 0
    assert "surface_partial.json" not in names(tmp_path)


def test_ctrl_c_before_the_first_point_is_one_sentence_and_writes_nothing(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("rm_optimizer.landscape.analysis_context.AnalysisContext.on_point", stop_after(0))
    with pytest.raises(Interrupted, match="stopped before there was a result to write"):
        analyzed(run_dir, "landscape=surface", "landscape.num_points=3", f"output_dir={tmp_path}")
    assert names(tmp_path) == {"directions.pt"}


def test_ctrl_c_among_the_eigenvectors_of_slices_is_one_sentence_and_writes_nothing(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("rm_optimizer.landscape.analysis_context.AnalysisContext.on_iteration", stopped)
    with pytest.raises(Interrupted, match="stopped before there was a result to write"):
        analyzed(run_dir, "landscape=slices", "landscape.directions=eigenvectors", f"output_dir={tmp_path}")
    assert names(tmp_path) == set()


def stopped(self, progress: object) -> None:
    raise KeyboardInterrupt


def test_layers_stopped_on_their_way_go_on_with_the_next_block(run_dir, tmp_path, monkeypatch):
    options = ["landscape=layers", "landscape.num_probes=2", "landscape.tolerance=0.1", f"output_dir={tmp_path}"]
    options += ["landscape.method=lanczos"]
    with monkeypatch.context() as patch:
        patch.setattr("rm_optimizer.landscape.computation.lanczos", allowed(1, lanczos))
        with pytest.raises(Interrupted, match="the same command goes on from them"):
            analyzed(run_dir, *options)
    partial = LayerCurvature.from_json((tmp_path / "layers_partial.json").read_text())
    assert [block.hessian_top is None for block in partial.blocks] == [False, True, True]
    assert partial.missing == ("layer 1", "output")
    with monkeypatch.context() as patch:
        patch.setattr("rm_optimizer.landscape.computation.lanczos", allowed(2, lanczos))
        patch.setattr("rm_optimizer.landscape.layers.block_traces", allowed(0, lanczos))
        patch.setattr("rm_optimizer.landscape.computation.estimate_trace", allowed(0, lanczos))
        analyzed(run_dir, *options)
    whole = LayerCurvature.from_json((tmp_path / "layers.json").read_text())
    assert whole.blocks[0] == partial.blocks[0]
    assert [block.hessian_top is None for block in whole.blocks] == [False, False, False]


def test_ctrl_c_before_the_first_layer_is_one_sentence(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("rm_optimizer.landscape.layers.block_traces", allowed(0, lanczos))
    with pytest.raises(Interrupted, match="stopped before there was a result to write"):
        analyzed(run_dir, "landscape=layers", f"output_dir={tmp_path}")
    assert names(tmp_path) == set()


def allowed(count: int, compute: Callable[..., object]):
    """So many calls of a function, and Ctrl-C in place of the next."""
    left = iter(range(count))

    def call(*args: object, **options: object) -> object:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return compute(*args, **options)

    return call


def stop_after(count: int):
    def on_point(self, done: int, total: int) -> None:
        if done == count:
            raise KeyboardInterrupt

    return on_point


def test_pairs_of_ones_own_are_all_drawn_from(run_dir, tmp_path):
    rows = [{"prompt": f"one {i}", "chosen": f"two {i}", "rejected": "three"} for i in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [f"data.train={tmp_path / 'pairs.jsonl'}", f"output_dir={tmp_path / 'out'}", "landscape.num_points=3"]
    analyzed(run_dir, "landscape=slices", *options)
    assert Slice.from_json((tmp_path / "out" / "slices.json").read_text()).measured.num_pairs == 3


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        (["landscape.params=lora"], ConfigError, "needs a model with a LoRA adapter"),
        (["landscape.params=*.layer.9.*"], ConfigError, "matches no parameter"),
        (["landscape.params=head", "landscape.top_k=9"], ConfigError, "top_k at each end must lie in"),
        (["data.synthetic.num_train=2", "data.max_pairs=1"], DataError, "at least 2 pairs"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_measured_is_one_sentence(run_dir, tmp_path, options, kind, sentence):
    with pytest.raises(kind, match=sentence.replace("*", r"\*")) as caught:
        analyzed(run_dir, f"output_dir={tmp_path}", *options)
    assert "\n" not in str(caught.value)


def test_another_beta_than_a_model_was_trained_with_is_told(run_dir, tmp_path, caplog):
    model = BradleyTerryRM.from_pretrained(run_dir / "best")
    model.beta = 0.25
    model.save_pretrained(tmp_path / "alone")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(f'{{"prompt": "{n}", "chosen": "yes", "rejected": "no"}}\n' for n in range(4)))
    arguments = ["landscape=slices", "landscape.num_points=3", f"data.train={pairs}"]
    analyzed(tmp_path / "alone", *arguments, f"output_dir={tmp_path / 'one'}")
    assert "loss.beta=0.25 measures that loss" in caplog.text
    caplog.clear()
    analyzed(tmp_path / "alone", *arguments, "loss.beta=0.25", f"output_dir={tmp_path / 'quarter'}")
    assert "measures that loss" not in caplog.text


def test_a_model_outside_of_a_run_needs_pairs(run_dir, tmp_path):
    BradleyTerryRM.from_pretrained(run_dir).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"data\.train must name pairs, .*; add --data PAIRS"):
        analyzed(tmp_path / "model", f"output_dir={tmp_path / 'out'}")


def test_a_missing_checkpoint_is_said_first(tmp_path):
    with pytest.raises(CheckpointError, match="the path does not exist"):
        analyzed(tmp_path / "nowhere", f"output_dir={tmp_path / 'out'}")


def test_a_loss_that_is_not_finite_names_its_pairs(run_dir, tmp_path):
    model = BradleyTerryRM.from_pretrained(run_dir)
    with torch.no_grad():
        model.reward_head.weight.fill_(float("nan"))
    model.model.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"one {i}", "chosen": f"two {i}", "rejected": "three"} for i in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(TrainingDiverged, match="NaN or infinite on pairs 0, 1, 2"):
        analyzed(tmp_path / "model", f"data.train={tmp_path / 'pairs.jsonl'}", f"output_dir={tmp_path / 'out'}")


@pytest.mark.parametrize("subject", [["--checkpoint", "runs/a"], ["runs/a"]])
def test_flags_become_overrides_of_the_hydra_entry(monkeypatch, subject):
    became = []
    monkeypatch.setattr(os, "execv", lambda program, command: became.append(command[1:]))
    flags = [*subject, "--type", "density", "--data", "p.jsonl", "--top-k", "5", "--method", "full"]
    result = CliRunner().invoke(
        app, ["analyze", *flags, "--pairs", "32", "--params", "*.layers.0.*", "seed=1", "--cfg", "job"]
    )
    assert result.exit_code == 0, result.output
    overrides = ["checkpoint=runs/a", "landscape=density", "data.train=p.jsonl", "landscape.top_k=5"]
    overrides += ["landscape.method=full", "landscape.num_pairs=32", "landscape.params='*.layers.0.*'"]
    assert became == [["-m", "rm_optimizer.analyze", *overrides, "seed=1", "--cfg", "job"]]
