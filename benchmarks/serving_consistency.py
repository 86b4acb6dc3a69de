"""Weights that flip under load: does every answer come from exactly one model, and say which?

A server is started with a small decoder, two sets of weights A and B are published in turn, and clients score the whole
time, most prompts with a common start, so that a stale prefix cache would show. Every answer is compared with both
models in memory. A sync (publish until it serves) is timed beside a start of the server (process until `/ready`).

    python benchmarks/serving_consistency.py --engine transformers --flips 20
    python benchmarks/serving_consistency.py --engine vllm --python PATH_OF_AN_ENVIRONMENT_WITH_VLLM/bin/python
    python benchmarks/serving_consistency.py --engine http://127.0.0.1:8000 --checkpoint SERVED_FOLDER

An answer is mixed if it is neither A's nor B's (beyond `--tolerance`), a request lost if it raises, a version wrong if
the answer names one set of weights and holds the other's rewards. With a URL no server is started, so none is timed.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch
from torch import Tensor

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.errors import RMOptimizerError
from rm_optimizer.schema.data import SyntheticConfig
from rm_optimizer.serving.client.client import RewardClient
from rm_optimizer.serving.weights.publisher import RMPublisherAdapter, create_rm_publisher

READY_SECONDS = 300.0
ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@dataclass
class Tally:
    """Counts of the clients' answers."""

    answers: int = 0
    mixed: int = 0
    lost: int = 0
    wrong: int = 0
    by_version: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def build_checkpoint(folder: Path) -> None:
    pairs = synthetic_world(SyntheticConfig(num_train=200, num_val=2)).train
    tokenizer = train_tokenizer(rendered_texts(pairs), 1024)
    BradleyTerryRM.from_config(ARCHITECTURE, tokenizer, max_length=512, seed=0).save_pretrained(folder)


def two_models(checkpoint: Path, mode: str) -> list[BradleyTerryRM]:
    """The checkpoint's model moved in two directions, far enough that no answer can be mistaken for the other's."""
    models = []
    for seed in (1, 2):
        model, generator = BradleyTerryRM.from_pretrained(checkpoint), torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.reward_head.parameters() if mode == "head_only" else model.parameters():
                spread = 3 * float(parameter.std()) if parameter.numel() > 1 else 1.0
                parameter.add_((spread or 0.1) * torch.randn(parameter.shape, generator=generator))
        models.append(model)
    return models


def conversations(count: int) -> tuple[list[str], list[str]]:
    pairs = synthetic_world(SyntheticConfig(num_train=count, num_val=2, seed=1)).train[:count]
    start = " ".join(str(pair.prompt) for pair in pairs[:6])
    return [f"{start} {pair.prompt}" for pair in pairs], [pair.chosen for pair in pairs]


