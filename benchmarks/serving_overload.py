"""Ten times the load that a server can carry: is it bounded, and is everybody told what becomes of him?

The real application and queue run in a process of their own around an engine that takes a fixed time for a token, so
that the capacity is known. Requests come at a fixed rate whether or not the earlier ones were answered (an open loop),
`--factor` times what the engine can do, and `/health` is asked all the while.

    python benchmarks/serving_overload.py --seconds 60

`refused` counts answers 503 with Retry-After and our typed body; `unanswered` everything that is neither that nor 200
with a reward. Memory is the server's resident set: the peak less what it was once the queue had first been full.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import torch
import uvicorn
from pydantic import ValidationError

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.pairs.synthetic import synthetic_world
from rm_optimizer.core.tokens.tokenizer import rendered_texts, train_tokenizer
from rm_optimizer.schema.data import SyntheticConfig
from rm_optimizer.serving.embedded.worker import TransformersWorker
from rm_optimizer.serving.engine import EngineDescription, ScoredBatch, StagedWeights
from rm_optimizer.serving.http.app import create_app
from rm_optimizer.serving.options import ServeOptions, WorkerOptions
from rm_optimizer.serving.protocol import ClassifyResponse, ErrorBody
from rm_optimizer.serving.service.service import RewardService

ROW = list(range(5, 105))
"""The request: one sequence of 100 tokens."""
TOKENS_PER_SECOND = 1000
QUEUED_TOKENS = 2000
"""Two seconds of work."""
ARCHITECTURE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


class SlowEngine:
    """Takes its time for every token, one batch after the other; the reward is the sum of the ids.

    Args:
        description: description of a real model, so that requests are read as ever.
        tokens_per_second: its capacity.
    """

    def __init__(self, description: EngineDescription, tokens_per_second: float) -> None:
        self.description = description
        self.version, self.revision = description.version, 1
        self.is_up, self.failure = True, None
        self.committed: tuple[StagedWeights, ...] = ()
        self.num_restarts = 0
        self.replica_bytes: dict[str, int] = {}
        self._seconds_a_token = 1 / tokens_per_second
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Nothing to load."""

    async def restore(self) -> None:
        """No earlier weights."""

    async def stop(self) -> None:
        """Nothing to end."""

    async def score(self, sequences: Sequence[Sequence[int]]) -> ScoredBatch:
        """The sums, after the time that they take."""
        async with self._turn:
            await asyncio.sleep(sum(map(len, sequences)) * self._seconds_a_token)
        return ScoredBatch(tuple(float(sum(row)) for row in sequences), self.version, self.revision)


@dataclass
class Tally:
    """Outcomes of the requests."""

    accepted: int = 0
    refused: int = 0
    health_failures: int = 0
    unanswered: list[str] = field(default_factory=list)
    most_queued_tokens: float = 0.0
    rss: list[tuple[float, int]] = field(default_factory=list)

    def peak_growth(self, after: float) -> int:
        """Bytes that the resident set grew by at most since the first reading later than `after` seconds."""
        late = [size for moment, size in self.rss if moment >= after]
        return max(late) - late[0] if late else 0


def serve(folder: str, port: int) -> None:
    """The server's process."""
    torch.set_num_threads(1)

    async def main() -> None:
        options = WorkerOptions(
            f"{folder}/checkpoint", token_budget=256, packed_linears=None, tokenizer_folder=f"{folder}/tokenizer"
        )
        description = TransformersWorker(options, []).description
        description.export.clear()  # type: ignore[attr-defined]  # the sums are certified by nobody
        engine = SlowEngine(description, TOKENS_PER_SECOND)
        service = RewardService(engine, model_name="rm", max_queued_tokens=QUEUED_TOKENS)  # type: ignore[arg-type]
        await service.start()
        app = create_app(service, ServeOptions("model"))
        await uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", ws="none")).serve()

    asyncio.run(main())


