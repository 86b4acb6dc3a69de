"""Tiny configurations of every family that transformers can classify texts with."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 258,
    "sliding_window": 64,
    "embedding_size": 32,
    # Mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    # Latent attention
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # Linear attention and state-space layers
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    # Names of older families
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "dff": 48,
    "hidden_dim": 48,
    "dim": 32,
    "emb_dim": 32,
    "word_embed_proj_dim": 32,
    "pooler_hidden_size": 32,
    "d_inner": 48,
    "d_head": 8,
    "rotary_dim": 4,
    "entity_vocab_size": 8,
    "entity_emb_size": 16,
    "pad_token_id": 2,
}
"""Sizes by the name that configurations give them; a family takes those that it has."""
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SECTIONS = {"mrope_section": [1, 1, 2]}
HYBRID = ["linear_attention", "full_attention"]
LINEAR = {name: size for name, size in SMALL.items() if name.startswith("linear_")}
TEXT = {
    name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
} | {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 258,
    "vocab_size": 384,
    "pad_token_id": 2,
}
PARTICULAR: dict[str, dict[str, Any]] = {
    "axk1": {"num_key_value_heads": 4},
    "axk2": {
        "num_key_value_heads": 4,
        "index_topk": 64,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "gated_norm_rank": 4,
        "qk_rope_head_dim": 8,
    },
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE | SECTIONS)},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "doge": {"keep_window_size": 64},
    "esmc": {"num_key_value_heads": 4},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"]},
    "falcon": {"num_kv_heads": 4},
    "funnel": {"block_sizes": [1, 1], "d_model": 32, "n_head": 4, "vocab_size": 300},
    "gemma3": {"text_config": TEXT | {"model_type": "gemma3_text", "head_dim": 8}, "vision_config": VISION},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"kv_channels": 8},
    "layoutlm": {"max_2d_position_embeddings": 16},
    "layoutlmv3": {"max_2d_position_embeddings": 16, "coordinate_size": 4, "shape_size": 8, "input_size": 32},
    "lilt": {"max_2d_position_embeddings": 16, "hidden_size": 48},
    "longformer": {"attention_window": [16, 16]},
    "markuplm": {"max_xpath_tag_unit_embeddings": 220, "max_xpath_subs_unit_embeddings": 1002, "max_depth": 2},
    "minicpm3": {"num_key_value_heads": 4},
    "mistral4": {"num_key_value_heads": 4, "head_dim": 16},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "modernvbert": {
        "text_config": TEXT | {"model_type": "modernbert"},
        "vision_config": VISION,
        "pixel_shuffle_factor": 1,
    },
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "nystromformer": {"max_position_embeddings": 254, "num_landmarks": 64, "segment_means_seq_len": 64},
    "perceiver": {"d_latents": 32, "d_model": 32, "num_latents": 8},
    "qwen3_5": {
        "text_config": TEXT | LINEAR | {"model_type": "qwen3_5_text", "layer_types": HYBRID},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
    },
    "qwen3_5_text": {"layer_types": HYBRID},
    "qwen3_next": {"layer_types": HYBRID},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 16],
        "feed_forward_size": 48,
        "attention_head_size": 8,
        "max_position_embeddings": 256,
    },
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
        "shape_vocab_size": 384,
        "pronunciation_vocab_size": 384,
    },
    "tapas": {"type_vocab_sizes": [3, 8, 8, 2, 8, 8, 4]},
    "xmod": {"default_language": "en_XX"},
    "yoso": {"use_expectation": True},
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {
        "mamba_headdim": 16,
        "n_mamba_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "chunk_size": 16,
        "adapter_rank": 4,
    },
}
"""What a family needs beside these sizes, or instead of them."""


def family_names() -> tuple[str, ...]:
    """Every family that transformers maps to a text classifier and that is no encoder-decoder."""
    names = sorted(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    return tuple(name for name in names if not CONFIG_MAPPING[name]().is_encoder_decoder)


def architecture(family: str) -> dict[str, Any]:
    """`model_type` and fields of a tiny configuration, as `model.architecture` takes them."""
    default = CONFIG_MAPPING[family]()
    computed = {name for name in SMALL if isinstance(getattr(type(default), name, None), property)}
    fields = {name: size for name, size in SMALL.items() if name not in computed and hasattr(default, name)}
    return {"model_type": family} | fields | PARTICULAR.get(family, {})
