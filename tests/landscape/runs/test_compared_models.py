"""Models to compare: names that tell them apart, and settings that make them one function of their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from rm_optimizer.core.model.identity import differing_settings
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.measured_loss import names_of, read_models
from tests.builders import tiny_reward_model
from tests.landscape.worlds import tokenizer


@pytest.mark.parametrize(
    ("checkpoints", "names"),
    [
        (["runs/lr0.01", "runs/lr0.05"], ["lr0.01", "lr0.05"]),
        (["a/lauf ü", "b/lauf ü"], ["a/lauf ü", "b/lauf ü"]),
        (["a/best", "b/best", "c/b/best"], ["runs/a/best", "runs/b/best", "c/b/best"]),
        (["a/checkpoints/step-1.ckpt", "a/best"], ["step-1", "best"]),
        (["same", "same"], ["same (1)", "same (2)"]),
        (["x/run (3)", "a/run", "b/run"], ["x/run (3)", "a/run", "b/run"]),
    ],
)
def test_names_are_as_short_as_tells_the_models_apart(
    checkpoints: list[str], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path / "runs")
    for each in checkpoints:
        Path(each).mkdir(parents=True, exist_ok=True)
    assert names_of(checkpoints) == names


def heads(count: int, **options: object) -> BradleyTerryRM:
    """A decoder whose weights have the same shapes whatever its number of heads."""
    return tiny_reward_model(
        "llama", hidden_size=16, num_attention_heads=count, num_key_value_heads=count, head_dim=16 // count, **options
    )


def test_equal_shapes_of_another_function_differ_and_dropout_and_length_do_not():
    model = heads(2)
    assert model.model.state_dict().keys() == heads(4).model.state_dict().keys()
    assert differing_settings(model, heads(4)) == ["head_dim", "num_attention_heads", "num_key_value_heads"]
    assert differing_settings(model, heads(2, seed=1, attention_dropout=0.5, max_length=64)) == []
    assert "tokenizer or template" in differing_settings(model, heads(2, tokenizer=tokenizer()))


def test_a_model_that_computes_otherwise_is_refused_by_its_name(tmp_path: Path):
    folders = [tmp_path / name for name in ("two", "four", "again")]
    for folder, count in zip(folders, (2, 4, 2), strict=True):
        heads(count).save_pretrained(folder)
    given = [str(folder) for folder in folders]
    with pytest.raises(ConfigError, match="and four has another head_dim, num_attention_heads, num_key_value_heads;"):
        read_models(given, given)
    assert [*read_models(given[::2], given[::2])] == ["two", "again"]
