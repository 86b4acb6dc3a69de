"""Members that share a backbone load it once and score as each does alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.model.identity import scorer_digest
from rm_optimizer.core.model.reward_model import BradleyTerryRM
from rm_optimizer.core.storage.export import save_adapter
from rm_optimizer.errors import CheckpointError
from rm_optimizer.rl_coupling import RewardModelEnsemble
from rm_optimizer.schema.adapters import AdapterConfig, AdapterKind
from tests.builders import tiny_reward_model

LORA = AdapterConfig(kind=AdapterKind.lora, rank=4, alpha=8, dropout=0.0)
PROMPTS, RESPONSES = ["Hi", "What is 2 + 2?", "Hi", "Why?"], ["Hello.", "4", "No.", "Because " * 30]


def scrambled(model: BradleyTerryRM, seed: int) -> BradleyTerryRM:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def save_adapters(root: Path, base_seed: int, seeds: range) -> list[Path]:
    tiny_reward_model("llama", seed=base_seed).save_pretrained(root / "base")
    for seed in seeds:
        model = BradleyTerryRM.from_pretrained(root / "base")
        add_adapter(model.model, LORA, seed=seed)
        save_adapter(scrambled(model, seed), root / f"adapter-{seed}")
    return [root / f"adapter-{seed}" for seed in seeds]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> list[Path]:
    return save_adapters(tmp_path_factory.mktemp("adapters"), 0, range(3))


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("heads")
    for seed in range(3):
        model = tiny_reward_model("llama", seed=0).requires_grad_(False)
        model.reward_head.requires_grad_(True)
        scrambled(model, seed).save_pretrained(root / f"head-{seed}")
    return [root / f"head-{seed}" for seed in range(3)]


def alone(folders: list[Path]) -> np.ndarray:
    return np.stack([BradleyTerryRM.from_pretrained(path).score(PROMPTS, RESPONSES).numpy() for path in folders])


def counting(loads: list[str]) -> Callable[[str], BradleyTerryRM]:
    def load(source: str) -> BradleyTerryRM:
        loads.append(source)
        return BradleyTerryRM.from_pretrained(source)

    return load


@pytest.mark.parametrize("memory_bytes", [None, 0])
def test_adapters_of_one_base_load_it_once_and_score_as_they_do_alone(adapters: list[Path], memory_bytes):
    loads: list[str] = []
    ensemble = RewardModelEnsemble(adapters, load=counting(loads), memory_bytes=memory_bytes)
    expected = alone(adapters)
    assert np.abs(expected - expected[0])[1:].min() > 1e-3
    for calls in (1, 2):
        assert ensemble.member_rewards(PROMPTS, RESPONSES) == pytest.approx(expected, abs=1e-5)
        assert len(loads) == (1 if memory_bytes is None else calls)


def test_heads_of_one_backbone_keep_it_once_and_score_as_they_do_alone(heads: list[Path]):
    ensemble = RewardModelEnsemble(heads)
    assert ensemble.member_rewards(PROMPTS, RESPONSES) == pytest.approx(alone(heads), abs=1e-5)
    (backbone,) = ensemble._saved._kept
    head = sum(p.numel() * p.element_size() for p in BradleyTerryRM.from_pretrained(heads[0]).reward_head.parameters())
    size = sum(p.numel() * p.element_size() for p in BradleyTerryRM.from_pretrained(heads[0]).parameters())
    assert backbone.num_bytes == size + 3 * head  # values of the first, and those of two others


def test_digests_are_those_of_the_members_alone(adapters: list[Path], heads: list[Path]):
    ensemble = RewardModelEnsemble([*adapters, *heads])
    first = ensemble.digest()
    assert first == RewardModelEnsemble([*adapters, *heads], memory_bytes=0).digest()
    assert first == RewardModelEnsemble([BradleyTerryRM.from_pretrained(p) for p in [*adapters, *heads]]).digest()
    assert len({scorer_digest(ensemble._member(number)) for number in range(6)}) == 6  # type: ignore[arg-type]


def test_members_of_several_bases_take_turns(adapters: list[Path], heads: list[Path], tmp_path: Path):
    others = save_adapters(tmp_path, 7, range(2))
    mixed = [adapters[0], others[0], heads[0], adapters[1], others[1], heads[1], adapters[2]]
    loads: list[str] = []
    ensemble = RewardModelEnsemble(mixed, load=counting(loads))
    for _ in range(2):
        assert ensemble.member_rewards(PROMPTS, RESPONSES) == pytest.approx(alone(mixed), abs=1e-5)
    assert len(loads) == 4  # a base for each kind of adapter, and each head's own file


def test_threads_that_score_at_once_get_the_rewards(adapters: list[Path]):
    ensemble, expected = RewardModelEnsemble(adapters), alone(adapters)
    found: list[np.ndarray] = []
    threads = [
        threading.Thread(target=lambda: found.append(ensemble.member_rewards(PROMPTS, RESPONSES))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(rewards == pytest.approx(expected, abs=1e-5) for rewards in found)


def test_an_adapter_that_changed_since_its_export_is_refused(adapters: list[Path], tmp_path: Path):
    changed = save_adapters(tmp_path, 0, range(2))
    ensemble = RewardModelEnsemble(changed)
    file = changed[1] / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(CheckpointError, match=r"the weights in .*adapter-1 are not those that were exported"):
        ensemble.member_rewards(PROMPTS, RESPONSES)
