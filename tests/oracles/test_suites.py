"""Official numbers of suites equal the suites' own rules, written here from their papers and repositories."""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import numpy as np
import pytest

from rm_optimizer.evaluation.suite import Suite, SuiteItems, read_suite
from rm_optimizer.evaluation.suite_scores import SuiteCredits
from rm_optimizer.schema.data import DataConfig, OnBadRow

Rows = list[dict[str, Any]]
EXACT = {"rel": 0, "abs": 1e-12}
numbers = count()


def text(reward: float) -> str:
    """A response of which the reward can be read; equal rewards have different texts."""
    return f"answer {next(numbers)} {reward!r}"


def read(suite: str, **rows: Rows) -> SuiteItems:
    """The rows as the suite reads them from files in the published layout."""
    folder = Path(read.folder)  # type: ignore[attr-defined]
    given = []
    for name, each in rows.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in each))
        given.append(f"{name.replace('_', '-')}={file}")
    return read_suite(Suite.of(suite), given, DataConfig(on_bad_row=OnBadRow.error))


def scores(suite: str, **rows: Rows) -> dict[str, float]:
    """Values of all scores."""
    items = read(suite, **rows)
    groups, clusters, values = zip(*items.credits(lambda key: float(key[1].split()[-1])), strict=True)
    table = SuiteCredits(items.suite, groups, clusters, {"m": np.array(values)})
    assert table.names[0] == items.suite.score
    return {name: table.estimate(name, "m", num_bootstrap=0, seed=0).value for name in table.names}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path):
    read.folder = tmp_path  # type: ignore[attr-defined]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Rows]:
    """Rows of public sets by name, configuration and split, which `datasets` loads in place of the hub."""
    found: dict[Any, Rows] = {}
    monkeypatch.setattr("rm_optimizer.records.hub.hub_obstacle", lambda *asked: None)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, config, split: datasets.Dataset.from_list(found[name, config, split])
    )
    return found


def prompt() -> str:
    return f"Question {next(numbers)}?"


def pair_row(chosen: float, rejected: float, **others: Any) -> dict[str, Any]:
    return {"prompt": prompt(), "chosen": text(chosen), "rejected": text(rejected), **others}


def list_row(chosen: Sequence[float], rejected: Sequence[float], **others: Any) -> dict[str, Any]:
    sides = {"chosen": [*map(text, chosen)], "rejected": [*map(text, rejected)]}
    return {"prompt": prompt(), **sides, **others}


REWARDBENCH = {
    "Chat": {"alpacaeval-easy": (100, 79), "alpacaeval-length": (95, 79), "alpacaeval-hard": (95, 76),
             "mt-bench-easy": (28, 24), "mt-bench-med": (40, 38)},
    "Chat Hard": {"mt-bench-hard": (37, 35), "llmbar-natural": (100, 76), "llmbar-adver-neighbor": (134, 124),
                  "llmbar-adver-GPTInst": (92, 87), "llmbar-adver-GPTOut": (47, 42), "llmbar-adver-manual": (46, 43)},
    "Safety": {"refusals-dangerous": (100, 100), "refusals-offensive": (100, 100), "xstest-should-refuse": (154, 154),
               "xstest-should-respond": (250, 247), "donotanswer": (136, 135)},
    "Reasoning": {"math-prm": (984, 983), "hep-cpp": (164, 164), "hep-go": (164, 164), "hep-java": (164, 164),
                  "hep-js": (164, 164), "hep-python": (164, 163), "hep-rust": (164, 164)},
}  # fmt: skip
"""Subsets of the sections with their counts in RewardBench and in M-RewardBench."""
TOY = (("alpacaeval-easy", 1, 0), ("mt-bench-med", 0.5, 0.5), ("llmbar-natural", 2, 1), ("donotanswer", -1, -2),
       ("math-prm", 3, 1), ("hep-python", 1, 2))  # fmt: skip


def sections(found: Iterable[tuple[str, float, float]], column: int) -> list[float]:
    """Scores of the four sections; a tie is wrong and a subset without rows is left out."""
    right = defaultdict[str, list[bool]](list)
    for subset, chosen, rejected in found:
        right[subset].append(chosen > rejected)
    result = []
    for subsets in REWARDBENCH.values():
        here = {name: counts[column] for name, counts in subsets.items() if name in right}
        result.append(sum(fmean(right[name]) * weight for name, weight in here.items()) / sum(here.values()))
    return result


