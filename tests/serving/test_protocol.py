from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from rm_optimizer.serving.protocol import ClassifyRequest, WeightProbe, sigmoid


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


@pytest.mark.parametrize("field", ["activation", "normalize", "softmax", "truncate_prompt_tokens"])
def test_fields_of_another_age_are_refused(field):
    with pytest.raises(ValidationError, match="Extra inputs"):
        ClassifyRequest.model_validate({"input": "a", field: False})


@pytest.mark.parametrize("value", [True, [True], [1.0], [None], 3, ["a", 1]])
def test_wrong_types_are_not_converted(value):
    with pytest.raises(ValidationError):
        ClassifyRequest.model_validate({"input": value})


def test_a_probe_has_a_reward_for_each_sequence():
    with pytest.raises(ValidationError, match="expected 2 rewards"):
        WeightProbe(input_ids=[[1], [2]], rewards=[0.5])
