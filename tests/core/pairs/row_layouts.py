"""Layouts in which preference rows are stored: each holds the same twelve comparisons, or one that must be refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rm_optimizer.core.pairs.pair import as_messages
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import RMOptimizerError

Row = dict[str, Any]
NUM_ROWS = 12
TOOLS = [{"type": "function", "function": {"name": "search"}}]


@dataclass(frozen=True)
class Layout:
    """One way to store comparisons.

    Args:
        name: what it is.
        row: row of a number.
        kind: ending of the file.
        options: arguments of `PreferenceDataset`.
        label: label of each pair.
        system: system turn of each prompt.
        is_readable: False where no reading is right, so that only an error is.
        needs_note: True where the file can only be read with a note.
        num_pairs: pairs of a row, of which the first is the comparison.
    """

    name: str
    row: Callable[[int], Row]
    kind: str = "jsonl"
    options: Mapping[str, Any] = field(default_factory=dict)
    label: float = 1.0
    system: str | None = None
    is_readable: bool = True
    needs_note: bool = False
    num_pairs: int = 1


def q(i: int) -> str:
    """The prompt of a row."""
    return f'Why is "{i}" odd,\nor isn\'t it?'


def a(i: int) -> str:
    """The better response of a row."""
    return f"Because {i} is; it's \\d."


def b(i: int) -> str:
    """The worse response of a row."""
    return f'No, "{i}" is not.'


def user(text: str) -> Row:
    """A user's message."""
    return {"role": "user", "content": text}


def answer(text: str) -> Row:
    """The assistant's message."""
    return {"role": "assistant", "content": text}


def explicit(i: int, **more: Any) -> Row:
    """Three texts, and more columns."""
    return {"prompt": q(i), "chosen": a(i), "rejected": b(i), **more}


def sides(i: int, write: Callable[[list[Row]], Any] = list) -> Row:
    """Whole conversations of both sides."""
    return {"chosen": write([user(q(i)), answer(a(i))]), "rejected": write([user(q(i)), answer(b(i))])}


def openai(i: int, **inside: Any) -> Row:
    """A row for direct preference optimization at OpenAI."""
    return {
        "input": {"messages": [user(q(i))], **inside},
        "preferred_output": [answer(a(i))],
        "non_preferred_output": [answer(b(i))],
    }


def ultrafeedback(i: int, **of_each: Any) -> Row:
    """Scored completions as objects."""
    scored = [(b(i), 2.0), (a(i), 4.5)]
    return {"instruction": q(i), "completions": [{"response": text, "score": s, **of_each} for text, s in scored]}


def winner(i: int, first: Any = "model_a", second: Any = "model_b", **more: Any) -> Row:
    """Two responses, of which the second is the better one in odd rows."""
    texts = (a(i), b(i)) if i % 2 == 0 else (b(i), a(i))
    return {"prompt": q(i), "response_a": texts[0], "response_b": texts[1], "winner": (first, second)[i % 2], **more}


def numpy_text(messages: list[Row]) -> str:
    """Messages as pandas writes an array of them to CSV."""
    return str(np.array(messages, dtype=object))


OPENAI = {"prompt": "input.messages", "chosen": "preferred_output", "rejected": "non_preferred_output"}
NESTED = {"prompt": "d.q", "chosen": "d.yes", "rejected": "d.no"}
ULTRA = {"prompt": "instruction", "responses": "completions.response", "scores": "completions.score"}
WINNER = {"winner": "model_a,model_b,tie"}


def nested(i: int, **inside: Any) -> Row:
    """All columns in one object."""
    return {"d": {"q": q(i), "yes": a(i), "no": b(i), **inside}}


