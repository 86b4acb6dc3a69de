"""Every parameter in the right group, on every family of model."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from rm_optimizer.errors import ConfigError
from rm_optimizer.optim import build_optimizer, describe_groups
from rm_optimizer.optim.param_groups import partition

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
]
SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_labels": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
GROUPED = {"num_key_value_heads": 1}
HEADED = GROUPED | {"head_dim": 8}
DEBERTA = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
DECODER = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
ENCODER = {"query", "key", "value", "dense"}
# Last name of the module that holds each hidden matrix, and the full names of the new matrices.
FAMILIES = {
    "llama": (GROUPED, DECODER, set()),
    "mistral": (GROUPED, DECODER, set()),
    "qwen2": (GROUPED, DECODER, set()),
    "qwen3": (HEADED, DECODER, set()),
    "gemma3_text": (HEADED, DECODER, set()),
    "gpt2": ({}, {"c_attn", "c_proj", "c_fc"}, set()),
    "opt": ({"ffn_dim": 32}, {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}, set()),
    "bert": ({}, ENCODER, {"bert.pooler.dense.weight"}),
    "roberta": ({}, ENCODER, {"classifier.dense.weight"}),
    "electra": ({"embedding_size": 8}, ENCODER | {"embeddings_project"}, {"classifier.dense.weight"}),
    "modernbert": ({"global_attn_every_n_layers": 1}, {"Wqkv", "Wo", "Wi"}, {"head.dense.weight"}),
    "deberta-v2": (DEBERTA, {"query_proj", "key_proj", "value_proj", "dense"}, {"pooler.dense.weight"}),
    "mixtral": (HEADED | {"num_local_experts": 2}, DECODER - {"gate_proj", "up_proj", "down_proj"}, set()),
}


def tiny(family):
    options = SMALL | FAMILIES[family][0]
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(family, **options))


def head_of(model):
    return [name for name, p in model.named_parameters() if p.shape[0] == 1 and p.requires_grad]


def names_by_role(model, **options):
    names = defaultdict(set)
    for item in partition(model, head_names=head_of(model), **options).parameters:
        names[item.role.value].add(item.name)
    return names


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_of_each_family(family):
    model = tiny(family)
    roles = names_by_role(model)
    _, hidden, new = FAMILIES[family]
    assert {name.split(".")[-2] for name in roles["hidden"]} == hidden
    assert roles["new"] == new
    assert roles["head"] == set(head_of(model))
    assert {name for name in roles["norm"] if "norm" not in name.lower() and "ln_" not in name} == set()
    tables = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.weight.requires_grad
    }
    assert roles["embedding"] == tables
    assert sum(map(len, roles.values())) == len(list(model.parameters()))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_never_in_muons_groups(family, preset):
    model = tiny(family)
    rows = describe_groups(build_optimizer(model, preset("muon"), head_names=head_of(model)))
    muon = {name for row in rows if row.algorithm == "muon" for name in row.names}
    adamw = {name for row in rows if row.algorithm == "adamw" for name in row.names}
    assert muon.isdisjoint(head_of(model))
    assert muon | adamw == {name for name, _ in model.named_parameters()}
    assert muon.isdisjoint(adamw)
    assert all(p.ndim == 2 for name, p in model.named_parameters() if name in muon)


def test_stacked_experts_and_routers_go_to_adamw(preset):
    roles = names_by_role(tiny("mixtral"))
    assert {name.split(".")[-1] for name in roles["other"]} == {"gate_up_proj", "down_proj", "weight"}
    with pytest.raises(ConfigError, match="scion has no norm for stacked experts"):
        build_optimizer(tiny("mixtral"), preset("scion"), head_names=["score.weight"])


def test_lora_factors_train_with_muon_and_the_head_with_adamw(preset):
    model = get_peft_model(
        tiny("llama"),
        LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["score"]),
    )
    heads = head_of(model)
    rows = describe_groups(build_optimizer(model, preset("muon"), head_names=heads))
    assert {(row.role, row.algorithm, row.num_tensors) for row in rows} == {("lora", "muon", 8), ("head", "adamw", 1)}
    with pytest.raises(ConfigError, match="must be match_rms_adamw with LoRA, got original"):
        build_optimizer(model, preset("muon", scaling="original"), head_names=heads)


def test_dora_magnitudes_are_vectors():
    model = get_peft_model(
        tiny("llama"), LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], use_dora=True)
    )
    assert all("magnitude" in name for name in names_by_role(model)["bias"])
    assert len(names_by_role(model)["bias"]) == 2


def test_a_wrapped_model_has_the_same_roles():
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny("roberta")

    plain, wrapped = names_by_role(tiny("roberta")), names_by_role(Wrapper())
    assert wrapped == {role: {f"model.{name}" for name in names} for role, names in plain.items()}


def test_frozen_parameters_are_in_no_group():
    model = tiny("llama")
    model.model.requires_grad_(False)
    assert set(names_by_role(model)) == {"head"}


def test_tied_parameters_count_once():
    model = tiny("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    names = [item.name for item in partition(model, head_names=["score.weight"]).parameters]
    assert "model.layers.0.mlp.up_proj.weight" in names
    assert "model.layers.1.mlp.up_proj.weight" not in names
    with pytest.raises(ConfigError, match=r"must be parameters of the model, got model\.layers\.1\.mlp"):
        partition(model, head_names=["model.layers.1.mlp.up_proj.weight"])


@pytest.fixture
def odd(toy):
    """A toy model with parameters of layers that no library knows."""
    model = toy()
    model.model.gain = nn.Parameter(torch.ones(3, 3))
    model.model.sinks = nn.Parameter(torch.ones(3))
    model.model.token = nn.Parameter(torch.ones(1, 1, 3))
    model.model.stack = nn.Parameter(torch.ones(2, 3, 3))
    model.model.A_log = nn.Parameter(torch.ones(4, 2))
    model.model.gate = nn.Linear(32, 4, bias=False)
    model.model.shared_expert_gate = nn.Linear(32, 1, bias=False)
    return model


def test_unknown_vectors_are_biases_and_unknown_matrices_other(odd, head):
    roles = {item.name: item.role.value for item in partition(odd, head_names=head).parameters}
    vectors, matrices = ("sinks", "token", "A_log"), ("gain", "stack", "gate.weight", "shared_expert_gate.weight")
    assert {roles[f"model.{name}"] for name in vectors} == {"bias"}
    assert {roles[f"model.{name}"] for name in matrices} == {"other"}


def test_a_matrix_of_an_embedding_that_torch_does_not_have_is_an_embedding(toy, head):
    class PositionEmbedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(7, 3))

    model = toy()
    model.model.positions = PositionEmbedding()
    roles = {item.name: item.role.value for item in partition(model, head_names=head).parameters}
    assert roles["model.positions.weight"] == "embedding"


def test_unknown_vectors_are_not_decayed(odd, head, preset):
    rows = describe_groups(build_optimizer(odd, preset("adamw", weight_decay=0.1), head_names=head))
    decay = {name: row.weight_decay for row in rows for name in row.names}
    assert (decay["model.sinks"], decay["model.A_log"], decay["model.gain"]) == (0, 0, 0.1)


@pytest.mark.parametrize("name", ["muon", "scion"])
def test_optimizers_of_hidden_matrices_refuse_unknown_ones(odd, head, preset, name):
    odd.model.stack.requires_grad_(False)
    with pytest.raises(
        ConfigError, match=rf"optimizer={name} must know .* for model\.gain \(3, 3\) of Backbone; choose"
    ):
        build_optimizer(odd, preset(name), head_names=head)
    odd.model.gain.requires_grad_(False)
    build_optimizer(odd, preset(name), head_names=head)


def test_a_frozen_tower_has_no_layers(toy, head, preset):
    model = toy()
    model.vision = nn.ModuleList([nn.Linear(4, 4) for _ in range(9)]).requires_grad_(False)
    assert partition(model, head_names=head).num_layers == 2


def test_a_head_nobody_named_is_refused(toy):
    with pytest.raises(ConfigError, match=r"score\.weight has one output, so it is a reward head"):
        partition(toy(), head_names=[])


def test_head_names_must_exist(toy, head):
    with pytest.raises(ConfigError, match=r"must be parameters of the model, got scor\.weight"):
        partition(toy(), head_names=[*head, "scor.weight"])


def rates(model, config, head):
    rows = describe_groups(build_optimizer(model, config, head_names=head))
    return {name: row.lr for row in rows for name in row.names}


def test_head_factor_acts_on_the_heads_side_only(preset):
    config = preset("adamw", head_lr_factor=10)
    model = tiny("roberta")
    lr = rates(model, config, head_of(model))
    tenfold = {name for name, rate in lr.items() if rate == pytest.approx(10 * config.lr)}
    assert tenfold == {"classifier.dense.weight", "classifier.out_proj.weight", "classifier.out_proj.bias"}
    assert {rate for name, rate in lr.items() if name not in tenfold} == {config.lr}


def test_layer_decay_falls_from_head_to_embeddings(preset, toy, head):
    config = preset("adamw", layer_lr_decay=0.5)
    lr = rates(toy(), config, head)
    expected = {"score.weight": 1, "model.norm.weight": 1, "model.layers.1.dense.weight": 1 / 2}
    expected |= {"model.layers.0.norm.bias": 1 / 4, "model.embed.weight": 1 / 8}
    assert {name: lr[name] / config.lr for name in expected} == pytest.approx(expected)


def test_layer_decay_counts_frozen_layers(preset, toy, head):
    model = toy()
    model.model.layers[1].requires_grad_(False)
    config = preset("adamw", layer_lr_decay=0.5)
    lr = rates(model, config, head)
    assert lr["model.layers.0.dense.weight"] == config.lr / 4
    assert lr["model.norm.weight"] == config.lr


def test_layer_decay_needs_layers(preset):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"layer_lr_decay must be 1 for a model without layers, got 0\.5"):
        build_optimizer(model, preset("adamw", layer_lr_decay=0.5), head_names=["1.weight", "1.bias"])


def test_rows_add_up_to_the_model(preset, toy, head):
    model = toy()
    config = deepcopy(preset("muon"))
    rows = describe_groups(build_optimizer(model, config, head_names=head))
    assert sum(row.num_parameters for row in rows) == sum(p.numel() for p in model.parameters())
    assert {row.role: row.lr for row in rows if row.algorithm == "muon"} == {"hidden": config.lr}
    assert {row.lr for row in rows if row.algorithm == "adamw"} == {config.adamw_lr}
