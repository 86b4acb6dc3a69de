"""Tables print the numbers they were given, and a collapse in the place of an accuracy."""

from __future__ import annotations

import io
import math

import numpy as np
from rich.console import Console, RenderableType

from rm_optimizer.core.audit import DataAudit, PromptOverlap, SourceAudit, SplitAudit
from rm_optimizer.core.estimate import Estimate
from rm_optimizer.core.metrics import PairwiseMetrics, evaluate_pairs
from rm_optimizer.reporting.tables import group_table, metrics_rows, print_audit, summary_table


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


def metrics(num_pairs: int = 90) -> PairwiseMetrics:
    rng = np.random.default_rng(0)
    sources = ["large" if k % 3 else "small" for k in range(num_pairs)]
    chosen = rng.normal(size=num_pairs) + 1.0
    rejected = rng.normal(size=num_pairs)
    same = np.array([name == "small" for name in sources])
    chosen[same] = rejected[same] = 1.0
    prompts = [str(k) for k in range(num_pairs)]
    return evaluate_pairs(
        chosen, rejected, beta=1.0, prompt_ids=prompts, groups={"source": sources}, num_bootstrap=100, seed=0
    )


def test_values_are_written_by_kind() -> None:
    rows = {"a": Estimate(0.5, 0.1, 9, 0.4, 0.6), "b": 12_345, "c": 0.8125, "d": None, "e": "[bold]", "f": math.nan}
    text = printed(summary_table("Run", rows))
    assert [row(text, name)[1] for name in rows] == ["0.500 [0.400, 0.600]", "12,345", "0.812", "n/a", "[bold]", "n/a"]


def test_headline_rows_are_the_metrics() -> None:
    result = metrics()
    text = printed(summary_table("Evaluation", metrics_rows(result)))
    assert row(text, "accuracy") == ["accuracy", str(result.accuracy)]
    assert row(text, "NLL")[1] == str(result.nll)
    assert row(text, "tied pairs")[1] == "33.3%"
    assert f"noise floor {result.ece_noise_floor:.3f}" in text


def test_a_collapse_stands_in_the_place_of_the_accuracy() -> None:
    collapsed = metrics().groups["source"]["small"]
    rows = metrics_rows(collapsed)
    assert next(iter(rows.values())) == collapsed.collapse.reason
    assert "accuracy" not in rows
    assert row(printed(group_table(metrics(), "source")), "small")[3] == "collapsed"


def test_groups_come_by_size_beside_their_length_baseline() -> None:
    result = metrics()
    text = printed(group_table(result, "source", longer_wins={"large": 0.7125}))
    assert text.index("large") < text.index("small")
    assert row(text, "large")[1:5] == ["60", "60", str(result.groups["source"]["large"].accuracy), "0.713"]
    assert row(text, "small")[4] == "n/a"
    assert "longer wins" not in printed(group_table(result, "source"))


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
        num_response_cut=10,
        chosen_tokens=tokens,
        rejected_tokens=tokens,
        longer_wins=Estimate(0.61, 0.02, 150),
        num_margins=0,
        num_soft_labels=5,
        sources={"hh": SourceAudit(num_pairs, 150, Estimate(0.61, 0.02, 150))},
    )


def test_audit_shows_each_split_with_shares_of_its_own_pairs() -> None:
    target = console()
    print_audit(DataAudit({"train": split(), "val": split(100)}, ()), target)
    text = written(target)
    assert row(text, "truncated")[1:] == ["50 (25.0%)", "50 (50.0%)"]
    assert row(text, "chosen tokens (median, 95%, most)")[1] == "30, 500, 7,000"
    assert row(text, 'accuracy of "longer wins"')[1] == "0.610 ± 0.020"
    assert "train: sources" in text


def test_audit_says_whether_splits_share_prompts() -> None:
    target = console()
    shared, none = PromptOverlap("train", "val", 7, 9, 8), PromptOverlap("train", "test", 0, 0, 0)
    print_audit(DataAudit({"train": split()}, (shared, none)), target)
    assert "train / val: 7 prompts in both (9 and 8 pairs)" in written(target)
    assert "train / test: no prompt in both" in written(target)


def test_an_empty_split_is_shown_without_shares() -> None:
    target = console()
    print_audit(DataAudit({"empty": split(0)}, ()), target)
    assert row(written(target), "chosen tokens")[1] == "n/a, n/a, n/a"
