"""Names that other libraries do not promise and this package uses: each is there and means what is relied on."""

from __future__ import annotations

import ast
import inspect
import sys
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf
from pytorch_lightning.callbacks import RichProgressBar
from scipy.stats import norm
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroupGloo, TCPStore, distributed_c10d
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.utils._pytree import tree_leaves
from transformers import MixtralModel
from transformers.utils.hub import extract_commit_hash
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from rm_optimizer.core.classifier import attention
from tests.builders import tiny_model

PACKAGE = Path(attention.__file__).parents[2]
IN_USE = {
    "huggingface_hub": {"_validators"},
    "hydra": {"_actions", "_internal", "_option_string_actions"},
    "omegaconf": {"_get_node", "_get_root", "_is_none"},
    "torch": {
        *("_apply", "_is_flat_param"),
        *("_ConvNd", "_NormBase", "_Options", "_devices", "_dynamo", "_foreach_add", "_foreach_add_", "_foreach_norm"),
        *("_cdata", "_compiled_call_impl", "_forward_hooks", "_forward_pre_hooks", "_subclasses"),
        *("_linear_pointwise", "_modules", "_pytree", "_reorder_linear_weight", "_timeout", "_version"),
    },
    "transformers": {
        *("_attn_implementation", "_can_record_outputs", "_can_set_attn_implementation", "_commit_hash"),
        *("_from_config", "_is_stateful", "_supports_sdpa"),
    },
}
"""Private names of each library."""


def private_names(path: Path) -> set[str]:
    """Names that begin with one underscore and that the file reads, imports or overrides without owning them."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            read |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }
    own |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and len(node.args) > 1]
    in_text = {ast.literal_eval(node.args[1]) for node in calls if is_name_of_attribute(node)}
    overridden = {node.attr for node in nodes if isinstance(node, ast.Attribute) and is_super(node.value)}
    return {name for name in (read - own) | in_text | overridden if name.startswith("_") and not name.startswith("__")}


def is_name_of_attribute(call: ast.Call) -> bool:
    """True for a call of `getattr`, `setattr` or `hasattr` with a literal name."""
    return ast.unparse(call.func) in ("getattr", "setattr", "hasattr") and isinstance(call.args[1], ast.Constant)


def is_super(node: ast.expr) -> bool:
    """True for `super()`, whose private names are another class's."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "super"


def test_every_private_name_in_use_is_listed_with_its_library():
    found = set().union(*map(private_names, PACKAGE.rglob("*.py")))
    assert found - {"_exit", "_information"} == set().union(*IN_USE.values())


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


def test_transformers_builds_a_class_from_a_configuration_and_knows_what_its_experts_record():
    model = tiny_model("llama")
    assert type(type(model)._from_config(model.config)) is type(model)
    assert "router_logits" in MixtralModel._can_record_outputs


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


def test_pytorch_has_tensors_without_data_whose_storages_are_told_apart():
    with FakeTensorMode():
        one, two = torch.empty(1 << 40), torch.empty(1)
    assert one.view(2, -1).untyped_storage()._cdata == one.untyped_storage()._cdata != two.untyped_storage()._cdata


def test_pytorch_adds_and_measures_lists_of_tensors():
    ones, twos = [torch.ones(2), torch.ones(1)], [torch.full((2,), 2.0), torch.full((1,), 2.0)]
    assert torch.equal(torch._foreach_add(ones, twos)[0], torch.full((2,), 3.0))
    torch._foreach_add_(ones, twos)
    assert [float(norm) for norm in torch._foreach_norm(ones, 1)] == [6.0, 3.0]
    assert (ones[0]._version, twos[0]._version) == (1, 0)


def test_a_store_of_pytorch_keeps_the_first_of_two_values_and_knows_its_keys():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    other = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    other.set_timeout(timedelta(seconds=10))
    assert not other.check(["key"])
    store.compare_set("key", "", "first")
    other.compare_set("key", "", "second")
    assert (other.get("key"), other.check(["key"])) == (b"first", True)


