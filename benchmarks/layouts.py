"""Pairs read from files of published layouts, against the pairs that a right reading gives.

    python benchmarks/layouts.py FOLDER [--rows 20000] [-v]

FOLDER holds one small file a layout, and `wanted.jsonl` with an object for each: `file`, and `pairs` as lists of the
prompt (text, or lists of role and content, without tools), the better response, the worse one, and the probability
that it is better.
Every file is read without an option, and so is a copy of it as pandas writes CSV, with lists as Python prints them. The
speed is that of the same rows repeated, against `datasets` reading the file.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rm_optimizer.core.pairs.pair import PreferencePair, as_messages
from rm_optimizer.core.rows.messages import CONTEXT_ROLE
from rm_optimizer.core.rows.readers import read_rows
from rm_optimizer.core.tokens.dataset import PreferenceDataset
from rm_optimizer.errors import RMOptimizerError

Turns = tuple[tuple[str, str], ...]


def meaning(turns: Turns, better: str, worse: str, label: float) -> tuple[Any, ...]:
    """A pair as it is compared: the response that is more probably better comes first, a tie in the texts' order."""
    if label < 0.5 or (label == 0.5 and better > worse):
        better, worse, label = worse, better, 1 - label
    return turns, better.strip(), worse.strip(), round(label, 6)


def of_pair(pair: PreferencePair) -> tuple[Any, ...]:
    """Meaning of a pair that was read."""
    turns = tuple((m.role, m.content) for m in as_messages(pair.prompt) if m.role != CONTEXT_ROLE)
    return meaning(turns, pair.chosen, pair.rejected, pair.label)


def of_wanted(wanted: Sequence[Any]) -> tuple[Any, ...]:
    """Meaning of a pair as `wanted.jsonl` has it."""
    prompt, better, worse, label = wanted
    turns = (("user", prompt),) if isinstance(prompt, str) else tuple((role, text) for role, text in prompt)
    return meaning(turns, better, worse, label)


def outcome(path: Path, wanted: Sequence[Sequence[Any]]) -> tuple[str, str]:
    """`right`, `refused` or `wrong`, and what was read or why not."""
    try:
        data = PreferenceDataset(path)
    except RMOptimizerError as error:
        return "refused", str(error)
    found, expected = (Counter(map(repr, each)) for each in (map(of_pair, data), map(of_wanted, wanted)))
    if found == expected:
        return "right", "; ".join(note.partition(": ")[2] for note in data.notes)
    return "wrong", f"only read: {[*(found - expected)]}; only wanted: {[*(expected - found)]}"


def as_csv(path: Path, folder: Path) -> Path:
    """A copy of a file as `DataFrame.to_csv` writes it, or the file itself if it is CSV."""
    import pandas as pd

    if path.suffix == ".csv":
        return path
    rows = [row for _, row in read_rows(path, lambda number, reason: None)]
    copy = folder / f"{path.stem}.csv"
    pd.DataFrame(rows).to_csv(copy)
    return copy


def rows_per_second(path: Path, num_rows: int, folder: Path) -> tuple[float, float]:
    """Rows a second of this package and of `datasets`, for the rows of a JSON Lines file repeated."""
    import datasets

    lines = path.read_text(encoding="utf-8").splitlines()
    large = folder / path.name
    repeated = num_rows // len(lines) + 1
    large.write_text("\n".join(lines * repeated) + "\n", encoding="utf-8")
    started = time.perf_counter()
    PreferenceDataset(large)
    read = time.perf_counter()
    loaded = datasets.load_dataset("json", data_files=str(large), split="train", cache_dir=str(folder / "cache"))
    for _ in loaded:
        pass
    done = time.perf_counter()
    count = len(lines) * repeated
    return count / (read - started), count / (done - read)


def main() -> int:
    """Read every file and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of a file whose reading is timed; 0 times none")
    parser.add_argument("-v", "--verbose", action="store_true", help="print right ones, too")
    options = parser.parse_args()
    logging.getLogger("rm_optimizer").setLevel(logging.ERROR)
    counts, copies, folder = Counter[str](), Counter[str](), tempfile.TemporaryDirectory()
    for line in (options.folder / "wanted.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        verdict, told = outcome(options.folder / case["file"], case["pairs"])
        counts[verdict] += 1
        copies[outcome(as_csv(options.folder / case["file"], Path(folder.name)), case["pairs"])[0]] += 1
        if verdict != "right" or options.verbose:
            print(f"{verdict}: {case['file']}: {told}")
    speeds = {}
    if options.rows:
        for name in ("trl_explicit_conversational.jsonl", "shp.jsonl", "nectar.jsonl"):
            speeds[name] = rows_per_second(options.folder / name, options.rows, Path(folder.name))
    folder.cleanup()
    print(f"tried: {counts.total()}")
    for verdict in ("right", "refused", "wrong"):
        print(f"{verdict}: {counts[verdict]}")
        print(f"{verdict} as CSV: {copies[verdict]}")
    for name, (ours, theirs) in speeds.items():
        print(f"rows_per_second {name}: {ours:.0f}")
        print(f"rows_per_second_of_datasets {name}: {theirs:.0f}")
    return 1 if counts["wrong"] or copies["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