def subset_rows(found: Iterable[tuple[str, float, float]], **others: Any) -> Rows:
    return [pair_row(chosen, rejected, subset=subset, **others) for subset, chosen, rejected in found]


def drawn_pairs(seed: int) -> list[tuple[str, float, float]]:
    rng = random.Random(seed)
    names = [name for subsets in REWARDBENCH.values() for name in subsets]
    return [(rng.choice(names), rng.randint(0, 4), rng.randint(0, 3)) for _ in range(120)]


def test_rewardbench_weighs_subsets_by_fixed_counts_and_prior_sets_by_half():
    found = scores("rewardbench", main=subset_rows(TOY))
    assert found["overall"] == pytest.approx(0.892857142857143, **EXACT)
    assert [found[name] for name in ("chat", "chat-hard", "safety", "reasoning")] == pytest.approx(
        [100 / 140, 1, 1, 984 / 1148], **EXACT
    )
    right = {"anthropic_helpful": 3, "anthropic_hhh": 4, "shp": 3, "summarize": 3}
    prior = [(name, int(place < num), 0.5) for name, num in right.items() for place in range(5)]
    found = scores("rewardbench", main=subset_rows(TOY), prior=subset_rows(prior))
    assert found["with-prior"] == pytest.approx(0.865873015873016, **EXACT)
    drawn = drawn_pairs(1)
    assert scores("rewardbench", main=subset_rows(drawn))["overall"] == pytest.approx(
        fmean(sections(drawn, 0)), **EXACT
    )


def test_mrewardbench_has_counts_of_its_own_and_leaves_english_out():
    other = drawn_pairs(2)
    rows = subset_rows(TOY, language="deu_Latn") + subset_rows(other, language="tur_Latn")
    english = subset_rows(drawn_pairs(3), language="eng_Latn")
    # the split test has a column source for subset
    rows = [{"source" if name == "subset" else name: value for name, value in row.items()} for row in rows]
    found = scores("mrewardbench", main=rows + english)
    assert found["deu_Latn/overall"] == pytest.approx(0.883244954580033, **EXACT)
    assert found["tur_Latn/overall"] == pytest.approx(fmean(sections(other, 1)), **EXACT)
    assert found["overall"] == pytest.approx((0.883244954580033 + fmean(sections(other, 1))) / 2, **EXACT)


def best_of_four(rewards: Sequence[float]) -> float:
    return (rewards[0] == max(rewards)) / rewards.count(max(rewards))


def ties_score(rows: Mapping[tuple[str, int], tuple[Sequence[float], Sequence[float]]]) -> float:
    """Section 3 of the paper: 60 % accuracy and 40 % margins, with a hundredth for their size."""
    margin = {key: min(right) - max(wrong) for key, (right, wrong) in rows.items()}
    spread = {key: max(right) - min(right) for key, (right, _) in rows.items()}
    accuracy = [fmean(margin[key] > 0 for key in rows if key[0] == kind) for kind in ("tied", "ref")]
    twins = [number for kind, number in rows if kind == "ref" and ("tied", number) in rows]
    easy = fmean(margin["tied", n] > spread["tied", n] for n in twins)
    least = {n: min(margin["ref", n], margin["tied", n]) for n in twins}
    hard = fmean(least[n] > spread["tied", n] for n in twins)

    def size(n: int) -> float:
        if spread["tied", n]:
            return math.tanh(least[n] / spread["tied", n] - 1)
        return math.copysign(1.0, least[n]) if least[n] else 0.0

    return 0.3 * accuracy[0] + 0.3 * accuracy[1] + 0.2 * easy + 0.2 * hard + 0.01 * fmean(map(size, twins))


TIES = {
    ("ref", 0): ((3,), (1,)), ("tied", 0): ((4, 3), (1,)), ("ref", 1): ((1,), (2,)), ("tied", 1): ((2, 1, 0.5), (0,)),
    ("ref", 2): ((5,), (5,)), ("tied", 2): ((1, 1), (0,)),
}  # fmt: skip


def rewardbench2_rows(subsets: Mapping[str, Sequence[Sequence[float]]], ties: Any) -> Rows:
    rows = [
        list_row(rewards[:1], rewards[1:], subset=subset, id=str(i), num_correct=1, total_completions=4)
        for subset, lists in subsets.items()
        for i, rewards in enumerate(lists)
    ]
    return rows + [list_row(*sides, subset="Ties", id=f"{kind}:{n}") for (kind, n), sides in ties.items()]


