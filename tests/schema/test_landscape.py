"""`rm-opt analyze` composes for every type, and takes from a run folder what the user does not say."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rm_optimizer.analyze import read
from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.command_line import checked
from rm_optimizer.records.recall import recalled
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.schema import TrainConfig, config_root
from rm_optimizer.schema.landscape import AnalysisType, AnalyzeConfig, Split


def composed(*arguments: str) -> AnalyzeConfig:
    return checked(read(arguments).overrides, AnalyzeConfig, name="analyze", writable=False)


@pytest.fixture
def run_folder(tmp_path, monkeypatch) -> str:
    overrides = [
        'data.train=[{path: "it\'s here.csv", weight: 2}]',
        "data.columns={prompt: question}",
        "loss.beta=0.5",
        "seed=7",
        "output_dir=any",
    ]
    options = asdict(checked(overrides, TrainConfig, writable=False))
    options["data"]["synthetic"]["noise"] = 2.0
    options["data"]["gone"] = "an option of an earlier version"
    monkeypatch.chdir(tmp_path)
    folder = Path("my run, really")
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "options.json").write_text(json.dumps(options, default=str))
    return str(folder)


def test_every_type_has_a_preset_of_its_name_and_no_other_is_there():
    names = {file.stem for file in Path(config_root(), "landscape").glob("*.yaml")}
    assert names == {kind.value for kind in AnalysisType}
    assert all(composed("checkpoint=a", f"landscape={name}").landscape.type == name for name in names)


def test_a_run_gives_its_pairs_loss_seed_and_folder(run_folder):
    config = composed(f"checkpoint='{run_folder}'", "landscape=density")
    assert (config.seed, config.loss.beta, config.split) == (7, 0.5, Split.train)
    assert config.data.train == [{"path": "it's here.csv", "weight": 2}]
    assert (config.data.columns, config.data.synthetic.noise) == ({"prompt": "question"}, 2.0)
    assert config.output_dir == f"{run_folder}/landscape/density"


@pytest.mark.parametrize("kind", list(AnalysisType))
def test_no_preset_sets_what_its_type_does_not_read(kind):
    preset = OmegaConf.load(Path(config_root(), "landscape", f"{kind}.yaml"))
    options = [f"landscape.{name}={value}" for name, value in preset.items() if name not in ("defaults", "type")]
    assert composed("checkpoint=a", f"landscape={kind}", *options) == composed("checkpoint=a", f"landscape={kind}")


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["landscape=slices", "landscape.tolerance=0.1"], "directions=eigenvectors, got landscape.type=slices"),
        (["landscape=slices", "landscape.method=full"], "landscape.type=hessian, .*layers, got landscape.type=slices"),
        (["landscape=slices", "landscape.directions=eigenvectors", "landscape.tolerance=0.1"], None),
        (["landscape=hessian", "landscape.method=full", "landscape.top_k=7"], "got landscape.method=full"),
        (["landscape=hessian", "landscape.method=pyhessian", "landscape.max_products=7"], "got .*method=pyhessian"),
        (["landscape=hessian", "landscape.method=pyhessian", "landscape.tolerance=0.1"], None),
        (["landscape=gauss_newton", "landscape.method=lanczos", "landscape.top_k=7"], None),
        (["landscape=gauss_newton", "landscape.method=lanczos", "landscape.num_sampled=5"], None),
        (["landscape=gauss_newton", "landscape.num_sampled=5"], None),
        (["landscape=fisher", "landscape.which=smallest"], "landscape.method=lanczos, got .*gauss_newton_exact"),
        (["landscape=fisher", "landscape.product=reverse"], "got landscape.type=fisher"),
        (
            ["landscape=hessian", "landscape.which=smallest", "landscape.product=reverse", "landscape.memory_gib=2"],
            None,
        ),
        (["landscape=layers", "landscape.memory_gib=2"], None),
        (["landscape=layers", "landscape.which=largest"], "got landscape.type=layers"),
        (["landscape=layers", "landscape.num_sampled=1"], "landscape.method=lanczos or .*, got .*gauss_newton_exact"),
        (["landscape=layers", "landscape.num_probes=3"], None),
        (["landscape=layers", "landscape.method=lanczos", "landscape.num_sampled=1"], None),
        (["landscape=trajectory", "landscape.span=2", "landscape.num_points=3"], "got landscape.type=trajectory"),
        (["landscape=evolution", "landscape.method=gauss_newton_exact"], None),
        (["landscape=between", "landscape.method=gauss_newton_exact", "landscape.num_probes=9"], "gauss_newton_exact"),
        (["landscape=surface", "landscape.others=[a]"], "landscape.type=between, got landscape.type=surface"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_a_type_or_its_method_does_not_read_is_refused(options, refused):
    if refused is None:
        composed("checkpoint=a", *options)
        return
    with pytest.raises(ConfigError, match=rf"^landscape\.\w+ has an effect only with .*{refused}; leave landscape"):
        composed("checkpoint=a", *options)


@pytest.mark.parametrize("kind", ["evolution", "between"])
@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("which=smallest", "landscape.which must be both or largest for {}, got smallest"),
        ("which=magnitude", "landscape.which must be both or largest for {}, got magnitude"),
        ("method=pyhessian", "landscape.method must be lanczos, full or gauss_newton_exact for {}, got pyhessian"),
    ],
)
def test_values_that_are_not_counted_from_the_largest_are_refused_where_models_are_compared(kind, option, sentence):
    with pytest.raises(ConfigError, match=sentence.format(kind)):
        composed("checkpoint=a", f"landscape={kind}", f"landscape.{option}")


def test_what_the_user_says_wins(run_folder):
    config = composed(f"checkpoint='{run_folder}'", "loss.beta=2", "seed=1", "output_dir=mine", "split=val")
    assert (config.seed, config.loss.beta, config.output_dir, config.split) == (1, 2.0, "mine", Split.val)


def test_pairs_of_the_users_own_are_not_read_as_the_runs(run_folder):
    config = composed(f"checkpoint='{run_folder}'", "data.train=other.jsonl")
    assert (config.data.train, config.data.columns, config.split) == ("other.jsonl", None, Split.all)
    assert config.loss.beta == 0.5


@pytest.mark.parametrize("inside", ["", "/best", "/checkpoints/step-00000002.ckpt"])
def test_the_run_is_found_from_its_parts(run_folder, inside):
    assert RunFolder.of(run_folder + inside) == RunFolder(Path(run_folder))


def test_other_models_are_in_no_run(tmp_path, run_folder):
    assert RunFolder.of("org/name") is None
    assert recalled(["checkpoint=org/name"]) == recalled(["seed=1"]) == []
    (tmp_path / "options.json").write_text(json.dumps({"checkpoint": "an analysis"}))
    assert RunFolder.of(str(tmp_path)) is None


def test_flags_may_stand_before_and_after(run_folder):
    arguments = read(["--cfg", "job", f"checkpoint='{run_folder}'", "seed=3"]).words()
    assert arguments[0] == "--cfg=job"
    assert arguments[-2:] == [f"checkpoint='{run_folder}'", "seed=3"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["checkpoint=a", "landscape=slice"], "unknown landscape 'slice'; did you mean 'slices'?"),
        (["checkpoint=a", "landscape.method=lanczo"], "unknown landscape.method 'lanczo'; did you mean 'lanczos'?"),
        (["checkpoint=a", "landscape.num_points=4"], "landscape.num_points must be odd and at least 3, got 4"),
        (["checkpoint=a", "landscape.num_pairs=1"], "landscape.num_pairs must be at least 2, got 1"),
        (["checkpoint=a", "landscape.topk=4"], "unknown option 'landscape.topk'; did you mean 'landscape.top_k'?"),
        (["landscape=slices"], "checkpoint must be given"),
        (["--checkpoint", "a"], "options are set without dashes: checkpoint=VALUE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence(arguments, sentence):
    with pytest.raises(ConfigError) as caught:
        composed(*arguments)
    assert sentence in str(caught.value)
