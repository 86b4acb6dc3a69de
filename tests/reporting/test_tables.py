"""Tables print the numbers they were given, and a collapse in the place of an accuracy."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
from rich.console import Console, RenderableType

from rm_optimizer.core.metrics.estimate import Estimate
from rm_optimizer.core.metrics.pairwise import PairwiseMetrics, evaluate_pairs
from rm_optimizer.core.tokens.audit import DataAudit, PromptOverlap, SourceAudit, SplitAudit
from rm_optimizer.reporting.data_audit import print_audit
from rm_optimizer.reporting.tables import group_table, metrics_rows, summary_table


def console() -> Console:
    return Console(file=io.StringIO(), width=140)


def printed(renderable: RenderableType) -> str:
    target = console()
    target.print(renderable)
    return written(target)


def written(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def row(text: str, name: str) -> list[str]:
    (found,) = [line for line in text.splitlines() if line.strip("│ ").startswith(name)]
    return [cell.strip() for cell in found.strip("│ ").split("│")]


def metrics(num_pairs: int = 90, length_gap: np.ndarray | None = None) -> PairwiseMetrics:
    rng = np.random.default_rng(0)
    sources = ["large" if k % 3 else "small" for k in range(num_pairs)]
    chosen = rng.normal(size=num_pairs) + 1.0
    rejected = rng.normal(size=num_pairs)
    same = np.array([name == "small" for name in sources])
    chosen[same] = rejected[same] = 1.0
    prompts = [str(k) for k in range(num_pairs)]
    options: dict[str, Any] = {"beta": 1.0, "prompt_ids": prompts, "num_bootstrap": 100, "seed": 0}
    groups = {"source": sources, "subset": [f"{name} / {k % 20}" for k, name in enumerate(sources)]}
    return evaluate_pairs(chosen, rejected, length_gap=length_gap, groups=groups, **options)


def test_values_are_written_by_kind():
    rows = {"a": Estimate(0.5, 0.1, 9, 0.4, 0.6), "b": 12_345, "c": 0.8125, "d": None, "e": "[bold]", "f": math.nan}
    text = printed(summary_table("Run", rows))
    assert [row(text, name)[1] for name in rows] == ["0.500 [0.400, 0.600]", "12,345", "0.812", "n/a", "[bold]", "n/a"]


def test_headline_rows_are_the_metrics():
    result = metrics()
    text = printed(summary_table("Evaluation", metrics_rows(result)))
    assert row(text, "accuracy") == ["accuracy", str(result.accuracy)]
    assert row(text, "NLL")[1] == str(result.nll)
    assert row(text, "tied pairs")[1] == "33.3%"
    assert f"noise floor {result.ece_noise_floor:.3f}" in text


def test_a_collapse_stands_in_the_place_of_the_accuracy():
    collapsed = metrics().groups["source"]["small"]
    rows = metrics_rows(collapsed)
    assert next(iter(rows.values())) == collapsed.collapse.reason
    assert "accuracy" not in rows
    assert row(printed(group_table(metrics(), "source")), "small")[3] == "collapsed"


def test_groups_come_by_size_beside_their_length_baseline():
    result = metrics(length_gap=np.arange(90) % 5 - 2.5)
    text = printed(group_table(result, "source"))
    assert text.index("large") < text.index("small")
    large = result.groups["source"]["large"]
    assert row(text, "large")[1:5] == ["60", "60", str(large.accuracy), f"{large.longer_wins.value:.3f}"]
    assert "longer" not in printed(group_table(metrics(), "source"))


def test_many_small_groups_are_counted_and_not_listed():
    text = printed(group_table(metrics(), "subset"))
    assert "large /" not in text
    assert "more with fewer than 20 pairs each: see metrics.json" in text


def test_the_headline_says_what_counting_characters_reaches_and_the_mean_over_sources():
    rng = np.random.default_rng(1)
    result = metrics(length_gap=rng.normal(size=90) + 0.4)
    text = printed(summary_table("Evaluation", metrics_rows(result)))
    assert row(text, "length baseline (longer wins)")[1] == str(result.longer_wins)
    assert row(text, "macro average over 2 sources")[1] == str(result.macro_accuracy)
    assert "not shown to be above counting characters" in row(text, "accuracy − length baseline")[1]


def test_one_prompt_says_why_it_has_no_interval():
    result = evaluate_pairs(np.ones(3), np.zeros(3), beta=1.0, prompt_ids=["a"] * 3, num_bootstrap=100, seed=0)
    assert row(printed(summary_table("", metrics_rows(result))), "accuracy")[1] == "1.000 (1 prompt: no interval)"


def test_few_prompts_that_carry_the_weight_are_said():
    weight = np.array([100.0, *[1.0] * 19])
    prompts = [str(k) for k in range(20)]
    options: dict[str, Any] = {"beta": 1.0, "prompt_ids": prompts, "num_bootstrap": 0, "seed": 0}
    result = evaluate_pairs(np.ones(20), np.zeros(20), weight=weight, **options)
    assert row(printed(summary_table("", metrics_rows(result))), "effective number of prompts")[1].endswith(
        ": 1 of 20 prompts have half of the weight of the pairs"
    )


def test_a_name_is_folded_and_no_number_cut_in_a_narrow_terminal():
    names = [f"is-it-better-to-have-a-rather-long-name/{k % 2}" for k in range(40)]
    options: dict[str, Any] = {"beta": 1.0, "prompt_ids": [str(k) for k in range(40)], "num_bootstrap": 50, "seed": 0}
    gap = np.random.default_rng(0).normal(size=40)
    result = evaluate_pairs(gap + 0.3, gap * 0, length_gap=gap, groups={"source": names}, **options)
    target = Console(file=io.StringIO(), width=80)
    target.print(group_table(result, "source"))
    for group in result.groups["source"].values():
        assert str(group.accuracy) in written(target)
    assert "…" not in written(target)


def split(num_pairs: int = 200) -> SplitAudit:
    tokens = (1.0, 2.0, 30.0, 40.0, 500.0, 600.0, 7000.0) if num_pairs else (math.nan,) * 7
    return SplitAudit(
        num_pairs=num_pairs,
        num_skipped=3,
        num_prompts=150,
        num_duplicates=4,
        num_contradictions=1,
        num_identical=2,
        num_truncated=50,
        num_uneven_cut=1,
        num_response_cut=10,
        chosen_tokens=tokens,
        rejected_tokens=tokens,
        longer_wins=Estimate(0.61, 0.02, 150),
        num_margins=0,
        num_zero_labels=2,
        num_soft_labels=5,
        sources={"hh": SourceAudit(num_pairs, 150, Estimate(0.61, 0.02, 150))},
    )


def test_audit_shows_each_split_with_shares_of_its_own_pairs():
    target = console()
    print_audit(DataAudit({"train": split(), "val": split(100)}, ()), target)
    text = written(target)
    assert row(text, "truncated")[1:] == ["50 (25.0%)", "50 (50.0%)"]
    assert row(text, "chosen tokens (median, 95%, most)")[1] == "30, 500, 7,000"
    assert row(text, 'accuracy of "longer wins"')[1] == "0.610 ± 0.020"
    assert "train: sources" in text


def test_audit_says_whether_splits_share_prompts():
    target = console()
    shared, none = PromptOverlap("train", "val", 7, 9, 8), PromptOverlap("train", "test", 0, 0, 0)
    print_audit(DataAudit({"train": split()}, (shared, none)), target)
    assert "train / val: 7 prompts in both (9 and 8 pairs)" in written(target)
    assert "train / test: no prompt in both" in written(target)


def test_an_empty_split_is_shown_without_shares():
    target = console()
    print_audit(DataAudit({"empty": split(0)}, ()), target)
    assert row(written(target), "chosen tokens")[1] == "n/a, n/a, n/a"
