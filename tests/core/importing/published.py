"""Reward models in the forms that their projects publish, each with its published rule in a few lines of torch.

The layouts follow TRL, OpenRLHF, LLaMA-Factory, DeepSpeed-Chat, Starling, UltraRM, Eurus, safe-rlhf, InternLM2, GRM,
INF-ORM, QRM, ArmoRM and NeMo RL, as their code or RewardBench's loaders have them.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter, save
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.builders import DECODERS, ENCODERS, decoder_tokenizer, encoder_tokenizer

TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
CONVERSATIONS = (
    ("Hi", "Hello, 日本."),
    ("What is 2 + 2?", "4"),
    ("Name  three\n\ncolors: 123", "red, 45 and  blue"),
    ("Tell me about the lighthouse keeper.", "He counted ships and wrote each name in a book that nobody read."),
)
MARKER = "<s>assistant"
Reward = Callable[[list[dict[str, str]]], Tensor]


@dataclass(frozen=True)
class Published:
    """A form of stored reward models.

    Args:
        name: its project.
        write: function that writes a model of this form and returns its published reward of messages.
        options: options of the import that its files do not tell.
        needs_code: True if the imported folder has its own code.
    """

    name: str
    write: Callable[[Path], Reward]
    options: Mapping[str, Any] = field(default_factory=dict)
    needs_code: bool = False


def drawn(module: nn.Module, seed: int = 5) -> Any:
    """The module with weights large enough that nothing in it is too small to be seen, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        value.data = 1 + 0.2 * noise if "norm" in name.lower() and value.dim() == 1 else 0.3 * noise
    return module.eval()


def config_of(family: str, **fields: Any) -> Any:
    """A tiny configuration."""
    known = {**DECODERS, **ENCODERS}[family]
    layers = {} if family in ("gpt2",) else {"num_hidden_layers": 2}
    vocabulary = len(tokenizer_of(family))
    return AutoConfig.for_model(family, **{"vocab_size": vocabulary, **known, **layers, **fields})


