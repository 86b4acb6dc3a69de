"""Speed of `rm-opt serve`'s transformers engine beside naive scoring, one sequence a pass in float32: HH-RLHF texts.

Both sides score the same token ids with the same random Llama-shaped decoder of about 30M parameters (`--layers` makes
it smaller). *Singles* are unrelated sequences; *best-of-8* are groups of eight responses to one prompt (its own two and
six of other prompts'). Offline, sides take turns `--rounds` times in one process, and a speed-up is the median over
rounds of the naive side's processor seconds over ours. `share_of_limit` is the operations that the rewards need, over
the rate of the products with the model's own matrices, over the engine's processor seconds. Needed are those of the
unique tokens (`ModelFlops`), without the last layer's matrices but for keys and values where no reward is read.
The rate is measured in each round, in the engine's type, for a pass of its size (`product_rate` of
`benchmarks/limit.py`), with packed weights where the engine packs its own.

Over HTTP, sixteen clients send singles and best-of-8 groups in turn, each one request after the other, to
`rm-opt serve` and to a FastAPI server that scores one sequence after the other; the servers take turns. `--dtype` is
the type of the engine that the last lines speak of; the preference orders that it flips against float32 are counted.

    python benchmarks/serving_throughput.py --pairs hh_val.jsonl.gz
    python benchmarks/serving_throughput.py --pairs hh_val.jsonl.gz --vllm-python .venv-vllm/bin/python
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.prefix_trees import common_runs, prefix_tree
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.serving.embedded.worker import TransformersWorker
from rm_optimizer.serving.options import WorkerOptions
from rm_optimizer.serving.weights.live_weights import PackedLinear, packing_gain
from rm_optimizer.training.callbacks.memory_profile import ModelFlops

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.limit import product_rate

GROUP = 8
VOCABULARY = 16_000
MAX_LENGTH = 768
SHAPE = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 7}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 1024}
Rows = list[NDArray[np.int32]]


@dataclass(frozen=True)
class Work:
    """Token ids to score.

    Args:
        singles: unrelated sequences.
        groups: groups of sequences with one prompt.
    """

    singles: Rows
    groups: list[Rows]


@dataclass(frozen=True)
class Cost:
    """Cost of a scoring.

    Args:
        cpu: processor seconds.
        wall: seconds.
        rewards: rewards that it returned.
    """

    cpu: float
    wall: float
    rewards: NDArray[np.float64]


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="The transformers engine beside naive scoring, offline and over HTTP.")
    parser.add_argument("--pairs", help="preference pairs, HH-RLHF say")
    parser.add_argument("--singles", type=int, default=24, help="unrelated sequences")
    parser.add_argument("--groups", type=int, default=6, help="groups of eight responses")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--clients", type=int, default=16, help="clients over HTTP; 0 measures offline only")
    parser.add_argument("--requests", type=int, default=4, help="requests of each client in a round")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="layers, fewer for a quick look")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of either side")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of the last lines")
    parser.add_argument(
        "--vllm-python", help="Python of an environment with vLLM, whose engine is measured over HTTP too"
    )
    parser.add_argument("--naive-server", nargs=2, metavar=("FOLDER", "PORT"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def write_model(args: argparse.Namespace, dataset: PreferenceDataset, folder: Path) -> BradleyTerryRM:
    """A random decoder with a tokenizer of the pairs, also in `folder`."""
    tokenizer = train_tokenizer(rendered_texts(dataset.pairs[:4000]), VOCABULARY)
    shape = {**SHAPE, **HEADS, "num_hidden_layers": args.layers}
    model = BradleyTerryRM.from_config(shape, tokenizer, max_length=MAX_LENGTH, seed=0)
    with torch.no_grad():
        model.reward_head.weight.normal_(std=1.0, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    return model


def work_of(args: argparse.Namespace, dataset: PreferenceDataset, renderer: ConversationRenderer) -> Work:
    """Token ids of singles and groups, no sequence cut."""
    pairs = dataset.subset(min(len(dataset), args.singles + 8 * args.groups + 64), 0).pairs
    spare = [pair.chosen for pair in pairs[args.singles :]]
    singles = [renderer.encode(pair.prompt, pair.chosen).ids for pair in pairs[: args.singles]]
    groups = []
    for number, pair in enumerate(pairs[args.singles : args.singles + args.groups]):
        others = [spare[(args.groups + 6 * number + place) % len(spare)] for place in range(GROUP - 2)]
        texts = [pair.chosen, pair.rejected, *others]
        groups.append([np.array(renderer.encode(pair.prompt, text).ids, np.int32) for text in texts])
    return Work([np.array(ids, np.int32) for ids in singles], groups)


class Naive:
    """Plain `transformers` in float32, one sequence a pass."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    @torch.inference_mode()
    def rewards(self, sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        """Rewards of the sequences."""
        ids = (torch.from_numpy(row.astype(np.int64))[None] for row in sequences)
        return np.array([self.model(input_ids=row).logits.item() for row in ids])


def timed(score: Callable[[Rows], NDArray[np.float64]], batches: Sequence[Rows]) -> Cost:
    """Cost of scoring the batches."""
    cpu, wall = time.process_time(), time.perf_counter()
    rewards = np.concatenate([score(batch) for batch in batches])
    return Cost(time.process_time() - cpu, time.perf_counter() - wall, rewards)


def is_packed(worker: TransformersWorker) -> bool:
    """True if the worker's linear layers compute with packed copies of their weights."""
    return any(isinstance(module, PackedLinear) for module in worker.model.modules())


def offline(args: argparse.Namespace, folder: Path, work: Work) -> dict[str, float]:
    """Costs by side, in turns; prints the table and returns the headline figures."""
    naive = Naive(folder)
    engines = {
        dtype: TransformersWorker(WorkerOptions(str(folder), dtype=dtype, threads=args.threads), [])
        for dtype in ("float32", "bfloat16")
    }
    sides = {"naive float32": naive.rewards} | {f"engine {d}": worker.scorer.rewards for d, worker in engines.items()}
    parts = {"singles": [work.singles], "best_of_8": work.groups}
    costs: dict[tuple[str, str], list[Cost]] = {}
    rates: dict[tuple[str, str], list[float]] = {}
    for side in sides.values():
        side(work.singles[:2])
    for _ in range(args.rounds):
        for part, batches in parts.items():
            for name, side in sides.items():
                costs.setdefault((name, part), []).append(timed(side, batches))
            for dtype, worker in engines.items():
                tokens = worker.description.token_budget if part == "singles" else worker.description.tree_budget
                kind = getattr(torch, dtype)
                rate = product_rate(naive.model, tokens, kind, backward=False, clock=time.process_time)
                layer = torch.nn.Linear(SHAPE["hidden_size"], SHAPE["intermediate_size"], bias=False, dtype=kind)
                gain = packing_gain(layer) if is_packed(worker) else 1.0
                rates.setdefault((dtype, part), []).append(rate * gain)
    rows = [row for group in work.groups for row in group]
    ratio = sum(map(len, rows)) / sum(unique_tokens(group) for group in work.groups)
    print(f"total / unique tokens of the groups: {ratio:.2f}; singles have {sum(map(len, work.singles))} tokens")
    for dtype, worker in engines.items():
        packed = "on" if is_packed(worker) else "off"
        print(f"engine {dtype}: passes of {worker.description.token_budget} tokens, packed linears {packed}")
    figures = {}
    for name, part in costs:
        report(name, part, costs)
        figures[f"{name} {part}"] = speedup(costs["naive float32", part], costs[name, part])
    flops = ModelFlops.of_model(engines["float32"].model)
    assert flops is not None, "the decoder above has no experts, windows or recurrence"
    for (dtype, part), found in rates.items():
        needed = sum(operations(naive.model, flops, batch) for batch in parts[part])
        own = costs[f"engine {dtype}", part]
        shares = [needed / rate / cost.cpu for rate, cost in zip(found, own, strict=True)]
        print(f"engine {dtype} {part}: products at {median(found) / 1e9:.0f} GFLOP per processor second")
        figures[f"share {dtype} {part}"] = median(shares)
    return figures


def unique_tokens(rows: Rows) -> int:
    """Tokens of the rows, with those of a common start counted once."""
    return sum(tokens for _, tokens in common_runs(rows, 10**9))


def operations(model: torch.nn.Module, flops: ModelFlops, batch: Rows) -> float:
    """Operations of the forward pass that the rewards of unrelated sequences, or of one group, need."""
    together = unique_tokens(batch) < sum(map(len, batch))
    trees = [prefix_tree(batch)] if together else [prefix_tree([row]) for row in batch]
    depths = [len(tree.prefix) for tree in trees]
    lengths = [depth + len(branch) for tree, depth in zip(trees, depths, strict=True) for branch in tree.branches]
    keys = sum(n * (n + 1) // 2 for n in lengths)
    keys -= sum((len(tree.branches) - 1) * n * (n + 1) // 2 for tree, n in zip(trees, depths, strict=True))
    tokens = sum(tree.num_tokens for tree in trees)
    last = model.get_submodule("model.layers")[-1].named_parameters()
    spared = sum(
        each.numel() for name, each in last if each.ndim == 2 and not name.endswith(("k_proj.weight", "v_proj.weight"))
    )
    return replace(flops, backward=0, trained=0).of_tokens(tokens, keys) - 2 * (tokens - len(batch)) * spared


def report(name: str, part: str, costs: dict[tuple[str, str], list[Cost]]) -> None:
    """Print one row: speed-up, processor and wall seconds, difference and flipped orders against the naive side."""
    own, plain = costs[name, part], costs["naive float32", part]
    difference = np.abs(own[0].rewards - plain[0].rewards).max()
    first, second = np.triu_indices(len(own[0].rewards), 1)
    signs = [np.sign(cost.rewards[first] - cost.rewards[second]) for cost in (own[0], plain[0])]
    print(
        f"{name:16s} {part:10s} speed-up {speedup(plain, own):5.2f}  cpu {median(c.cpu for c in own):7.3f} s  "
        f"wall {median(c.wall for c in own):7.3f} s  max difference {difference:.2g}  "
        f"flipped {int((signs[0] != signs[1]).sum())} of {len(first)}"
    )


def speedup(plain: Sequence[Cost], own: Sequence[Cost]) -> float:
    """Median over rounds of the naive side's processor seconds over the other's."""
    return median(a.cpu / b.cpu for a, b in zip(plain, own, strict=True))


def run_naive_server(folder: str, port: str) -> None:
    """A FastAPI server that scores one sequence after the other."""
    import uvicorn
    from fastapi import FastAPI

    app, naive = FastAPI(), Naive(Path(folder))

    @app.get("/ready")
    def ready() -> dict[str, str]:
        return {"status": "ready"}

    @app.post("/classify")
    async def classify(body: dict[str, list[list[int]]]) -> list[float]:
        rewards: list[float] = naive.rewards([np.array(row, np.int32) for row in body["input"]]).tolist()
        return rewards

    uvicorn.run(app, port=int(port), log_level="error")


@contextmanager
def servers(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, str]]:
    """Addresses of the servers, all of them running, only one of them loaded at a time."""
    ports = [free_port() for _ in range(3)]
    naive = [sys.executable, __file__, "--naive-server", str(folder), str(ports[0])]
    start = ["-c", "from rm_optimizer.interfaces.cli import app; app()", "serve", str(folder), "--dtype", args.dtype]
    common = [*start, "--threads", str(args.threads), "--port"]
    commands = {"naive": naive, "engine": [sys.executable, *common, str(ports[1]), "--engine", "transformers"]}
    if args.vllm_python:
        commands["vllm"] = [args.vllm_python, *common, str(ports[2]), "--engine", "vllm"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for command in commands.values()]
    try:
        urls = {name: f"http://127.0.0.1:{port}" for name, port in zip(commands, ports[: len(commands)], strict=True)}
        for url in urls.values():
            wait_until_ready(url)
        yield urls
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, seconds: float = 300.0) -> None:
    """Wait for `/ready` to answer 200."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{url} did not get ready within {seconds:.0f} s")


async def latencies(url: str, args: argparse.Namespace, work: Work) -> list[float]:
    """Seconds of every request of all clients, each of which sends a single and a group in turn."""
    bodies = [[row.tolist()] for row in work.singles], [[row.tolist() for row in group] for group in work.groups]
    taken: list[float] = []

    async def client(number: int) -> None:
        for turn in range(args.requests):
            kind = bodies[(number + turn) % 2]
            body = {"input": kind[(number * args.requests + turn) % len(kind)]}
            started = time.perf_counter()
            answer = await session.post(f"{url}/classify", json=body)
            answer.raise_for_status()
            taken.append(time.perf_counter() - started)

    limits = httpx.Limits(max_connections=args.clients)
    async with httpx.AsyncClient(timeout=None, limits=limits) as session:
        await asyncio.gather(*map(client, range(args.clients)))
    return taken


def over_http(args: argparse.Namespace, folder: Path, work: Work) -> dict[str, float]:
    """Each server's p99 and wall time beside the naive server's, over all rounds."""
    seen: dict[str, list[float]] = {}
    walls: dict[str, float] = {}
    with servers(args, folder) as urls:
        for _ in range(args.rounds):
            for name, url in urls.items():
                began = time.perf_counter()
                seen.setdefault(name, []).extend(asyncio.run(latencies(url, args, work)))
                walls[name] = walls.get(name, 0.0) + time.perf_counter() - began
    tails = {name: float(np.percentile(taken, 99)) for name, taken in seen.items()}
    for name, taken in seen.items():
        rate = len(taken) / walls[name]
        print(f"http {name:7s} {len(taken)} requests, {rate:.2f}/s  p50 {median(taken):.3f} s  p99 {tails[name]:.3f} s")
    found = {"p99_ratio": tails["engine"] / tails["naive"], "http_speedup": walls["naive"] / walls["engine"]}
    if "vllm" in seen:
        found["p99_ratio_vllm"] = tails["vllm"] / tails["naive"]
        found["http_speedup_vllm"] = walls["naive"] / walls["vllm"]
    return found


def main() -> None:
    """Measure and print; the figures to quote come last."""
    args = options()
    torch.set_num_threads(args.threads)
    if args.naive_server:
        run_naive_server(*args.naive_server)
        return
    dataset = PreferenceDataset(args.pairs)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model = write_model(args, dataset, folder)
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {args.threads} CPU thread(s)")
        work = work_of(args, dataset, model.renderer)
        figures = offline(args, folder, work)
        http = over_http(args, folder, work) if args.clients else {}
    singles, groups = (figures[f"engine {args.dtype} {part}"] for part in ("singles", "best_of_8"))
    print(f"speedup_singles: {singles:.2f}")
    print(f"speedup_best_of_8: {groups:.2f}")
    for name, value in http.items():
        print(f"{name}: {value:.3f}")
    for name, value in figures.items():
        if name.startswith("share "):
            print(f"share_of_limit_{name.removeprefix('share ').replace(' ', '_')}: {value:.2f}")


if __name__ == "__main__":
    main()
