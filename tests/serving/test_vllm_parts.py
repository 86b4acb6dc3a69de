"""What the vLLM engine is made of, without a vLLM: lock, history, checks, command line, supervisor."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from starlette.datastructures import State

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.export import save_adapter
from rm_optimizer.errors import (
    CheckpointError,
    EngineUnavailable,
    HandshakeFailed,
    MissingExtra,
    RMOptimizerError,
    WeightsRefused,
)
from rm_optimizer.interfaces.commands.serve import serve
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.engine import StagedWeights, WeightHistory
from rm_optimizer.serving.options import ServeOptions
from rm_optimizer.serving.update_protocol import TensorSpec
from rm_optimizer.serving.vllm.engine import ReadWriteLock, ReloadEngine
from rm_optimizer.serving.vllm.folder import prepare_model, require_unchanged, suits_vllm
from rm_optimizer.serving.vllm.plugin import RewardApplication, RewardEndpoint
from rm_optimizer.serving.vllm.supervisor import (
    FAILED_FILE,
    RESTARTS_VARIABLE,
    SETTINGS_VARIABLE,
    Supervisor,
    VllmSettings,
    command,
    environment,
)
from rm_optimizer.serving.vllm.worker import RewardWorkerExtension, latest_tensors
from rm_optimizer.serving.weights.live_weights import checked_tensors, checkpoint_version, tensor_specs
from rm_optimizer.serving.weights.sending import manifest
from tests.serving.engines import exported, fake_description

FULL, HEAD = RewardModelTrainingMode.full, RewardModelTrainingMode.head_only


def test_a_writer_waits_for_readers_and_keeps_new_ones_out():
    events: list[str] = []

    async def read(lock: ReadWriteLock, name: str, seconds: float) -> None:
        async with lock.reading():
            events.append(f"{name} in")
            await asyncio.sleep(seconds)
            events.append(f"{name} out")

    async def write(lock: ReadWriteLock) -> None:
        async with lock.writing():
            events.append("write in")
            await asyncio.sleep(0.01)
            events.append("write out")

    async def scene() -> None:
        lock = ReadWriteLock()
        first = asyncio.create_task(read(lock, "first", 0.02))
        await asyncio.sleep(0.005)
        writer = asyncio.create_task(write(lock))
        await asyncio.sleep(0.005)
        await asyncio.gather(first, writer, read(lock, "late", 0.0))

    asyncio.run(scene())
    assert events == ["first in", "first out", "write in", "write out", "late in", "late out"]


def test_a_reader_keeps_a_writer_out_until_it_is_cancelled():
    entered: list[str] = []

    async def enter(lock_side: AbstractAsyncContextManager[None], name: str) -> None:
        async with lock_side:
            entered.append(name)
            if name == "reader":
                await asyncio.Event().wait()

    async def scene() -> None:
        lock = ReadWriteLock()
        reader = asyncio.create_task(enter(lock.reading(), "reader"))
        writer = asyncio.create_task(enter(lock.writing(), "writer"))
        assert not (await asyncio.wait([writer], timeout=0.05))[0]
        assert entered == ["reader"]
        reader.cancel()
        assert (await asyncio.wait([writer], timeout=5))[0]
        assert entered == ["reader", "writer"]

    asyncio.run(scene())


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
    assert sorted(map(str, kept.glob("*.safetensors"))) == sorted(again.files)
    assert {name: value.tolist() for name, value in latest_tensors(again.files)} == {"a": [0.0, 0.0], "b": [3.0]}


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


class FakeWorker(RewardWorkerExtension):
    """vLLM's worker as far as the extension knows it; a tensor `bad` cannot be loaded."""

    def __init__(self) -> None:
        self.loaded: dict[str, float] = {}

    def reload_weights(self, weights_iterator) -> None:
        for name, tensor in weights_iterator:
            if name == "bad":
                raise ValueError("no such parameter")
            self.loaded[name] = float(tensor)