def tokenizer_of(family: str, pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """The tokenizer of a family, a decoder's with a chat template."""
    if family == "bert":
        return encoder_tokenizer(model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    return encoder_tokenizer() if family in ENCODERS else decoder_tokenizer(pad, TEMPLATE)


def ids_of(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> Tensor:
    """Token ids of plain `apply_chat_template`, as one row."""
    return tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]


def states(backbone: Any, ids: Tensor) -> Tensor:
    """States of all tokens after the last norm."""
    return backbone(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state


def stored(folder: Path, config: Any, weights: Mapping[str, Tensor], *, to: str = "safetensors", **fields: Any) -> None:
    """Write configuration, tokenizer and weights in files of a kind."""
    content = json.loads(config.to_json_string(use_diff=False)) | fields
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    tokenizer_of(config.model_type if config.model_type in {**DECODERS, **ENCODERS} else "llama").save_pretrained(
        folder
    )
    tensors = {name: value.detach().contiguous().clone() for name, value in weights.items()}
    if to == "safetensors":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif to == "shards":
        names = sorted(tensors)
        parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
        for file, each in parts.items():
            torch.save({name: tensors[name] for name in each}, folder / file)
        places = {name: file for file, each in parts.items() for name in each}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    elif to == "dcp":
        with warnings.catch_warnings(action="ignore"):  # it runs in one process
            save({"model": tensors}, storage_writer=FileSystemWriter(folder), no_dist=True)
    else:
        torch.save(tensors, folder / to)


def prefixed(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    """Weights of a module under a prefix."""
    return {f"{prefix}{name}": value for name, value in module.state_dict().items()}


def at_last(
    family: str,
    prefix: str,
    head: Callable[[int], nn.Module],
    stem: str,
    *,
    to: str = "safetensors",
    lm_head: bool = False,
    more: Mapping[str, Any] | None = None,
    after: Callable[[Tensor], Tensor] = lambda value: value,
    extra: Mapping[str, Tensor] | None = None,
    text: Callable[[PreTrainedTokenizerFast, list[dict[str, str]]], Tensor] = ids_of,
    copies: str | None = None,
    dtype: torch.dtype = torch.float32,
    index: int = 0,
) -> Callable[[Path], Reward]:
    """Writer of a backbone with a head that is read at the last token."""

    def write(folder: Path) -> Reward:
        config = config_of(family)
        backbone = drawn(AutoModel.from_config(config))
        for value in backbone.parameters():
            value.data = value.data.to(dtype).float()
        top = drawn(head(config.hidden_size), seed=7)
        half = {name: value.to(dtype) for name, value in prefixed(prefix, backbone).items()}
        weights = half | prefixed(f"{stem}.", top) | dict(extra or {})
        if lm_head:
            weights["lm_head.weight"] = torch.randn(config.vocab_size, config.hidden_size)
        if copies is not None:
            weights |= prefixed(copies, backbone)
        stored(folder, config, weights, to=to, **(more or {}))
        tokenizer = tokenizer_of(family)
        return lambda messages: after(top(states(backbone, text(tokenizer, messages))[0, -1]))[index]

    return write


def openrlhf_ids(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> Tensor:
    """Ids of OpenRLHF's reward data set: the text without line breaks at its end, a blank and EOS."""
    text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
    text += "" if text.endswith(tokenizer.eos_token) else " " + tokenizer.eos_token
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]


def linear(size: int) -> nn.Module:
    """A linear head without bias."""
    return nn.Linear(size, 1, bias=False)


def biased(size: int) -> nn.Module:
    """A linear head with bias."""
    return nn.Linear(size, 1)


def layered(*sizes: int) -> Callable[[int], nn.Module]:
    """Layers with ReLU between them."""

    def make(size: int) -> nn.Module:
        widths = [size, *sizes, 1]
        layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(widths)]
        return nn.Sequential(*[each for pair in layers for each in pair][:-1])

    return make


def llama_factory(folder: Path) -> Reward:
    """A whole model and `value_head.safetensors` beside it."""
    reward = at_last("llama", "model.", biased, "v_head.summary", lm_head=True)(folder)
    return moved_head(folder, reward, "value_head.safetensors")


def in_fp8(folder: Path) -> Reward:
    """Matrices of the layers in FP8, each block of 16 x 16 with a factor, as DeepSeek-V3 and Qwen3 publish theirs."""
    config = config_of("llama")
    backbone, head = drawn(AutoModel.from_config(config)), drawn(nn.Linear(32, 1, bias=False), seed=7)
    weights = prefixed("model.", backbone) | prefixed("score.", head)
    for name, value in backbone.named_parameters():
        if name.endswith("_proj.weight"):
            rows, columns = (size // 16 for size in value.shape)
            scale = value.detach().view(rows, 16, columns, 16).abs().amax((1, 3)) / 400
            whole = torch.kron(scale, torch.ones(16, 16))
            packed = (value.detach() / whole).to(torch.float8_e4m3fn)
            weights |= {f"model.{name}": packed, f"model.{name}_scale_inv": scale}
            value.data = packed.float() * whole
    stored(folder, config, weights, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    tokenizer = tokenizer_of("llama")
    return lambda messages: head(states(backbone, ids_of(tokenizer, messages))[0, -1])[0]


def moved_head(folder: Path, reward: Reward, file: str) -> Reward:
    """The model with its head in a file of its own."""
    weights = load_file(folder / "model.safetensors")
    head = {name: weights.pop(name) for name in list(weights) if name.startswith("v_head.")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(head, folder / file) if file.endswith("safetensors") else torch.save(head, folder / file)
    return reward


def llama_factory_lora(folder: Path, new_tokens: int = 0) -> Reward:
    """An adapter of a causal model, with `value_head.bin`, and with embeddings and tokenizer if it has new tokens."""
    base = folder.parent / f"{folder.name}-base"
    model = drawn(AutoModelForCausalLM.from_config(config_of("llama")))
    model.save_pretrained(base)
    tokenizer_of("llama").save_pretrained(base)
    options = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    grown, tokenizer = AutoModelForCausalLM.from_pretrained(base), tokenizer_of("llama")
    if new_tokens:
        tokenizer.add_tokens(["Hello"])
        grown.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        tokenizer.save_pretrained(folder)
    adapted = get_peft_model(grown, options)
    generator = torch.Generator().manual_seed(3)
    for name, value in adapted.named_parameters():
        if "lora_" in name:
            value.data = 0.3 * torch.randn(value.shape, generator=generator)
    adapted.save_pretrained(folder, save_embedding_layers=bool(new_tokens))
    head = drawn(nn.Linear(32, 1), seed=7)
    torch.save(prefixed("v_head.summary.", head), folder / "value_head.bin")
    backbone = adapted.eval().get_base_model().model
    return lambda messages: head(states(backbone, ids_of(tokenizer, messages))[0, -1])[0]


def before_pad(prefix: str, *, to: str, copies: str | None = None) -> Callable[[Path], Reward]:
    """DeepSpeed-Chat and Starling: the state before the first pad id, of a row with padding after it."""

    def write(folder: Path) -> Reward:
        config = config_of("llama")
        backbone, head = drawn(AutoModel.from_config(config)), drawn(nn.Linear(32, 1, bias=False), seed=7)
        weights = prefixed(prefix, backbone) | prefixed("v_head.", head)
        weights |= {} if copies is None else prefixed(copies, backbone)
        stored(folder, config, weights, to=to)
        tokenizer = tokenizer_of("llama")

        def reward(messages: list[dict[str, str]]) -> Tensor:
            ids = nn.functional.pad(ids_of(tokenizer, messages), (0, 3), value=tokenizer.pad_token_id)
            values = head(backbone(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long())[0]).squeeze(-1)
            return values[0, (ids[0] == tokenizer.pad_token_id).nonzero()[0].item() - 1]

        return reward

    return write


def beaver(kind: str) -> Callable[[Path], Reward]:
    """safe-rlhf's score models: rewards less the mean over the deviation, costs over the deviation alone."""
    mean, var = 1.5, 4.0
    settings = {"score_dim": 1, "bias": True, "score_type": kind, "do_normalize": True, "mean": [9.0], "var": [9.0]}
    buffers = {
        "normalizer.mean": torch.tensor([mean]),
        "normalizer.var": torch.tensor([var]),
        "normalizer.count": torch.tensor([7]),
    }
    shift = mean if kind == "reward" else 0.0
    return at_last(
        *("llama", "model.", biased, "score_head"),
        more={**settings, "architectures": ["LlamaForScore"]},
        extra=buffers,
        after=lambda value: (value - shift) / (var**0.5 + 1e-8),
    )


def internlm(folder: Path) -> Reward:
    """InternLM2's names and its packed `wqkv`; the reward is read at a token that its code appends."""
    config = config_of("llama")
    backbone, head = drawn(AutoModel.from_config(config)), drawn(nn.Linear(32, 1, bias=False), seed=7)
    width, groups = 8, config.num_key_value_heads
    each = config.num_attention_heads // groups
    weights = {"model.tok_embeddings.weight": backbone.embed_tokens.weight, "model.norm.weight": backbone.norm.weight}
    for i, layer in enumerate(backbone.layers):
        q, k, v = (getattr(layer.self_attn, f"{name}_proj").weight for name in "qkv")
        rows = []
        for g in range(groups):
            rows += [q[g * each * width : (g + 1) * each * width], k[g * width : (g + 1) * width]]
            rows.append(v[g * width : (g + 1) * width])
        parts = {
            "attention.wqkv": torch.cat(rows),
            "attention.wo": layer.self_attn.o_proj.weight,
            "feed_forward.w1": layer.mlp.gate_proj.weight,
            "feed_forward.w3": layer.mlp.up_proj.weight,
            "feed_forward.w2": layer.mlp.down_proj.weight,
            "attention_norm": layer.input_layernorm.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
        }
        weights |= {f"model.layers.{i}.{name}.weight": value for name, value in parts.items()}
    fields = {
        "bias": False,
        "reward_token_id": 2,
        "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"},
    }
    stored(folder, config, weights | prefixed("v_head.", head), **fields, model_type="internlm2")
    tokenizer = tokenizer_of("llama")

    def reward(messages: list[dict[str, str]]) -> Tensor:
        ids = torch.cat([ids_of(tokenizer, messages), torch.tensor([[2]])], dim=1)
        return head(states(backbone, ids)[0, -1])[0]

    return reward


class Gating(nn.Module):
    """ArmoRM's gating network; with batch normalization it is QRM's."""

    def __init__(self, size: int, outputs: int, *, normed: bool) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor([1.7]))
        layers: list[nn.Module] = []
        for _ in range(3):
            layers.append(nn.Linear(size, 12, bias=not normed))
            layers += [nn.ReLU(), nn.BatchNorm1d(12)] if normed else []
            size = 12
        self.layers = nn.ModuleList([*layers, nn.Linear(size, outputs)])
        self.normed = normed

    def forward(self, x: Tensor) -> Tensor:
        """Weights of the objectives at temperature 10."""
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if not self.normed and i < len(self.layers) - 1:
                x = torch.relu(x)
        return torch.softmax(x / 10, dim=1) * self.logit_scale[0]


def gated(*, quantiles: int) -> Callable[[Path], Reward]:
    """ArmoRM, or QRM with several quantiles of each objective."""
    number = 5

    def write(folder: Path) -> Reward:
        config = config_of("llama")
        backbone = drawn(AutoModel.from_config(config))
        regression = drawn(nn.Linear(32, number * quantiles, bias=False), seed=8)
        gating = Gating(32, number, normed=quantiles > 1)
        for layer in gating.layers:
            drawn(layer, seed=9)
            if isinstance(layer, nn.BatchNorm1d):
                layer.running_mean, layer.running_var = torch.rand(12), 0.5 + torch.rand(12)
        transform = torch.eye(number) - 0.1 * torch.rand(number, number)
        weights = prefixed("model.", backbone) | prefixed("regression_layer.", regression) | prefixed("gating.", gating)
        fields = {
            "num_objectives": number,
            "num_quantiles": quantiles,
            "architectures": ["LlamaForRewardModelWithGating"],
        }
        stored(folder, config, weights | {"reward_transform_matrix": transform}, **fields)
        tokenizer = tokenizer_of("llama")
        marker = tokenizer(MARKER, add_special_tokens=False)["input_ids"]

        def reward(messages: list[dict[str, str]]) -> Tensor:
            ids = ids_of(tokenizer, messages)
            row, hidden = ids[0].tolist(), states(backbone, ids)[0]
            place = max(i for i in range(len(row)) if row[i : i + len(marker)] == marker)
            rewards = regression(hidden[-1:]).reshape(1, number, quantiles).mean(dim=2)
            return (gating.eval()(hidden[place : place + 1]) * (rewards @ transform)).sum(dim=1)[0]

        return reward

    return write


def nemo(folder: Path) -> Reward:
    """A distributed checkpoint of weights alone, beside the folder of its base."""
    config = config_of("qwen2")
    backbone, head = drawn(AutoModel.from_config(config)), drawn(nn.Linear(32, 1, bias=False), seed=7)
    stored(folder, config, prefixed("model.", backbone) | prefixed("score.", head), to="dcp")
    (folder / "config.json").unlink()
    stored(folder.parent / "nemo-base", config, {})
    tokenizer = tokenizer_of("qwen2")
    return lambda messages: head(states(backbone, ids_of(tokenizer, messages))[0, -1])[0]


def cross_encoder(labels: int, family: str = "roberta", **fields: Any) -> Callable[[Path], Reward]:
    """An encoder's classifier of text pairs, without the activation that its card may name; BERT reads their types."""

    def write(folder: Path) -> Reward:
        config = config_of(family, num_labels=labels, type_vocab_size=1 + (family == "bert"))
        model: PreTrainedModel = drawn(AutoModelForSequenceClassification.from_config(config))
        stored(folder, config, model.state_dict(), architectures=[type(model).__name__], **fields)
        tokenizer = tokenizer_of(family)

        def reward(messages: list[dict[str, str]]) -> Tensor:
            row = tokenizer(messages[0]["content"], messages[1]["content"], return_tensors="pt")
            types = {"token_type_ids": row["token_type_ids"]} if family == "bert" else {}
            logits = model(row["input_ids"], **types).logits[0]
            return logits[0] if labels == 1 else logits[1] - logits[0]

        return reward

    return write


def two_labels(folder: Path) -> Reward:
    """A decoder's classifier with two labels, whose first logit is the reward."""
    return at_last("llama", "model.", lambda size: nn.Linear(size, 2, bias=False), "score")(folder)


def zoo(work: Path) -> tuple[Published, ...]:
    """All forms; those with a base write it below `work`."""
    mean_std = {"normalize_reward": True, "mean": 2.0, "std": 3.0}
    normed = {"more": mean_std, "after": lambda value: (value - 2.0) / 3.0, "text": openrlhf_ids}
    inform, math = ["INFORMForSequenceClassification"], ["Qwen2ForRewardModel"]
    code = {"needs_code": True}
    return (
        Published("plain classifier", at_last("llama", "model.", linear, "score")),
        Published("classifier with a head bias", at_last("llama", "model.", biased, "score"), **code),
        Published(
            "classifier with a head bias, dropped", at_last("llama", "model.", biased, "score"), {"drop_constant": True}
        ),
        Published(
            "token classification",
            at_last("qwen2", "model.", biased, "score", more={"architectures": ["Qwen2ForTokenClassification"]}),
            **code,
        ),
        Published("names under module.", at_last("llama", "module.model.", linear, "module.score")),
        Published("compiled names", at_last("llama", "_orig_mod.model.", linear, "_orig_mod.score")),
        Published(
            "sharded .bin in bfloat16", at_last("llama", "model.", linear, "score", to="shards", dtype=torch.bfloat16)
        ),
        Published("two labels, first logit", two_labels, {"logit": "0"}),
        Published("TRL v_head.summary", at_last("llama", "model.", biased, "v_head.summary", lm_head=True), **code),
        Published(
            "TRL v_head.summary, .bin",
            at_last("qwen2", "pretrained_model.model.", biased, "v_head.summary", to="pytorch_model.bin"),
            **code,
        ),
        Published("TRL value head of GPT-2", at_last("gpt2", "transformer.", biased, "v_head.summary"), **code),
        Published("LLaMA-Factory value_head.safetensors", llama_factory, **code),
        Published("LLaMA-Factory adapter with value_head.bin", llama_factory_lora, **code),
        Published("LLaMA-Factory adapter with new tokens", lambda folder: llama_factory_lora(folder, 1), **code),
        Published("FP8 with a factor for each block", in_fp8),
        Published(
            "OpenRLHF value_head, normalized", at_last("llama", "model.", linear, "value_head", **normed), **code
        ),
        Published(
            "OpenRLHF score with buffers",
            at_last(
                "qwen2",
                "model.",
                linear,
                "score",
                extra={"mean": torch.tensor([2.0]), "std": torch.tensor([3.0])},
                **normed,
            ),
            **code,
        ),
        Published(
            "OpenRLHF own prefix",
            at_last("llama", "model.", linear, "my_reward", more={"value_head_prefix": "my_reward"}, text=openrlhf_ids),
        ),
        Published("DeepSpeed-Chat", before_pad("rwtransformer.", to="pytorch_model.bin")),
        Published("Starling", before_pad("transformer.", to="starling.pt", copies="model.model.")),
        Published(
            "UltraRM",
            at_last("llama", "model.", linear, "regression_head", more={"architectures": ["LlamaRewardModel"]}),
        ),
        Published(
            "Eurus",
            at_last("mistral", "model.", linear, "regression_head", more={"architectures": ["EurusRewardModel"]}),
        ),
        Published("Beaver reward", beaver("reward"), **code),
        Published("Beaver cost", beaver("cost"), **code),
        Published("InternLM2", internlm),
        Published("GRM", at_last("llama", "model.", layered(24), "v_head.summary"), **code),
        Published("INF-ORM", at_last("llama", "model.", layered(32), "score", more={"architectures": inform}), **code),
        Published(
            "Qwen2.5-Math-RM", at_last("qwen2", "model.", layered(32), "score", more={"architectures": math}), **code
        ),
        Published("ArmoRM", gated(quantiles=1), {"marker": MARKER}, **code),
        Published("QRM", gated(quantiles=3), {"marker": MARKER}, **code),
        Published("NeMo RL, distributed checkpoint", nemo, {"base": work / "nemo-base"}),
        Published(
            "cross-encoder",
            cross_encoder(1, sentence_transformers={"activation_fn": "torch.nn.modules.activation.Sigmoid"}),
            {"input_form": "pair"},
        ),
        Published("cross-encoder of two labels", cross_encoder(2), {"input_form": "pair", "logit": "difference"}),
        Published("cross-encoder with token types", cross_encoder(1, "bert"), {"input_form": "pair"}, **code),
    )
