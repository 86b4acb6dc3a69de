"""Collections, paths and options as a Python caller has them in hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict

from rm_optimizer import compose, evaluate_model, train_reward_model
from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.pairs.pair import Message, PreferencePair
from rm_optimizer.core.rows.natural import paired
from rm_optimizer.errors import ConfigError, DataError
from rm_optimizer.evaluation.score_file import score_file
from tests.builders import tiny_reward_model

ROWS = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": "No.", "source": "sums"} for n in range(3)]
PAIRS = [
    PreferencePair(row["prompt"], row["chosen"], row["rejected"], metadata={"source": row["source"]}) for row in ROWS
]
COLLECTIONS = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "array": lambda values: np.array(values, dtype=object),
    "column": lambda values: pd.Series(values, index=range(7, 7 + len(values))),
}
MESSAGES = [Message("user", "Hi.")]


@pytest.mark.parametrize("collect", COLLECTIONS.values(), ids=COLLECTIONS)
def test_texts_may_come_in_any_collection(collect):
    prompts, responses = [row["prompt"] for row in ROWS], [row["chosen"] for row in ROWS]
    assert paired(collect(prompts), collect(responses)) == (prompts, responses)
    assert paired("Hi.", collect(responses)) == (["Hi."] * 3, responses)
    assert paired(collect(MESSAGES), collect(responses[:1])) == ([tuple(MESSAGES)], responses[:1])
    model = tiny_reward_model("llama")
    assert model.score(collect(prompts), collect(responses)).tolist() == model.score(prompts, responses).tolist()


@pytest.mark.parametrize(
    ("prompts", "responses", "said"),
    [
        (None, ["a"], "prompts must be a list, tuple, generator, array or column, got NoneType"),
        (["a"], 3, "responses must be a list, tuple, generator, array or column, got int"),
        ({"role": "user"}, ["a"], "prompts must be a list, tuple, generator, array or column, got dict"),
        (["a"], [None], r"responses\[0\] must be text, got NoneType"),
        (["a", "b"], ["a", 3.5], r"responses\[1\] must be text, got float"),
    ],
)
def test_what_are_no_texts_is_told_by_the_arguments_name(prompts, responses, said):
    with pytest.raises(TypeError, match=said):
        paired(prompts, responses)


@pytest.mark.parametrize("rows", [PAIRS, ROWS], ids=["pairs", "rows"])
@pytest.mark.parametrize("collect", COLLECTIONS.values(), ids=COLLECTIONS)
def test_pairs_may_come_in_any_collection(collect, rows):
    assert list(PreferenceDataset(collect(rows))) == PAIRS


def test_pairs_may_come_as_a_frame_or_a_data_set():
    for table in (pd.DataFrame(ROWS), Dataset.from_list(ROWS)):
        assert list(PreferenceDataset(table)) == PAIRS
    data = PreferenceDataset(PAIRS)
    assert list(PreferenceDataset(data)) == PAIRS
    rows = [{**ROWS[0], "margin": 2.0, "label": 0.9}, {**ROWS[1], "margin": float("nan"), "label": 1.0}]
    (first, second) = PreferenceDataset(pd.DataFrame(rows))
    assert (first.margin, first.label, second.margin) == (2.0, 0.9, None)
    messages = {**ROWS[0], "prompt": [{"role": "user", "content": "Hi."}]}
    assert PreferenceDataset([messages])[0].prompt == tuple(MESSAGES)
    (briefly,) = PreferenceDataset([{**ROWS[0], "system": "Be brief."}])
    assert briefly.prompt[0] == Message("system", "Be brief.")
    kept = PreferenceDataset([*ROWS, {**ROWS[0], "chosen": ""}], on_bad_row="drop")
    assert (len(kept), len(kept.skipped)) == (3, 1)


@pytest.mark.parametrize(
    ("pairs", "kind", "said"),
    [
        ("no_pairs.jsonl", DataError, "no_pairs.jsonl"),
        (ROWS[0], TypeError, "data must be a list, tuple, generator, array or column, got dict"),
        ([7], TypeError, r"data\[0\] must be a PreferencePair or a row with prompt, chosen and rejected, got int"),
        ([PAIRS[0], {"text": "a"}], TypeError, r"data\[1\] must be .* got dict"),
        ([{**ROWS[0], "chosen": "No."}], DataError, "pairs, row 1: chosen and rejected must differ"),
        ([{**ROWS[0], "functions": ["f"]}], DataError, "the column functions is not read and would be lost"),
        ([{**ROWS[0], "tools": ["search"]}], DataError, "tools must be a list of objects"),
        ([{"text": "a"}], DataError, "got columns text; expected prompt, chosen and rejected"),
    ],
)
def test_what_are_no_pairs_is_told_by_its_place(pairs, kind, said):
    with pytest.raises(kind, match=said):
        PreferenceDataset(pairs)


def test_paths_may_be_texts_and_data_a_list(tmp_path):
    model, options = tiny_reward_model("llama"), {"token_budget": 256, "num_bootstrap": 20, "seed": 0}
    found = evaluate_model(model, PAIRS, checkpoint=tmp_path, output_dir=str(tmp_path / "out"), **options)
    assert (tmp_path / "out" / "metrics.json").is_file()
    assert found.metrics.num_pairs == 3
    pd.DataFrame({"prompt": ["Hi."], "response": ["Ho."]}).to_csv(tmp_path / "in.csv", index=False)
    score_file(model, str(tmp_path / "in.csv"), str(tmp_path / "out.csv"), scorer_name="tiny")
    assert (tmp_path / "out.csv").is_file()
    with pytest.raises(TypeError, match="output_dir must be a path, got int"):
        evaluate_model(model, PAIRS, checkpoint="tiny", output_dir=3, **options)
    with pytest.raises(TypeError, match="target must be a path, got NoneType"):
        score_file(model, tmp_path / "in.csv", None, scorer_name="tiny")


def test_options_are_taken_as_compose_returns_them():
    with pytest.raises(ConfigError, match="output_dir must be given"):
        train_reward_model(compose(["model=tiny"]))
    with pytest.raises(TypeError, match="model_name must be a preset, a hub id or a path, got dict"):
        train_reward_model({"model": "tiny"})


@pytest.mark.parametrize(
    "form",
    [
        pd.DataFrame,
        Dataset.from_list,
        pa.Table.from_pylist,
        iter,
        lambda rows: pd.DataFrame(rows, [7, 8, 9]),
        lambda rows: pd.DataFrame(rows).set_index("prompt"),
        lambda rows: pd.DataFrame(rows).set_index(["prompt", "chosen"]),
        lambda rows: pd.DataFrame(rows).set_index(["prompt", [7, 8, 9]]),
        lambda rows: pd.DataFrame(rows).to_dict("list"),
        lambda rows: Dataset.from_list([*rows, *rows]).select([0, 1, 2]),
    ],
)
def test_every_table_gives_the_pairs_of_its_rows(form):
    rows = [{"prompt": f"What is {n}?", "chosen": "It is.", "rejected": "No."} for n in range(3)]
    assert PreferenceDataset(form(rows)).fingerprint == PreferenceDataset(rows).fingerprint


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (pd.DataFrame({"prompt": ["secret", 3]}), "data cannot be read as a table: .*column prompt"),
        (
            DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS)}),
            "holds the splits train, test",
        ),
        (
            pd.DataFrame({"prompt": ["secret"], "chosen": ["secret"]}).rename_axis("prompt"),
            r"data: the index prompt is also a column; rename it or reset_index\(drop=True\)",
        ),
        (
            pd.DataFrame({"prompt": ["secret"]}, pd.MultiIndex.from_tuples([("a", 1)], names=["x", "x"])),
            "data: the index x is also",
        ),
        ({"prompt": ["secret"], "chosen": ["1", "2"]}, "data cannot be read as a table: .*chosen.*length"),
    ],
)
def test_a_table_that_no_file_could_hold_is_refused_without_its_content(table, said):
    with pytest.raises(DataError, match=said) as caught:
        PreferenceDataset(table)
    assert "secret" not in str(caught.value)