def test_a_load_that_fails_half_way_ends_with_the_old_weights(tmp_path):
    worker, old = FakeWorker(), staged(tmp_path, "old", {"a": torch.zeros(()), "b": torch.zeros(())})
    worker.rm_restore([str(old.file)])
    new = staged(tmp_path, "new", {"a": torch.ones(()), "bad": torch.ones(())})
    assert worker.rm_stage(str(new.file), [spec.model_dump() for spec in new.tensors]) is None
    assert worker.loaded == {"a": 0.0, "b": 0.0}
    assert "no such parameter" in str(worker.rm_commit())
    worker.rm_restore([str(old.file)])
    assert worker.loaded == {"a": 0.0, "b": 0.0}
    assert worker.rm_commit() == "no weights are staged; begin the update again"


def options_for(checkpoint: Path, **changes: object) -> ServeOptions:
    return ServeOptions(str(checkpoint), api_key="sesame", **changes)


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
    words = command(options_for(tmp_path), prepared)
    assert "--enable-lora" in words
    assert words[words.index("--max-lora-rank") + 1] == "8"


def test_the_key_is_in_neither_the_command_line_nor_a_file_that_others_read(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    exported("llama", tmp_path / "export")
    options = options_for(tmp_path / "export", threads=1)
    prepared = prepare_model(options.checkpoint, tmp_path, options.dtype)
    settings = VllmSettings(work=tmp_path / "work", model=prepared, options=options)
    file = settings.write()
    variables = environment(options, file)
    assert not any("sesame" in word for word in [*command(options, prepared), *variables.values()])
    assert file.stat().st_mode & 0o077 == 0
    assert (variables["VLLM_SERVER_DEV_MODE"], variables["VLLM_PLUGINS"]) == ("0", "rm_optimizer")
    monkeypatch.setenv(SETTINGS_VARIABLE, str(file))
    assert VllmSettings.read() == settings


def test_auto_gives_only_decoders_in_folders_to_vllm(tmp_path):
    exported("llama", tmp_path / "llama")
    exported("bert", tmp_path / "bert")
    assert suits_vllm(str(tmp_path / "llama"))
    assert not suits_vllm(str(tmp_path / "bert"))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_asking_for_a_vllm_that_is_missing_names_the_extra(tmp_path):
    with pytest.raises(MissingExtra, match=r"vLLM is not installed; pip install 'rm-optimizer\[vllm\]'"):
        serve(ServeOptions(str(tmp_path), engine="vllm"))


def supervised(tmp_path: Path, program: str) -> Supervisor:
    started = tmp_path / "started"
    return Supervisor([sys.executable, "-c", program], os.environ | {"STARTED": str(started)}, started)


DYING = f"""
import os, pathlib, time
pathlib.Path(os.environ["STARTED"]).touch()
with open(os.environ["STARTED"] + ".log", "a") as log:
    log.write(os.environ["{RESTARTS_VARIABLE}"])
os._exit(1)
"""


def test_a_server_that_dies_is_started_again_but_not_for_ever(tmp_path):
    with pytest.raises(RMOptimizerError, match="vLLM's server ended 6 times within"):
        supervised(tmp_path, DYING).run()
    assert (tmp_path / "started.log").read_text() == "012345"


def test_a_check_that_fails_ends_the_server(tmp_path):
    write = f"Path(os.environ['STARTED']).with_name({FAILED_FILE!r}).write_text('other rewards')"
    program = f"import os; from pathlib import Path; {write}"
    with pytest.raises(HandshakeFailed, match="other rewards"):
        supervised(tmp_path, program).run()


def test_a_server_that_never_was_up_is_not_started_again(tmp_path):
    with pytest.raises(RMOptimizerError, match="ended with code 3 before it was up"):
        supervised(tmp_path, "raise SystemExit(3)").run()


def is_gone_soon(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")
    deadline = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return True


def test_sigterm_ends_the_server_and_what_it_left_behind(tmp_path):
    program = """
import os, pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(os.environ["STARTED"]).write_text(str(child.pid))
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
time.sleep(60)
"""
    started = tmp_path / "started"

    def stop() -> None:
        while not (started.exists() and started.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    supervised(tmp_path, program).run()
    assert is_gone_soon(int(started.read_text()))


@pytest.mark.slow
def test_a_supervisor_that_is_killed_takes_a_server_along_that_is_still_starting(tmp_path):
    """It has called nothing of ours."""
    program = (
        "import os, pathlib, time; pathlib.Path(os.environ['STARTED']).write_text(str(os.getpid())); time.sleep(60)"
    )
    supervisor = f"""
import os, pathlib, sys
from rm_optimizer.serving.vllm.supervisor import Supervisor
started = pathlib.Path({str(tmp_path / "started")!r})
Supervisor([sys.executable, "-c", {program!r}], os.environ | {{"STARTED": str(started)}}, started).run()
"""
    started = tmp_path / "started"
    with subprocess.Popen([sys.executable, "-c", supervisor]) as process:
        while not (started.exists() and started.read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    assert is_gone_soon(int(started.read_text()))


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


def test_vllm_hears_of_sigterm_when_open_requests_are_answered():
    events: list[str] = []
    statuses: list[int] = []

    async def nothing(*_: object) -> None: ...

    async def note(message) -> None:
        statuses.append(message.get("status", 0))

    async def scene() -> None:
        loop, may_answer = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGINT, events.append, "vllm ends")

        async def reward_app(*_: object) -> None:
            await may_answer.wait()
            events.append("answered")

        outer = RewardApplication(nothing)
        config = SimpleNamespace(limit_concurrency=None)
        state = SimpleNamespace(reward_app=reward_app, server=SimpleNamespace(config=config))
        scope = {"type": "http", "app": SimpleNamespace(state=state)}
        await outer(scope | {"type": "lifespan"}, nothing, nothing)
        assert config.limit_concurrency >= 16
        early = asyncio.create_task(outer(scope, nothing, nothing))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        await outer(scope, nothing, note)
        may_answer.set()
        await early
        while len(events) < 2:
            await asyncio.sleep(0.01)
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)

    asyncio.run(scene())
    assert events == ["answered", "vllm ends"]
    assert statuses[0] == 503


class FakeClient:
    """vLLM's engine client as far as an update knows it."""

    errored = False

    def __init__(self, answers: dict[str, str | None]) -> None:
        self.answers = answers
        self.calls: list[str] = []
        self.is_awake = asyncio.Event()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("wait", True)
        self.calls.append("pause")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> list[str | None]:
        self.calls.append(method)
        if method == "rm_alive":
            await self.is_awake.wait()
            return [None]
        if method not in self.answers:
            raise RuntimeError(f"{method} failed in a worker")
        return [None, self.answers[method]]


def engine_on(client: FakeClient, folder: Path) -> ReloadEngine:
    client.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=64))  # type: ignore[attr-defined]
    model = SimpleNamespace(description=fake_description(), folder=folder, adapter=None)
    return ReloadEngine(client, SimpleNamespace(history_folder=folder, model=model, num_restarts=0))


