"""What a Python program may hand over as prompts, responses and pairs."""

from __future__ import annotations

from tests.builders import fresh_reward_model
from tests.core.call_forms import calls, outcome


def test_every_form_of_an_argument_means_the_same_or_is_an_error():
    found = {name: outcome(call, expected) for name, call, expected in calls(fresh_reward_model("llama"))}
    assert {name: told for name, told in found.items() if told.startswith("wrong")} == {}
    assert sum(told == "right" for told in found.values()) >= 60
    assert all(told == "right" for name, told in found.items() if name.startswith("score, ") and "arr" in name)
