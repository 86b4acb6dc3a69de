"""`rm-opt blame`: its files and sentences, a run's own pairs, validation by retraining, and the suspects' column."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from rm_optimizer import compose
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.synthetic import PreferenceWorld
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.data_efficiency.blame import Blame
from rm_optimizer.interfaces.cli import app
from rm_optimizer.records.run_folder import OPTIONS_FILE
from rm_optimizer.records.run_options import options_of
from rm_optimizer.reporting.folder_page import write_page
from rm_optimizer.schema import TrainConfig, typed
from rm_optimizer.training.preparation import build_model, from_start
from rm_optimizer.training.run import train_reward_model
from tests.builders import narrow_reward_model

WORLD = PreferenceWorld(0).pairs(40, 12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "best"
    narrow_reward_model(text for pair in WORLD.train for text in (pair.chosen, pair.rejected)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, pairs in (("train.jsonl", WORLD.train), ("val.jsonl", WORLD.val)):
        rows = [pair.to_dict() | {"annotator": f"a{i % 3}", "metadata": {}} for i, pair in enumerate(pairs)]
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def rm_opt(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.stderr + repr(result.exception)
    return result.stdout


@pytest.mark.usefixtures("files")
def test_a_saved_model_is_explained_by_the_pairs_that_are_named(checkpoint: str):
    printed = rm_opt(
        *("blame", checkpoint, "-d", "train.jsonl", "--data-val", "val.jsonl", "--edit", "length", "--output", "found")
    )
    assert "reward for the edit 'length', over 12 responses" in printed
    assert "annotator a1" in printed
    assert "not validated" in printed
    names = {path.name for path in Path("found").iterdir()}
    assert names == {"blame.json", "influence.parquet", "index.html", "blame_groups.csv", "blame_groups.png"} | {
        "blame_groups.svg",
        "blame_raised.csv",
        "blame_lowered.csv",
    }
    found = Blame.from_json(Path("found/blame.json").read_text())
    table = pq.read_table("found/influence.parquet").to_pylist()
    assert len(table) == 40
    assert table[found.raised[0].row - 1]["influence"] == pytest.approx(found.raised[0].influence)
    assert WORLD.train[found.raised[0].row - 1].chosen == found.raised[0].chosen
    rm_opt("data", "clean", "train.jsonl", "--out", "kept.jsonl", "--influence", "found/influence.parquet")
    for line in Path("kept.jsonl.suspects.jsonl").read_text().splitlines():
        assert json.loads(line)["influence"] in [row["influence"] for row in table]


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "--data must name the training pairs"),
        (("--data", "train.jsonl"), "--output must name a folder"),
        (("--data", "train.jsonl", "--output", "o", "--all-checkpoints"), "--all-checkpoints needs a run folder"),
        (("--data", "train.jsonl", "--output", "o", "--validate", "8"), "--validate needs a run folder"),
        (("--data", "train.jsonl", "--output", "o"), "--data-val or --pair"),
        (
            ("--data", "train.jsonl", "--output", "o", "--of", "margins"),
            "unknown --of 'margins'; did you mean 'margin'?",
        ),
        (("--data", "train.jsonl", "--output", "o", "--edit", "list", "--pair", "val.jsonl"), "one target at a time"),
        (("--data", "train.jsonl", "--output", "o", "--edit", "bald", "--data-val", "val.jsonl"), "--edit must be one"),
        (("--data", "train.jsonl", "--output", "o", "--subset", "x", "--data-val", "val.jsonl"), "no validation pair"),
        (("--data", "train.jsonl", "--output", "o", "--pair", "val.jsonl", "--damping", "0"), "--damping must be"),
        (("--data", "train.jsonl", "--output", "o", "--pair", "val.jsonl", "--by", "anotator"), "'anotator' groups no"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(checkpoint: str, arguments: tuple[str, ...], sentence: str):
    result = CliRunner().invoke(app, ["blame", checkpoint, *arguments])
    assert result.exit_code != 0
    assert sentence in result.stderr
    assert not Path("o").exists()


@pytest.mark.usefixtures("files")
def test_influences_of_other_pairs_are_refused(checkpoint: str):
    rm_opt("blame", checkpoint, "-d", "val.jsonl", "--pair", "val.jsonl", "--of", "loss", "--output", "found")
    for file, sentence in (
        ("found/influence.parquet", "is of other pairs"),
        ("train.jsonl", "must be influence.parquet"),
    ):
        arguments = ["data", "clean", "train.jsonl", "--out", f"{Path(file).stem}.out", "--influence", file]
        result = CliRunner().invoke(app, arguments)
        assert sentence in result.stderr
        assert not Path(f"{Path(file).stem}.out").exists()


def test_a_half_starts_from_the_weights_and_the_tokenizer_of_its_run(tmp_path: Path):
    dropped = ["model.dropout=true", "+model.architecture.attention_dropout=0.2"]
    options = compose(["model=tiny", "model.architecture.num_hidden_layers=1", "output_dir=.", *dropped])
    config = typed(options, TrainConfig)
    run = build_model(config.model, PreferenceDataset(WORLD.train), config.seed)
    half = from_start(config, run, tmp_path)
    model = build_model(half.model, PreferenceDataset(WORLD.train[:20]), half.seed)
    assert model.tokenizer.get_vocab() == run.tokenizer.get_vocab()
    pairs = zip(model.state_dict().values(), run.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert model.model.config.attention_dropout == run.model.config.attention_dropout == 0.2
    assert from_start(half, run, tmp_path) is half
    assert from_start(config, run, tmp_path) == half
    assert len([*tmp_path.iterdir()]) == 1


def test_another_seed_or_tokenizer_does_not_start_from_an_earlier_run(tmp_path: Path):
    config = typed(compose(["model=tiny", "model.architecture.num_hidden_layers=1", "output_dir=."]), TrainConfig)
    run, other = (build_model(config.model, PreferenceDataset(pairs), 0) for pairs in (WORLD.train, WORLD.val))
    starts = [from_start(*given, tmp_path).model for given in ((config, run), (replace(config, seed=1), run))]
    first, second = (BradleyTerryRM.from_pretrained(str(start.path)) for start in starts)
    assert not torch.equal(first.model.get_input_embeddings().weight, second.model.get_input_embeddings().weight)
    third = BradleyTerryRM.from_pretrained(str(from_start(config, other, tmp_path).model.path))
    assert third.tokenizer.get_vocab() == other.tokenizer.get_vocab() != run.tokenizer.get_vocab()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str) -> None:
    """Folders of runs, of which only the first kept a checkpoint."""
    monkeypatch.chdir(tmp_path)
    changes = {"run": [], "seed": ["seed=1"], "other": ["seed=2", "loss.label_smoothing=0.1", "model.freeze=1"]}
    for name, changed in changes.items():
        config = typed(compose(["model=tiny", "output_dir=.", *changed]), TrainConfig)
        shutil.copytree(checkpoint, f"{name}/best")
        Path(name, OPTIONS_FILE).write_text(json.dumps(options_of(config)))
    Path("run/checkpoints").mkdir()
    Path("run/checkpoints/step-00000002.ckpt").touch()


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "seed", "other"), "other and run differ in loss.label_smoothing, model.freeze; leave one of them out"),
        (("run", "other/best"), "only in the seed, but other and run differ in loss.label_smoothing, model.freeze"),
        (("run", "{outside}", "--data", "v.jsonl", "--output", "o"), "name runs alone, or saved models alone"),
        (("run", "seed", "--all-checkpoints"), "--all-checkpoints needs checkpoints, and seed holds none"),
        (("run", "seed", "./run/best"), "each run must be named once, but run/best is named twice"),
        (("run", "run/best", "--all-checkpoints"), "each run must be named once, but run is named twice"),
        (("{outside}", "{outside}/", "--data", "v.jsonl", "--output", "o"), "each model must be named once"),
    ],
)
def test_models_without_a_mean_are_refused(checkpoint: str, arguments: tuple[str, ...], sentence: str):
    result = CliRunner().invoke(app, ["blame", *(each.replace("{outside}", checkpoint) for each in arguments)])
    assert result.exit_code != 0
    assert sentence in result.stderr
    assert not Path("o").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("files")
def test_weights_that_the_run_froze_stay_out_of_the_influences():
    options = {"training.max_steps": 4, "model.freeze": "backbone"}
    train_reward_model("tiny", "adamw", "train.jsonl", val="val.jsonl", output_dir="run", options=options)
    found = []
    for params in ("trainable", "head"):
        rm_opt("blame", "run", "--params", params, "--damping", "0.1", "--output", params)
        found.append(Blame.from_json(Path(params, "blame.json").read_text()))
    assert found[0].raised == found[1].raised


@pytest.mark.slow
@pytest.mark.usefixtures("files")
def test_a_run_brings_its_pairs_and_is_validated_by_retraining_halves():
    options = {"training.max_steps": 6, "training.checkpoint_every": 3, "training.keep_checkpoints": 2}
    run = train_reward_model("tiny", "adamw", "train.jsonl", val="val.jsonl", output_dir="run", options=options)
    assert Path(run.run_dir).name == "run"
    printed = rm_opt("blame", "run", "--all-checkpoints", "--validate", "4")
    assert "by 2 models" in printed
    assert "linear datamodeling score over 4 retrained halves" in printed
    assert "difference: " in printed
    first = Blame.from_json(Path("run/blame/blame.json").read_text())
    again = rm_opt("blame", str(Path("run").resolve()), "--all-checkpoints", "--validate", "5")
    assert "half 5 of 5" in again
    assert "half 4 of 5" not in again  # earlier halves are kept, by whatever path the run is named
    other = rm_opt("blame", "run", "--edit", "length", "--validate", "4")  # another target has halves of its own
    assert "half 1 of 4" in other
    assert len([*Path("run/blame").glob("halves-*.jsonl")]) == 2
    assert first.num_models == 2
    assert not Path("run/blame/half").exists()
    page = write_page(Path("run")).read_text()
    assert "Pairs that raised it" in page
    train_reward_model("tiny", "adamw", "train.jsonl", val="val.jsonl", output_dir="other", options=options, seed=1)
    assert "by 4 models" in rm_opt("blame", "run", "other", "--all-checkpoints")
    train_reward_model("tiny", "adamw", "val.jsonl", val="train.jsonl", output_dir="stranger", options=options)
    refused = CliRunner().invoke(app, ["blame", "run", "stranger"])
    assert "stranger" in refused.stderr
    eigenvector = rm_opt("blame", "run", "--of", "eigenvector", "--params", "head")
    assert "first eigenvector" in eigenvector
