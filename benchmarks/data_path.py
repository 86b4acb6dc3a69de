"""Cost of the data path: in memory from 10^5 to 10^6 pairs, and streamed by Ray from more text than it may hold.

In memory, each size runs in a process of its own: read the pairs from Parquet, index their prompts, tokenize them into
the cache, open the cache again as a second run does, and make macro-batches. Seconds are those of the processor.
`growth_exponent` is that of cost in pairs between the smallest and the largest size, 1 for linear growth. Streaming
reads a generated JSON Lines file once through, tokenized by two workers, and prints the largest memory of this process
and all that it started, pages they share counted once (`pss`) and in each (`rss`). Texts are made of a thousand words,
one token each.

    python benchmarks/data_path.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rm_optimizer.core.data_loader import PreferenceDataset, RayPreferenceDataset
from rm_optimizer.core.tokens.batching import BatchShape, PairCollator
from rm_optimizer.core.tokens.cache import tokenize_pairs
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.loader import MacroBatches

SIZES = (100_000, 300_000, 1_000_000)
WORDS = tuple(f"word{i:03d}" for i in range(1000))
SHAPE = BatchShape(batch_size=64, micro_token_budget=16_384)
MACRO_BATCHES = 200
ROWS_AT_ONCE = 10_000


def renderer(max_length: int) -> ConversationRenderer:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate([*special, *WORDS])}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    return ConversationRenderer(tokenizer, max_length)


def rows(num_pairs: int, words: int) -> Iterator[dict[str, list[str]]]:
    """Columns of a few thousand rows at a time, each text of half to one and a half times `words` words."""
    rng = np.random.default_rng(0)
    for start in range(0, num_pairs, ROWS_AT_ONCE):
        size = min(ROWS_AT_ONCE, num_pairs - start)
        tape = rng.integers(0, len(WORDS), 4 * words * 1000)
        drawn = " ".join(WORDS[i] for i in tape)
        width = len(WORDS[0]) + 1
        starts = width * rng.integers(0, len(tape) - 2 * words, (3, size))
        stops = starts + width * rng.integers(words // 2 + 1, words * 3 // 2 + 1, (3, size)) - 1
        texts = [
            [drawn[a:b] for a, b in zip(*side, strict=True)]
            for side in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        prompts = [f"{start + i} {text[: 10 * width]}" for i, text in enumerate(texts[0])]
        rejected = [f"{text} not" for text in texts[2]]  # so that no two responses are equal
        yield {"prompt": prompts, "chosen": texts[1], "rejected": rejected}


def write_parquet(path: Path, num_pairs: int) -> None:
    parts = rows(num_pairs, 12)
    first = pa.table(next(parts))
    with pq.ParquetWriter(path, first.schema) as writer:
        writer.write_table(first)
        for columns in parts:
            writer.write_table(pa.table(columns))


def write_json_lines(path: Path, num_bytes: int) -> None:
    """Pairs of about 2 kB each, until the file holds `num_bytes`."""
    with path.open("w") as file:
        for columns in rows(sys.maxsize, 120):
            records = zip(*columns.values(), strict=True)
            file.writelines(json.dumps(dict(zip(columns, record, strict=True))) + "\n" for record in records)
            if file.tell() >= num_bytes:
                return


def memory(pid: str | int = "self") -> tuple[int, int]:
    """Resident bytes of a process, and those with shared pages divided among who shares them."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has just ended
        return 0, 0
    found = {line.split()[0]: int(line.split()[1]) * 1024 for line in text.splitlines()[1:]}
    return found.get("Rss:", 0), found.get("Pss:", 0)


def in_memory(path: Path) -> dict[str, float]:
    """Seconds of each stage and resident bytes that the pairs add."""
    render = renderer(256)
    before = memory()[0]
    marks = [("start", time.process_time())]
    data = PreferenceDataset(str(path))
    marks.append(("read", time.process_time()))
    assert len(set(data.prompt_ids)) == len(data)
    marks.append(("index", time.process_time()))
    with tempfile.TemporaryDirectory() as cache:
        tokenize_pairs(data, render, Path(cache))
        marks.append(("tokenize", time.process_time()))
        tokens = tokenize_pairs(data, render, Path(cache))
        marks.append(("reopen", time.process_time()))
        batches = MacroBatches(PairCollator(tokens, data, 0), SHAPE, seed=0)
        batches[0]
        marks.append(("sampler", time.process_time()))
        for step in range(1, MACRO_BATCHES + 1):
            batches[step]
        marks.append(("batches", time.process_time()))
    seconds = {name: end - start for (_, start), (name, end) in itertools.pairwise(marks)}
    seconds["batches"] *= batches.steps_per_epoch / MACRO_BATCHES  # of a whole epoch
    return {"num_pairs": len(data), "rss_bytes": memory()[0] - before} | seconds