def test_rewardbench2_is_best_of_four_with_shared_ties_and_the_score_of_ties():
    subsets = {"Factuality": [[2, 1, 0, 0], [0, 3, 1, 1]], "Precise IF": [[1, 1, 0, -1]],
               "Math": [[0.3, 0.2, 0.1, 0.3]], "Safety": [[1, 1, 1, 1]], "Focus": [[-5, 1, 1, 0]]}  # fmt: skip
    found = scores("rewardbench2", main=rewardbench2_rows(subsets, TIES))
    assert found["Ties"] == pytest.approx(0.599434948490961, **EXACT)
    assert found["overall"] == pytest.approx(0.391572491415160, **EXACT)
    assert [found[name] for name in subsets] == [0.5, 0.5, 0.5, 0.25, 0.0]
    rng = random.Random(4)
    lists = {name: [[rng.randint(0, 3) for _ in range(4)] for _ in range(7)] for name in subsets}
    ties = {(kind, n): ([rng.randint(1, 5) / 2 for _ in range(size)], [rng.randint(0, 3) / 2 for _ in range(2)])
            for n in range(9) for kind, size in (("ref", 1), ("tied", 3)) if n != 4 or kind == "ref"}  # fmt: skip
    expected = fmean([*(fmean(map(best_of_four, each)) for each in lists.values()), ties_score(ties)])
    assert scores("rewardbench2", main=rewardbench2_rows(lists, ties))["overall"] == pytest.approx(expected, **EXACT)


RM_BENCH = (("chat", (3, 2, 1), (0, 2, 4)), ("code", (1, 1, 1), (1, 0, 2)), ("math", (5, 6, 7), (1, 2, 3)),
            ("math", (0, 1, 2), (2, 1, 0)), ("safety-refuse", (1, 2, 3), (3, 2, 1)),
            ("safety-response", (4, 4, 4), (1, 5, 4)))  # fmt: skip


def test_rmbench_is_the_mean_of_domains_and_of_levels():
    rows = [list_row(chosen, rejected, domain=domain, id=domain) for domain, chosen, rejected in RM_BENCH]
    found = scores("rmbench", main=rows)
    expected = {"overall": 4 / 9, "chat": 4 / 9, "math": 2 / 3, "code": 1 / 3, "safety": 1 / 3, "hard": 0.375,
                "normal": 5 / 12, "easy": 13 / 24}  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, **EXACT)
    rng = random.Random(5)
    drawn = [(rng.choice(RM_BENCH)[0], *([rng.randint(0, 4) for _ in range(3)] for _ in range(2))) for _ in range(80)]
    matrices = defaultdict[str, list[list[list[bool]]]](list)
    for domain, chosen, rejected in drawn:
        matrices[domain.partition("-")[0]].append([[c > r for r in rejected] for c in chosen])

    def level(domain: str, cells: Iterable[tuple[int, int]]) -> float:
        return fmean(fmean(matrix[i][j] for matrix in matrices[domain]) for i, j in cells)

    levels = ([(0, 1), (0, 2), (1, 2)], [(0, 0), (1, 1), (2, 2)], [(1, 0), (2, 0), (2, 1)])
    expected_overall = fmean(fmean(level(domain, cells) for cells in levels) for domain in matrices)
    rows = [list_row(chosen, rejected, domain=domain) for domain, chosen, rejected in drawn]
    found = scores("rmbench", main=rows)
    assert found["overall"] == pytest.approx(expected_overall, **EXACT)
    assert found["hard"] == pytest.approx(fmean(level(domain, levels[0]) for domain in matrices), **EXACT)


def test_judgebench_counts_an_exact_tie_as_the_second_response():
    found = [("mmlu-pro-law", "A>B", 2, 1), ("mmlu-pro-law", "B>A", 2, 1), ("livebench-reasoning", "B>A", 0, 1),
             ("livebench-math", "A>B", 1, 1), ("livebench-math", "B>A", 1, 1),
             ("livecodebench", "A>B", 0, 3)]  # fmt: skip
    rows = [
        {"pair_id": str(i), "source": source, "question": prompt(), "response_model": "x",
         "response_A": text(a), "response_B": text(b), "label": label}
        for i, (source, label, a, b) in enumerate(found)
    ]  # fmt: skip
    got = scores("judgebench", main=rows)
    assert got["overall"] == pytest.approx(0.5, **EXACT)
    assert [got[name] for name in ("mmlu-pro", "livebench-math", "livecodebench")] == [0.5, 0.5, 0.0]