async def ask(client: httpx.AsyncClient, tally: Tally) -> None:
    """One request, counted by its answer."""
    try:
        answer = await client.post("/classify", json={"input": ROW})
        if answer.status_code == 200:
            assert ClassifyResponse.model_validate(answer.json()).data[0].probs == [float(sum(ROW))]
            tally.accepted += 1
        else:
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert ErrorBody.model_validate(answer.json()).error.type == "Overloaded"
            tally.refused += 1
    except (httpx.HTTPError, AssertionError, ValidationError, KeyError) as error:
        tally.unanswered.append(f"{type(error).__name__} {error}")


async def look(client: httpx.AsyncClient, server: psutil.Process, tally: Tally) -> None:
    """Health, queue and memory, ten times a second."""
    started = time.monotonic()
    while True:
        try:
            tally.health_failures += (await client.get("/health", timeout=5.0)).status_code != 200
            lines = (await client.get("/metrics")).text.splitlines()
            queued = next(float(line.split()[1]) for line in lines if line.startswith("rm_queued_tokens "))
            tally.most_queued_tokens = max(tally.most_queued_tokens, queued)
        except httpx.HTTPError:
            tally.health_failures += 1
        tally.rss.append((time.monotonic() - started, server.memory_info().rss))
        await asyncio.sleep(0.1)


async def overload(url: str, server_pid: int, seconds: float, factor: float) -> Tally:
    """Requests at `factor` times the capacity for some seconds, and what became of every one."""
    tally, every = Tally(), len(ROW) / TOKENS_PER_SECOND / factor
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as client:
        looking = asyncio.create_task(look(client, psutil.Process(server_pid), tally))
        started, requests = time.monotonic(), list[asyncio.Task[None]]()
        while (passed := time.monotonic() - started) < seconds:
            due = int(passed / every) + 1 - len(requests)  # all that are due: a late loop does not lower the rate
            requests += [asyncio.create_task(ask(client, tally)) for _ in range(due)]
            await asyncio.sleep(every)
        await asyncio.gather(*requests)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    return tally


def wait_ready(url: str, process: multiprocessing.process.BaseProcess) -> None:
    while process.is_alive():
        try:
            if httpx.get(f"{url}/ready", trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise SystemExit("the server ended")


def measure(seconds: float, factor: float) -> Tally:
    """Start a server, overload it, end it."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        pairs = synthetic_world(SyntheticConfig(num_train=50, num_val=2)).train
        tokenizer = train_tokenizer(rendered_texts(pairs), 400)
        BradleyTerryRM.from_config(ARCHITECTURE, tokenizer, max_length=128, seed=0).save_pretrained(
            Path(folder) / "checkpoint"
        )
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, port), daemon=True)
        process.start()
        try:
            wait_ready(f"http://127.0.0.1:{port}", process)
            return asyncio.run(overload(f"http://127.0.0.1:{port}", process.pid or 0, seconds, factor))
        finally:
            process.terminate()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the overload lasts")
    parser.add_argument("--factor", type=float, default=10.0, help="times the capacity")
    args = parser.parse_args()
    tally = measure(args.seconds, args.factor)
    for error in sorted(set(tally.unanswered))[:5]:
        print(f"unanswered: {error}")
    sent = tally.accepted + tally.refused + len(tally.unanswered)
    print(f"offered: {sent / args.seconds * len(ROW) / TOKENS_PER_SECOND:.1f} times the capacity, {sent} requests")
    print(f"most_queued_tokens: {tally.most_queued_tokens:.0f} of {QUEUED_TOKENS}")
    print(f"accepted: {tally.accepted}")
    print(f"refused: {tally.refused}")
    print(f"unanswered: {len(tally.unanswered)}")
    print(f"health_failures: {tally.health_failures}")
    print(f"peak_rss_growth_bytes: {tally.peak_growth(min(5.0, args.seconds / 2))}")


if __name__ == "__main__":
    main()