def committing(
    tmp_path: Path, client: FakeClient, verify: Callable[[], None] = lambda: None
) -> tuple[ReloadEngine, list[int], BaseException | None]:
    """A commit over the client: the engine after it, the SIGTERMs sent, and what it raised."""
    signals: list[int] = []

    async def check(*_: object) -> None: ...

    async def scene() -> tuple[ReloadEngine, BaseException | None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, signals.append, signal.SIGTERM)
        engine = engine_on(client, tmp_path)
        engine._verify, engine._check = verify, check
        [raised] = await asyncio.gather(
            engine._swap_in(staged(tmp_path, "v1", {"a": torch.ones(1)})), return_exceptions=True
        )
        await asyncio.sleep(0.01)
        loop.remove_signal_handler(signal.SIGTERM)
        return engine, raised

    engine, raised = asyncio.run(scene())
    return engine, signals, raised


def test_an_update_serves_once_all_workers_have_it(tmp_path):
    client = FakeClient({"rm_commit": None})
    engine, signals, raised = committing(tmp_path, client)
    assert raised is None
    assert (engine.version, engine.revision, engine.is_up, signals) == ("v1", 1, True, [])
    assert client.calls == ["pause", "rm_commit", "resume"]


def test_an_update_that_one_worker_cannot_load_is_taken_back_in_all(tmp_path):
    client = FakeClient({"rm_commit": "no such parameter", "rm_restore": None})
    engine, signals, raised = committing(tmp_path, client)
    assert isinstance(raised, WeightsRefused)
    assert (engine.version, engine.is_up, signals) == ("v0", True, [])
    assert client.calls == ["pause", "rm_commit", "resume", "pause", "rm_restore", "resume"]