def single(i: int, **more: Any) -> Row:
    """One response and its score a row: two rows make a prompt."""
    return {"prompt": q(i // 2), "response": (b, a)[i % 2](i // 2), "score": i % 2, **more}


def parse(*columns: str) -> dict[str, Any]:
    """Options that read the text of columns as what it spells."""
    return {"layout": {"parse": list(columns)}}


LAYOUTS = (
    Layout("texts in JSON Lines", explicit),
    Layout("texts in CSV", explicit, "csv"),
    Layout("texts in CSV with a byte-order mark", explicit, "bom.csv"),
    Layout("texts in CSV with semicolons", explicit, "semicolon.csv"),
    Layout("texts in Parquet", explicit, "parquet"),
    Layout("texts in a JSON array", explicit, "json"),
    Layout("texts in zipped JSON Lines", explicit, "jsonl.gz"),
    Layout("capital names", lambda i: {k.capitalize(): v for k, v in explicit(i).items()}),
    Layout("other names without a mapping", lambda i: {"question": q(i), "better": a(i), "worse": b(i)}),
    Layout(
        "other names",
        lambda i: {"question": q(i), "better": a(i), "worse": b(i)},
        options={"columns": {"prompt": "question", "chosen": "better", "rejected": "worse"}},
    ),
    Layout("prompt of messages", lambda i: explicit(i) | {"prompt": [user(q(i))]}),
    *(
        Layout(
            f"prompt of messages as text by {write.__name__}",
            lambda i, write=write: explicit(i) | {"prompt": write([user(q(i))])},
            "csv",
            options=options,
            is_readable=bool(options),
        )
        for write in (json.dumps, str)
        for options in ({}, parse("prompt"))
    ),
    Layout(
        "prompt of messages by numpy",
        lambda i: explicit(i) | {"prompt": numpy_text([user(q(i)), answer("Hm?"), user(q(i))])},
        "csv",
        is_readable=False,
    ),
    Layout(
        "transcripts",
        lambda i: {s: f"\n\nHuman: {q(i)}\n\nAssistant: {t}" for s, t in (("chosen", a(i)), ("rejected", b(i)))},
    ),
    Layout(
        "transcripts beside a prompt",
        lambda i: {
            "prompt": q(i),
            **{s: f"\n\nHuman: {q(i)}\n\nAssistant: {t}" for s, t in (("chosen", a(i)), ("rejected", b(i)))},
        },
    ),
    Layout("conversations", sides),
    Layout("conversations in Parquet", sides, "parquet"),
    Layout("conversations beside a prompt", lambda i: {"prompt": q(i), **sides(i)}),
    *(
        Layout(
            f"conversations as text by {write.__name__}",
            lambda i, write=write: sides(i, write),
            "csv",
            options=options,
            is_readable=bool(options),
        )
        for write in (json.dumps, str)
        for options in ({}, parse("chosen", "rejected"))
    ),
    Layout("conversations by numpy in CSV", lambda i: sides(i, numpy_text), "csv", is_readable=False),
    Layout("completions", lambda i: {"prompt": [user(q(i))], "chosen": [answer(a(i))], "rejected": [answer(b(i))]}),
    Layout("messages alone", lambda i: {"prompt": q(i), "chosen": answer(a(i)), "rejected": answer(b(i))}),
    Layout(
        "ShareGPT",
        lambda i: {
            "conversations": [{"from": "human", "value": q(i)}],
            "chosen": {"from": "gpt", "value": a(i)},
            "rejected": {"from": "gpt", "value": b(i)},
        },
        options={"columns": {"prompt": "conversations"}},
    ),
    Layout(
        "ShareGPT by its first turn",
        lambda i: {
            "conversations": [{"from": "human", "value": q(i)}, *([{"from": "gpt", "value": "Hm?"}] if i > 8 else [])],
            "chosen": a(i),
            "rejected": b(i),
        },
        options={"columns": {"prompt": "conversations.0.value"}},
        is_readable=False,
    ),
    Layout("OpenAI", openai, options={"columns": OPENAI}),
    Layout("OpenAI without a mapping", openai),
    Layout("OpenAI with tools", lambda i: openai(i, tools=TOOLS), options={"columns": OPENAI}, is_readable=False),
    Layout(
        "OpenAI with tools of one row",
        lambda i: openai(i, tools=TOOLS if i == 9 else []),
        options={"columns": OPENAI},
        is_readable=False,
    ),
    Layout("one object", nested, options={"columns": NESTED}),
    Layout(
        "one object in JSON in CSV", lambda i: {"d": json.dumps(nested(i)["d"])}, "csv", options={"columns": NESTED}
    ),
    Layout("one object by repr in CSV", lambda i: {"d": str(nested(i)["d"])}, "csv", options={"columns": NESTED}),
    Layout(
        "one object with a system turn",
        lambda i: nested(i, system="Be rude."),
        options={"columns": NESTED},
        system="Be rude.",
    ),
    Layout(
        "one object with a mapped system turn",
        lambda i: nested(i, rules="Be rude."),
        options={"columns": NESTED | {"system": "d.rules"}},
        system="Be rude.",
    ),
    Layout(
        "one object with a context",
        lambda i: nested(i, context="A rock."),
        options={"columns": NESTED},
        is_readable=False,
    ),
    Layout("system column", lambda i: explicit(i, system="Be brief."), system="Be brief."),
    Layout(
        "system column and another in the prompt",
        lambda i: explicit(i, system="Be brief.") | {"prompt": [{"role": "system", "content": "Be long."}, user(q(i))]},
        is_readable=False,
    ),
    Layout(
        "Alpaca without a mapping", lambda i: {**explicit(i, input="1, 2"), "instruction": "Add."}, is_readable=False
    ),
    Layout("documents", lambda i: explicit(i, documents=["A rock."]), is_readable=False),
    Layout("history", lambda i: explicit(i, history=[["Hi", "Hello"]]), is_readable=False),
    Layout("images", lambda i: explicit(i, images=["a.png"]), is_readable=False),
    Layout("flattened tools", lambda i: explicit(i, **{"input.tools": TOOLS}), is_readable=False),
    Layout(
        "content of one text part",
        lambda i: sides(i) | {"chosen": [user([{"type": "text", "text": q(i)}]), answer(a(i))]},
    ),
    Layout(
        "content with an image",
        lambda i: explicit(i) | {"prompt": [user([{"type": "text", "text": q(i)}, {"type": "image"}])]},
        is_readable=False,
    ),
    Layout("lists", lambda i: explicit(i) | {"rejected": [b(i), "Hm."]}, num_pairs=2),
    Layout(
        "lists in JSON in CSV",
        lambda i: explicit(i) | {"rejected": json.dumps([b(i)])},
        "csv",
        options=parse("rejected"),
    ),
    Layout("winner", winner, options=WINNER),
    Layout("winner in CSV", winner, "csv", options=WINNER),
    Layout("winner by number", lambda i: winner(i, 1, 2), options={"winner": "1,2"}),
    Layout("winner by true and false", lambda i: winner(i, True, False), options={"winner": "true,false"}),
    Layout("winner untold", winner),
    Layout(
        "winner with another name", lambda i: {("verdict" if k == "winner" else k): v for k, v in winner(i).items()}
    ),
    Layout("winner beside chosen", lambda i: explicit(i, winner="model_a"), options=WINNER, needs_note=True),
    Layout(
        "one-hot winners",
        lambda i: (
            {k: v for k, v in winner(i).items() if k != "winner"}
            | {"winner_model_a": 1 - i % 2, "winner_model_b": i % 2, "winner_tie": 0}
        ),
    ),
    Layout(
        "lists of turns in JSON",
        lambda i: winner(i) | {k: json.dumps([winner(i)[k]]) for k in ("prompt", "response_a", "response_b")},
        "csv",
        options=WINNER,
    ),
    Layout(
        "lists of turns in JSON by path",
        lambda i: winner(i) | {k: json.dumps([winner(i)[k]]) for k in ("prompt", "response_a", "response_b")},
        "csv",
        options=WINNER | {"columns": {k: f"{k}.0" for k in ("prompt", "response_a", "response_b")}},
    ),
    Layout(
        "two score columns",
        lambda i: {k: v for k, v in winner(i).items() if k != "winner"} | {"score_a": 1 - i % 2, "score_b": i % 2},
    ),
    Layout("scores that contradict", lambda i: explicit(i, score_chosen=1, score_rejected=2), needs_note=True),
    Layout("scored responses", lambda i: {"prompt": q(i), "responses": [b(i), a(i)], "scores": [1, 2]}),
    Layout("ranked responses", lambda i: {"prompt": q(i), "responses": [a(i), b(i)], "ranks": [1, 2]}),
    Layout(
        "ranks as scores",
        lambda i: {"prompt": q(i), "responses": [a(i), b(i)], "rank": [1, 2]},
        options={"columns": {"scores": "rank"}},
        is_readable=False,
    ),
    Layout(
        "scored responses in JSON in CSV",
        lambda i: {"prompt": q(i), "responses": json.dumps([b(i), a(i)]), "scores": "[1, 2]"},
        "csv",
        options=parse("responses", "scores"),
    ),
    Layout(
        "scored responses by repr in CSV",
        lambda i: {"prompt": q(i), "responses": str([b(i), a(i)]), "scores": "[1, 2]"},
        "csv",
        options=parse("responses", "scores"),
    ),
    Layout(
        "scored responses by numpy in CSV",
        lambda i: {"prompt": q(i), "responses": str(np.array([b(i), a(i)])), "scores": "[1, 2]"},
        "csv",
        options=parse("responses", "scores"),
        is_readable=False,
    ),
    Layout("scored objects", ultrafeedback, options={"columns": ULTRA}),
    Layout(
        "scored objects with tool calls",
        lambda i: ultrafeedback(i, tool_calls=TOOLS),
        options={"columns": ULTRA},
        is_readable=False,
    ),
    Layout("one response a row", single),
    Layout("one response a row in CSV", single, "csv"),
    Layout("one response a row with a system turn", lambda i: single(i, system="Be brief."), system="Be brief."),
    Layout("one response a row with other weights", lambda i: single(i, weight=1 + i), is_readable=False),
    Layout("label 0", lambda i: {**explicit(i), "chosen": b(i), "rejected": a(i), "label": 0}, label=0.0),
    Layout("label of votes", lambda i: explicit(i, label=0.75), label=0.75),
    Layout("labels in percent", lambda i: explicit(i, label=75), is_readable=False),
    Layout("missing numbers", lambda i: explicit(i, label=math.nan, margin=math.nan, weight=math.nan), "parquet"),
    Layout("missing numbers in CSV", lambda i: explicit(i, label="", margin="NaN", weight=" "), "csv"),
    Layout(
        "answers in the prompt",
        lambda i: {"messages": [user(q(i)), answer(a(i))], "rejected": b(i)},
        options={"columns": {"prompt": "messages", "chosen": "messages.-1.content"}},
        is_readable=False,
    ),
    Layout("empty response", lambda i: explicit(i) | {"rejected": " "}, is_readable=False),
    Layout("equal responses", lambda i: explicit(i) | {"rejected": a(i)}, is_readable=False),
    Layout("half a surrogate pair", lambda i: explicit(i) | {"rejected": "\ud83d"}, is_readable=False),
    Layout("mapping that nothing reads", explicit, options={"columns": {"winner": "chosen"}}, is_readable=False),
    Layout("mapping of a missing column", explicit, options={"columns": {"prompt": "question"}}, is_readable=False),
    Layout("content in another column", lambda i: explicit(i, persona="a pirate of the seven seas"), needs_note=True),
)


def write(layout: Layout, folder: Path) -> Path:
    """The file of a layout."""
    rows = [layout.row(i) for i in range(2 * NUM_ROWS if layout.name.startswith("one response") else NUM_ROWS)]
    path = folder / f"pairs.{layout.kind}"
    if layout.kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif layout.kind == "json":
        path.write_text(json.dumps(rows))
    elif layout.kind.endswith("csv"):
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, list(rows[0]), delimiter=";" if "semicolon" in layout.kind else ",")
        table.writeheader()
        table.writerows(rows)
        path.write_text(text.getvalue(), encoding="utf-8-sig" if "bom" in layout.kind else "utf-8", newline="")
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if layout.kind.endswith("gz") else data)
    return path


def outcome(layout: Layout, folder: Path) -> str:
    """`right`, `refused: …` or `wrong: …` for a layout."""
    try:
        data = PreferenceDataset(write(layout, folder), **layout.options)
    except RMOptimizerError as error:
        return f"refused: {error}"
    if not layout.is_readable:
        return f"wrong: read as {data.pairs[0].to_dict()}, where an error was expected"
    if layout.needs_note and not data.notes:
        return "wrong: read without a note"
    found = [_meaning(pair) for pair in data.pairs[:: max(1, layout.num_pairs)]]
    expected = [_expected(layout, i) for i in range(NUM_ROWS)]
    return "right" if found == expected else f"wrong: read as {found[0]}"


def _meaning(pair: Any) -> Sequence[Any]:
    return [(m.role, m.content) for m in as_messages(pair.prompt)], pair.chosen, pair.rejected, pair.label, pair.weight


def _expected(layout: Layout, i: int) -> Sequence[Any]:
    turns = [("system", layout.system)] if layout.system else []
    texts = (b(i), a(i)) if layout.label < 0.5 else (a(i), b(i))
    return [*turns, ("user", q(i))], *texts, layout.label, 1.0
