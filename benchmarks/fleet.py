"""Replicas behind one port: their speed, and every answer while weights are updated and processes are killed.

    python benchmarks/fleet.py --updates 20
    python benchmarks/fleet.py --updates 20 --ray
    python benchmarks/fleet.py --rounds 0 --updates 0 --pool 10000 --rows 2048

The rewards a second of one and of two replicas are taken in turn, by the same clients, with one thread a replica. Then
two sets of weights are published in turn while clients score, and before each update one process is killed (`-9`) or
stopped at a random moment: a replica, or the process that listens. An answer is mixed if it is neither set's, a request
lost if it raises, a version wrong if the answer names one set and holds the other's rewards. `recovery_seconds_max` is
the longest time from a fault until a request that was sent after it is answered.

`--pool` sends the rewards of an RL trainer's step to four replicas by one asynchronous client, in more requests than
the server's queue holds: those that are refused come again. `--rows` scores a Parquet file by one and by two workers on
Ray, kills the command in between, and compares the bytes of the outputs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from serving_consistency import Tally, ask, build_checkpoint, conversations, two_models, wait_ready

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.errors import RMOptimizerError
from rm_optimizer.evaluation.score_file import score_file
from rm_optimizer.serving.client.client import AsyncRewardClient, RewardClient
from rm_optimizer.serving.engine import ScoredBatch
from rm_optimizer.serving.weights.publisher import create_rm_publisher

FAULT_SECONDS = 1.0
"""Longest time from the begin of an update to its fault."""


@contextmanager
def fleet(checkpoint: Path, replicas: int, *options: str) -> Iterator[tuple[str, psutil.Process]]:
    """URL of `rm-opt serve --replicas` once it is ready with all of them, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from rm_optimizer.interfaces.cli import app; app()", "serve", str(checkpoint)]
    command += ["--port", str(port), "--replicas", str(replicas), "--threads", "1", "--token-budget", "2048", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(os.devnull, "w") as null:
        process = subprocess.Popen(command, stdout=null, stderr=null, env=environment)
    try:
        wait_ready(f"http://127.0.0.1:{port}", process)
        wait_until(lambda: len(replicas_of(psutil.Process(process.pid))) == replicas)
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def replicas_of(server: psutil.Process) -> list[psutil.Process]:
    """Processes that hold a model."""
    found = []
    for child in server.children(recursive=True):
        with suppress(psutil.Error):
            if "spawn_main" in " ".join(child.cmdline()) and "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
    return found


def wait_until(holds: Callable[[], bool], seconds: float = 120.0) -> float:
    started = time.monotonic()
    while not holds():
        if time.monotonic() - started > seconds:
            raise SystemExit("the fleet did not come back")
        time.sleep(0.02)
    return time.monotonic() - started


def speed(url: str, seconds: float, clients: int) -> tuple[float, float]:
    """Rewards a second, and the 99th percentile of a request's seconds."""
    prompts, responses = conversations(64)
    times: list[float] = []
    until = time.monotonic() + seconds

    def score(client: RewardClient) -> None:
        while time.monotonic() < until:
            started = time.perf_counter()
            client.score(prompts, responses)
            times.append(time.perf_counter() - started)

    with RewardClient(url, concurrency=clients, timeout_seconds=120) as client:
        threads = [threading.Thread(target=score, args=(client,)) for _ in range(clients)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = len(times) * len(prompts) / (time.perf_counter() - started)
    return rate, sorted(times)[int(0.99 * (len(times) - 1))]


def cpu_seconds(server: psutil.Process) -> float:
    """Processor time of the replicas so far."""
    return sum(sum(replica.cpu_times()[:2]) for replica in replicas_of(server))


def measure_speed(args: argparse.Namespace, checkpoint: Path) -> None:
    rates: dict[int, list[float]] = {1: [], 2: []}
    tails: dict[int, list[float]] = {1: [], 2: []}
    efficiencies: dict[int, list[float]] = {1: [], 2: []}
    with ExitStack() as stack:
        fleets = {number: stack.enter_context(fleet(checkpoint, number, *args.options)) for number in rates}
        for url, _ in fleets.values():
            speed(url, 1.0, args.clients)
        for _ in range(args.rounds):
            for number, (url, server) in fleets.items():
                before = cpu_seconds(server)
                started = time.perf_counter()
                rate, tail = speed(url, args.seconds, args.clients)
                scored = rate * (time.perf_counter() - started)
                rates[number].append(rate)
                tails[number].append(tail)
                efficiencies[number].append(scored / (cpu_seconds(server) - before))
    for number in rates:
        print(f"rewards_per_second_{number}: {statistics.median(rates[number]):.1f}")
        print(f"rewards_per_cpu_second_{number}: {statistics.median(efficiencies[number]):.1f}")
        print(f"p99_seconds_{number}: {statistics.median(tails[number]):.3f}")
    print(f"speedup: {statistics.median(rates[2]) / statistics.median(rates[1]):.2f}")


def serves(url: str, version: str) -> bool:
    with suppress(httpx.HTTPError):
        answer = httpx.get(f"{url}/ready", timeout=2, trust_env=False)
        return answer.status_code == 200 and answer.json()["version"] == version
    return False


def break_one(
    server: psutil.Process, draw: random.Random, faults: list[tuple[str, float]], ask_once: Callable[[], object]
) -> None:
    """Kill or stop a replica, or kill the process that listens; note the seconds until a new request is answered."""
    while True:
        with suppress(psutil.Error, IndexError):  # it has just ended
            fronts = server.children()
            victim = draw.choice([*replicas_of(server), *fronts])
            fault = signal.SIGKILL if victim in fronts else draw.choice([signal.SIGKILL, signal.SIGSTOP])
            victim.send_signal(fault)
            break
    started = time.monotonic()
    ask_once()
    of = "the process that listens" if victim in fronts else "a replica"
    faults.append((f"{fault.name} of {of}", time.monotonic() - started))


def measure_faults(args: argparse.Namespace, checkpoint: Path) -> None:
    models, texts, tally, draw = two_models(checkpoint, "full"), conversations(32), Tally(), random.Random(args.seed)
    expected = [model.score(*texts) for model in models]
    done, refused = threading.Event(), 0
    faults: list[tuple[str, float]] = []
    with fleet(checkpoint, 2, *args.options) as (url, server), create_rm_publisher(url) as publisher:
        publisher.publish(models[0], "flip-0")
        client = RewardClient(url, renderer=models[0].renderer, concurrency=args.clients, timeout_seconds=120)
        once = partial(client.score, texts[0][:1], texts[1][:1])
        wanted = (expected, 3e-4, tally, done, texts)
        threads = [threading.Thread(target=ask, args=(client, seed, *wanted)) for seed in range(args.clients)]
        for thread in threads:
            thread.start()
        try:
            for number in range(1, args.updates + 1):
                threading.Timer(draw.uniform(0.0, FAULT_SECONDS), break_one, (server, draw, faults, once)).start()
                time.sleep(draw.uniform(0.0, FAULT_SECONDS))
                try:
                    publisher.publish(models[number % 2], f"flip-{number}")
                    served = f"flip-{number}"
                except RMOptimizerError:
                    refused += 1
                    served = publisher.status().version
                while len(faults) < number:
                    time.sleep(0.02)
                wait_until(lambda served=served: serves(url, served))
                wait_until(lambda: len(replicas_of(server)) >= 2)
                print(f"  {served}: {faults[-1][0]}, answered {faults[-1][1]:.1f} s later", flush=True)
        finally:
            done.set()
            for thread in threads:
                thread.join()
            client.close()
    for error in sorted(set(tally.errors))[:5]:
        print(f"lost: {error}")
    print(f"updates: {args.updates - refused} of {args.updates}")
    print(f"answers: {tally.answers}")
    print(f"recovery_seconds_max: {max(seconds for _, seconds in faults):.1f}")
    print(f"mixed_answers: {tally.mixed}")
    print(f"lost_requests: {tally.lost}")
    print(f"wrong_versions: {tally.wrong}")


PART = 100
"""Rewards of one call of the pool."""
QUEUED_TOKENS = 40_000
"""Most tokens in the server's queue while the pool asks; a call has about 8,000."""


def measure_pool(args: argparse.Namespace, checkpoint: Path) -> None:
    prompts, responses = conversations(args.pool)
    model = BradleyTerryRM.from_pretrained(checkpoint)
    expected = model.score(prompts[:PART], responses[:PART])
    limits = ("--max-queued-tokens", str(QUEUED_TOKENS))

    async def step(url: str) -> list[ScoredBatch | BaseException]:
        async with AsyncRewardClient(url, concurrency=32, timeout_seconds=600) as client:
            firsts = range(0, args.pool, PART)
            calls = [client.score_versioned(prompts[i : i + PART], responses[i : i + PART]) for i in firsts]
            return await asyncio.gather(*calls, return_exceptions=True)

    with fleet(checkpoint, 4, *limits, *args.options) as (url, _):
        started = time.perf_counter()
        answers = asyncio.run(step(url))
        seconds = time.perf_counter() - started
        metrics = httpx.get(f"{url}/metrics", timeout=20, trust_env=False).text
    refused = re.search(r'rm_requests_total\{route="/rm/score",status="503"\} (\S+)', metrics)
    whole = [answer for answer in answers if isinstance(answer, ScoredBatch)]
    print(f"pool_rewards: {sum(len(answer.rewards) for answer in whole)}")
    print(f"pool_rewards_per_second: {args.pool / seconds:.1f}")
    print(f"pool_refused_and_repeated_requests: {0 if refused is None else float(refused[1]):.0f}")
    print(f"pool_lost_calls: {len(answers) - len(whole)}")
    print(f"pool_versions: {len({answer.weights for answer in whole})}")
    print(f"pool_largest_difference: {float((torch.tensor(answers[0].rewards) - expected).abs().max()):.1g}")


def score_command(checkpoint: Path, source: Path, target: Path, workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from rm_optimizer.interfaces.cli import app; app()", "score", str(checkpoint)]
    return subprocess.Popen([*command, str(source), str(target), "--ray", str(workers)], stdout=subprocess.DEVNULL)


def measure_files(args: argparse.Namespace, checkpoint: Path, scratch: Path) -> None:
    source = scratch / "rows.parquet"
    prompts, responses = conversations(args.rows)
    pq.write_table(pa.table({"prompt": prompts, "response": responses}), source)
    outputs, rates = {}, {}
    for workers in (1, 2):
        times: list[tuple[int, float]] = []  # rows done, and when; the first chunks wait for the start of the workers
        outputs[workers] = scratch / f"by-{workers}.parquet"
        score_file(
            BradleyTerryRM.from_pretrained(checkpoint),
            source,
            outputs[workers],
            scorer_name="benchmark",
            num_workers=workers,
            on_progress=lambda rows, times=times: times.append((rows, time.perf_counter())),
        )
        (first, began), (last, ended) = times[workers], times[-1]
        rates[workers] = (last - first) / (ended - began)
        print(f"rows_per_second_{workers}: {rates[workers]:.1f}")
    ray.shutdown()
    print(f"rows_speedup: {rates[2] / rates[1]:.2f}")
    killed, partial = scratch / "killed.parquet", scratch / "killed.parquet.partial"
    driver = score_command(checkpoint, source, killed, 2)
    wait_until(lambda: partial.exists() and len(partial.read_bytes().splitlines()) > 1, 300.0)
    driver.kill()
    driver.wait()
    kept = len(partial.read_bytes().splitlines()) - 1
    if score_command(checkpoint, source, killed, 1).wait():
        raise SystemExit("the resumed command failed")
    print(f"chunks_kept_after_a_kill: {kept}")
    same = outputs[1].read_bytes() == outputs[2].read_bytes() == killed.read_bytes()
    print(f"files_equal_to_the_bit: {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20, help="updates, each with a fault")
    parser.add_argument("--clients", type=int, default=4, help="threads that score the whole time")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement of speed")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of speed; 0 measures none")
    parser.add_argument("--pool", type=int, default=0, help="rewards of one step over four replicas; 0 measures none")
    parser.add_argument("--rows", type=int, default=0, help="rows of the file for Ray's workers; 0 measures none")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--ray", action="store_const", const=["--ray"], default=[], dest="options", help="on Ray Serve")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = Path(scratch) / "checkpoint"
        build_checkpoint(checkpoint)
        if args.rounds:
            measure_speed(args, checkpoint)
        if args.updates:
            measure_faults(args, checkpoint)
        if args.pool:
            measure_pool(args, checkpoint)
        if args.rows:
            measure_files(args, checkpoint, Path(scratch))


if __name__ == "__main__":
    main()
