"""Names that other libraries do not promise and this package uses: each is there and means what is relied on."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from hydra._internal.utils import get_args_parser
from torch.utils._pytree import tree_leaves
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from tests.builders import tiny_model


def test_hydra_parses_its_own_flags_and_gathers_overrides():
    parser = get_args_parser()
    flags, rest = parser.parse_known_args(["--multirun", "seed=1,2", "--cfg", "job"])
    assert (flags.overrides, flags.multirun, flags.cfg, rest) == (["seed=1,2"], True, "job", [])
    assert {"--multirun", "--config-name"} <= set(parser._option_string_actions)
    assert {action.dest for action in parser._actions} >= {"overrides", "multirun", "cfg"}


def test_transformers_reads_the_attention_kernel_of_a_forward_pass_from_its_configuration():
    model = tiny_model("llama")
    assert model._can_set_attn_implementation()
    assert (model._supports_sdpa, model._is_stateful) == (True, False)
    model.config._attn_implementation_internal = "eager"
    assert model.config._attn_implementation == "eager"


def test_transformers_takes_a_mask_of_four_axes_as_it_is():
    module = sys.modules[type(tiny_model("llama").base_model).__module__]
    assert hasattr(module, "create_causal_mask")
    assert "position_ids" in inspect.signature(tiny_model("llama").base_model.forward).parameters


@pytest.mark.parametrize("name", ["connection_made", "connection_lost", "data_received", "send_400_response"])
def test_the_protocol_of_uvicorn_has_the_methods_that_the_server_extends(name):
    assert callable(getattr(AutoHTTPProtocol, name))


@pytest.mark.parametrize("name", ["cycle", "connections", "flow", "transport", "loop"])
def test_the_protocol_of_uvicorn_has_the_attributes_that_the_server_reads(name):
    assert f"self.{name}" in inspect.getsource(AutoHTTPProtocol.__init__)


def test_pytorch_flattens_nested_tensors():
    one, two = torch.zeros(1), torch.ones(1)
    assert tree_leaves({"a": (one, [two])}) == [one, two]
