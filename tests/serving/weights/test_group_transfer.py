from __future__ import annotations

import socket
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from rm_optimizer.errors import TransferFailed
from rm_optimizer.schema.publish import Transport
from rm_optimizer.serving.weights.group_transfer import (
    PIECE_BYTES,
    RECEIVER,
    SENDER,
    GroupLink,
    connect_store,
    open_store,
    wait_for_sender,
)
from rm_optimizer.serving.weights.sending import manifest
from rm_optimizer.serving.weights.weight_file import write_weight_file

two_gpus = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each end")]
TRANSPORTS = [Transport.gloo, pytest.param(Transport.nccl, marks=two_gpus)]


def received(transport: Transport, specs, path, rendezvous: str, failures: list[BaseException]) -> None:
    if transport is Transport.nccl:
        torch.cuda.set_device(1)
    try:
        link = GroupLink(connect_store(rendezvous, 20.0), RECEIVER, transport, 20.0)
        write_weight_file(path, specs, link.receive(specs))
    except TransferFailed as error:
        failures.append(error)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_arrive_bit_for_bit(tmp_path, transport):
    tensors = {
        "wide": torch.randn(PIECE_BYTES // 4 + 3, generator=torch.Generator().manual_seed(0)),  # more than one piece
        "half": torch.randn(7, 3).to(torch.bfloat16),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "counter": torch.tensor(3),
        "flags": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
    }
    specs, store, failures = manifest(tensors), open_store("127.0.0.1", 20.0), []
    path = tmp_path / "weights.safetensors"
    arguments = (transport, specs, path, f"127.0.0.1:{store.port}", failures)
    receiver = threading.Thread(target=received, args=arguments)
    receiver.start()
    link = GroupLink(store, SENDER, transport, 20.0)
    link.send((spec.name, tensors[spec.name]) for spec in specs)
    receiver.join(timeout=30)
    assert failures == []
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_receiver_whose_sender_falls_silent_gives_up_in_time(tmp_path):
    specs, store, failures = manifest({"a": torch.zeros(4)}), open_store("127.0.0.1", 5.0), []

    def receive() -> None:
        link = GroupLink(connect_store(f"127.0.0.1:{store.port}", 1.0), RECEIVER, Transport.gloo, 1.0)
        with pytest.raises(TransferFailed, match="a was not transferred"):
            write_weight_file(tmp_path / "w", specs, link.receive(specs))
        failures.append(time.monotonic())

    started = time.monotonic()
    thread = threading.Thread(target=receive)
    thread.start()
    link = GroupLink(store, SENDER, Transport.gloo, 5.0)
    thread.join(timeout=20)
    assert link.rank == SENDER
    assert failures[0] - started < 15
    assert list(tmp_path.iterdir()) == []


def test_a_sender_whose_receiver_never_comes_gives_up_in_time():
    with pytest.raises(TransferFailed, match="the gloo group did not form"):
        GroupLink(open_store("127.0.0.1", 0.5), SENDER, Transport.gloo, 0.5)


def test_a_receiver_that_is_given_up_ends_at_once():
    store, given_up = open_store("127.0.0.1", 60.0), threading.Event()
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            wait_for_sender(connect_store(f"127.0.0.1:{store.port}", 60.0), 3600.0, given_up.is_set)
        except TransferFailed as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    given_up.set()
    thread.join(timeout=5)
    assert [str(failure) for failure in failures] == ["the sender did not begin to send"]


def test_an_address_without_a_sender_is_refused_in_the_same_words_whatever_is_there():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound and not listening
        port = silent.getsockname()[1]
        for rendezvous in (f"127.0.0.1:{port}", "no-such-host.invalid:80", "127.0.0.1:99999"):
            with pytest.raises(TransferFailed, match=f"^no sender can be reached at {rendezvous}$"):
                connect_store(rendezvous, 0.5)
