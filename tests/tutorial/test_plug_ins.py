"""A loss and a pooling head of one's own, from a plug-in module: on the command line, stored, loaded and refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rm_optimizer import BradleyTerryRM, register_pooling_head
from rm_optimizer.core.classifier.adapters import add_adapter
from rm_optimizer.core.classifier.pooling import POOLING_HEADS, last_token, require_pooling, set_pooling_head
from rm_optimizer.core.model.losses import LOSSES
from rm_optimizer.core.storage.export import save_adapter
from rm_optimizer.core.storage.loading import PAYLOAD_KEY, WEIGHTS_PREFIX, checkpoint_payload
from rm_optimizer.doctor.model import plain_forward
from rm_optimizer.errors import CheckpointError, ConfigError
from rm_optimizer.records.run_folder import RunFolder, read_rows
from rm_optimizer.schema.config import AdapterConfig, AdapterKind
from rm_optimizer.serving.embedded.vllm_model import prepare_model
from tests.builders import fresh_reward_model
from tests.tutorial.test_training import ROWS, SMALL

PLUG_IN = """
import torch

from rm_optimizer import register_loss, register_pooling_head


@register_loss("mine")
def mine(chosen, rejected, *, margin, label):
    return torch.relu(1 + margin - (2 * label - 1) * (chosen - rejected))


@register_pooling_head("mean")
def mean(hidden, attention_mask):
    weights = attention_mask / attention_mask.sum(dim=1, keepdim=True)
    return (hidden * weights[..., None].to(hidden.dtype)).sum(dim=1)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run folder of a command that names loss and pooling head of the plug-in module beside it."""
    folder = tmp_path_factory.mktemp("plug_ins")
    (folder / "my_plug_in.py").write_text(PLUG_IN, encoding="utf-8")
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    options = SMALL | {"batching.batch_size": 27, "data.train": "pairs.jsonl", "output_dir": "run"}
    words = [f"{name}={str(value).lower()}" for name, value in options.items()]
    words += ["plugins=[my_plug_in]", "loss.name=mine", "model.pooling_head=mean"]
    command = [sys.executable, "-c", "from rm_optimizer.interfaces.entry import main; main()", "train", *words]
    path = {"PYTHONPATH": f"{Path.cwd()}:{folder}", "PATH": ""}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=path)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(folder))
    import_module("my_plug_in")
    yield folder / "run"
    sys.path.remove(str(folder))
    sys.modules.pop("my_plug_in")
    for registry, name in ((LOSSES, "mine"), (POOLING_HEADS, "mean")):
        registry._entries.pop(name)  # type: ignore[attr-defined]


def test_the_command_line_trains_with_a_loss_of_ones_own(trained: Path):
    means = np.mean([max(0.0, 1 - pair.chosen + pair.rejected) for pair in RunFolder(trained).pair_rewards()])
    assert float(read_rows(trained / "metrics.csv")[-1]["eval_loss"]) == pytest.approx(means, rel=1e-5)


def test_the_command_line_trains_with_a_pooling_head_of_ones_own(trained: Path):
    model = BradleyTerryRM.from_pretrained(trained)
    tokens = model.tokenize(["Say 1", "Say 2"], ["1 it is", "no"])
    with torch.no_grad():
        rewards = model(**tokens)
        hidden = model.model.base_model(**tokens).last_hidden_state
        means = [row[mask == 1].mean(dim=0) for row, mask in zip(hidden, tokens["attention_mask"], strict=True)]
        expected = model.reward_head(torch.stack(means)).squeeze(-1)
    torch.testing.assert_close(rewards, expected)
    assert RunFolder(trained).options["model"]["pooling_head"] == "mean"
    assert "Plain `transformers` reads other rewards" in (trained / "best" / "README.md").read_text(encoding="utf-8")


def test_a_stored_pooling_head_is_needed_again(trained: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(POOLING_HEADS._entries, "mean")  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="unknown pooling head 'mean'; Known: none; import its module"):
        BradleyTerryRM.from_pretrained(trained)


def test_every_form_of_a_model_keeps_its_pooling_head(trained: Path, tmp_path: Path):
    plain = BradleyTerryRM.from_pretrained(trained)
    rewards = plain.score("Say 1", ["1 it is", "no"])
    weights = {WEIGHTS_PREFIX + name: value for name, value in plain.model.state_dict().items()}
    torch.save({PAYLOAD_KEY: checkpoint_payload(plain), "state_dict": weights}, tmp_path / "step.ckpt")
    torch.testing.assert_close(BradleyTerryRM(tmp_path / "step.ckpt").score("Say 1", ["1 it is", "no"]), rewards)
    base = fresh_reward_model("llama")
    base.save_pretrained(tmp_path / "base")
    adapted = BradleyTerryRM(tmp_path / "base", pooling_head="mean")
    assert (adapted.score("Hi", "Hello.") - base.score("Hi", "Hello.")).abs() > 1e-4
    add_adapter(adapted.model, AdapterConfig(kind=AdapterKind.lora, rank=2, alpha=4.0, dropout=0.0), seed=0)
    save_adapter(adapted, tmp_path / "adapter")
    again = BradleyTerryRM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(again.score("Hi", ["Hello.", "No"]), adapted.score("Hi", ["Hello.", "No"]))


def test_what_reads_the_last_token_is_refused(trained: Path, tmp_path: Path):
    model = BradleyTerryRM.from_pretrained(trained)
    assert "its pooling head 'mean'" in str(model.supports_prefix_sharing())
    assert plain_forward(model, [(5, 6), (7,)]).status == "skipped"
    config = json.loads((trained / "best" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForSequenceClassificationWithPoolingHead"]
    with pytest.raises(CheckpointError, match="vLLM has no pooling head 'mean'"):
        prepare_model(str(trained), tmp_path, "float32")
    with pytest.raises(ConfigError, match="for decoders with a linear score, and Bert"):
        set_pooling_head(fresh_reward_model("bert").model, "mean")


def test_the_built_in_pooling_obeys_the_contract():
    require_pooling("last", last_token)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (lambda hidden, mask: hidden.mean(dim=(1, 2)), r"one vector a sequence, of shape \(3, 4\) .* got \(3,\)"),
        (lambda hidden, mask: hidden.mean(dim=1), "the same vector alone, in a batch and padded on either side"),
        (lambda hidden, mask: hidden[:, 0], "the same vector alone"),
        (lambda hidden, mask: last_token(hidden, mask) - hidden.mean(dim=(0, 1)), "the same vector alone"),
        (lambda hidden, mask: last_token(hidden, mask).detach(), "differentiable in the hidden states"),
    ],
)
def test_a_pooling_head_that_breaks_the_contract_is_refused(bad: Any, sentence: str):
    with pytest.raises(ConfigError, match=f"the pooling head 'bad' .*{sentence}"):
        register_pooling_head("bad")(bad)
    assert "bad" not in POOLING_HEADS