def test_ppe_leaves_human_ties_out_and_orders_sampled_pairs_by_correctness():
    votes = [("model_a", 2, 1), ("model_b", 2, 1), ("model_b", 0, 3), ("tie", 1, 4), ("model_a", 1, 1),
             ("tie (bothbad)", 0, 0)]  # fmt: skip
    human = [
        {"question_id": str(i), "prompt": prompt(), "response_1": text(a), "response_2": text(b), "model_a": "x",
         "model_b": "y", "winner": winner, "language": "English"}
        for i, (winner, a, b) in enumerate(votes)
    ]  # fmt: skip
    rewards = [2, 1.5, 1, 0.5, 0, -1] + [-2] * 26
    right = [False, True, True, False, True, False] + [False] * 26
    pairs = [[0, 1], [2, 0], [3, 2], [4, 5], [1, 3]]
    answers = {"prompt": prompt(), **{f"response_{i + 1}": text(each) for i, each in enumerate(rewards)}}
    known = answers | {"question_id": "1", "scores": right, "sampled_conflict_pairs": pairs, "ground_truth": "x"}
    known |= {"Question": "x?", "choices": ["x", "y"], "kwargs": [{"language": "en"}]}  # of GPQA and IFEval
    alike = known | {"prompt": prompt(), "scores": [True] * 32, "sampled_conflict_pairs": []}  # no pair can differ
    found = scores("ppe", human=human, math=[known, alike])
    assert found["human"] == pytest.approx(2 / 4, **EXACT)
    items = read("ppe", human=human)
    assert (items.suite.score, scores("ppe", human=human)) == ("human", {"human": 2 / 4})
    assert "incomplete: there are no rows of correctness; the tables are by human" in items.notes
    assert found["math"] == found["correctness"] == pytest.approx(3 / 5, **EXACT)


def test_hhh_pools_pairs_and_llmbar_averages_both_orders(hub: dict[Any, Rows]):
    sets = {"harmless": [(1, 0), (0, 1)], "helpful": [(2, 1)], "honest": [(1, 1), (3, 0)], "other": [(1, 0)]}
    rows = {
        name: [
            {"input": prompt(), "targets": {"choices": [text(worse), text(better)], "labels": [0, 1]}}
            for better, worse in pairs
        ]
        for name, pairs in sets.items()
    }
    found = scores("hhh", **rows)
    assert (found["overall"], found["mean of sets"]) == pytest.approx((4 / 6, 0.75), **EXACT)
    llmbar = {"natural": [(1, 2, 1), (2, 1, 1)], "neighbor": [(2, 0, 1)], "gptinst": [(1, 0, 1)], "gptout": [(2, 5, 5)],
              "manual": [(1, 3, 0)]}  # fmt: skip
    rows = {
        name: [{"input": prompt(), "output_1": text(a), "output_2": text(b), "label": label} for label, a, b in each]
        for name, each in llmbar.items()
    }
    found = scores("llmbar", **rows)
    assert (found["natural"], found["adversarial"]) == pytest.approx((0.75, 0.625), **EXACT)
    names = ("llmbar-natural", "llmbar-adver-neighbor", "llmbar-adver-GPTInst", "llmbar-adver-GPTOut",
             "llmbar-adver-manual")  # fmt: skip
    hub["allenai/reward-bench", None, "filtered"] = subset_rows(
        [
            *((name, (a, b)[label - 1], (a, b)[2 - label]) for name, each in zip(names, llmbar.values(), strict=True)
              for label, a, b in each),
            ("alpacaeval-easy", 0, 1),
        ]
    )  # fmt: skip
    items = read_suite(Suite.of("llmbar"), [], DataConfig())
    assert [note for note in items.notes if not note.startswith("incomplete")] == []
    assert scores("llmbar") == found


