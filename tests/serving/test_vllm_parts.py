"""Workers of vLLM on a fake of its engine, and the parts that need none: history, checks and exported folders."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.export import save_adapter
from rm_optimizer.errors import CheckpointError, MissingExtra, PublishFailed, RMOptimizerError, WeightsRefused
from rm_optimizer.interfaces.commands.serve import serve
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.embedded.vllm_model import prepare_model, suits_vllm
from rm_optimizer.serving.embedded.vllm_worker import VllmWorker, choose_device, engine_arguments, latest_tensors
from rm_optimizer.serving.engine import StagedWeights, WeightHistory
from rm_optimizer.serving.options import ServeOptions, WorkerOptions
from rm_optimizer.serving.update_protocol import TensorSpec
from rm_optimizer.serving.weights.live_weights import checked_tensors, checkpoint_version, tensor_specs
from rm_optimizer.serving.weights.publisher import create_rm_publisher
from rm_optimizer.serving.weights.sending import manifest, sent_tensors, weight_probe
from tests.serving.engines import exported
from tests.serving.running import free_socket, wait_ready
from tests.serving.server_processes import START
from tests.serving.test_update_faults import asked_all_the_time, assert_whole, models_of
from tests.serving.test_weight_sync import PROMPTS, RESPONSES
from tests.serving.trained import moved

FULL, HEAD = RewardModelTrainingMode.full, RewardModelTrainingMode.head_only


def staged(folder: Path, name: str, tensors: dict[str, torch.Tensor], mode=FULL) -> StagedWeights:
    file = folder / f"{name}.safetensors"
    save_file(tensors, file)
    return StagedWeights(name, int(name[1:]) if name[1:].isdigit() else 1, mode, file, tuple(manifest(tensors)))


def test_history_survives_a_restart_and_keeps_what_is_not_replaced(tmp_path):
    incoming, kept = tmp_path / "incoming", tmp_path / "kept"
    incoming.mkdir()
    kept.mkdir()
    history = WeightHistory(kept)
    for weights in (
        staged(incoming, "v1", {"a": torch.zeros(2), "b": torch.zeros(1)}),
        staged(incoming, "v2", {"b": torch.ones(1)}, HEAD),
        staged(incoming, "v3", {"b": torch.full((1,), 3.0)}, HEAD),
    ):
        history.remember(history.keep(weights))
        assert not weights.file.exists()
    history.keep(staged(incoming, "v4", {"a": torch.ones(2), "b": torch.ones(1)}))  # staged, never committed
    again = WeightHistory(kept)
    assert [(weights.version, weights.revision) for weights in again.committed] == [("v1", 1), ("v3", 3)]
    files = [str(weights.file) for weights in again.committed]
    assert sorted(map(str, kept.glob("*.safetensors"))) == sorted(files)
    assert {name: value.tolist() for name, value in latest_tensors(files)} == {"a": [0.0, 0.0], "b": [3.0]}


@pytest.mark.parametrize("fault", ["nan", "digest", "shape", "missing", "extra", "truncated"])
def test_files_that_are_not_their_manifest_are_refused(tmp_path, fault):
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(1)}
    specs = manifest(tensors)
    changed = {
        "nan": tensors | {"b": torch.full((1,), torch.nan)},
        "digest": tensors | {"b": torch.zeros(1)},
        "shape": tensors | {"a": torch.ones(3, 2)},
        "missing": {"a": tensors["a"]},
        "extra": tensors | {"c": torch.ones(1)},
        "truncated": tensors,
    }[fault]
    if fault == "nan":
        specs = manifest(changed)
    file = tmp_path / "update.safetensors"
    save_file(changed, file)
    if fault == "truncated":
        os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(WeightsRefused):
        dict(checked_tensors(file, specs))


def test_an_export_is_served_as_it_is_and_described_from_its_files(tmp_path):
    model = exported("llama", tmp_path / "export")
    prepared = prepare_model(str(tmp_path / "export"), tmp_path, "float32")
    description = prepared.description
    assert (prepared.folder, prepared.adapter) == (tmp_path / "export", None)
    assert description.version == checkpoint_version(model.model, tmp_path / "export", {})
    assert description.tensors == {mode: tensor_specs(model.model, mode) for mode in (FULL, HEAD)}
    assert description.identity == model.renderer.identity()
    assert description.max_length == model.max_length


def test_an_adapter_is_served_beside_its_base(tmp_path):
    exported("qwen2", tmp_path / "base")
    model = BradleyTerryRM.from_pretrained(tmp_path / "base")
    add_adapter(model.model, AdapterConfig(kind=AdapterKind.lora, rank=4, alpha=8.0, dropout=0.0), seed=0)
    with torch.no_grad():
        model.reward_head.weight.add_(1.0)
    save_adapter(model, tmp_path / "adapter")
    prepared = prepare_model(str(tmp_path / "adapter"), tmp_path / "work", "float32")
    assert prepared.adapter is not None
    assert prepared.rank == 4
    base, own = load_file(tmp_path / "base" / "model.safetensors"), load_file(prepared.folder / "model.safetensors")
    assert own.keys() == base.keys()
    assert all(torch.equal(own[name], base[name]) for name in base if name != "score.weight")
    assert torch.equal(own["score.weight"], model.reward_head.weight)
    arguments = engine_arguments(WorkerOptions(str(tmp_path)), prepared)
    assert (arguments["enable_lora"], arguments["max_lora_rank"]) == (True, 8)


def test_auto_gives_only_decoders_in_folders_to_vllm(tmp_path):
    exported("llama", tmp_path / "llama")
    exported("bert", tmp_path / "bert")
    assert suits_vllm(str(tmp_path / "llama"))
    assert not suits_vllm(str(tmp_path / "bert"))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_asking_for_a_vllm_that_is_missing_names_the_extra(tmp_path):
    with pytest.raises(MissingExtra, match=r"vLLM is not installed; pip install 'rm-optimizer\[vllm\]'"):
        serve(ServeOptions(str(tmp_path), engine="vllm"))


def is_gone_soon(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return True


def test_a_process_whose_parent_ended_before_it_asked_ends_too(tmp_path):
    asks = (
        "import sys; from rm_optimizer.serving.child_process import end_with_parent; "
        "sys.stdin.read(); end_with_parent(); print('it lives')"
    )
    starts = f"""
