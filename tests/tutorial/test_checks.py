"""A check of one's own is registered, run, skipped and refused like the built-in ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rm_optimizer import Check, PreferencePair, diagnose, register_check
from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.doctor.doctor import CHECKS
from rm_optimizer.errors import ConfigError
from rm_optimizer.interfaces.cli import app
from tests.builders import tiny_reward_model

BLOCK = re.compile(r"^```python\n(from rm_optimizer import Check.*?)^```$", re.DOTALL | re.MULTILINE)
PAGE = Path(__file__).parents[2] / "docs/how-to-extend.md"


@pytest.fixture(autouse=True)
def own_checks(monkeypatch):
    monkeypatch.setattr(CHECKS, "_entries", dict(CHECKS._entries))


@pytest.fixture(scope="module")
def model():
    return tiny_reward_model("llama", max_length=64)


def pairs() -> PreferenceDataset:
    rows = [PreferencePair("Why?" if i == 0 else f"What is number {i}?", f"It is {i}.", f"No {i}.") for i in range(8)]
    return PreferenceDataset(rows)


def test_the_check_of_the_manual_runs_and_is_skipped_without_pairs(model):
    exec(BLOCK.search(PAGE.read_text(encoding="utf-8"))[1], {})
    check = diagnose(model, {"train": pairs()}, seed=0).check("short_prompts")
    assert (check.status, check.measured) == ("warn", 1)
    assert diagnose(model, seed=0).check("short_prompts").status == "skipped"


def test_a_check_is_refused_with_its_reason(model):
    for needs, parameter, sentence in (
        ("modell", "model", "unknown needs 'modell'; did you mean 'model'?"),
        ("model", "modle", "unknown parameter of the check 'mine' 'modle'; did you mean 'model'?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            register_check("mine", needs)(eval(f"lambda {parameter}: None"))
    with pytest.raises(ConfigError, match="the check 'padding' is registered already"):
        register_check("padding")(lambda model: None)
    register_check("mine")(lambda model: True)
    with pytest.raises(TypeError, match="the check 'mine' must return a Check, got bool"):
        diagnose(model, seed=0)


def test_the_command_imports_the_module_of_a_check(model, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "my_own_checks.py").write_text(
        "from rm_optimizer import Check, register_check\n"
        "@register_check('always', needs='files')\n"
        "def always(model):\n    return Check('always', 'fail', 1.0, '', '0', 'this always fails')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "model"), "--plugin", "my_own_checks"])
    assert result.exit_code == 4
    assert "this always fails" in " ".join(result.stdout.split())
    missing = CliRunner().invoke(app, ["doctor", str(tmp_path / "model"), "--plugin", "no_such_module"])
    assert missing.exit_code == 2


def test_a_check_takes_its_status_as_text():
    assert Check("x", "ok", 0.0, "", "", "").status.value == "ok"
