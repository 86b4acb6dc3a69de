from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from rm_optimizer.serving.protocol import ClassifyRequest, ScoringRequest, WireMessage, sigmoid
from rm_optimizer.serving.update_protocol import Abort, Begin, WeightProbe


def test_sigmoid_of_two_is_applied_once():
    assert sigmoid(2.0) == pytest.approx(0.8807970779778823, abs=1e-15)
    assert sigmoid(sigmoid(2.0)) == pytest.approx(0.7070, abs=1e-3)  # what a double application would give


@pytest.mark.parametrize("reward", [-800.0, -2.0, 0.0, 3.0, 800.0])
def test_sigmoid_is_symmetric_and_does_not_overflow(reward):
    assert sigmoid(reward) + sigmoid(-reward) == pytest.approx(1.0)
    assert math.isfinite(sigmoid(reward))


@pytest.mark.parametrize("value", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_the_four_forms_of_input_stay_apart(value):
    assert ClassifyRequest.model_validate({"input": value}).input == value


@pytest.mark.parametrize("field", ["activation", "normalize", "softmax"])
def test_fields_of_another_age_are_refused(field):
    with pytest.raises(ValidationError, match="unknown field"):
        ClassifyRequest.model_validate({"input": "a", field: False})


def test_an_unknown_field_names_the_nearest_known_one():
    with pytest.raises(ValidationError, match="unknown field 'item'; did you mean 'items'"):
        ScoringRequest.model_validate({"item": []})


def test_fields_that_change_no_reward_are_taken_and_ignored():
    fields = {"user": "me", "priority": 3, "request_id": "r", "cache_salt": "s"}
    assert ClassifyRequest.model_validate({"input": "a", **fields}).input == "a"


def begin(**fields: object) -> Begin:
    tensor = {"name": "score.weight", "shape": [1, 2], "dtype": "float32"}
    known = {"batch_id": "b", "mode": "full", "version": "v1", "tensors": [tensor], "transport": "inline"}
    return Begin.model_validate(known | fields)


@pytest.mark.parametrize("name", ["步骤-1", "é", "a b", "a\r\nx: y", "", "v" * 129, "²", "v\n"])
def test_a_version_that_no_header_can_carry_is_refused(name):
    for field in ("version", "base_version"):
        with pytest.raises(ValidationError):
            begin(**{field: name})


def test_a_tensor_announced_twice_is_refused_by_name():
    tensor = {"name": "score.weight", "shape": [1, 2], "dtype": "float32"}
    with pytest.raises(ValidationError, match=r"expected each tensor once, got 'score\.weight' 2 times"):
        begin(tensors=[tensor, tensor])


@pytest.mark.parametrize("seconds", [1e-9, 0, -1, float("nan"), float("inf")])
def test_an_update_without_time_is_refused(seconds):
    with pytest.raises(ValidationError):
        begin(timeout_seconds=seconds)


def test_the_reason_of_an_abort_is_one_short_line():
    reason = Abort(batch_id="b", reason="a\nWARNING forged\x1b[2J" + "x" * 10**6).reason
    assert reason.startswith("a WARNING forged [2J")
    assert len(reason) == 500


@pytest.mark.parametrize("value", [True, [True], [1.0], [None], 3, ["a", 1]])
def test_wrong_types_are_not_converted(value):
    with pytest.raises(ValidationError):
        ClassifyRequest.model_validate({"input": value})


def test_a_probe_has_a_reward_for_each_sequence():
    with pytest.raises(ValidationError, match="expected 2 rewards"):
        WeightProbe(input_ids=[[1], [2]], rewards=[0.5])


def test_text_parts_of_a_message_are_joined_and_others_refused():
    text = {"type": "text", "text": "a"}
    assert WireMessage.model_validate({"role": "user", "content": [text, text]}).text == "aa"
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, "a", {"type": "text"}):
        with pytest.raises(ValidationError):
            WireMessage.model_validate({"role": "user", "content": [part]})
