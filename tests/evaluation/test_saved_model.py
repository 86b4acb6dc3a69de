"""An evaluation drops no pair, scores no response twice, goes on after a kill and says what it must be read with."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import binom
from torch import Tensor

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.metrics.pairwise import PairwiseMetrics
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import PreferencePair, pair_fingerprints
from rm_optimizer.core.storage.certificate import TurnedOrders
from rm_optimizer.core.storage.model_files import TRAINED_PAIRS_FILE, TrainedPairs
from rm_optimizer.core.tokens.batching import AnyPairBatch
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.errors import ConfigError
from rm_optimizer.evaluation import saved_model
from rm_optimizer.evaluation.pair_rewards import score_pairs
from rm_optimizer.evaluation.saved_model import Evaluation, evaluate_checkpoint, evaluate_model, load_in
from rm_optimizer.records.files import held
from rm_optimizer.records.run_folder import RunFolder
from rm_optimizer.reporting.tables import print_evaluation
from tests.builders import narrow_reward_model

LONG = "the same long beginning " * 20
SHORT = [PreferencePair(f"Say {i}", f"{i} it is", "no", metadata={"id": i, "topic": i % 2}) for i in range(6)]
CUT = [PreferencePair(f"Say {i}", f"{LONG}good {i}", f"{LONG}bad {i}") for i in range(6, 10)]


@pytest.fixture(scope="module")
def model() -> BradleyTerryRM:
    return narrow_reward_model(text for pair in SHORT for text in (str(pair.prompt), pair.chosen))


def evaluated(model: BradleyTerryRM, pairs: Sequence[PreferencePair], folder: Path, **options: Any) -> Evaluation:
    settings: dict[str, Any] = {"token_budget": 4096, "num_bootstrap": 50, "seed": 0, "checkpoint": str(folder)}
    return evaluate_model(model, PreferenceDataset(pairs), output_dir=folder, **settings | options)


def printed(evaluation: Evaluation) -> str:
    target = io.StringIO()
    print_evaluation("title", evaluation, Console(file=target, width=300))
    return target.getvalue()


def test_pairs_equal_after_truncation_are_ties_and_are_said(model: BradleyTerryRM, tmp_path: Path):
    result = evaluated(model, [*SHORT, *CUT], tmp_path)
    assert (result.metrics.num_pairs, result.metrics.tie_rate) == (10, 0.4)
    assert result.truncation.num_identical_dropped == result.truncation.num_response_cut == 4
    assert "of 10 pairs lost prompt tokens, 4 response tokens" in printed(result)
    assert "4 pairs have one sequence of tokens on both sides and count as ties" in printed(result)
    uncut = replace(result.truncation, num_prompt_cut=0, num_response_cut=0)
    assert "none, at 64 tokens" in printed(replace(result, truncation=uncut))
    stored = json.loads((tmp_path / "metrics.json").read_text())
    assert stored["truncation"]["num_identical_dropped"] == 4
    assert PairwiseMetrics.from_json((tmp_path / "metrics.json").read_text()) == result.metrics


def test_validation_in_training_counts_the_same_ties(model: BradleyTerryRM, tmp_path: Path):
    data = PreferenceDataset([CUT[0], *SHORT, CUT[1]])
    tokens = tokenize_pairs(data.pairs, model.renderer, tmp_path)
    rewards = score_pairs(model, tokens, data, token_budget=512, prefix_sharing=False)
    assert rewards.pair_index.tolist() == list(range(8))
    assert (rewards.margin == 0).tolist() == [True, *[False] * 6, True]
    sample = score_pairs(
        model, tokens, data, token_budget=512, prefix_sharing=False, positions=np.array([0, 2, 4], dtype=np.int64)
    )
    assert sample.pair_index.tolist() == [0, 1, 3, 5]
    evaluation = evaluated(model, data.pairs, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "pair_rewards.jsonl").read_text().splitlines()]
    assert [line["chosen"] for line in lines] == pytest.approx(rewards.chosen.tolist(), abs=1e-5)
    assert evaluation.metrics.tie_rate == 0.25


def test_validation_computes_each_response_of_lists_once(model: BradleyTerryRM, monkeypatch: pytest.MonkeyPatch):
    rows = [
        {"prompt": f"Say {n}", "responses": [f"{i} it is" for i in range(n)], "scores": [*range(n)]} for n in (5, 8)
    ]
    data = PreferenceDataset(rows)
    tokens = tokenize_pairs(data.pairs, model.renderer, None)
    alone = [model.score([pair.prompt] * 2, [pair.chosen, pair.rejected]).tolist() for pair in data.pairs]
    passed: list[int] = []
    done: list[int] = []
    rewards_of = BradleyTerryRM.rewards_of

    def counted(model: BradleyTerryRM, batch: AnyPairBatch) -> Tensor:
        passed.append(2 * batch.num_pairs)
        return rewards_of(model, batch)

    monkeypatch.setattr(BradleyTerryRM, "rewards_of", counted)
    for sharing in (False, True):
        for positions in (None, np.arange(0, len(data), 3)):
            passed.clear()
            found = score_pairs(
                model, tokens, data,
                token_budget=64, prefix_sharing=sharing, positions=positions, after_batch=done.append,
            )  # fmt: skip
            wanted = [alone[i] for i in found.pair_index]
            assert np.stack([found.chosen, found.rejected], axis=1) == pytest.approx(np.array(wanted), abs=1e-5)
            assert done[-1] == len(found.pair_index)
            if positions is None:
                assert sum(passed) == 6 + 8  # five responses make two pairs and one more


def test_each_response_of_a_list_is_scored_once(model: BradleyTerryRM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = {"prompt": "Say it", "responses": [f"{i} it is" for i in range(8)], "scores": list(range(8))}
    (tmp_path / "lists.jsonl").write_text(json.dumps(rows))
    data = PreferenceDataset(str(tmp_path / "lists.jsonl"))
    assert len(data) == 28
    seen: list[int] = []
    score = BradleyTerryRM.score_encoded
    monkeypatch.setattr(
        BradleyTerryRM, "score_encoded", lambda self, e, **k: (seen.append(len(e)), score(self, e, **k))[1]
    )
    result = evaluated(model, data.pairs, tmp_path)
    assert seen == [8]
    assert result.best_of_n is not None
    assert result.best_of_n.num_lists == 1
    assert "best of 8 (1 lists)" in printed(result)
    lines = [json.loads(line) for line in (tmp_path / "pair_rewards.jsonl").read_text().splitlines()]
    assert {(line["chosen_index"], line["rejected_index"]) for line in lines} == {
        (i, j) for i in range(8) for j in range(i)
    }
    assert {line["group"] for line in lines} == {lines[0]["group"]}
    assert len({(line["chosen_index"], line["chosen"]) for line in lines}) == 7


def test_votes_and_annotators_stay_with_their_pairs(model: BradleyTerryRM, tmp_path: Path):
    row = {"prompt": "Say 1", "response_a": "1 it", "response_b": "no"}
    voted = [row | {"votes_a": 3, "votes_b": 1}]
    evaluated(model, PreferenceDataset(voted).pairs, tmp_path / "votes")
    (line,) = map(json.loads, (tmp_path / "votes" / "pair_rewards.jsonl").read_text().splitlines())
    assert (line["votes_chosen"], line["votes_rejected"]) == (3.0, 1.0)
    cast = [row | {"vote": vote, "annotator": name} for vote, name in (("A", "ann"), ("B", "ben"), ("A", "ben"))]
    found = evaluated(model, PreferenceDataset(cast).pairs, tmp_path / "cast", by=["annotator"])
    lines = map(json.loads, (tmp_path / "cast" / "pair_rewards.jsonl").read_text().splitlines())
    assert [line["annotator"] for line in lines] == ["ann", "ben", "ben"]
    assert found.metrics.groups["annotator"].keys() == {"ann", "ben"}


def test_the_official_number_of_each_subset_follows_from_the_files_written(model: BradleyTerryRM, tmp_path: Path):
    rows = [
        {"prompt": f"Say {n}", "chosen": [f"{n} it"], "rejected": ["no", "so what", "is it"], "subset": "ab"[n % 2]}
        for n in range(6)
    ]
    (tmp_path / "lists.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = evaluated(model, PreferenceDataset(str(tmp_path / "lists.jsonl")).pairs, tmp_path)
    rewards: dict[tuple[str, str], dict[str, float]] = {}
    for line in map(json.loads, (tmp_path / "pair_rewards.jsonl").read_text().splitlines()):
        own = rewards.setdefault((line["subset"], line["group"]), {})
        own |= {f"c{line['chosen_index']}": line["chosen"], f"r{line['rejected_index']}": line["rejected"]}
    stored = json.loads((tmp_path / "metrics.json").read_text())["best_of_n"]["by_subset"]
    for subset in "ab":
        lists = [own for (name, _), own in rewards.items() if name == subset]
        assert len(lists) == 3
        best = sum(max(own, key=own.__getitem__) == "c0" for own in lists) / 3
        assert stored[subset]["accuracy"]["value"] == pytest.approx(best)
    assert "a: best of 4 (3 lists)" in printed(result)


class Killed(Exception):
    pass


def test_a_killed_evaluation_goes_on_to_the_same_bytes(
    model: BradleyTerryRM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(saved_model, "CHUNK_RESPONSES", 4)

    def kill(done: int, total: int) -> None:
        if done == 8:
            raise Killed

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    evaluated(model, SHORT, whole, checkpoint="org/name")
    with pytest.raises(Killed):
        evaluated(model, SHORT, resumed, checkpoint="org/name", on_progress=kill)
    seen: list[int] = []
    evaluated(model, SHORT, resumed, checkpoint="org/name", on_progress=lambda done, total: seen.append(done))
    assert seen == [8, 12]
    assert sorted(path.name for path in resumed.iterdir()) == sorted(path.name for path in whole.iterdir())
    for path in whole.iterdir():
        assert path.read_bytes() == (resumed / path.name).read_bytes(), path.name


def test_other_weights_do_not_go_on_from_a_killed_evaluation(
    model: BradleyTerryRM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(saved_model, "CHUNK_RESPONSES", 4)

    def kill(done: int, total: int) -> None:
        if done == 8:
            raise Killed

    with pytest.raises(Killed):
        evaluated(model, SHORT, tmp_path, on_progress=kill)
    with torch.no_grad():
        model.reward_head.weight.mul_(2.0)
    try:
        seen: list[int] = []
        evaluated(model, SHORT, tmp_path, on_progress=lambda done, total: seen.append(done))
    finally:
        with torch.no_grad():
            model.reward_head.weight.div_(2.0)
    assert seen[0] == 0


def test_pairs_that_were_trained_on_are_said_loudly(model: BradleyTerryRM, tmp_path: Path):
    assert "unknown" in printed(evaluated(model, SHORT, tmp_path))
    TrainedPairs.of(pair_fingerprints(SHORT[:2])).write(tmp_path / TRAINED_PAIRS_FILE)
    result = evaluated(model, SHORT, tmp_path)
    assert "WARNING: 2 of 6 pairs were trained on, and 2 of 6 prompts (2 pairs)" in printed(result)
    assert json.loads((tmp_path / "metrics.json").read_text())["trained_on"]["num_pairs"] == 2
    assert "none of these pairs" in printed(evaluated(model, SHORT[2:], tmp_path))


def test_a_length_that_nobody_chose_is_said(model: BradleyTerryRM, tmp_path: Path):
    assert "--max-length" not in printed(evaluated(model, SHORT, tmp_path))
    model.has_default_length = True
    try:
        text = printed(evaluated(model, SHORT, tmp_path))
    finally:
        model.has_default_length = False
    assert "none, at 64 tokens (a default: the model records none; set --max-length)" in text


def test_the_share_of_turned_orders_is_bounded_from_above():
    exact, rounded = np.array([[1.0] * 50, [0.0] * 50]), np.array([[1.0] * 47 + [-1.0, -1.0, 0.0], [0.0] * 50])
    found = TurnedOrders.of("bfloat16", exact, rounded)
    assert (found.num_pairs, found.num_turned, found.largest_change) == (50, 3, 2.0)
    assert binom.cdf(3, 50, found.at_most) == pytest.approx(0.05)  # so few are seen with 5 % where the share is larger
    assert TurnedOrders.of("bfloat16", exact, exact).at_most == pytest.approx(1 - 0.05 ** (1 / 50))
    assert TurnedOrders.of("bfloat16", exact, exact[::-1]).at_most == 1


def test_an_evaluation_in_a_half_type_counts_what_it_turns(model: BradleyTerryRM, tmp_path: Path):
    model.save_pretrained(tmp_path / "model")
    exact, half = (
        evaluate_checkpoint(tmp_path / "model", SHORT, dtype=dtype, output_dir=tmp_path / f"{dtype}", num_bootstrap=50)
        for dtype in (None, "bfloat16")
    )
    margins = [
        np.array([row.chosen - row.rejected for row in RunFolder(tmp_path / f"{dtype}").pair_rewards()])
        for dtype in (None, "bfloat16")
    ]
    assert exact.turned is None
    with pytest.raises(ConfigError, match="unknown dtype 'bf17'"):
        load_in("bf17", lambda dtype: pytest.fail("loaded"), PreferenceDataset(SHORT), token_budget=64, seed=0)
    assert load_in("float64", lambda dtype: model, PreferenceDataset(SHORT), token_budget=64, seed=0) == (model, None)
    assert half.turned is not None
    assert (half.turned.dtype, half.turned.num_pairs) == ("bfloat16", len(SHORT))
    assert half.turned.num_turned == int((np.sign(margins[0]) != np.sign(margins[1])).sum())
    assert 0 < half.turned.largest_change < 0.1
    assert re.search(rf"order turned by bfloat16 *│ {half.turned.num_turned} of 6 pairs", printed(half))
    assert Evaluation.from_json((tmp_path / "bfloat16" / "metrics.json").read_text()).turned == half.turned


def test_an_unknown_option_is_refused_before_the_model_is_loaded():
    with pytest.raises(TypeError, match=r"unknown argument of evaluate_checkpoint 'sed'; did you mean 'seed'"):
        evaluate_checkpoint("nowhere", SHORT, sed=1)  # type: ignore[call-arg]


def test_groups_stay_within_their_source_and_rows_keep_their_own_id(model: BradleyTerryRM, tmp_path: Path):
    pairs = [
        PreferencePair(str(pair.prompt), pair.chosen, pair.rejected, metadata={**pair.metadata, **groups})
        for pair, groups in zip(
            SHORT, [{"source": name, "subset": subset} for name in "ab" for subset in "xyy"], strict=True
        )
    ]
    result = evaluated(model, pairs, tmp_path, by=["topic"])
    assert set(result.metrics.groups) == {"source", "subset", "topic"}
    assert set(result.metrics.groups["subset"]) == {"a / x", "a / y", "b / x", "b / y"}
    assert set(result.metrics.groups["topic"]) == {"a / 0", "a / 1", "b / 0", "b / 1"}
    row = json.loads((tmp_path / "pair_rewards.jsonl").read_text().splitlines()[1])
    assert (row["id"], row["source"], row["subset"], row["topic"]) == (1, "a", "y", 1)
    assert "macro average over 2 sources" in printed(result)


def test_an_evaluation_writes_into_no_run_and_no_folder_in_use(model: BradleyTerryRM, tmp_path: Path):
    with held(tmp_path / "busy", "evaluation"):
        assert evaluated(model, SHORT, tmp_path / "busy").metrics.num_pairs == len(SHORT)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    with pytest.raises(ConfigError, match=r"output_dir must not be the folder of a run or a model, .* run\.json"):
        evaluated(model, SHORT, tmp_path / "run")
    busy = tmp_path / "free"
    busy.mkdir()
    descriptor = os.open(busy, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="free is in use: another process writes an evaluation there"):
        evaluated(model, SHORT, busy)
    os.close(descriptor)
    assert not [*busy.iterdir()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # options that Ray Data itself sets
def test_any_number_of_workers_on_ray_gives_the_same_bits_and_continues_a_stopped_evaluation(
    model: BradleyTerryRM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import ray

    monkeypatch.setattr(saved_model, "CHUNK_RESPONSES", 3)

    def stop(done: int, total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    found = {}
    try:
        for stopped, workers in ((2, None), (None, 1), (None, 2)):
            folder = tmp_path / str(workers)
            with pytest.raises(KeyboardInterrupt):
                evaluated(model, SHORT, folder, num_workers=stopped, on_progress=stop)
            evaluated(model, SHORT, folder, num_workers=workers, checkpoint="narrow")
            found[workers] = [(folder / name).read_bytes() for name in ("pair_rewards.jsonl", "metrics.json")]
    finally:
        ray.shutdown()
    assert found[None] == found[1] == found[2]