def test_an_engine_whose_weights_are_unknown_answers_nobody_and_ends(tmp_path):
    engine, signals, raised = committing(tmp_path, FakeClient({"rm_commit": "no such parameter"}))
    assert isinstance(raised, RuntimeError)
    assert (engine.version, engine.is_up, signals) == ("v0", False, [signal.SIGTERM])
    with pytest.raises(EngineUnavailable):
        asyncio.run(engine.score([[1, 2]]))


REPLACED = "replaced while it was served, so start the server again"


def test_an_update_is_not_taken_back_to_a_checkpoint_that_was_replaced(tmp_path):
    exported("llama", tmp_path / "export")
    model = prepare_model(str(tmp_path / "export"), tmp_path, "float32")
    shutil.rmtree(tmp_path / "export")
    exported("llama", tmp_path / "export", seed=1)
    client = FakeClient({"rm_commit": "no such parameter", "rm_restore": None})
    engine, signals, raised = committing(tmp_path, client, partial(require_unchanged, model))
    assert isinstance(raised, CheckpointError)
    assert REPLACED in str(raised)
    assert (engine.is_up, signals) == (False, [signal.SIGTERM])


@pytest.mark.parametrize("change", ["nothing", "weights", "max_length", "removed"])
def test_a_server_that_is_started_again_loads_the_same_checkpoint_or_ends_for_good(tmp_path, monkeypatch, change):
    exported("llama", tmp_path / "export")
    options = options_for(tmp_path / "export")
    model = prepare_model(options.checkpoint, tmp_path, options.dtype)
    settings = VllmSettings(work=tmp_path / "work", model=model, options=options)
    monkeypatch.setenv(SETTINGS_VARIABLE, str(settings.write()))
    monkeypatch.setattr("rm_optimizer.serving.vllm.plugin.show_server_log", lambda: None)
    settings.started_file.touch()
    if change != "nothing":
        shutil.rmtree(tmp_path / "export")
    if change in ("weights", "max_length"):
        exported("llama", tmp_path / "export", **({"seed": 1} if change == "weights" else {"max_length": 60}))
    client = FakeClient({})
    client.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=64))  # type: ignore[attr-defined]
    if change == "nothing":  # it goes on to score the certificate's conversations, which needs vLLM
        with pytest.raises(EngineUnavailable):
            asyncio.run(RewardEndpoint().init_state(client, State(), Namespace()))
    else:
        with pytest.raises(CheckpointError, match="no model at" if change == "removed" else REPLACED):
            asyncio.run(RewardEndpoint().init_state(client, State(), Namespace()))
    assert settings.started_file.exists() == (change == "nothing")  # without it, the supervisor starts no other


def test_an_engine_that_stands_still_ends_its_server(tmp_path, monkeypatch):
    ended: list[int] = []

    async def scene() -> None:
        client = FakeClient({})
        engine = engine_on(client, tmp_path)
        monkeypatch.setattr(os, "_exit", lambda code: (ended.append(code), engine.give_up()))
        monkeypatch.setattr(os, "kill", lambda *_: None)
        client.is_awake.set()
        watching = asyncio.create_task(engine.watch(every=0.01, silence=0.1))
        await asyncio.sleep(0.2)
        assert len(client.calls) > 3
        assert ended == []
        client.is_awake.clear()
        await asyncio.wait_for(watching, timeout=5)

    asyncio.run(scene())
    assert len(ended) == 1
    assert ended[0] != 0
