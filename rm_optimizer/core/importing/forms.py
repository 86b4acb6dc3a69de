"""Forms of stored reward models: heads by names and shapes of their tensors, and InternLM2's backbone as a Llama."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rm_optimizer.core.classifier.head import published_form
from rm_optimizer.core.importing.stored import StoredModel, StoredTensor
from rm_optimizer.errors import CheckpointError, ConfigError, require_known

_RELU_CLASSES = ("INFORMForSequenceClassification", "Qwen2ForRewardModel", "GRewardModel")
"""Published classes of heads of several layers, which have ReLU between them."""
_LAYER = re.compile(r"(?P<stem>.+?)(?:\.(?P<index>\d+))?\.(?P<kind>weight|bias)")
_NORMALIZER = re.compile(r"(?:.*\.)?(?:normalizer\.(?:mean|var|count)|mean|std)")
_GATED = re.compile(r"(?:.*\.)?(regression_layer\.weight|reward_transform_matrix|gating\..+)")
LOGITS = ("difference", "0", "1")
"""Rewards of a head of two labels: the second logit less the first, or one of them."""


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices about a head that its files may leave open.

    Args:
        head: start of the names of the head that is meant; None takes the only one.
        logit: reward of a head of two labels, one of `LOGITS`.
        activation: function between the layers of a head of several.
        marker: ids at which a gated head reads the prompt.
    """

    head: str | None = None
    logit: str | None = None
    activation: str | None = None
    marker: Sequence[int] | None = None


@dataclass(frozen=True)
class Head:
    """A head as it is stored: linear layers in order, or the parts of a gated one.

    Args:
        form: its form in words.
        names: stored names of its tensors.
        layers: matrix and bias of each layer in float64, the last matrix of shape (1, …); zero without a bias.
        activation: function between the layers.
        gate: settings of a gated head, whose first matrix has the objectives; empty for others.
    """

    form: str
    names: tuple[str, ...]
    layers: tuple[tuple[Tensor, Tensor], ...]
    activation: str = "relu"
    gate: Mapping[str, Any] = field(default_factory=dict)

    def scaled(self, factor: float, constant: float) -> Head:
        """The head whose reward is `factor` times this one's plus a constant, folded into its last layer."""
        *before, (weight, bias) = self.layers
        return replace(self, layers=(*before, (factor * weight, factor * bias + constant)))


def backbone_prefix(names: Iterable[str], expected: Sequence[str]) -> str:
    """Prefix of the backbone's own names in the stored ones; most of the names decide.

    Raises:
        CheckpointError: if fewer than half of the names of the backbone are stored.

    Example:
        >>> backbone_prefix(["module.rwtransformer.norm.weight", "module.v_head.weight"], ["norm.weight"])
        'module.rwtransformer.'
    """
    wanted, votes = set(expected), Counter[str]()
    for name in names:
        parts = name.split(".")
        votes.update(
            "".join(f"{part}." for part in parts[:i]) for i in range(len(parts)) if ".".join(parts[i:]) in wanted
        )
    found, number = votes.most_common(1)[0] if votes else ("", 0)
    if 2 * number < len(wanted):
        raise CheckpointError(
            f"the stored weights are not of the configuration's backbone: {number} of its {len(wanted)} tensors "
            f"are there, and for example {min(wanted)} is not; name the right base with --base"
        )
    return found


