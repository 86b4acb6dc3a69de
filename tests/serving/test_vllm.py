"""`rm-opt serve --engine vllm`, over a real vLLM: the same API, parity, updates and refusals as the embedded engine.

Run in an environment of its own: `make test-vllm`.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from safetensors.torch import save_file

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.certificate import DEFAULT_PROBE
from rm_optimizer.core.storage.export import save_adapter
from rm_optimizer.errors import PublishFailed, RMOptimizerError
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.serving.client.client import RewardClient
from rm_optimizer.serving.protocol import VERSION_HEADER, sigmoid
from rm_optimizer.serving.weights.publisher import create_rm_publisher
from rm_optimizer.serving.weights.sending import manifest
from tests.serving.engines import exported
from tests.serving.running import free_socket
from tests.serving.trained import moved

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
PROMPTS, RESPONSES = (list(column) for column in zip(*DEFAULT_PROBE, strict=True))
PARITY = 1e-4
KEY = "sesame"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
READY_SECONDS = 600.0
"""Most of a start is three Python processes importing; on a busy machine that takes minutes."""
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 32: vLLM's attention on a CPU knows no smaller ones."""
LORA = AdapterConfig(kind=AdapterKind.lora, rank=4, alpha=8.0, dropout=0.0)


@contextmanager
def vllm_server(checkpoint: Path, model: BradleyTerryRM, root: Path, *options: str) -> Iterator[SimpleNamespace]:
    """`rm-opt serve --engine vllm` as a process, and a client of it."""
    with free_socket() as taken:
        port = taken.getsockname()[1]
    command = [Path(sys.executable).with_name("rm-opt"), "serve", checkpoint, "--engine", "vllm", "--port", port]
    command += ["--api-key", KEY, "--weights-root", root, "--served-model-name", "rm", *options]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen([str(word) for word in command], env=environment)
    server = SimpleNamespace(
        url=f"http://127.0.0.1:{port}", process=process, model=model, root=root, checkpoint=checkpoint
    )
    try:
        wait_ready(server)
        with RewardClient(server.url, renderer=model.renderer, api_key=KEY) as server.client:
            yield server
    finally:
        process.terminate()
        assert process.wait(timeout=90) == 0


def wait_ready(server: SimpleNamespace) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        assert server.process.poll() is None, "the server ended"
        if is_ready(server):
            return
        time.sleep(0.2)
    raise TimeoutError("the server did not become ready")


def is_ready(server: SimpleNamespace) -> bool:
    try:
        return httpx.get(f"{server.url}/ready", timeout=5, headers=AUTHORIZED).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    model = exported("llama", folder / "export", **SIZES, head_dim=32)
    (folder / "root").mkdir()
    with vllm_server(folder / "export", model, folder / "root", "--replicas", "2") as running:
        while num_replicas(running) < 2:
            time.sleep(0.2)
        yield running


def num_replicas(server) -> int:
    """Processes of vLLM that serve."""
    text = httpx.get(f"{server.url}/metrics", headers=AUTHORIZED, timeout=20).text
    return int(float(re.search(r"^rm_replicas (\S+)", text, re.MULTILINE)[1]))


def post(server, path: str, body: object, **options: object) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **{"headers": AUTHORIZED} | options)


def publisher(server, mode: str, transport: str = "inline"):
    return create_rm_publisher(server.url, mode=mode, transport=transport, api_key=KEY, timeout_seconds=60)


def served_difference(server, model: BradleyTerryRM, version: str) -> float:
    scored = server.client.score_versioned(PROMPTS, RESPONSES)
    assert scored.version == version
    return float((torch.tensor(scored.rewards) - model.score(PROMPTS, RESPONSES)).abs().max())


def test_served_rewards_are_those_in_memory_and_the_certificate_was_compared(server):
    info = httpx.get(f"{server.url}/rm/info", headers=AUTHORIZED).json()
    assert (info["engine"], info["dtype"], info["max_length"]) == ("vllm", "float32", server.model.max_length)
    assert info["parity"]["is_passed"]
    assert info["parity"]["max_difference"] <= PARITY
    assert info["parity"]["flipped_pairs"] == 0
    assert served_difference(server, server.model, info["version"]) <= PARITY


