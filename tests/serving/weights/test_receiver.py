"""What a server does with an update that is not as it should be; the model is a real one, the transport real HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import threading
import time
import uuid
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save, save_file

from rm_optimizer.errors import EngineUnavailable, TransferFailed, WeightsRefused
from rm_optimizer.schema.publish import RewardModelTrainingMode, Transport
from rm_optimizer.serving.update_protocol import Begin, Outcome, OutcomeStatus, TensorSpec
from rm_optimizer.serving.weights import receiver
from rm_optimizer.serving.weights.incoming import FromPath, checked_path
from rm_optimizer.serving.weights.live_weights import tensor_specs
from rm_optimizer.serving.weights.sending import Payload, manifest
from rm_optimizer.serving.weights.weight_file import check_weight_file, write_weight_file
from tests.serving.engines import InProcessEngine, exported, options_of
from tests.serving.running import engine_running

FULL, HEAD = RewardModelTrainingMode.full, RewardModelTrainingMode.head_only
TEXT = {"input": "How do I boil an egg?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    model = exported("llama", folder / "export")
    (folder / "root").mkdir()
    engine = lambda: InProcessEngine(options_of(folder / "export", folder / "tokenizer"))  # noqa: E731
    with engine_running(engine, root=folder / "root") as state:
        state.model, state.root, state.outside = model, folder / "root", folder
        yield state


@pytest.fixture(autouse=True)
def unchanged(server):
    """Whatever a test sends, the rewards and the version before serve after it, and nothing stays in progress."""
    before = served(server)
    yield
    assert served(server) == before
    assert status(server)["active"] is None


def served(server) -> tuple[float, str]:
    answer = httpx.post(f"{server.url}/classify", json=TEXT).json()
    return answer["data"][0]["probs"][0], answer["rm_version"]


def status(server, **query) -> dict:
    return httpx.get(f"{server.url}/rm/weights/status", params=query).json()


def tensors_of(server, mode=HEAD) -> dict[str, torch.Tensor]:
    state = server.model.model.state_dict()
    return {spec.name: state[spec.name] + 1 for spec in tensor_specs(server.model.model, mode)}


def announcement(tensors, **changes) -> dict:
    begin = Begin(
        batch_id=uuid.uuid4().hex, mode=HEAD, version="new", tensors=manifest(tensors), transport=Transport.path
    )
    return begin.model_copy(update=changes).model_dump(mode="json")


def send(server, route: str, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}/rm/weights/{route}", json=body, timeout=30)


def refused(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def published(server, tensors, path, **changes) -> httpx.Response:
    """Announce a file that is there already, and commit it."""
    begin = announcement(tensors, path=str(path), **changes)
    ready = send(server, "begin", begin)
    return ready if ready.is_error else send(server, "commit", {"batch_id": begin["batch_id"]})


def test_manifests_that_do_not_fit_are_refused_before_anything_is_sent(server):
    whole = tensors_of(server, FULL)
    lacking = {name: tensor for name, tensor in whole.items() if name != "score.weight"}
    wide = whole | {"score.weight": torch.zeros(1, 33)}
    whole_numbers = whole | {"score.weight": torch.zeros(1, 32, dtype=torch.int64)}
    for tensors, mode, message in (
        (lacking, FULL, "an update of mode full lacks 1 tensor: score.weight"),
        (whole | {"extra.weight": torch.zeros(2)}, FULL, "an update of mode full has unknown 1 tensor: extra.weight"),
        (wide, FULL, r"score.weight: expected float32[1, 32], got float32[1, 33]"),
        (whole_numbers, FULL, r"score.weight: expected float32[1, 32], got int64[1, 32]"),
        (whole, HEAD, "an update of mode head_only has unknown 20 tensors"),
        (tensors_of(server), RewardModelTrainingMode.lora, "mode lora has no tensors in the served model"),
    ):
        begin = announcement(tensors, mode=mode, transport=Transport.inline)
        assert message in refused(send(server, "begin", begin))


def header(value: object) -> bytes:
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + b"0000"


def test_files_that_are_not_their_manifest_are_refused(server):
    tensors, specs = tensors_of(server), manifest(tensors_of(server))
    whole = server.root / "whole.safetensors"
    write_weight_file(whole, specs, [(name, tensor.numpy().tobytes()) for name, tensor in tensors.items()])
    check_weight_file(whole, specs)
    broken = {
        "truncated": (whole.read_bytes()[:-4], "or was cut off: Error while deserializing header: incomplete metadata"),
        "longer": (whole.read_bytes() + b"0000", "file not fully covered"),
        "headless": (whole.read_bytes()[:20], "invalid header length"),
        "empty": (b"", "header too small"),
        "pickle": (b"\x80\x04\x95" + b"0" * 64, "header too large"),
        "no shape": (header({"score.weight": {"dtype": "F32", "data_offsets": [0, 4]}}), "missing field `shape`"),
        "odd shape": (header({"score.weight": {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}}), "invalid type"),
        "no object": (header([1, 2]), "invalid type"),
        "deep": (
            struct.pack("<Q", 400_005) + b'{"a":' + b"[" * 200_000 + b"]" * 200_000,
            "cannot be read as safetensors",
        ),
        "altered": (whole.read_bytes()[:-1] + b"\x55", "its SHA-256 is not the manifest's"),
    }
    for name, (content, message) in broken.items():
        path = server.root / f"{name}.safetensors"
        path.write_bytes(content)
        assert message in refused(published(server, tensors, path)), name


def test_tensors_that_are_not_the_announced_ones_are_refused(server):
    tensors = tensors_of(server)
    head = tensors["score.weight"]
    for name, stored, message in (
        ("missing", {"other": head}, "lacks 1 tensor: score.weight"),
        ("extra", {"score.weight": head, "more": head.clone()}, "has unknown 1 tensor: more"),
        ("shape", {"score.weight": head.flatten()}, "the manifest says float32[1, 32], the file F32[32]"),
        ("dtype", {"score.weight": head.double()}, "the file F64"),
    ):
        path = server.root / f"{name}.safetensors"
        save_file(stored, path)
        assert message in refused(published(server, tensors, path)), name


def test_values_that_are_not_finite_are_refused(server):
    for value in (float("nan"), float("inf")):
        tensors = {"score.weight": torch.full((1, 32), value)}
        save_file(tensors, server.root / "nan.safetensors")
        answer = published(server, tensors, server.root / "nan.safetensors")
        assert "not finite" in refused(answer)
        assert answer.json()["status"] == OutcomeStatus.refused


def test_paths_outside_the_root_are_refused(server):
    tensors = tensors_of(server)
    outside = server.outside / "outside.safetensors"
    save_file(tensors, outside)
    (server.root / "link.safetensors").symlink_to(outside)
    (server.root / "folder").symlink_to(server.outside)
    save_file(tensors, server.root / "weights.bin")
    for path in (
        str(outside),
        f"{server.root}/../outside.safetensors",
        "../outside.safetensors",
        f"{server.root}/link.safetensors",
        "link.safetensors",
        "folder/outside.safetensors",
        "weights.bin",
        "/etc/passwd",
        "absent.safetensors",
        str(server.root),
        "a\0.safetensors",
        "",
        "a" * 5000 + ".safetensors",
    ):
        assert "path" in refused(published(server, tensors, path)), path


def test_a_path_that_was_swapped_for_a_link_after_the_announcement_is_refused(server):
    tensors, path = tensors_of(server), server.root / "swapped.safetensors"
    save_file(tensors, path)
    save_file(tensors, server.outside / "elsewhere.safetensors")
    begin = announcement(tensors, path=str(path))
    assert send(server, "begin", begin).status_code == 200
    path.unlink()
    path.symlink_to(server.outside / "elsewhere.safetensors")
    assert "must not lead through a link" in refused(send(server, "commit", {"batch_id": begin["batch_id"]}))


def test_a_root_behind_a_link_is_a_root(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "a.safetensors").touch()
    for path in (f"{tmp_path}/alias/a.safetensors", f"{tmp_path}/real/a.safetensors", "a.safetensors"):
        assert checked_path(tmp_path / "alias", path) == tmp_path / "real" / "a.safetensors"


def test_bodies_that_are_not_the_manifests_size_are_refused(server):
    tensors = tensors_of(server)
    begin = announcement(tensors, transport=Transport.inline)
    url = f"{server.url}/rm/weights/upload/{begin['batch_id']}"
    assert httpx.put(url, content=b"early").status_code == 404
    assert send(server, "begin", begin).status_code == 200
    assert "cut off" in refused(httpx.put(url, content=b"short"))
    assert "longer than" in refused(httpx.put(url, content=b"0" * 2**21))
    assert "not uploaded completely" in refused(send(server, "commit", {"batch_id": begin["batch_id"]}))


def test_a_second_update_is_a_conflict_until_the_first_has_ended(server):
    first, second = (announcement(tensors_of(server), transport=Transport.inline) for _ in range(2))
    assert send(server, "begin", first).status_code == 200
    assert f"update {first['batch_id']} is in progress" in refused(send(server, "begin", second), 409)
    assert send(server, "begin", first).status_code == 200  # the same message once more
    assert send(server, "abort", {"batch_id": first["batch_id"], "reason": "tired"}).json()["status"] == "aborted"
    assert send(server, "begin", second).status_code == 200
    assert send(server, "abort", {"batch_id": second["batch_id"]}).status_code == 200


@pytest.mark.parametrize("transport", [Transport.inline, Transport.path])
def test_an_update_whose_sender_died_gives_way_to_its_successor(server, monkeypatch, transport):
    monkeypatch.setattr(receiver, "LEASE_SECONDS", 0.5)
    path = server.root / "successor.safetensors"
    path.touch()
    dead = announcement(tensors_of(server), transport=transport, path=path.name)
    successor = announcement(tensors_of(server), transport=Transport.inline)
    assert send(server, "begin", dead).status_code == 200
    assert refused(send(server, "begin", successor), 409)
    time.sleep(0.6)
    assert send(server, "begin", successor).status_code == 200
    assert "silent for" in refused(send(server, "commit", {"batch_id": dead["batch_id"]}))
    assert send(server, "abort", {"batch_id": successor["batch_id"]}).status_code == 200


def test_other_weights_under_a_name_that_has_served_are_refused(server):
    begin = announcement(tensors_of(server), version=served(server)[1], transport=Transport.inline)
    assert "publish these under another name" in refused(send(server, "begin", begin), 409)


def test_an_update_in_progress_is_given_up_when_the_server_stops(server):
    begin = Begin.model_validate(announcement(tensors_of(server), transport=Transport.inline))

    async def stopped() -> Outcome:
        closing = receiver.WeightReceiver(server.service)
        await closing.begin(begin)
        await closing.close()
        return closing.status().outcome

    outcome = asyncio.run(stopped())
    assert (outcome.status, outcome.error.message) == (OutcomeStatus.aborted, "given up: the server is stopping")


def test_an_upload_that_goes_on_keeps_others_out(server, monkeypatch):
    monkeypatch.setattr(receiver, "LEASE_SECONDS", 0.5)
    tensors = tensors_of(server)
    slow, other = (announcement(tensors, transport=Transport.inline) for _ in range(2))
    body, answers = save(tensors), []

    def pieces():
        for place in range(6):
            yield body[place : place + 1]
            time.sleep(0.2)
            answers.append(send(server, "begin", other).status_code)
        yield body[6:]

    assert send(server, "begin", slow).status_code == 200
    httpx.put(f"{server.url}/rm/weights/upload/{slow['batch_id']}", content=pieces())
    assert answers == [409] * 6
    assert send(server, "abort", {"batch_id": slow["batch_id"]}).status_code == 200


def test_of_many_updates_at_once_one_is_taken(server):
    begins = [announcement(tensors_of(server), transport=Transport.inline) for _ in range(8)]
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda begin=begin: statuses.append(send(server, "begin", begin).status_code))
        for begin in begins
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] + [409] * 7
    assert send(server, "abort", {"batch_id": status(server)["active"]}).status_code == 200


def test_outcomes_are_repeated_and_the_unknown_is_said_to_be_unknown(server):
    begin = announcement(tensors_of(server), transport=Transport.inline)
    assert refused(send(server, "commit", {"batch_id": "nobody"}), 404)
    assert send(server, "begin", begin).status_code == 200
    answers = [send(server, "commit", {"batch_id": begin["batch_id"]}) for _ in range(3)]
    assert answers[0].status_code == 400
    assert answers[0].json() == answers[1].json() == answers[2].json()
    assert send(server, "abort", {"batch_id": begin["batch_id"]}).json() == answers[0].json()
    assert status(server, batch_id=begin["batch_id"])["outcome"] == answers[0].json()


def test_an_update_that_is_not_committed_in_time_is_given_up(server):
    begin = announcement(tensors_of(server), transport=Transport.inline, timeout_seconds=0.2)
    assert send(server, "begin", begin).status_code == 200
    deadline = time.monotonic() + 10
    while status(server)["active"] is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    outcome = send(server, "commit", {"batch_id": begin["batch_id"]})
    assert outcome.json()["status"] == "aborted"
    assert "not committed within" in refused(outcome)


def test_an_update_of_other_weights_than_serve_is_a_conflict(server):
    begin = announcement(tensors_of(server), transport=Transport.inline, base_version="another")
    assert "the update follows another" in refused(send(server, "begin", begin), 409)


def test_a_group_without_its_sender_is_refused(server):
    for rendezvous, message in (
        (None, "needs rendezvous"),
        ("nonsense", "must be host:port"),
        ("127.0.0.1:1", "no sender can be reached"),
        ("127.0.0.1:99999999", "no sender can be reached"),
    ):
        begin = announcement(tensors_of(server), transport=Transport.gloo, rendezvous=rendezvous, timeout_seconds=2)
        assert message in refused(send(server, "begin", begin))


def test_a_file_that_its_sender_writes_again_in_place_is_not_what_serves(tmp_path):
    sent, landing = tmp_path / "sent.safetensors", tmp_path / "landing.safetensors"
    sent.write_bytes(b"first")
    begin = Begin.model_validate(announcement({"a": torch.zeros(1)}, path=str(sent)))
    received = FromPath(begin, tmp_path, landing)
    copy = asyncio.run(received.file())
    with sent.open("r+b") as file:
        file.write(b"other")
    assert copy.read_bytes() == b"first"
    received.drop()
    assert sorted(tmp_path.iterdir()) == [sent]


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path, monkeypatch):
    sent, landing = tmp_path / "sent.safetensors", Path("/dev/full")
    sent.write_bytes(b"0" * 2**16)
    begin = Begin.model_validate(announcement({"a": torch.zeros(1)}, path=str(sent)))
    removed = []
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: removed.append(self))
    with pytest.raises(WeightsRefused, match="cannot be written: No space left on device"):
        asyncio.run(FromPath(begin, tmp_path, landing).file())
    assert removed == [landing]


def test_a_body_that_the_safetensors_library_wrote_is_taken(server):
    tensors = tensors_of(server)
    begin = announcement(tensors, transport=Transport.inline)
    assert send(server, "begin", begin).status_code == 200
    url = f"{server.url}/rm/weights/upload/{begin['batch_id']}"
    assert httpx.put(url, content=save(tensors, metadata={"written by": "somebody"})).status_code == 200
    assert send(server, "abort", {"batch_id": begin["batch_id"]}).json()["status"] == "aborted"


def test_no_update_is_taken_before_the_model_was_compared_with_its_certificate(server):
    service, reader = server.service, server.service._reader
    begin = announcement(tensors_of(server), transport=Transport.inline)
    service._reader = None
    try:
        answer = send(server, "begin", begin)
    finally:
        service._reader = reader
    assert "updates are not accepted yet: the model is loading" in refused(answer, 503)
    assert float(answer.headers["retry-after"]) > 0


def test_an_update_of_other_weights_than_those_that_serve_is_refused(server):
    begin = announcement(tensors_of(server), transport=Transport.inline, base_revision=5)
    assert "the update follows 5, but" in refused(send(server, "begin", begin), 409)


def test_an_update_under_way_keeps_others_out_and_says_for_how_long(server):
    first, second = (announcement(tensors_of(server), transport=Transport.inline) for _ in range(2))
    assert send(server, "begin", first).status_code == 200
    answer = send(server, "begin", second)
    assert f"update {first['batch_id']} is in progress" in refused(answer, 409)
    assert 1 <= float(answer.headers["retry-after"]) <= 5
    assert send(server, "abort", {"batch_id": first["batch_id"]}).status_code == 200
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'rm_updates_total{outcome="aborted"}' in metrics
    assert "rm_update_seconds_count" in metrics
    [shown] = [line for line in metrics.splitlines() if line.startswith("rm_weights_revision ")]
    assert float(shown.split()[1]) == status(server)["revision"]


def test_a_swap_that_takes_too_long_answers_in_time_and_may_be_asked_for_again(server, monkeypatch):
    monkeypatch.setattr(receiver, "SWAP_GRACE_SECONDS", 0.2)
    tensors, path = tensors_of(server), server.root / "slow.safetensors"
    save_file(tensors, path)
    begin = announcement(tensors, path=str(path), timeout_seconds=0.3)

    async def slow(revision: int) -> None:
        await asyncio.sleep(1.0)
        raise WeightsRefused("its worker was given up")

    monkeypatch.setattr(server.engine, "commit", slow)
    assert send(server, "begin", begin).status_code == 200
    answer = send(server, "commit", {"batch_id": begin["batch_id"]})
    assert "is still being swapped in; ask again" in refused(answer, 503)
    time.sleep(0.8)
    assert "given up" in refused(send(server, "commit", {"batch_id": begin["batch_id"]}))


def test_an_update_that_a_still_worker_never_checks_is_refused_in_its_time(server, monkeypatch):
    monkeypatch.setattr(receiver, "ROLLBACK_SECONDS", 0.2)
    tensors, path = tensors_of(server), server.root / "still.safetensors"
    save_file(tensors, path)

    async def still(*_: object) -> None:
        await asyncio.sleep(60)
        raise EngineUnavailable("its worker was given up")

    monkeypatch.setattr(server.engine, "stage", still)
    monkeypatch.setattr(server.engine, "rollback", still)
    started = time.monotonic()
    answer = published(server, tensors, path, timeout_seconds=0.5)
    assert "not received and checked within 0.5 s" in refused(answer)
    assert time.monotonic() - started < 30


def test_new_weights_that_score_otherwise_than_their_sender_are_taken_back(server):
    tensors, path = tensors_of(server), server.root / "probe.safetensors"
    save_file(tensors, path)
    probe = {"input_ids": [[5, 6, 7]], "rewards": [1e6], "tolerance": 1e-4}
    begin = announcement(tensors, path=str(path)) | {"probe": probe}
    assert send(server, "begin", begin).status_code == 200
    assert "the new weights give" in refused(send(server, "commit", {"batch_id": begin["batch_id"]}))


def test_probes_that_the_model_cannot_compute_and_endless_waits_are_refused(server):
    begin = announcement(tensors_of(server), transport=Transport.inline)
    for ids in ([], [10_000], [-1], [5] * 129):
        probe = {"input_ids": [ids], "rewards": [0.0]}
        assert "probe[0] must hold 1 to 128 token ids" in refused(send(server, "begin", begin | {"probe": probe}))
    assert "at most 3600" in refused(send(server, "begin", begin | {"timeout_seconds": 1e300}))


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    specs = [TensorSpec(name=name, shape=[2], dtype="float32") for name in ("a", "b")]
    path = tmp_path / "w.safetensors"

    def broken_off():
        yield "a", b"12345678"
        raise TransferFailed("b was not transferred")

    with pytest.raises(TransferFailed):
        write_weight_file(path, specs, broken_off())
    assert os.listdir(tmp_path) == []
    write_weight_file(path, specs, [(name, b"12345678") for name in ("a", "b")])
    assert os.listdir(tmp_path) == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "int64", "int16", "int8", "bool"])
def test_files_of_ours_are_read_by_safetensors(tmp_path, dtype):
    from safetensors.torch import load_file

    tensors = {
        "odd": torch.arange(3).to(torch.int8),
        "x": (torch.arange(6).reshape(2, 3) % 2).to(getattr(torch, dtype)),
        "none": torch.zeros(0),
    }
    write_weight_file(tmp_path / "w.safetensors", manifest(tensors), Payload(tensors).pieces())
    loaded = load_file(tmp_path / "w.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype
               for name, tensor in tensors.items())  # fmt: skip


def test_an_update_that_cannot_be_prepared_or_is_aborted_then_leaves_the_old_weights(server):
    tensors, before = tensors_of(server), status(server)["version"]
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    begin = announcement(broken, path=str(written(server, broken)), version="broken")
    assert send(server, "begin", begin).status_code == 200
    answer = send(server, "commit", {"batch_id": begin["batch_id"], "only_prepares": True})
    assert (answer.status_code, answer.json()["status"]) == (400, "refused")
    begin = announcement(tensors, path=str(written(server, tensors)), version="aborted")
    assert send(server, "begin", begin).status_code == 200
    for _ in range(2):  # a message may be repeated
        prepared = send(server, "commit", {"batch_id": begin["batch_id"], "only_prepares": True})
        assert (prepared.status_code, prepared.json()["status"]) == (200, "prepared")
        assert prepared.json()["version"] == before
    assert send(server, "abort", {"batch_id": begin["batch_id"]}).json()["status"] == "aborted"
    assert send(server, "commit", {"batch_id": begin["batch_id"]}).json()["status"] == "aborted"
    assert status(server)["version"] == before


def written(server, tensors):
    file = server.root / f"{uuid.uuid4().hex}.safetensors"
    write_weight_file(file, manifest(tensors), [(name, tensor.numpy().tobytes()) for name, tensor in tensors.items()])
    return file
