"""A mistyped command line becomes one sentence that names the option and what to do."""

from __future__ import annotations

import sys

import pytest

from rm_optimizer import train
from rm_optimizer.analyze import check_command as check_analysis
from rm_optimizer.errors import ConfigError, DataError, DataStalled
from rm_optimizer.interfaces.exits import report
from rm_optimizer.train import check_command

MISTAKES = [
    ("optimizer=moun", r"unknown optimizer 'moun'; did you mean 'muon'\? Known: ada"),
    ("model=tinny", r"unknown model 'tinny'; did you mean 'tiny'\?"),
    ("optimizer=", r"unknown optimizer ''; Known: "),
    ("experiment=quikstart", r"unknown experiment 'quikstart'; did you mean 'quickstart'\?"),
    ("training=1", r"unknown training '1'; Known: default"),
    ("optimzer=adamw", r"unknown option 'optimzer'; did you mean 'optimizer'\? Known: adapter, batching, "),
    ("optimizer.lrr=1", r"unknown option 'optimizer\.lrr'; did you mean 'optimizer\.lr'\? Known: "),
    ("data.synthetic.noize=1", r"unknown option 'data\.synthetic\.noize'; did you mean 'data\.synthetic\.noise'\?"),
    ("lr=1", r"unknown option 'lr'; did you mean 'optimizer\.lr'\?"),
    ("epochs=3", r"unknown option 'epochs'; did you mean 'training\.epochs'\?"),
    ("hydra.run.dri=x", r"unknown option 'hydra\.run\.dri'; did you mean 'hydra\.run\.dir'\?"),
    ("+foo=1", r"unknown option 'foo'; Known: "),
    ("+model.foo=1", r"unknown option 'model\.foo'; "),
    ("++loss.betta=1", r"unknown option 'loss\.betta'; did you mean 'loss\.beta'\?"),
    ("~model.foo", r"model\.foo"),
    ("training.epochs=abc", r"training\.epochs must be a number, got 'abc'$"),
    ("data.max_pairs=x", r"data\.max_pairs must be an integer or null, got 'x'$"),
    ("batching.batch_size=null", r"batching\.batch_size must be an integer, got 'null'$"),
    ("data.allow_prompt_overlap=perhaps", r"data\.allow_prompt_overlap must be true or false, got 'perhaps'$"),
    ("data.synthetic=3", r"data\.synthetic must be a group of options, set one by one, got '3'$"),
    ("data.on_bad_row=dro", r"unknown data\.on_bad_row 'dro'; did you mean 'drop'\? Known: drop, error$"),
    ("hardware.precision=16-mixed", r"hardware\.precision must be 32-true or bf16-mixed: float16 overflows.*16-mixed$"),
    ("hardware.precision=fp8", r"hardware\.precision must be 32-true or bf16-mixed.*, got fp8$"),
    ("loss.label_smoothing=0.7", r"loss\.label_smoothing must lie in \[0, 0\.5\), got 0\.7"),
    ("loss.beta=inf", r"loss\.beta must be a finite number, got inf"),
    ("loss.reward_l2=inf", r"loss\.reward_l2 must be a finite number, got inf"),
    ("seed=-1", r"seed must lie in \[0, 2\*\*32\), got -1$"),
    ("model.max_length=???", r"model\.max_length must be given; set it with model\.max_length=VALUE$"),
    ("~optimizer", r"optimizer must be given; set it with optimizer=VALUE$"),
    ("optimizer.lr=${nope}", r"optimizer\.lr refers to another option that cannot be found"),
    ("data.columns=question", r"data\.columns must map our columns to the file's, as \{prompt: .*, got question$"),
    ("pairs.jsonl", r"expected option=value, got 'pairs\.jsonl'; "),
    ("optimizer.lr=[1,", r"cannot read 'optimizer\.lr=\[1,': "),
    ("data.train=a=b.jsonl", r"cannot read 'data\.train=a=b\.jsonl': .*\"data\.train='a=b\.jsonl'\"$"),
    ("seed=1,2", r"seed=1,2 names several values; add --multirun"),
    ("--optimizer muon", r"unknown flag '--optimizer'; options are set without dashes: optimizer=VALUE$"),
    ("--lr 1e-3", r"unknown flag '--lr'; options are set without dashes: optimizer\.lr=VALUE$"),
    ("seed=1 seed=2", r"seed is given twice, as 1 and as 2; give it once$"),
    ("optimizer=muon ++optimizer=adamw", r"optimizer is given twice, as muon and as adamw"),
    ("--multirun seed=1,2 --cfg job", r"--cfg prints one configuration; leave out --multirun"),
    ("--configdir x", r"unknown flag '--configdir'; did you mean '--config-dir'\?"),
    ("--cfg jub", r"invalid choice: 'jub'"),
    ("--config-dir /nowhere", r"--config-dir must name an existing folder, got '/nowhere'$"),
    ("--config-name confg", r"confg"),
    ("--multirun seed=1,x", r"seed must be an integer, got 'x'$"),
    ("--multirun optimizer=adamw,moun", r"unknown optimizer 'moun'"),
    ("--multirun optimizer=moun,adamw", r"unknown optimizer 'moun'"),
    ("--multirun hardware.devices=2", r"--multirun takes hardware\.devices=1, got 2"),
]