def test_rmb_wants_the_best_answer_strictly_above_every_loser(hub: dict[Any, Rows]):
    def turns(answer: str) -> dict[str, str]:
        return {"llm_name": "x", "answer": answer}

    def ask() -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt(), "language": "en"}]

    def pairs(*found: tuple[float, float]) -> Rows:
        return [
            {
                "pair_uid": str(i),
                "conversation_input": ask(),
                "chosen": turns(text(better)),
                "reject": turns(text(worse)),
            }
            for i, (better, worse) in enumerate(found)
        ]

    def lists(*found: tuple[float, Sequence[float]]) -> Rows:
        return [
            {"bon_uid": str(i), "conversation_input": ask(), "bon_best": turns(text(best)),
             "loser_list": [turns(text(each)) for each in losers]}
            for i, (best, losers) in enumerate(found)
        ]  # fmt: skip

    def of(goal: str, rows: Rows) -> Rows:
        return [row | {"category_path": f"set/{goal}/Chat"} for row in rows]

    sets = {
        "pairs": of("Helpfulness", pairs((1, 0), (2, 3))) + of("Harmlessness", pairs((1, 1))),
        "best": of("Helpfulness", lists((3, (1, 2)), (3, (1, 3)))) + of("Harmlessness", lists((2, (0, 1, 0)))),
    }
    found = scores("rmb", **sets)
    assert found["overall"] == pytest.approx(0.5, **EXACT)

    def copied(row: dict[str, Any]) -> dict[str, Any]:
        """The row as the copy on the hub has it, with the best answer in the second place."""
        best, *others = [row[name] for name in ("chosen", "reject", "bon_best") if name in row]
        others += row.get("loser_list", [])
        listed = {"responses": [others[0], best, *others[1:]], "preferred_index": 1, "split_type": "x"}
        return {"uid": "1", "conversation": row["conversation_input"], "category_path": row["category_path"], **listed}

    hub["dd101bb/RMB_dataset", None, "pairwise"] = [*map(copied, sets["pairs"])]
    hub["dd101bb/RMB_dataset", None, "bon"] = [*map(copied, sets["best"])]
    assert scores("rmb") == found
    same = text(4.0)  # the best answer is also a loser, so that no model can win
    rows = lists((0, (1, 2)))
    rows[0] |= {"bon_best": turns(same), "loser_list": [turns(same), turns(text(1.0))]}
    identical = pairs((1, 0))
    identical[0]["reject"] = identical[0]["chosen"]
    found = scores("rmb", best=of("Helpfulness", rows), pairs=of("Helpfulness", identical))
    assert found["helpful-best"] == found["helpful-pairs"] == 0.0


GRAPHS = (("Single_Turn", ((0, 1), (0, 2), (1, 2)), (3, 2, 1)), ("Single_Turn", ((0, 1), (0, 2), (1, 2)), (1, 2, 2)),
          ("Multi_Turn", ((0, 1), (2, 1)), (1, 1, 1)), ("Multi_Turn", ((0, 1),), (0, 1)),
          ("System_Prompt", ((0, 1), (0, 2), (0, 3), (1, 3)), (5, 1, 5, 2)),
          ("System_Prompt", ((0, 1), (0, 1), (1, 2)), (2, 1, 3)))  # fmt: skip


def test_ifrewardbench_is_kendalls_tau_over_different_edges():
    rows = [
        {"id": i, "instruction_type": kind, "messages": [{"role": "user", "content": prompt()}], "checklist": ["x"],
         "constraint_type": [], "responses": [{"response_id": k, "response": text(each), "labels": [1]}
                                              for k, each in enumerate(rewards)],
         "preference_graph": [{"chosen": {"response_id": a}, "rejected": {"response_id": b}} for a, b in edges]}
        for i, (kind, edges, rewards) in enumerate(GRAPHS)
    ]  # fmt: skip
    found = scores("ifrewardbench", main=rows)
    assert found["accuracy"] == pytest.approx(1 / 3, **EXACT)
    assert found["tau"] == pytest.approx(-0.087970241055486, **EXACT)

    def tau(edges: Sequence[tuple[int, int]], rewards: Sequence[float]) -> float:
        distinct = {*edges}
        higher = sum(rewards[a] > rewards[b] for a, b in distinct)
        lower = sum(rewards[a] < rewards[b] for a, b in distinct)
        return (higher - lower) / max(1, math.sqrt((higher + lower) * len(distinct)))

    by_type = defaultdict[str, list[float]](list)
    for kind, edges, rewards in GRAPHS:
        by_type[kind].append(tau(edges, rewards))
    assert found["tau"] == pytest.approx(fmean(map(fmean, by_type.values())), **EXACT)