def test_gloo_has_a_time_limit_and_devices():
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=3)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    assert options._timeout == timedelta(seconds=3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_pytorch_has_its_forward_derivatives_its_compiler_and_its_base_layers():
    import_module("torch._decomp.decompositions_for_jvp")
    assert isinstance(torch._dynamo.config.optimize_ddp, bool)
    assert isinstance(torch.nn.Conv1d(1, 1, 1), torch.nn.modules.conv._ConvNd)
    assert isinstance(torch.nn.BatchNorm1d(1), torch.nn.modules.batchnorm._NormBase)
    assert torch.nn.Sequential(torch.nn.Identity())._modules.keys() == {"0"}
    assert torch.nn.Identity()._forward_hooks == torch.nn.Identity()._forward_pre_hooks == {}


def test_pytorch_casts_the_tensors_of_a_module_by_one_method():
    head = torch.nn.Linear(1, 1)
    assert head._apply(lambda tensor: tensor.double()) is head
    assert head.weight.dtype == torch.float64
    assert list(inspect.signature(head._apply).parameters) == ["fn", "recurse"]


def test_pytorch_marks_the_flat_parameters_of_its_first_fsdp():
    assert isinstance(FlatParameter(torch.zeros(1), requires_grad=False), FlatParameter)
    assert not isinstance(torch.nn.Parameter(torch.zeros(1)), FlatParameter)
    assert FlatParameter(torch.zeros(1), requires_grad=False)._is_flat_param


def test_the_progress_bar_of_lightning_asks_for_its_description():
    assert list(inspect.signature(RichProgressBar()._get_train_description).parameters) == ["current_epoch"]
    assert "self._get_train_description(" in inspect.getsource(RichProgressBar)


def test_a_configuration_of_transformers_does_not_store_the_commit_of_its_files():
    config = tiny_model("llama").config
    config._commit_hash = "0" * 40
    assert "_commit_hash" not in config.to_dict()
    assert extract_commit_hash(f"models--a--b/snapshots/{'0' * 40}/config.json", None) == "0" * 40


def test_omegaconf_gives_the_node_of_a_missing_value_and_the_root_of_each():
    config = OmegaConf.create({"inner": {"none": None}})
    assert config.inner._get_node("none")._is_none()
    assert config.inner._get_root() is config


def test_a_hub_name_of_three_parts_is_refused():
    validate_repo_id("owner/name")
    with pytest.raises(HFValidationError):
        validate_repo_id("owner/name/more")


def arguments(owner: ast.ClassDef, name: str) -> list[str]:
    """Arguments of a method of a class, the instance left out."""
    method = next(node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return [argument.arg for argument in method.args.args[1:]]


def test_nccl_takes_the_arguments_of_a_transfer():
    """By the type stub, since torch for processors has no NCCL."""
    stub = ast.parse((Path(torch.__file__).with_name("_C") / "_distributed_c10d.pyi").read_text(encoding="utf-8"))
    nccl = next(node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "ProcessGroupNCCL")
    options = next(node for node in nccl.body if isinstance(node, ast.ClassDef) and node.name == "Options")
    assert arguments(nccl, "__init__") == ["store", "rank", "size", "options"]
    assert "is_high_priority_stream: bool=" in ast.unparse(options)  # all that it takes, with a default
    assert arguments(options, "__init__") == ["is_high_priority_stream"]
    assert [ast.unparse(each) for each in (*nccl.bases, *options.bases)] == ["Backend", "Backend.Options"]
    backend, timed = ProcessGroupGloo.__mro__[1], ProcessGroupGloo._Options.__mro__[1]
    assert (backend.__qualname__, timed.__qualname__) == ("Backend", "Backend.Options")
    assert timed._timeout.fset
    assert backend.abort.__doc__.startswith("abort(self: torch._C._distributed_c10d.Backend) -> None")
    # the same as gloo's, which the tests of transfers call
    assert (ProcessGroupGloo.send, ProcessGroupGloo.recv) == (backend.send, backend.recv)
    assert callable(distributed_c10d.Work.is_completed)


def test_bitsandbytes_takes_the_nearest_of_sixteen_levels_of_a_normal_distribution():
    """Dettmers et al. (2023), Eq. 4, with their offset: a level for 0, 7 below and 8 above, and 64 weights a scale."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    sides = [norm.ppf(np.linspace(0.9677083, 0.5, count)[:-1]) for count in (9, 8)]
    levels = torch.tensor(np.sort(np.concatenate([sides[0], [0.0], -sides[1]])) / sides[0].max(), dtype=torch.float32)
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    scale = weight.abs().amax(dim=1, keepdim=True)
    nearest = levels[(weight[..., None] / scale[..., None] - levels).abs().argmin(-1)]
    torch.testing.assert_close(functional.dequantize_4bit(packed, state), nearest * scale, rtol=1e-5, atol=1e-5)