def test_rewards_are_raw_unless_one_sigmoid_is_asked_for(server):
    ids = [list(encoding.ids) for encoding in server.model.renderer.encode_batch(PROMPTS[:2], RESPONSES[:2])]
    answers = {
        use: [
            datum["probs"][0]
            for datum in post(server, "/classify", {"input": ids, "use_activation": use}).json()["data"]
        ]
        for use in (None, False, True)
    }
    assert answers[None] == answers[False] == pytest.approx(server.model.score(PROMPTS[:2], RESPONSES[:2]), abs=PARITY)
    assert answers[True] == pytest.approx([sigmoid(reward) for reward in answers[False]], abs=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": "a", "activation": False}, 400, "activation"),
        ({"input": "a", "normalize": False}, 400, "normalize"),
        ({"input": []}, 400, "input"),
        ({"input": [[3, 10_000_000]]}, 400, "input[0]"),
        ({"input": [[3] * 129]}, 400, "input[0]"),
        ({"input": "a", "model": "other"}, 404, "model"),
    ],
)
def test_a_request_that_cannot_be_answered_says_which_field_is_at_fault(server, body, status, param):
    answer = post(server, "/classify", body)
    assert answer.status_code == status
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (status, param)


def test_the_longest_sequence_that_the_model_reads_is_scored(server):
    answer = post(server, "/classify", {"input": [[3] * 128]})
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 128


def test_every_answer_names_its_version(server):
    answer = post(server, "/classify", {"input": "a"})
    version = httpx.get(f"{server.url}/version", headers=AUTHORIZED).json()["version"]
    assert answer.headers[VERSION_HEADER] == answer.json()["rm_version"] == version


@pytest.mark.parametrize("transport", ["inline", "path"])
@pytest.mark.parametrize("mode", ["full", "head_only"])
def test_the_server_scores_as_the_published_model(server, mode, transport):
    version, before = f"{mode}-{transport}", server.model.score(PROMPTS, RESPONSES)
    model = moved(server.model, 1, head_only=mode == "head_only")
    with publisher(server, mode, transport) as sender:
        assert sender.publish(model, version).version == version
    assert served_difference(server, model, version) <= PARITY
    assert float((model.score(PROMPTS, RESPONSES) - before).abs().max()) > 100 * PARITY