import subprocess, sys
with open({str(tmp_path / "printed")!r}, "w") as printed:
    child = subprocess.Popen([sys.executable, "-c", {asks!r}], stdin=subprocess.PIPE, stdout=printed)
print(child.pid)
"""
    done = subprocess.run([sys.executable, "-c", starts], start_new_session=True, capture_output=True, check=True)
    assert is_gone_soon(int(done.stdout))
    assert (tmp_path / "printed").read_text() == ""


def test_a_manifest_may_name_no_type_that_no_file_holds(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(WeightsRefused, match="a: the manifest says"):
        dict(checked_tensors(tmp_path / "a.safetensors", [TensorSpec(name="a", shape=[1], dtype="float99")]))


FAKE = Path(__file__).with_name("fake_vllm")


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A worker on the fake engine, and the model that it serves."""
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setattr("os.environ", dict(os.environ))
    sys.modules.pop("vllm", None)
    model = exported("llama", tmp_path / "export")
    folders = {"tokenizer_folder": str(tmp_path / "tokenizer"), "vllm_folder": str(tmp_path / "vllm")}
    yield VllmWorker(WorkerOptions(str(tmp_path / "export"), engine="vllm", **folders), ()), model
    sys.modules.pop("vllm", None)


def rewards(worker: VllmWorker, model: BradleyTerryRM) -> tuple[torch.Tensor, int]:
    """Rewards of the conversations, and the revision that computed them."""
    rows = [encoding.ids for encoding in model.renderer.encode_batch(PROMPTS, RESPONSES)]
    scored = worker.score(rows)
    return torch.tensor(scored.rewards), scored.revision


def update(folder: Path, model: BradleyTerryRM, revision: int, mode=FULL, **changes: torch.Tensor) -> StagedWeights:
    tensors = {name: tensor.detach().clone() for name, tensor in sent_tensors(model, mode).items()} | changes
    file = folder / f"{revision}.safetensors"
    save_file(tensors, file)
    return StagedWeights(f"v{revision}", revision, mode, file, tuple(manifest(tensors)), weight_probe(model))


def prepare(worker: VllmWorker, weights: StagedWeights) -> None:
    worker.expect(weights.revision)
    worker.stage(weights)
    worker.rehearse(weights.revision)


def test_a_worker_of_vllm_serves_the_old_weights_until_the_new_ones_are_loaded(worker, tmp_path):
    worker, model = worker
    own = worker.revision
    assert rewards(worker, model)[0] == pytest.approx(model.score(PROMPTS, RESPONSES), abs=1e-5)
    old, new = rewards(worker, model), moved(BradleyTerryRM.from_pretrained(tmp_path / "export"), 1)
    prepare(worker, update(tmp_path, new, 5))
    assert torch.equal(rewards(worker, model)[0], old[0])
    worker.load(5)
    expected = new.score(PROMPTS, RESPONSES)
    found, revision = rewards(worker, model)
    assert revision == 5  # no answer of the new weights carries the old revision
    assert found == pytest.approx(expected, abs=1e-5)
    worker.expect(None)  # another replica refused them
    found, revision = rewards(worker, model)
    assert revision == own
    assert found == pytest.approx(old[0], abs=1e-5)
    prepare(worker, update(tmp_path, new, 6))
    worker.commit(6)
    head = moved(new, 2, head_only=True)
    prepare(worker, update(tmp_path, head, 7, HEAD))
    worker.load(7)
    worker.expect(8)  # another update begins
    found, revision = rewards(worker, model)
    assert (revision, worker.version) == (6, "v6")
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("fault", ["half", "probe"])
def test_weights_that_do_not_load_are_taken_back(worker, tmp_path, fault):
    worker, model = worker
    old = rewards(worker, model)
    new = moved(BradleyTerryRM.from_pretrained(tmp_path / "export"), 1)
    wrong = torch.full_like(new.reward_head.weight, 13.0 if fault == "half" else 0.5).detach()
    prepare(worker, update(tmp_path, new, 5, **{"score.weight": wrong}))
    with pytest.raises(WeightsRefused, match="cannot load the new weights" if fault == "half" else r"probe\[0\]"):
        worker.load(5)
    found, revision = rewards(worker, model)
    assert revision == old[1]
    assert found == pytest.approx(old[0], abs=1e-5)
    with pytest.raises(WeightsRefused, match="not staged any more"):
        worker.commit(5)


