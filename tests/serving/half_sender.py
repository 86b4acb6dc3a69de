"""A trainer that stops in the middle of a transfer: `python -m tests.serving.half_sender URL CHECKPOINT`."""

from __future__ import annotations

import sys
import time

import httpx
import torch

from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.schema.publish import RewardModelTrainingMode, Transport
from rm_optimizer.serving.update_protocol import Begin
from rm_optimizer.serving.weights.group_transfer import SENDER, GroupLink, open_store
from rm_optimizer.serving.weights.sending import manifest


def send_half(url: str, checkpoint: str) -> None:
    """Begin an update, send half of it, print a line, and then nothing more."""
    tensors = dict(BradleyTerryRM.from_pretrained(checkpoint).model.state_dict())
    specs = manifest(tensors)
    store = open_store("127.0.0.1", 30.0)
    begin = Begin(
        batch_id="half",
        mode=RewardModelTrainingMode.full,
        version="half",
        tensors=specs,
        transport=Transport.gloo,
        rendezvous=f"127.0.0.1:{store.port}",
        timeout_seconds=3.0,
    )
    httpx.post(f"{url}/rm/weights/begin", json=begin.model_dump(mode="json"), timeout=30).raise_for_status()
    link = GroupLink(store, SENDER, Transport.gloo, 30.0)
    link.send((spec.name, torch.zeros_like(tensors[spec.name])) for spec in specs[: len(specs) // 2])
    print("sent", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    send_half(*sys.argv[1:])