BROKEN = {
    "nan": (lambda state: state | {"score.weight": torch.full((1, 64), torch.nan)}, "not finite"),
    "shape": (lambda state: state | {"score.weight": torch.zeros(1, 65)}, "expected float32"),
    "missing": (lambda state: {name: state[name] for name in state if name != "model.norm.weight"}, "lacks 1 tensor"),
    "extra": (lambda state: state | {"model.bias": torch.zeros(3)}, "has unknown 1 tensor"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_update_is_refused_and_the_old_rewards_stay(server, fault):
    before = server.client.score_versioned(PROMPTS, RESPONSES)
    spoil, message = BROKEN[fault]
    with publisher(server, "full") as sender, pytest.raises(PublishFailed, match=message):
        sender.publish(spoil(dict(server.model.model.state_dict())), "refused")
    assert server.client.score_versioned(PROMPTS, RESPONSES) == before


@pytest.mark.parametrize("fault", ["truncated", "altered"])
def test_a_torn_file_is_refused_and_the_old_rewards_stay(server, fault):
    before = server.client.score_versioned(PROMPTS, RESPONSES)
    state, file = dict(server.model.model.state_dict()), server.root / f"{fault}.safetensors"
    specs = [spec.model_dump() for spec in manifest(state)]
    save_file(state if fault == "truncated" else state | {"score.weight": torch.zeros(1, 64)}, file)
    if fault == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    announced = {"batch_id": fault, "mode": "full", "version": "refused", "transport": "path", "path": str(file)}
    assert post(server, "/rm/weights/begin", announced | {"tensors": specs}).status_code == 200
    outcome = post(server, "/rm/weights/commit", {"batch_id": fault})
    assert outcome.status_code == 400
    assert outcome.json()["status"] == "refused"
    assert ("cut off" if fault == "truncated" else "SHA-256") in outcome.json()["error"]["message"]
    assert server.client.score_versioned(PROMPTS, RESPONSES) == before


def test_a_head_over_another_backbone_is_taken_back(server):
    before = server.client.score_versioned(PROMPTS, RESPONSES)
    other = moved(BradleyTerryRM.from_pretrained(server.checkpoint), 99)
    with publisher(server, "head_only") as sender, pytest.raises(PublishFailed, match="probe"):
        sender.publish(other, "refused")
    assert server.client.score_versioned(PROMPTS, RESPONSES) == before


class Load:
    """Clients that ask without pause, and what was wrong with their answers.

    Args:
        server: asked.
        expected: rewards of the probe for each version, by the version's first word.
    """

    def __init__(self, server, expected: dict[str, torch.Tensor]) -> None:
        self.server, self.expected = server, expected
        self.wrong: list[str] = []
        self.lost: list[str] = []
        self.seen: set[str] = set()
        self.num_answers = 0
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(4)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def _ask(self, seed: int) -> None:
        draw = random.Random(seed)
        with RewardClient(self.server.url, renderer=self.server.model.renderer, api_key=KEY) as client:
            while not self._done.is_set():
                chosen = draw.sample(range(len(PROMPTS)), 4)
                try:
                    scored = client.score_versioned([PROMPTS[i] for i in chosen], [RESPONSES[i] for i in chosen])
                except RMOptimizerError as error:
                    self.lost.append(str(error))
                    continue
                of_version = self.expected[scored.version.partition("-")[0]][chosen]
                if float((torch.tensor(scored.rewards) - of_version).abs().max()) > PARITY:
                    self.wrong.append(scored.version)
                self.seen.add(scored.version)
                self.num_answers += 1


def test_flips_under_load_lose_and_mix_nothing_and_label_right(server):
    models = {
        name: moved(BradleyTerryRM.from_pretrained(server.checkpoint), seed) for name, seed in (("A", 5), ("B", 6))
    }
    expected = {name: model.score(PROMPTS, RESPONSES) for name, model in models.items()}
    with publisher(server, "full") as sender:
        sender.publish(models["A"], "A-0")
        with Load(server, expected) as load:
            for number in range(1, 21):
                sender.publish(models["AB"[number % 2]], f"{'AB'[number % 2]}-{number}")
    print(f"\nvllm: {load.num_answers} answers over 20 flips, {len(load.seen)} versions seen, {len(load.wrong)} wrong")
    assert load.wrong == load.lost == []
    assert len(load.seen) >= 10
    server.model = models["A"]


def workers_of(server) -> list[int]:
    """Processes that hold a model."""
    psutil = pytest.importorskip("psutil")
    family = psutil.Process(server.process.pid).children(recursive=True)
    return [process.pid for process in family if "spawn_main" in " ".join(process.cmdline())]


def test_a_killed_replica_comes_back_with_the_weights_that_were_published(server):
    version, started = httpx.get(f"{server.url}/version", headers=AUTHORIZED).json()["version"], time.monotonic()
    first, second = workers_of(server)
    os.kill(first, signal.SIGKILL)
    while num_replicas(server) > 1:
        time.sleep(0.05)
    assert served_difference(server, server.model, version) <= PARITY  # by the other one
    while num_replicas(server) < 2:
        assert time.monotonic() - started < READY_SECONDS
        time.sleep(0.2)
    print(f"\nvllm: two replicas again {time.monotonic() - started:.0f} s after one was killed")
    os.kill(second, signal.SIGKILL)
    assert served_difference(server, server.model, version) <= PARITY


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A server of another family with a LoRA adapter."""
    folder = tmp_path_factory.mktemp("qwen2")
    exported("qwen2", folder / "base", **SIZES)
    model = BradleyTerryRM.from_pretrained(folder / "base")
    add_adapter(model.model, LORA, seed=0)
    save_adapter(moved(model, 7), folder / "adapter")
    (folder / "root").mkdir()
    with vllm_server(folder / "adapter", model, folder / "root") as running:
        yield running


def test_an_adapter_is_served_with_its_head(adapted):
    info = httpx.get(f"{adapted.url}/rm/info", headers=AUTHORIZED).json()
    assert info["parity"]["is_passed"]
    assert served_difference(adapted, adapted.model, info["version"]) <= PARITY


def test_adapters_are_exchanged_under_load_and_nothing_is_mixed(adapted):
    expected = {}
    models = {}
    for name, seed in (("A", 8), ("B", 9)):
        models[name] = {key: value.clone() for key, value in moved(adapted.model, seed).model.state_dict().items()}
        expected[name] = adapted.model.score(PROMPTS, RESPONSES)
    with publisher(adapted, "lora") as sender:
        sender.publish(adapted.model, "B-0")
        with Load(adapted, expected) as load:
            for number in range(1, 21):
                name = "BA"[number % 2]
                adapted.model.model.load_state_dict(models[name])
                sender.publish(adapted.model, f"{name}-{number}")
    print(f"\nvllm, LoRA: {load.num_answers} answers over 20 flips, {len(load.seen)} versions, {len(load.wrong)} wrong")
    assert load.wrong == load.lost == []
    assert len(load.seen) >= 10


def test_a_broken_adapter_is_refused_and_the_old_rewards_stay(adapted):
    before = adapted.client.score_versioned(PROMPTS, RESPONSES)
    state = {
        name: value for name, value in adapted.model.model.state_dict().items() if "lora_" in name or "score" in name
    }
    with publisher(adapted, "lora") as sender:
        for broken, message in (
            (state | {"score.weight": torch.full((1, 64), torch.inf)}, "not finite"),
            ({name: value for name, value in state.items() if name != "score.weight"}, "lacks 1 tensor"),
        ):
            with pytest.raises(PublishFailed, match=message):
                sender.publish(broken, "refused")
    assert adapted.client.score_versioned(PROMPTS, RESPONSES) == before
