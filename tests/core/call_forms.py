"""Forms in which a Python program may hand over prompts, responses and pairs: all of one meaning, or an error."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from rm_optimizer import BaseRewardModel, Message, PreferenceDataset, PreferencePair, RMOptimizerError

PROMPT, RESPONSE, OTHER = "Why?", "Because.", "No."
TURN = {"role": "user", "content": PROMPT}
PAIR = PreferencePair(PROMPT, RESPONSE, OTHER)
ROW = {"prompt": PROMPT, "chosen": RESPONSE, "rejected": OTHER}
LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "iterator of a file": lambda items: itertools.chain(items),
    "numpy array": lambda items: np.array(items, dtype=object),
    "pandas series": pd.Series,
    "pandas series from 7": lambda items: pd.Series(items, index=range(7, 7 + len(items))),
    "values of a dict": lambda items: dict(enumerate(items)).values(),
    "column of a data set": lambda items: datasets.Dataset.from_dict({"x": items})["x"],
    "arrow array": pa.array,
    "frame": lambda items: pd.DataFrame({"x": items}),
    "set": lambda items: set(map(str, items)),
    "dict": lambda items: dict(enumerate(items)),
}
"""Ways to hold several things."""
PROMPTS: dict[str, Any] = {
    "text": PROMPT,
    "numpy text": np.str_(PROMPT),
    "messages": [TURN],
    "message objects": (Message("user", PROMPT),),
    "message": TURN,
    "ShareGPT": [{"from": "human", "value": PROMPT}],
    "texts": [PROMPT],
    "none": None,
    "number": 3,
    "bytes": PROMPT.encode(),
    "path": Path(PROMPT),
}
"""Ways to write one prompt."""
RESPONSES: dict[str, Any] = {
    "numpy text": np.str_(RESPONSE),
    "none": None,
    "number": float("nan"),
    "bytes": RESPONSE.encode(),
    "message": {"role": "assistant", "content": RESPONSE},
    "messages": [{"role": "assistant", "content": RESPONSE}],
}
"""Ways to write one response."""
PAIRS: dict[str, Any] = {
    "data set": PreferenceDataset((PAIR,)),
    "list of rows": [ROW],
    "row": ROW,
    "frame": pd.DataFrame([ROW]),
    "datasets": datasets.Dataset.from_list([ROW]),
    "arrow table": pa.Table.from_pylist([ROW]),
    "tuples": [(PROMPT, RESPONSE, OTHER)],
    "pair": PAIR,
    "path as text": "pairs.jsonl",
    "path": Path("pairs.jsonl"),
    "none": None,
}
"""Ways to hand over pairs."""


def calls(model: BaseRewardModel) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Name, call and expected value of each form; rewards are expected to be equal within 1e-5."""
    reward = float(model.score([PROMPT], [RESPONSE])[0])
    for name, hold in LISTS.items():
        yield f"score, {name}", lambda hold=hold: model.score(hold([PROMPT] * 2), hold([RESPONSE] * 2)), [reward] * 2
        yield (
            f"score_groups, {name}",
            lambda hold=hold: torch.cat(model.score_groups(hold([PROMPT]), [hold([RESPONSE, RESPONSE])])),
            [reward] * 2,
        )
        if name != "arrow array":
            yield f"data set, {name}", lambda hold=hold: PreferenceDataset(hold([PAIR])).pairs, (PAIR,)
    for name, prompt in PROMPTS.items():
        if name != "message":  # a list of two is one conversation
            twice = [prompt] * 2
            yield f"prompt of several, {name}", lambda twice=twice: model.score(twice, [RESPONSE] * 2), [reward] * 2
        yield f"prompt of all, {name}", lambda prompt=prompt: model.score(prompt, [RESPONSE, RESPONSE]), [reward] * 2
        yield f"prompt of one, {name}", lambda prompt=prompt: [model.score(prompt, RESPONSE)], [reward]
        yield (
            f"pair, prompt {name}",
            lambda prompt=prompt: PreferencePair(prompt, RESPONSE, OTHER).pair_id,
            PAIR.pair_id,
        )
    for name, response in RESPONSES.items():
        yield f"response, {name}", lambda response=response: model.score([PROMPT], [response]), [reward]
        yield f"pair, chosen {name}", lambda text=response: PreferencePair(PROMPT, text, OTHER).pair_id, PAIR.pair_id
    for name, pairs in PAIRS.items():
        yield f"data set, {name}", lambda pairs=pairs: PreferenceDataset(pairs)[0].pair_id, PAIR.pair_id
    for field, value in itertools.product(("margin", "label", "weight"), ("1", True, np.float32(1), torch.tensor(1.0))):
        yield (
            f"{field} {type(value).__name__}",
            lambda field=field, value=value: getattr(PreferencePair(PROMPT, RESPONSE, OTHER, **{field: value}), field),
            1.0,
        )


def outcome(call: Callable[[], Any], expected: Any) -> str:
    """`right`, `refused: …` for an error of a user's mistake, or `wrong: …`."""
    try:
        found = call()
    except (ValueError, RMOptimizerError) as error:
        return f"refused: {error}"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, TypeError) and "rm_optimizer" in frame.filename and str(frame.line).startswith("raise"):
            return f"refused: {error}"
        return f"wrong: {type(error).__name__}: {error}"
    if isinstance(expected, list):
        is_right = len(found) == len(expected) and torch.allclose(
            torch.as_tensor(found), torch.tensor(expected), atol=1e-5
        )
    else:
        is_right = found == expected
    return "right" if is_right else f"wrong: {found} instead of {expected}"