def find_head(stored: StoredModel, rest: Mapping[str, StoredTensor], hidden: int, choices: Choices) -> Head:
    """The reward head among the tensors that are not the backbone's.

    Args:
        stored: the model.
        rest: the tensors.
        hidden: width of the backbone's states.
        choices: what the user tells about the head.

    Raises:
        CheckpointError: if there is no head, or a tensor belongs to none.
        ConfigError: if several heads are stored or something of the head is not in the files, and no option tells it.
    """
    parts = {name: each for name, each in rest.items() if not is_normalizer(name)}
    if gated := {name: each for name, each in parts.items() if _GATED.fullmatch(name)}:
        return _gated(stored.config, gated, set(parts) - set(gated), choices.marker)
    stems: dict[str, dict[int, dict[str, str]]] = {}
    for name in parts:
        if (match := _LAYER.fullmatch(name)) is not None:
            stems.setdefault(match["stem"], {}).setdefault(int(match["index"] or 0), {})[match["kind"]] = name
    chains = {stem: layers for stem, layers in stems.items() if _is_chain(layers, parts, hidden)}
    if not chains:
        told = (f"{name} of shape {[*parts[name].shape]}" for name in sorted(parts)[:3])
        found = f"; it stores {', '.join(told)}" if parts else ""
        raise CheckpointError(f"no stored tensor is a reward head, from {hidden} channels to one number{found}")
    if choices.head is None and len(chains) > 1:
        raise ConfigError(f"the model stores {len(chains)} heads, {', '.join(sorted(chains))}; name one with --head")
    stem = choices.head or next(iter(chains))
    require_known("--head", stem, chains)
    layers = chains[stem]
    read = chains if choices.head else {stem: layers}  # a head that was not chosen is left out knowingly
    used = {name for each in read.values() for layer in each.values() for name in layer.values()}
    if unread := sorted(set(parts) - used):
        raise CheckpointError(
            f"{len(unread)} stored tensors have no part in the backbone or the head {stem}, such as {unread[0]}; "
            "remove them if they have no part in the reward"
        )
    activation = choices.activation
    order = [layers[index] for index in sorted(layers)]
    if len(order) > 1 and activation is None:
        classes = stored.config.get("architectures") or ()
        if "v_head.summary" not in stem and not any(each in _RELU_CLASSES for each in classes):
            raise ConfigError(
                f"the head {stem} has {len(order)} layers, and the files do not tell the function between them; name "
                "it with --activation, such as relu"
            )
        activation = "relu"
    linear = list[tuple[Tensor, Tensor]]()
    for layer in order:
        weight = parts[layer["weight"]].read().double()
        bias = parts[layer["bias"]].read().double() if "bias" in layer else weight.new_zeros(len(weight))
        linear.append((weight, bias))
    linear[-1] = one_reward(*linear[-1], choices.logit)
    form = published_form(stem) or "a head"
    if len(order) > 1:
        form = f"{form} of {len(order)} layers with {activation} between them"
    names = tuple(layer[kind] for layer in order for kind in ("weight", "bias") if kind in layer)
    return Head(form, names, tuple(linear), activation or "relu")


def _is_chain(layers: Mapping[int, Mapping[str, str]], parts: Mapping[str, StoredTensor], hidden: int) -> bool:
    """True if linear layers lead from the hidden size to one or two outputs."""
    width = hidden
    for index in sorted(layers):
        shape = parts[layers[index]["weight"]].shape if "weight" in layers[index] else ()
        if len(shape) != 2 or shape[1] != width:
            return False
        width = shape[0]
    return width in (1, 2)


def one_reward(weight: Tensor, bias: Tensor, logit: str | None) -> tuple[Tensor, Tensor]:
    """The last layer with one output; of two labels, the reward that `logit` names.

    Raises:
        ConfigError: if `logit` is missing, unknown or not for this head.
    """
    if (len(weight) == 2) != (logit is not None):
        told = "name the reward with --logit: difference (second less first), 0 or 1"
        told = told if logit is None else "leave --logit out"
        raise ConfigError(f"the head has {len(weight)} output{'s' * (len(weight) > 1)}; {told}")
    if logit is None:
        return weight, bias
    require_known("--logit", logit, LOGITS)
    mixed = torch.tensor([[-1.0, 1.0] if logit == "difference" else [logit == "0", logit == "1"]], dtype=weight.dtype)
    return mixed @ weight, mixed @ bias


def _gated(
    config: Mapping[str, Any], parts: Mapping[str, StoredTensor], others: set[str], marker: Sequence[int] | None
) -> Head:
    """The head of ArmoRM (Wang et al., 2024), or of QRM (Dorka, 2024), whose reward is the mean of quantiles.

    Linear steps are folded: the mean over quantiles and the transform into the objectives, batch normalization into the
    gate's next layer, and the scale of the weights into the sum.
    """
    if others:
        raise CheckpointError(f"{min(others)} has no part in the backbone or the gated head")
    if marker is None:
        raise ConfigError(
            "the head reads the end of the prompt at a marker, which the files do not tell; give its text with "
            "--marker, such as '<|start_header_id|>assistant<|end_header_id|>\\n\\n'"
        )
    values = {
        name[_GATED.fullmatch(name).start(1) :]: each.read().double()  # type: ignore[union-attr]
        for name, each in parts.items()
        if not name.endswith("num_batches_tracked")
    }
    transform, regression = values["reward_transform_matrix"], values["regression_layer.weight"]
    objectives = transform.T @ regression.view(len(transform), -1, regression.shape[1]).mean(dim=1)
    layers = [(objectives, objectives.new_zeros(len(objectives)))]
    scale, shift = objectives.new_ones(()), objectives.new_zeros(())
    for index in sorted({int(name.split(".")[2]) for name in values if name.startswith("gating.layers.")}):
        layer = {key: values[name] for key in _NORM if (name := f"gating.layers.{index}.{key}") in values}
        if "running_mean" in layer:  # x -> scale x + shift on the inputs of the next layer, at torch's default epsilon
            scale = layer["weight"] / (layer["running_var"] + 1e-5).sqrt()
            shift = layer["bias"] - scale * layer["running_mean"]
        else:
            bias = layer.get("bias", objectives.new_zeros(())) + (layer["weight"] * shift).sum(dim=1)
            layers.append((layer["weight"] * scale, bias))
            scale, shift = objectives.new_ones(()), objectives.new_zeros(())
    layers.append((values["gating.logit_scale"] * objectives.new_ones(1, len(objectives)), objectives.new_zeros(1)))
    gate = {"temperature": float(config.get("gating_temperature", 10)), "marker": [*marker]}
    form = f"{published_form('gating')} of {len(objectives)} objectives" + (
        f" of {len(regression) // len(objectives)} quantiles (QRM)" if len(regression) > len(objectives) else ""
    )
    return Head(form, tuple(sorted(parts)), tuple(layers), gate=gate)


