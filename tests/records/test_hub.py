"""A mistyped name or a missing connection is one sentence in a moment, for models, tokenizers and data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.rows.readers import read_rows
from rm_optimizer.core.storage.model_files import refuse_by_files
from rm_optimizer.errors import CheckpointError, DataError
from rm_optimizer.interfaces.commands.data import data_check
from rm_optimizer.interfaces.inputs import PairOptions
from rm_optimizer.records.hub import hub_obstacle

RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://hub"))


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes the hub answer a question with an error, or with nothing; an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    asked: list[dict[str, Any]] = []

    def make(error: Exception | None) -> list[dict[str, Any]]:
        def repo_info(self: HfApi, name: str, **options: Any) -> None:
            asked.append({"name": name, **options})
            if error is not None:
                raise error

        monkeypatch.setattr(HfApi, "repo_info", repo_info)
        return asked

    return make


def test_an_unknown_name_is_refused_after_one_question(answer: Any, tmp_path: Path):
    asked = answer(RepositoryNotFoundError("404", response=RESPONSE))
    with pytest.raises(
        CheckpointError, match=r"nothing of that name is here, and the hub has no public model nowhere/x"
    ):
        BradleyTerryRM.from_pretrained("nowhere/x")
    with pytest.raises(CheckpointError, match=r"model quen; .*; did you mean qwen, a preset of train_reward_model"):
        BradleyTerryRM("quen")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    with pytest.raises(CheckpointError, match="no tokenizer at 'nowhere': nothing of that name is here"):
        data_check([str(pairs)], PairOptions(), tokenizer="nowhere", max_length=64)
    with pytest.raises(DataError, match="the hub has no public dataset nowhere/data"):
        list(read_rows("nowhere/data", lambda number, reason: None))
    assert [(one["name"], one["repo_type"], one["timeout"]) for one in asked] == [
        ("nowhere/x", "model", 5.0),
        ("quen", "model", 5.0),
        ("nowhere", "model", 5.0),
        ("nowhere/data", "dataset", 5.0),
    ]


@pytest.fixture
def nothing_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub's own client meets a closed port; an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")


@pytest.mark.usefixtures("nothing_listens")
def test_without_a_connection_a_name_that_is_not_cached_is_refused_at_once():
    with pytest.raises(CheckpointError, match=r"the hub cannot be reached \(.*Connection refused\)"):
        BradleyTerryRM.from_pretrained("owner/name")
    with pytest.raises(DataError, match="the hub cannot be reached"):
        list(read_rows("owner/data", lambda number, reason: None))
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.usefixtures("nothing_listens")
def test_without_a_connection_a_cached_name_goes_on_offline(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "hub" / "models--owner--name" / "snapshots").mkdir(parents=True)
    assert hub_obstacle("owner/name", "model") is None
    assert constants.HF_HUB_OFFLINE
    assert "owner/name is taken from the cache" in caplog.text
    constants.HF_HUB_OFFLINE = False
    with pytest.raises(CheckpointError):
        BradleyTerryRM.from_pretrained("owner/name")
    refuse_by_files("owner/name")
    assert not constants.HF_HUB_OFFLINE, "a hiccup of the network lasts for one load"


def test_a_gated_model_says_where_to_ask_and_a_mirror_without_answers_is_let_pass(answer: Any):
    answer(GatedRepoError("403", response=RESPONSE))
    assert "run hf auth login" in str(hub_obstacle("owner/name", "model"))
    answer(HfHubHTTPError("500", response=RESPONSE))
    assert hub_obstacle("owner/name", "model") is None
    answer(None)
    assert hub_obstacle("owner/name", "model") is None