@contextmanager
def server(engine: str, python: str, checkpoint: Path, root: Path) -> Iterator[tuple[str, float | None]]:
    """URL of a server of the checkpoint, and the seconds from its process's start to `/ready`."""
    if engine.startswith("http"):
        yield engine, None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, "-c", "from rm_optimizer.interfaces.cli import app; app()", "serve", str(checkpoint)]
    command += ["--engine", engine, "--port", str(port), "--weights-root", str(root)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        wait_ready(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}", time.perf_counter() - started
    finally:
        process.terminate()
        process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    with httpx.Client(timeout=5, trust_env=False) as client:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if client.get(f"{url}/ready").is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
    raise SystemExit(f"the server at {url} did not become ready")


def ask(client: RewardClient, seed: int, expected: list[Tensor], tolerance: float, tally: Tally, done: threading.Event,
        texts: tuple[list[str], list[str]]) -> None:  # fmt: skip
    """One client's requests until the flips are over."""
    draw = random.Random(seed)
    while not done.is_set():
        rows = draw.sample(range(len(texts[0])), draw.randint(1, 6))
        try:
            scored = client.score_versioned([texts[0][i] for i in rows], [texts[1][i] for i in rows])
        except RMOptimizerError as error:
            with tally.lock:
                tally.lost += 1
                tally.errors.append(str(error))
            continue
        got = torch.tensor(scored.rewards)
        named = int(scored.version.rpartition("-")[2]) % 2
        fits = [bool(((got - of[rows]).abs() <= tolerance * of[rows].abs().clamp(min=1.0)).all()) for of in expected]
        with tally.lock:
            tally.answers += 1
            tally.mixed += not any(fits)
            tally.wrong += any(fits) and not fits[named]
            tally.by_version[scored.version] = tally.by_version.get(scored.version, 0) + 1


def flip(publisher: RMPublisherAdapter, models: list[BradleyTerryRM], flips: int, tally: Tally) -> list[float]:
    """Publish in turn, each time once some answers of the last version were seen; seconds of every sync."""
    seconds = []
    for number in range(1, flips + 1):
        before = tally.answers
        deadline = time.monotonic() + 30
        while tally.answers < before + 8 and time.monotonic() < deadline:
            time.sleep(0.005)
        started = time.perf_counter()
        publisher.publish(models[number % 2], f"flip-{number}")
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(args: argparse.Namespace, scratch: Path) -> None:
    checkpoint = Path(args.checkpoint) if args.checkpoint else scratch / "checkpoint"
    if not args.checkpoint:
        build_checkpoint(checkpoint)
    models, texts, tally = two_models(checkpoint, args.mode), conversations(32), Tally()
    expected = [model.score(*texts) for model in models]
    apart = float((expected[0] - expected[1]).abs().min())
    if apart <= 2 * args.tolerance * float(torch.stack(expected).abs().max().clamp(min=1.0)):
        raise SystemExit(f"the two models differ by {apart:.3g} only; take another --checkpoint or --tolerance")
    (scratch / "root").mkdir()
    with server(args.engine, args.python, checkpoint, scratch / "root") as (url, restart_seconds):
        publisher = create_rm_publisher(url, mode=args.mode, transport=args.transport, api_key=args.api_key)
        publisher.publish(models[0], "flip-0")
        client = RewardClient(url, renderer=models[0].renderer, api_key=args.api_key, concurrency=args.clients)
        done = threading.Event()
        wanted = (expected, args.tolerance, tally, done, texts)
        threads = [threading.Thread(target=ask, args=(client, seed, *wanted)) for seed in range(args.clients)]
        for thread in threads:
            thread.start()
        try:
            sync = flip(publisher, models, args.flips, tally)
        finally:
            done.set()
            for thread in threads:
                thread.join()
        client.close()
        publisher.close()
    for error in sorted(set(tally.errors))[:5]:
        print(f"lost: {error}")
    print(f"  engine {args.engine}, mode {args.mode}, transport {args.transport}, {args.clients} clients")
    print(f"  models differ by at least {apart:.3g}; times of {len(sync)} flips")
    print(f"answers: {tally.answers}")
    print(f"versions: {len(tally.by_version)}")
    print(f"sync_seconds: {statistics.median(sync):.3f}")
    print(f"sync_seconds_max: {max(sync):.3f}")
    print(f"restart_seconds: {'not measured' if restart_seconds is None else f'{restart_seconds:.1f}'}")
    print(f"mixed_answers: {tally.mixed}")
    print(f"lost_requests: {tally.lost}")
    print(f"wrong_versions: {tally.wrong}")
    print(f"sync_speedup: {float('nan') if restart_seconds is None else restart_seconds / statistics.median(sync):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="transformers", help="transformers, vllm, or the URL of a running server")
    parser.add_argument("--flips", type=int, default=20, help="changes of the weights")
    parser.add_argument("--clients", type=int, default=4, help="threads that score the whole time")
    parser.add_argument("--mode", default="full", choices=["full", "head_only"], help="what is published")
    parser.add_argument("--transport", default="path", choices=["path", "inline", "gloo"], help="how")
    parser.add_argument("--checkpoint", help="exported model; a small decoder is built where none is given")
    parser.add_argument("--python", default=sys.executable, help="interpreter that starts the server")
    parser.add_argument("--api-key", default=os.environ.get("RM_OPT_API_KEY"), help="of a running server")
    parser.add_argument("--tolerance", type=float, default=3e-4, help="in units of max(1, |reward|)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        measure(args, Path(scratch))


if __name__ == "__main__":
    main()