def test_weights_are_not_taken_back_to_a_checkpoint_that_was_replaced(worker, tmp_path):
    worker, _ = worker
    new = moved(BradleyTerryRM.from_pretrained(tmp_path / "export"), 1)
    prepare(worker, update(tmp_path, new, 5))
    worker.load(5)
    shutil.rmtree(tmp_path / "export")
    exported("llama", tmp_path / "export", seed=1)
    with pytest.raises(CheckpointError, match="replaced while it was served, so start the server again"):
        worker.expect(None)


def test_a_later_worker_loads_what_the_first_one_prepared(worker, tmp_path):
    _, model = worker
    BradleyTerryRM.from_pretrained(tmp_path / "export").save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "export.json").unlink()
    options = WorkerOptions(str(tmp_path / "run"), engine="vllm", vllm_folder=str(tmp_path / "vllm"))
    VllmWorker(WorkerOptions(**{**vars(options), "tokenizer_folder": str(tmp_path / "tokenizer")}), ())
    shutil.rmtree(tmp_path / "run")
    later = VllmWorker(options, (update(tmp_path, moved(model, 1), 5),))
    found, revision = rewards(later, model)
    assert revision == 5
    assert found == pytest.approx(model.score(PROMPTS, RESPONSES), abs=1e-5)


def test_a_model_that_vllm_cannot_load_ends_the_first_start_alone(worker, tmp_path):
    first = WorkerOptions(
        str(tmp_path / "export"),
        dtype="bfloat16",
        engine="vllm",
        tokenizer_folder=str(tmp_path / "tokenizer"),
        vllm_folder=str(tmp_path / "vllm"),
    )
    with pytest.raises(RMOptimizerError, match=r"vLLM cannot load .*export \(ValueError: there is no bfloat16 here\)"):
        VllmWorker(first, ())
    with pytest.raises(ValueError, match="no bfloat16"):
        VllmWorker(replace(first, tokenizer_folder=""), ())


@pytest.mark.parametrize(("visible", "chosen"), [("", "1"), ("4,7", "7")])
def test_each_replica_has_a_gpu_and_there_are_no_more_of_them(monkeypatch, visible, chosen):
    monkeypatch.setattr("os.environ", {"CUDA_VISIBLE_DEVICES": visible})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    choose_device(WorkerOptions("model", replica=1, replicas=2))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen
    with pytest.raises(RMOptimizerError, match="--replicas must be at most 2 with vLLM"):
        choose_device(WorkerOptions("model", replica=0, replicas=3))  # before the first one loads anything


@pytest.mark.slow
def test_two_processes_of_vllm_behind_one_port_serve_one_version_or_the_other(tmp_path):
    original, models = exported("llama", tmp_path / "export"), models_of(tmp_path / "export", 3)
    with free_socket() as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-c", START, "serve", str(tmp_path / "export"), "--port", str(port), "--engine", "vllm"]
    command += ["--replicas", "2", "--threads", "1", "--state", str(tmp_path / "state")]
    path = os.pathsep.join([str(FAKE), *sys.path])
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path})
    server = SimpleNamespace(url=f"http://127.0.0.1:{port}", process=process)
    answers = []
    try:
        wait_ready(server)
        while "rm_replicas 2.0" not in httpx.get(f"{server.url}/metrics").text:
            time.sleep(0.1)
        served = httpx.get(f"{server.url}/version").json()["version"]
        known = {served: original.score(PROMPTS, RESPONSES)}
        known |= {f"v{number}": model.score(PROMPTS, RESPONSES) for number, model in enumerate(models)}
        with create_rm_publisher(server.url) as publisher, asked_all_the_time(server.url, answers):
            publisher.publish(models[0], "v0")
            state = dict(models[1].model.state_dict())
            with pytest.raises(PublishFailed, match="cannot load the new weights"):
                publisher.publish(state | {"score.weight": torch.full_like(state["score.weight"], 13.0)}, "bad")
            publisher.publish(models[1], "v1")
            while all(answer.version != "v1" for answer in answers):  # else the kill may come before any
                time.sleep(0.05)
            front = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
            os.kill(front, signal.SIGKILL)
            wait_ready(server)
            publisher.publish(models[2], "v2")
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0
    assert_whole(answers, known)
    assert {"v0", "v1"} <= {answer.version for answer in answers}
    assert not (tmp_path / "state" / "vllm").exists()
