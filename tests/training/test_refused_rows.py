"""A row that the chat template refuses is dropped, or named, alike by train, evaluate, doctor and data check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.errors import DataError
from rm_optimizer.interfaces.cli import app
from rm_optimizer.schema import TrainConfig
from rm_optimizer.schema.data import SpecialTokens
from rm_optimizer.training import train_reward_model
from rm_optimizer.training.preparation import trainable_model
from tests.builders import narrow_reward_model
from tests.core.rows.test_bad_rows import rows, written
from tests.core.test_template_zoo import KNOWN_ROLES

TEXTS = ["user assistant Question? Yes. No."]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "best"
    narrow_reward_model(TEXTS, chat_template=KNOWN_ROLES, max_length=128).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("command", ["evaluate", "doctor", "data check"])
def test_a_command_names_or_drops_it(command: str, checkpoint: str, tmp_path: Path):
    pairs = written(tmp_path, rows(20, (4, 7)))
    arguments = {
        "evaluate": ["evaluate", checkpoint, "--data", pairs, "--bootstrap", "2", "--output", str(tmp_path / "found")],
        "doctor": ["doctor", checkpoint, "--data", pairs],
        "data check": ["data", "check", pairs, "--tokenizer", checkpoint],
    }[command]
    stopped = CliRunner().invoke(app, arguments)
    said = " ".join((stopped.stderr + str(stopped.exception)).split())
    assert stopped.exit_code != 0
    assert "pairs.jsonl, line 5: the tokenizer's chat template prints nothing" in said
    assert "--on-bad-row drop" in said
    whole = CliRunner().invoke(app, [*arguments, "--on-bad-row", "drop"])
    dropped = "rows of this cause: 2" if command == "data check" else "rows that give no pair: 2"
    assert dropped in whole.stdout
    strict = CliRunner().invoke(app, [*arguments, "--on-bad-row", "drop", "--max-bad-share", "0.05"])
    assert "2 of 20 rows are bad, more than the 5%" in " ".join((strict.stderr + str(strict.exception)).split())


def test_a_run_names_or_drops_it(checkpoint: str, small_config: Callable[..., TrainConfig], tmp_path: Path):
    pairs = written(tmp_path, rows(60, (4, 7)))
    options = [f"data.train={pairs}", "data.val_fraction=0.4", "training.max_steps=1"]
    stopped = small_config(tmp_path / "stopped", *options)
    stopped.model.path = checkpoint
    with pytest.raises(DataError, match=r"pairs\.jsonl, line (5|8): .*data\.on_bad_row=drop"):
        train_reward_model(stopped)
    config = small_config(tmp_path / "run", *options, "data.on_bad_row=drop")
    config.model.path = checkpoint
    result = train_reward_model(config)
    assert (result.data.skipped_rows, result.data.train_pairs + result.data.val_pairs) == (2, 58)
    listed = (tmp_path / "run" / "skipped_rows.txt").read_text()
    assert "line 5: " in listed
    assert "line 8: " in listed
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data"]["skipped_rows"] == 2


def test_a_run_stores_its_rules_for_contents_with_the_model(
    checkpoint: str, small_config: Callable[..., TrainConfig], tmp_path: Path
):
    config = small_config(
        tmp_path / "run", "training.max_steps=1", "data.thinking=strip", "data.special_tokens=as_text"
    )
    config.model.path = checkpoint
    train_reward_model(config)
    best = tmp_path / "run" / "best"
    found = BradleyTerryRM.from_pretrained(best)
    assert (found.renderer.rules.thinking, found.renderer.rules.special_tokens) == ("strip", "as_text")
    texts = [
        model.renderer.text("Hi <|eos|>", "<think>No.</think>Yes.") for model in (found, BradleyTerryRM(checkpoint))
    ]
    assert "< |eos|>" in texts[0]
    assert "<think>" not in texts[0]
    assert "<think>" in texts[1]
    going_on = small_config(tmp_path / "next", "training.max_steps=1", "data.special_tokens=keep")
    going_on.model.path = str(best)
    train_reward_model(going_on)
    found = BradleyTerryRM.from_pretrained(tmp_path / "next" / "best")
    assert (found.renderer.rules.thinking, found.renderer.rules.special_tokens) == ("strip", "keep")


@pytest.mark.parametrize(("option", "rule"), [(None, "as_text"), ("keep", "keep"), ("refuse", "refuse")])
def test_a_new_head_learns_control_tokens_as_text_unless_told_otherwise(
    small_config: Callable[..., TrainConfig], tmp_path: Path, option: str | None, rule: str
):
    config = small_config(tmp_path / "run", "training.max_steps=1")
    config.data.special_tokens = None if option is None else SpecialTokens(option)
    model = trainable_model(config, PreferenceDataset([PreferencePair("Hi", "a", "b")]))
    assert model.renderer.rules.special_tokens == rule
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So.<|eos|>"}]
    if rule != "refuse":
        plain = model.tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
        assert plain == list(model.renderer.encode("Hi", "So.<|eos|>").ids)


@pytest.mark.parametrize(
    ("chosen", "option", "note"),
    [
        ("Yes.<|im_end|>", None, "hold control tokens (<|im_end|>), which are read as plain text"),
        ("Yes.<|im_end|>", "data.special_tokens=keep", "so that a text can forge a turn"),
        ("<think>\n\n</think>\n\nYes.", None, "have an empty thinking block in one response alone"),
        ("<think>\n\n</think>\n\nYes.", "data.thinking=strip", None),
    ],
)
def test_training_names_content_that_reads_otherwise_than_it_looks(
    small_config: Callable[..., TrainConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture, chosen, option, note
):
    rows = [{"prompt": f"Question {i}?", "chosen": "Yes.", "rejected": "No."} for i in range(20)]
    rows[3]["chosen"] = rows[4]["chosen"] = chosen
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("training.max_steps=1", f"data.train={path}", "data.val_fraction=0.1", *([option] if option else ()))
    train_reward_model(small_config(tmp_path / "run", *options))
    notes = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["notes"]
    found = [each for each in notes if "training pairs h" in each]
    assert len(found) == (note is not None)
    for each in found:
        assert note in each
        assert each in caplog.text


def test_a_token_without_a_row_in_the_embedding_names_its_pair(tmp_path: Path):
    model = narrow_reward_model(TEXTS, max_length=128)
    model.tokenizer.add_tokens(["<tool>"])  # as a base model whose embedding nobody resized
    model = BradleyTerryRM(model.model, tokenizer=model.tokenizer, max_length=128)
    table = [{"prompt": f"Question {i}?", "chosen": "Yes.", "rejected": "No."} for i in range(20)]
    table[6]["rejected"] = "No <tool>."
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 7: .*no row for the token '<tool>' \(id 283\)"):
        PreferenceDataset(path).accepted_by(model.renderer)
    kept = PreferenceDataset(path, on_bad_row="drop").accepted_by(model.renderer)
    assert [len(kept), len(kept.skipped)] == [19, 1]
    with pytest.raises(DataError, match="no row for the token '<tool>'"):
        model.score(["Question?"], ["No <tool>."])
