"""Best of n: scoring many responses to a prompt with the prompt computed once, and the estimator of the curve.

`speedup_scoring` is the seconds of naive batching over those of `score_groups`, both in this process and in float32, as
the median over `--rounds` in which the two take turns. Naive batching renders every response with its prompt, and
passes padded batches of `--batch` in the order of the draw. `speedup_server` is the same for a client of
`rm-opt serve`. `max_score_difference` is the largest difference of a reward between the ways, over the largest reward
where that exceeds 1. `curve_error` is the largest difference between the estimator and the mean over all subsets of
small pools with ties.

    python benchmarks/best_of_n.py
    python benchmarks/best_of_n.py --pairs hh_val.jsonl.gz
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import numpy as np
import torch

from rm_optimizer.core.data_loader import PreferenceDataset
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.pair import Message, Prompt
from rm_optimizer.core.pairs.synthetic import PreferenceWorld
from rm_optimizer.core.tokens.padding import pad_sequences
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.rl_coupling.best_of_n_curve import selected_means
from rm_optimizer.serving.client.client import RewardClient

Groups = tuple[list[Prompt], list[list[str]]]
ARCHITECTURE = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4}
READY_SECONDS = 300


def main(arguments: Sequence[str] | None = None) -> None:
    args = options(arguments)
    torch.set_num_threads(1)
    groups, texts = responses(args)
    tokenizer = train_tokenizer(texts, 4096)
    fields = ARCHITECTURE | {
        "hidden_size": args.hidden,
        "intermediate_size": 3 * args.hidden,
        "num_hidden_layers": args.layers,
    }
    model = BradleyTerryRM.from_config(fields, tokenizer, max_length=1024, seed=0)
    torch.nn.init.normal_(model.reward_head.weight, generator=torch.Generator().manual_seed(0))
    lengths = [
        (len(model.encode([p], [t[0]])[0].ids), len(tokenizer(t[0])["input_ids"])) for p, t in zip(*groups, strict=True)
    ]
    whole, response = np.mean(lengths, axis=0)
    print(
        f"{len(groups[0])} prompts, {args.samples} responses each; {whole:.0f} tokens, {response:.0f} of the response"
    )
    ways: dict[str, Callable[[], np.ndarray]] = {
        "naive": lambda: naive(model, groups, args.batch),
        "scoring": lambda: torch.cat(model.score_groups(*groups)).double().numpy(),
    }
    with tempfile.TemporaryDirectory() as folder:
        if args.server:
            model.save_pretrained(Path(folder) / "model")
        with served(Path(folder) / "model", model) if args.server else nothing() as client:
            if client is not None:
                ways["server"] = lambda: torch.cat(client.score_groups(*groups)).double().numpy()
            report(ways, args.rounds)
    print(f"curve_error: {curve_error():.2g}")
    print(f"curve_seconds_16384: {curve_seconds():.3f}")


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", help="Pairs whose prompts and responses are taken; else the synthetic world's.")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64, help="Sequences of a naive batch.")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4, help="Turns before the response in the synthetic world.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(arguments)


def responses(args: argparse.Namespace) -> tuple[Groups, list[str]]:
    """Prompts with their responses, and texts for a tokenizer."""
    world = PreferenceWorld(0)
    rng = np.random.default_rng(0)
    if args.pairs:
        data = PreferenceDataset(args.pairs)
        prompts = list({pair.prompt_id: pair.prompt for pair in data.pairs}.values())[: args.num_prompts]
        pool = [text for pair in data.pairs for text in (pair.chosen, pair.rejected)]
        drawn = rng.choice(len(pool), size=(len(prompts), args.samples), replace=False)
        return (prompts, [[pool[i] for i in row] for row in drawn]), list(rendered_texts(data.pairs[:2000]))
    questions = world.prompts()
    prompts = []
    for number in range(args.num_prompts):
        turns: list[Message] = []
        for question in questions[number * args.turns : (number + 1) * args.turns]:
            turns += [Message("user", question), Message("assistant", world.sample_response(question, rng))]
        prompts.append(tuple(turns[:-1]))
    last = [prompt[-1].content for prompt in prompts]
    texts = list(rendered_texts(world.pairs(500, 2).train))
    return (prompts, [[world.sample_response(text, rng) for _ in range(args.samples)] for text in last]), texts


@torch.inference_mode()
def naive(model: BradleyTerryRM, groups: Groups, batch: int) -> np.ndarray:
    """Rewards by padded batches, the prompt computed for every response."""
    rows = [(prompt, text) for prompt, texts in zip(*groups, strict=True) for text in texts]
    sequences = [encoding.ids for encoding in model.encode([prompt for prompt, _ in rows], [text for _, text in rows])]
    found = []
    for start in range(0, len(sequences), batch):
        ids, mask = pad_sequences(sequences[start : start + batch], model.pad_choice.token_id)
        found.append(model(ids, mask))
    return torch.cat(found).double().numpy()


def report(ways: dict[str, Callable[[], np.ndarray]], rounds: int) -> None:
    """Let the ways take turns, and print speeds and the largest difference."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    rewards = {name: way() for name, way in ways.items()}  # also the first pass of each, which is slower
    for _ in range(rounds):
        for name, way in ways.items():
            before = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - before)
    for name, taken in seconds.items():
        print(f"seconds_{name}: {median(taken):.3f}")
    largest = float(np.abs(rewards["naive"]).max())
    for name in list(ways)[1:]:
        ratios = [slow / fast for slow, fast in zip(seconds["naive"], seconds[name], strict=True)]
        print(f"speedup_{name}: {median(ratios):.2f}")
    difference = max(float(np.abs(found - rewards["naive"]).max()) for found in rewards.values())
    print(f"max_score_difference: {difference / max(1.0, largest):.2g}")


@contextmanager
def nothing() -> Iterator[None]:
    yield None


@contextmanager
def served(folder: Path, model: BradleyTerryRM) -> Iterator[RewardClient]:
    """A client of `rm-opt serve` in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = ["-c", "from rm_optimizer.interfaces.cli import app; app()", "serve", str(folder), "--port", port]
    process = subprocess.Popen([sys.executable, *start, "--threads", "1"], stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.2)
        with RewardClient(url, renderer=model.renderer, timeout_seconds=600) as client:
            yield client
    finally:
        process.terminate()
        process.wait(timeout=60)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def curve_error() -> float:
    """Largest difference of the estimator from the mean over all subsets of pools of 12, ties among them."""
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(5):
        proxy, gold = rng.integers(0, 6, size=12).astype(float), rng.normal(size=12)
        sizes = range(1, 13)
        found = selected_means(proxy[None], [gold[None]], sizes)[0, 0]
        for n, value in zip(sizes, found, strict=True):
            best = (np.array(subset) for subset in itertools.combinations(range(12), n))
            means = [gold[rows[proxy[rows] == proxy[rows].max()]].mean() for rows in best]
            worst = max(worst, abs(value - math.fsum(means) / len(means)))
    return worst


def curve_seconds() -> float:
    """Seconds for the curve of one prompt with 16,384 responses at 15 values of n."""
    proxy, gold = np.random.default_rng(0).normal(size=(2, 1, 16_384))
    before = time.process_time()
    selected_means(proxy, [proxy, gold], [2**k for k in range(15)])
    return time.process_time() - before


if __name__ == "__main__":
    main()
