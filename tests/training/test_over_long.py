"""A pair that is longer than the limit is cut, left out, or named by file and row, alike at every entrance."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rm_optimizer.core.data_loader import PreferenceDataset, create_dataloader
from rm_optimizer.core.pairs.pair import PreferencePair
from rm_optimizer.core.streaming.blocks import BlockTokenizer
from rm_optimizer.core.streaming.dataset import RayPreferenceDataset
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.splits import TrainVal
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.evaluation.saved_model import evaluate_model
from rm_optimizer.interfaces.cli import app
from rm_optimizer.landscape.hessian import HessianAnalyzer
from rm_optimizer.schema import TrainConfig
from rm_optimizer.training import train_reward_model
from tests.builders import byte_tokenizer, narrow_reward_model

FRAME = len("Prompt: \n\nResponse: ") + 1
"""Tokens around prompt and response, EOS included, of a tokenizer with one token a byte."""
LIMIT = 60
LONG = (3, 8)
"""Rows with one side of a token more than the limit."""
NAMED = r"pairs\.jsonl, line 4: a sequence has more than max_length=60 tokens, got 61; .*"


def rows(count: int = 20, long: tuple[int, ...] = LONG) -> list[dict[str, str]]:
    table = [{"prompt": f"Question {i:02}?", "chosen": f"Yes {i}.", "rejected": "No."} for i in range(count)]
    for i in long:
        side = "chosen" if i % 4 else "rejected"
        table[i][side] = "x" * (LIMIT + 1 - FRAME - len(table[i]["prompt"]))
    return table


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return file


@pytest.fixture
def renderer() -> ConversationRenderer:
    return ConversationRenderer(byte_tokenizer(), LIMIT)


def test_dropped_pairs_are_those_above_the_limit(path: Path, renderer: ConversationRenderer):
    whole = PreferenceDataset(path).pairs
    kept = PreferenceDataset(path, over_long="drop").accepted_by(renderer)
    assert kept.pairs == tuple(pair for i, pair in enumerate(whole) if i not in LONG)
    assert [row.row for row in kept.skipped] == [4, 9]
    assert str(kept.skipped[0]).endswith("line 4: a sequence has more than max_length=60 tokens, got 61")
    assert kept.accepted_by(renderer) is kept
    assert len(PreferenceDataset(path, over_long="drop").accepted_by(ConversationRenderer(byte_tokenizer(), 61))) == 20


def test_a_tokenizer_leaves_them_out_at_once(path: Path, renderer: ConversationRenderer):
    assert len(PreferenceDataset(path, renderer, over_long="drop")) == 18
    assert len(PreferenceDataset(PreferenceDataset(path, over_long="drop"), renderer)) == 18
    assert len(PreferenceDataset(PreferenceDataset(path), renderer, over_long="drop")) == 18
    assert len(PreferenceDataset(path, renderer)) == len(PreferenceDataset(path, over_long="drop")) == 20


def test_the_rule_goes_with_parts_of_a_data_set(path: Path, renderer: ConversationRenderer):
    data = PreferenceDataset(path, over_long="drop")
    train, val = data.split_by_prompt(0.3, seed=0)
    assert len(train.accepted_by(renderer)) + len(val.accepted_by(renderer)) == 18
    assert len(data[:5].accepted_by(renderer)) == len(data.subset(5, seed=0)[:5]) - (3 in range(5))
    assert len(PreferenceDataset.joined([PreferenceDataset(path), data]).accepted_by(renderer)) == 36


def test_a_refused_pair_is_named(path: Path, renderer: ConversationRenderer):
    with pytest.raises(DataError, match=NAMED + 'over_long="drop"'):
        PreferenceDataset(path, renderer, over_long="refuse")
    pairs = [PreferencePair(**row) for row in rows()]
    with pytest.raises(DataError, match=r"pairs, row 4: a sequence has more than max_length=60 tokens, got 61"):
        PreferenceDataset(pairs, renderer, over_long="refuse")
    assert [row.row for row in PreferenceDataset(pairs, renderer, over_long="drop").skipped] == [4, 9]
    with pytest.raises(DataError, match="none of 1 pairs is left by over_long=drop"):
        PreferenceDataset(pairs[3:4], renderer, over_long="drop")
    with pytest.raises(ConfigError, match=r"unknown over_long 'cut'.*Known: drop, refuse, truncate"):
        PreferenceDataset(pairs, over_long="cut")


def test_loaders_measurements_and_evaluation_leave_them_out(path: Path, tmp_path: Path):
    model = narrow_reward_model([json.dumps(rows(20, ()))], max_length=40)
    data = PreferenceDataset(path, over_long="drop")
    assert len(create_dataloader(data, model, 4, cache_dir=tmp_path / "cache").pairs) == 18
    batches, _ = HessianAnalyzer(model, token_budget=4096).batches_of(data)
    assert sum(batch.num_pairs for batch in batches) == 18
    evaluation = evaluate_model(model, data)
    assert (evaluation.metrics.num_pairs, evaluation.num_skipped) == (18, 2)


def test_streamed_blocks_leave_them_out_and_list_their_rows(path: Path, renderer: ConversationRenderer):
    data = RayPreferenceDataset(str(path), over_long="drop", block_bytes=300)
    found = [BlockTokenizer(data.reader, renderer).tokenize(block) for block in data.blocks]
    assert len(found) > 1
    kept = [index for block in found for index in block.pairs.pair_index.tolist()]
    assert kept == [i for i in range(20) if i not in LONG]
    assert [row.row for block in found for row in block.rows.skipped] == [4, 9]
    assert not any(block.cuts.any() or block.rows.causes() for block in found)
    assert len(data.first_pairs(20).accepted_by(renderer)) == 18
    strict = RayPreferenceDataset(str(path), over_long="refuse")
    with pytest.raises(DataError, match=NAMED):
        BlockTokenizer(strict.reader, renderer).tokenize(strict.blocks[0])


@pytest.mark.parametrize("command", ["evaluate", "doctor", "data check"])
def test_a_command_drops_or_names_them(command: str, path: Path, tmp_path: Path):
    model = narrow_reward_model([json.dumps(rows(20, ()))], max_length=40)
    model.save_pretrained(tmp_path / "model")
    arguments = {
        "evaluate": ["evaluate", f"{tmp_path}/model", "-d", f"{path}", "--bootstrap", "2", "--output", f"{tmp_path}/o"],
        "doctor": ["doctor", f"{tmp_path}/model", "--data", f"{path}"],
        "data check": ["data", "check", f"{path}", "--tokenizer", f"{tmp_path}/model", "--max-length", "40"],
    }[command]
    dropped = CliRunner().invoke(app, [*arguments, "--over-long", "drop"]).stdout
    assert ("rows of this cause: " if command == "data check" else "rows that give no pair: ") + "2" in dropped
    stopped = CliRunner().invoke(app, [*arguments, "--over-long", "refuse"])
    said = " ".join((stopped.stderr + str(stopped.exception)).split())
    assert "pairs.jsonl, line 4: a sequence has more than max_length=40 tokens" in said
    assert "--over-long drop" in said


def test_a_run_drops_or_names_them(small_config: Callable[..., TrainConfig], tmp_path: Path):
    table = rows(60, ())
    for i in LONG:
        table[i]["chosen"] = "word " * 100
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in table))
    options = [f"data.train={file}", "data.val_fraction=0.4", "training.max_steps=1", f"data.cache_dir={tmp_path}/c"]
    cut = train_reward_model(small_config(tmp_path / "cut", *options))
    assert cut.data.train_pairs + cut.data.val_pairs == 60
    result = train_reward_model(small_config(tmp_path / "run", *options, "data.over_long=drop"))
    assert (result.data.skipped_rows, result.data.train_pairs + result.data.val_pairs) == (2, 58)
    assert "line 9: a sequence has more than" in (tmp_path / "run" / "skipped_rows.txt").read_text()
    for split in ("train", "val"):
        assert result.data.truncation[split]["tokens_cut_share"] == 0
    with pytest.raises(DataError, match=r"pairs\.jsonl, line (4|9): .*data\.over_long=drop"):
        train_reward_model(small_config(tmp_path / "strict", *options, "data.over_long=refuse"))
    with pytest.raises(ConfigError, match=r"data\.over_long was drop, is truncate"):
        train_reward_model(small_config(tmp_path / "run", *options, "resume=auto"))
    given = TrainVal(*PreferenceDataset(file).split_by_prompt(0.4, seed=0))
    config = small_config(tmp_path / "given", "training.max_steps=1", "data.over_long=drop")
    again = train_reward_model(config, data_path=given)
    assert again.data.train_pairs + again.data.val_pairs == 58


def test_a_comparison_of_optimizers_refuses_the_option():
    from rm_optimizer.experiments.optimizer_comparison.setting import ComparisonOptions

    with pytest.raises(ConfigError, match=r"sets data\.over_long itself.*all pairs"):
        ComparisonOptions.of_budget("smoke", "x.jsonl", ["adamw", "muon"], overrides=("data.over_long=drop",))