@pytest.mark.parametrize(("typed", "sentence"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_is_one_sentence(typed, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_command(typed.split())
    assert "\n" not in str(caught.value)


def test_a_path_with_spaces_needs_no_quotes_of_its_own():
    check_command(["data.train=my file.jsonl", "--cfg", "job"])


@pytest.mark.parametrize("arguments", [[], ["optimizer=muon", "hardware=h100", "--cfg", "job"], ["--help"]])
def test_a_right_command_line_passes(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_command(arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["hydra.run.dir", "output_dir"])
def test_a_run_folder_that_cannot_be_made_is_refused_before_the_run(tmp_path, option, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"^{option} must be a folder that can be written, got .*file: Not a dir"):
        check_command([f"{option}={tmp_path / 'file' / 'run'}"])


def test_a_folder_of_an_analysis_that_cannot_be_made_is_named_as_it_was_typed(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^output_dir must be a folder that can be written"):
        check_analysis(["checkpoint=x", f"output_dir={tmp_path / 'file' / 'analysis'}"])


def test_a_link_that_leads_nowhere_is_no_run_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"^hydra\.run\.dir must be a folder that can be written, got .*link'"):
        check_command([f"hydra.run.dir={tmp_path / 'link'}"])


def test_a_broken_preset_of_the_user_names_file_and_line(tmp_path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("lr: 1\nbeta1: [0.9\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml.*line 3: not valid YAML"):
        check_command(["--config-dir", str(tmp_path), "optimizer=mine"])


def test_main_prints_the_sentence_and_exits_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train", "optimizer=moun"])
    with pytest.raises(SystemExit) as stopped:
        train.main()
    captured = capsys.readouterr()
    assert stopped.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: unknown optimizer 'moun'")
    assert captured.err.count("\n") == 1


def test_control_c_before_training_exits_130(monkeypatch):
    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["train"])
    monkeypatch.setattr(train, "check_command", interrupt)
    with pytest.raises(SystemExit) as stopped:
        train.main()
    assert stopped.value.code == 130


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK"])
def test_only_the_first_process_speaks(monkeypatch, capsys, variable):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(variable, "1")
    assert report(DataError("a bad row")) == 2
    assert capsys.readouterr().err == ""
    report(DataStalled("no batch in 60 s"))
    assert capsys.readouterr().err == "error: no batch in 60 s\n"
    monkeypatch.setenv(variable, "0")
    report(DataError("a bad row"))
    assert capsys.readouterr().err == "error: a bad row\n"


def test_a_new_name_in_a_free_mapping_is_shown_as_it_was_typed_beside_its_group():
    with pytest.raises(ConfigError, match=r"with a plus: '\+model\.architecture\.hidden_size=32'"):
        check_command(["model=custom", "model.architecture.hidden_size=32"])