_NORM = ("weight", "bias", "running_mean", "running_var")


def is_normalizer(name: str) -> bool:
    """True for a tensor with the mean or deviation of rewards."""
    return _NORMALIZER.fullmatch(name) is not None


def normalization(config: Mapping[str, Any], rest: Mapping[str, StoredTensor]) -> tuple[float, float, str | None]:
    """Factor and constant that the stored model applies to its raw reward, and their origin in words; 1 and 0 if none.

    OpenRLHF divides by `std` after subtracting `mean` where `normalize_reward` is true; Beaver by the root of `var`,
    with `mean` for rewards, without for costs, where `do_normalize` is true.

    Raises:
        CheckpointError: if configuration and tensors give different numbers.
        ConfigError: if mean and deviation are stored, and nothing tells whether they are applied.
    """
    stored = {name.rpartition(".")[2]: each for name, each in rest.items() if is_normalizer(name)}
    values = {name: float(each.read().flatten()[0]) for name, each in stored.items() if name != "count"}
    for name in ("mean", "std", "var"):
        own = config.get(name)
        own = own[0] if isinstance(own, list) and own else own
        differs = isinstance(own, int | float) and abs(values.setdefault(name, float(own)) - own) > 1e-6 * abs(own)
        if differs and "score_dim" not in config:  # Beaver's buffers go on from its configuration
            raise CheckpointError(f"the stored {name} {values[name]} is not that of config.json, {own}")
    mean, project = values.get("mean", 0.0), "OpenRLHF"
    if "var" in values:
        project, deviation, kind = "Beaver", values["var"] ** 0.5 + 1e-8, config.get("score_type", "reward")
        mean, is_applied = mean if kind == "reward" else 0.0, kind != "critic" and config.get("do_normalize")
    elif "std" in values and "normalize_reward" not in config:
        raise ConfigError(
            f"the model stores a mean of {mean:g} and a deviation of {values['std']:g}, and config.json does not tell "
            "whether they are applied; set normalize_reward in it to true or false"
        )
    else:
        deviation, is_applied = values.get("std", 0.0), "std" in values and config["normalize_reward"]
    if not is_applied:
        return 1.0, 0.0, None
    return 1 / deviation, -mean / deviation, f"{project}'s normalization by mean {mean:g} and deviation {deviation:g}"


_NAMES = {
    "tok_embeddings": "embed_tokens",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def as_llama(stored: StoredModel) -> StoredModel:
    """An InternLM2 model under Llama's configuration and names; any other model as it is.

    A group of query heads lies before its key and its value head in `wqkv` (Cai et al., 2024,
    https://arxiv.org/abs/2403.17297, section 2.2).

    Raises:
        CheckpointError: if the projections have biases, which Llama's have not one by one.
    """
    config = stored.config
    if config["model_type"] not in ("internlm2", "internlm2_reward"):
        return stored
    if config.get("bias"):
        raise CheckpointError("InternLM2 with biases in its projections cannot be imported")
    groups, width = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    tensors = dict[str, StoredTensor]()
    for name, tensor in stored.tensors.items():
        if "attention.wqkv" not in name:
            for theirs, ours in _NAMES.items():
                name = name.replace(theirs, ours)
            tensors[name] = tensor
            continue
        per_group = config["num_attention_heads"] // groups
        for part, (start, stop) in {"q": (0, per_group), "k": (-2, -1), "v": (-1, None)}.items():
            rows = {"q": config["hidden_size"]}.get(part, groups * width)
            read = partial(_part, tensor, groups, width, slice(start, stop))
            renamed = name.replace("attention.wqkv", f"self_attn.{part}_proj")
            tensors[renamed] = StoredTensor((rows, tensor.shape[1]), read)
    kept = {key: value for key, value in config.items() if key not in ("auto_map", "bias", "attn_implementation")}
    return replace(stored, tensors=tensors, config={**kept, "model_type": "llama", "attention_bias": False})


def _part(tensor: StoredTensor, groups: int, width: int, heads: slice) -> Tensor:
    grouped = tensor.read().view(groups, -1, width, tensor.shape[1])
    return grouped[:, heads].flatten(0, 2)
