"""InternLM2's backbone, which `transformers` does not have, as the Llama model that computes the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from rm_optimizer.core.importing.stored import StoredModel, StoredTensor
from rm_optimizer.errors import CheckpointError

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
