from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rm_optimizer.errors import WeightsRefused
from rm_optimizer.schema.publish import RewardModelTrainingMode
from rm_optimizer.serving.embedded.worker import TransformersWorker
from rm_optimizer.serving.engine import StagedWeights
from rm_optimizer.serving.update_protocol import TensorSpec, WeightProbe
from rm_optimizer.serving.weights.live_weights import checkpoint_version, tensor_sha256, tensor_specs
from tests.builders import tiny_reward_model
from tests.serving.engines import exported, options_of

FULL, HEAD = RewardModelTrainingMode.full, RewardModelTrainingMode.head_only
ROWS = [np.arange(5, 45, dtype=np.int32), np.array([7, 8, 9], np.int32)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "model"
    exported("llama", folder)
    return folder


@pytest.fixture(params=[None, 0.0], ids=["plain", "packed"])
def worker(request, folder, tmp_path):
    return TransformersWorker(options_of(folder, tmp_path / "tokenizer", packed_linears=request.param), [])


def other_state(seed=1):
    model = tiny_reward_model("llama", seed=seed)
    return model, {name: tensor.detach().clone() for name, tensor in model.model.state_dict().items()}


def specs_of(state):
    return tuple(
        TensorSpec(
            name=name,
            shape=list(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            sha256=tensor_sha256(tensor),
        )
        for name, tensor in state.items()
    )


def staged(tmp_path, state, mode=FULL, specs=None, probe=None, version="v1"):
    file = tmp_path / f"{version}.safetensors"
    save_file(state, file)
    return StagedWeights(version, int(version[1:]), mode, file, specs_of(state) if specs is None else specs, probe)


def stage(worker, weights):
    worker.expect(weights.revision)
    worker.stage(weights)


def rewards(worker):
    worker.prompts.clear()  # a kept start rounds otherwise
    return worker.scorer.rewards(ROWS)


def test_full_weights_score_as_their_sender(worker, tmp_path):
    model, state = other_state()
    ids = [torch.from_numpy(row.astype(np.int64))[None] for row in ROWS]
    expected = [model(row, torch.ones_like(row)).item() for row in ids]
    stage(worker, staged(tmp_path, state, probe=WeightProbe(input_ids=[r.tolist() for r in ROWS], rewards=expected)))
    before = rewards(worker)
    worker.rehearse(1)
    np.testing.assert_array_equal(rewards(worker), before)
    worker.commit(1)
    assert worker.version == "v1"
    np.testing.assert_allclose(rewards(worker), expected, atol=1e-5)


def test_keys_and_values_of_earlier_weights_answer_no_request(worker, tmp_path):
    model, state = other_state()
    prompt = np.random.default_rng(0).integers(5, 300, 60)
    rows = [np.append(prompt, last).astype(np.int32).tolist() for last in range(5, 9)]
    before = [worker.score([row]).rewards[0] for row in rows]
    stage(worker, staged(tmp_path, state))
    worker.rehearse(1)
    np.testing.assert_allclose([worker.score([row]).rewards[0] for row in rows], before, atol=1e-5)
    worker.commit(1)
    expected = [model(ids, torch.ones_like(ids)).item() for ids in torch.tensor(rows)[:, None]]
    np.testing.assert_allclose([worker.score([row]).rewards[0] for row in rows], expected, atol=1e-5)
    assert np.abs(np.subtract(expected, before)).min() > 1e-3


def test_a_head_update_is_one_tensor_and_changes_nothing_else(worker, tmp_path):
    before = rewards(worker)
    head = {"score.weight": 2 * worker.model.model.score.weight.detach().clone()}
    stage(worker, staged(tmp_path, head, HEAD))
    worker.commit(1)
    np.testing.assert_allclose(rewards(worker), 2 * before, atol=1e-5)


def test_staging_leaves_the_serving_weights_alone(worker, tmp_path):
    before = rewards(worker)
    stage(worker, staged(tmp_path, other_state()[1]))
    np.testing.assert_array_equal(rewards(worker), before)


def changed(state, name, value):
    return state | {name: value}


BROKEN = {
    "missing": (lambda s: {k: v for k, v in s.items() if k != "score.weight"}, "lacks 1 tensor: score.weight"),
    "extra": (lambda s: s | {"spare": torch.zeros(2)}, "has unknown 1 tensor: spare"),
    "shape": (lambda s: s | {"score.weight": torch.zeros(1, 31)}, r"score.weight: expected shape \[1, 32\]"),
    "type": (lambda s: s | {"score.weight": torch.zeros(1, 32, dtype=torch.int32)}, "score.weight: expected"),
    "nan": (lambda s: s | {"score.weight": torch.full((1, 32), torch.nan)}, "score.weight: holds values that are not"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_weights_that_do_not_fit_are_refused_by_name(worker, tmp_path, case):
    breaking, sentence = BROKEN[case]
    before, broken = rewards(worker), breaking(other_state()[1])
    with pytest.raises(WeightsRefused, match=sentence):
        stage(worker, staged(tmp_path, broken))
    with pytest.raises(WeightsRefused, match="not staged any more"):
        worker.commit(1)
    np.testing.assert_array_equal(rewards(worker), before)


def test_a_file_that_is_not_what_the_manifest_says_is_refused(worker, tmp_path):
    state = other_state()[1]
    announced = specs_of(state)
    altered = staged(tmp_path, changed(state, "score.weight", state["score.weight"] + 1), specs=announced)
    with pytest.raises(WeightsRefused, match=r"score.weight: its SHA-256"):
        stage(worker, altered)


def test_a_truncated_file_is_refused(worker, tmp_path):
    weights = staged(tmp_path, other_state()[1])
    weights.file.write_bytes(weights.file.read_bytes()[:-100])
    with pytest.raises(WeightsRefused, match="cannot be read as safetensors"):
        stage(worker, weights)


def test_a_failed_probe_takes_the_weights_back(worker, tmp_path):
    before, version = rewards(worker), worker.version
    probe = WeightProbe(input_ids=[[1, 2, 3]], rewards=[123.0])
    stage(worker, staged(tmp_path, other_state()[1], probe=probe))
    with pytest.raises(WeightsRefused, match=r"probe\[0\]: the new weights give .* where their sender has 123"):
        worker.rehearse(1)
    with pytest.raises(WeightsRefused, match="not staged any more"):
        worker.commit(1)
    np.testing.assert_array_equal(rewards(worker), before)
    assert worker.version == version


def test_finite_weights_with_rewards_that_are_not_finite_are_taken_back(worker, tmp_path):
    before = rewards(worker)
    stage(worker, staged(tmp_path, changed(other_state()[1], "score.weight", torch.full((1, 32), 3e38))))
    with pytest.raises(WeightsRefused, match="not finite"):
        worker.rehearse(1)
    np.testing.assert_array_equal(rewards(worker), before)


def test_committed_updates_come_back_in_a_new_worker(worker, folder, tmp_path):
    full = staged(tmp_path, other_state()[1])
    head = staged(tmp_path, {"score.weight": torch.ones(1, 32)}, HEAD, version="v2")
    for weights in (full, head):
        stage(worker, weights)
        worker.commit(weights.revision)
    again = TransformersWorker(options_of(folder, tmp_path / "tokenizer"), [full, head])
    assert again.version == "v2"
    np.testing.assert_allclose(rewards(again), rewards(worker), atol=1e-5)


def test_any_changed_value_is_another_version(folder, tmp_path):
    worker = TransformersWorker(options_of(folder, tmp_path / "tokenizer"), [])
    model = worker.model.model
    stored, held = checkpoint_version(model, folder, {}), checkpoint_version(model, None, {})
    assert stored == worker.version
    tensors = load_file(folder / "model.safetensors")
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].flatten()[tensors[name].numel() // 2] += 1e-6
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert checkpoint_version(model, tmp_path, {}) != stored
    with torch.no_grad():
        next(model.parameters()).flatten()[200] += 1e-6
    assert checkpoint_version(model, None, {}) != held


def test_every_mode_names_its_tensors(worker):
    model = worker.model.model
    assert {spec.name for spec in tensor_specs(model, FULL)} == set(model.state_dict())
    assert [spec.name for spec in tensor_specs(model, HEAD)] == ["score.weight"]
    assert tensor_specs(model, RewardModelTrainingMode.lora) == ()