def measured(path: Path) -> dict[str, float]:
    """`in_memory` in a process of its own."""
    command = [sys.executable, __file__, "--one", str(path)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def name_of(size: int) -> str:
    return f"{size // 1_000_000}m" if size % 1_000_000 == 0 else f"{size // 1000}k"


def report_in_memory(sizes: list[int], folder: Path) -> None:
    costs = []
    for size in sizes:
        path = folder / f"{size}.parquet"
        write_parquet(path, size)
        found = measured(path)
        units = found.pop("num_pairs") / 100_000
        rss = found.pop("rss_bytes") / units
        costs.append((sum(found.values()) / units, rss))
        for stage, seconds in found.items():
            print(f"seconds_per_100k_pairs_{stage}_at_{name_of(size)}: {seconds / units:.3f}")
        print(f"seconds_per_100k_pairs_at_{name_of(size)}: {costs[-1][0]:.3f}")
        print(f"rss_bytes_per_100k_pairs_at_{name_of(size)}: {rss:.0f}", flush=True)
    spread = math.log(sizes[-1] / sizes[0]) or 1.0
    print(f"growth_of_seconds_per_pair: {costs[-1][0] / costs[0][0]:.3f}")
    print(f"growth_of_rss_per_pair: {costs[-1][1] / costs[0][1]:.3f}")
    print(f"growth_exponent: {1 + math.log(costs[-1][0] / costs[0][0]) / spread:.3f}")


class MemoryWatch(threading.Thread):
    """The largest memory of this process and everything below it, looked at twice a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_rss = self.peak_pss = self.peak_driver = 0
        self.over = threading.Event()

    def run(self) -> None:
        """Look until it is over."""
        while not self.over.wait(0.5):
            driver = memory()
            rss, pss = (sum(side) for side in zip(driver, *map(memory, descendants()), strict=True))
            self.peak_rss, self.peak_pss = max(self.peak_rss, rss), max(self.peak_pss, pss)
            self.peak_driver = max(self.peak_driver, driver[0])


def descendants() -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    found, left = [], list(parents.get(int(Path("/proc/self").readlink().name), []))
    while left:
        found.append(left.pop())
        left += parents.get(found[-1], [])
    return found


def report_ray(num_bytes: int, num_workers: int, folder: Path) -> None:
    path = folder / "large.jsonl"
    write_json_lines(path, num_bytes)
    watch = MemoryWatch()
    watch.start()
    before = time.perf_counter()
    data = RayPreferenceDataset(str(path))
    indexed = time.perf_counter()
    with data.macro_batches(renderer(512), **vars(SHAPE), seed=0, num_workers=num_workers) as stream:
        started = time.perf_counter()
        tokens = pairs = 0
        for batch in stream:
            tokens += sum(micro.num_tokens for micro in batch.micro)
            pairs += len(batch.pair_index)
            if pairs == data.num_rows:
                break
        seconds = time.perf_counter() - started
    watch.over.set()
    watch.join()
    print(f"ray_text_bytes: {path.stat().st_size}")
    print(f"ray_pairs: {pairs}")
    print(f"ray_index_seconds: {indexed - before:.1f}")
    print(f"ray_tokens_per_second: {tokens / seconds:.0f}")
    print(f"ray_text_bytes_per_second: {path.stat().st_size / seconds:.0f}")
    print(f"ray_driver_peak_rss_bytes: {watch.peak_driver}")
    print(f"ray_peak_pss_bytes: {watch.peak_pss}")
    print(f"ray_peak_rss_bytes: {watch.peak_rss}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="pairs of the in-memory measurements")
    parser.add_argument("--ray-bytes", type=int, default=2_100_000_000, help="streamed text; 0 streams none")
    parser.add_argument("--workers", type=int, default=2, help="Ray workers")
    parser.add_argument("--folder", type=Path, help="where to put the generated files, removed afterwards")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(in_memory(args.one)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.sizes:
            report_in_memory(list(args.sizes), Path(folder))
        if args.ray_bytes:
            report_ray(args.ray_bytes, args.workers, Path(folder))


if __name__ == "__main__":
    main()
