"""Forms in which a trained reward model is stored: the same rewards, or a word about what is otherwise."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rm_optimizer import BradleyTerryRM, RMOptimizerError
from tests.builders import decoder_tokenizer, tiny_reward_model

Weights = dict[str, torch.Tensor]
PROMPTS, RESPONSES = ["Hi", "What is 2 + 2?", "Name  three\n\ncolors: 123"], ["Hello, 日本.", "4", "red, 45 and  blue"]
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Form:
    """One way to store a model.

    Args:
        name: what it is.
        change: function that changes the folder of an export; it returns the folder to load if that is another.
        is_export: True to keep the record of the export, which other software does not write.
        has_same_rewards: False where the folder stands for another model, which must be refused or warned of.
    """

    name: str
    change: Callable[[Path], Path | None]
    is_export: bool = False
    has_same_rewards: bool = True


def weights(change: Callable[[Weights], Weights]) -> Callable[[Path], None]:
    """A change of the stored tensors."""

    def apply(folder: Path) -> None:
        changed = {name: value.contiguous() for name, value in change(load_file(folder / "model.safetensors")).items()}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def added(name: str, value: torch.Tensor | None = None) -> Callable[[Path], None]:
    """One tensor more."""
    return weights(lambda stored: stored | {name: torch.ones(1) if value is None else value})


def renamed(rename: Callable[[str], str]) -> Callable[[Path], None]:
    """The same tensors under other names."""
    return weights(lambda stored: {rename(name): value for name, value in stored.items()})


def scaled(factor: float, part: str = "score") -> Callable[[Path], None]:
    """Tensors multiplied by a factor."""
    return weights(lambda stored: {name: value * factor if part in name else value for name, value in stored.items()})


def settings(file: str, **fields: Any) -> Callable[[Path], None]:
    """Fields of a file of settings; None leaves one out."""

    def apply(folder: Path) -> None:
        found = json.loads((folder / file).read_text()) | fields
        (folder / file).write_text(json.dumps({name: value for name, value in found.items() if value is not None}))

    return apply


def removed(*files: str) -> Callable[[Path], None]:
    """Files less."""

    def apply(folder: Path) -> None:
        for file in files:
            (folder / file).unlink()

    return apply


def nothing(folder: Path) -> None:
    """No change."""


def pickled(folder: Path) -> None:
    """Weights in the older format."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def sharded(folder: Path, lost: int = 0) -> None:
    """Weights in two files and an index; the last `lost` of the files are left out."""
    stored = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    parts = dict(zip(files, (dict(stored[:5]), dict(stored[5:])), strict=True))
    for file, part in list(parts.items())[: 2 - lost]:
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def torn(folder: Path) -> None:
    """A file of weights of which half is missing."""
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def value_head_file(folder: Path) -> None:
    """A head of TRL in a file beside the weights."""
    save_file({"v_head.summary.weight": torch.ones(1, 32)}, folder / "value_head.safetensors")


def two_copies(folder: Path) -> None:
    """Two files of weights that differ."""
    stored = load_file(folder / "model.safetensors")
    torch.save({name: value * 2 for name, value in stored.items()}, folder / "pytorch_model.bin")


def more_tokens(folder: Path) -> None:
    """A tokenizer with a token that has no embedding."""
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    number = max(token["id"] for token in found["added_tokens"]) + 1000
    found["added_tokens"].append(found["added_tokens"][0] | {"id": number, "content": "Hello", "special": False})
    path.write_text(json.dumps(found))


def other_words(folder: Path) -> None:
    """A tokenizer whose file folds letters."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "Lowercase"}}))


def other_template(folder: Path) -> None:
    """A template that writes the roles otherwise."""
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text().replace("m['role'] }}:", "m['role'] | upper }}:"))


def swapped_layers(name: str) -> str:
    """The two layers in each other's place."""
    return name.replace("layers.0.", "layers.x.").replace("layers.1.", "layers.0.").replace("layers.x.", "layers.1.")


FORMS = (
    Form("an export", nothing, is_export=True),
    Form("a classifier of transformers", nothing),
    Form("weights in pytorch_model.bin", pickled),
    Form("weights in shards", sharded),
    Form("weights in shards of which one is lost", lambda folder: sharded(folder, lost=1), has_same_rewards=False),
    Form("torn weights", torn, has_same_rewards=False),
    Form("no weights", removed("model.safetensors"), has_same_rewards=False),
    Form("no configuration", removed("config.json"), has_same_rewards=False),
    Form("no tokenizer", removed("tokenizer.json", "tokenizer_config.json"), has_same_rewards=False),
    Form("two copies of the weights that differ", two_copies),
    Form("an unused language head", added("lm_head.weight")),
    Form("frequencies of positions", added("model.layers.0.self_attn.rotary_emb.inv_freq")),
    Form("a bias of the head", added("score.bias"), has_same_rewards=False),
    Form("a bias of the head that is zero", added("score.bias", torch.zeros(1))),
    Form("a mean of the rewards", added("mean"), has_same_rewards=False),
    Form("a deviation of the rewards", added("score.std"), has_same_rewards=False),
    Form("a layer beyond the configuration", added("model.layers.7.mlp.up_proj.weight"), has_same_rewards=False),
    Form("a tensor of no known name", added("head.temperature"), has_same_rewards=False),
    Form("a second head", added("v_head.summary.weight", torch.ones(1, 32)), has_same_rewards=False),
    Form("a second head in a file", value_head_file, has_same_rewards=False),
    Form("a configuration of one layer", settings("config.json", num_hidden_layers=1), has_same_rewards=False),
    Form("a configuration of three layers", settings("config.json", num_hidden_layers=3), has_same_rewards=False),
    Form("a configuration of two labels", settings("config.json", num_labels=2), has_same_rewards=False),
    Form(
        "a configuration with the labels' names",
        settings("config.json", id2label={"0": "bad", "1": "good"}, label2id={"bad": 0, "good": 1}),
        has_same_rewards=False,
    ),
    Form("a configuration of more tokens", settings("config.json", vocab_size=999), has_same_rewards=False),
    Form("a configuration without a pad token", settings("config.json", pad_token_id=None)),
    Form(
        "a configuration of another activation in an export",
        settings("config.json", hidden_act="gelu"),
        is_export=True,
        has_same_rewards=False,
    ),
    Form("other software's prefix module.", renamed(lambda name: f"module.{name}")),
    Form("other software's prefix _orig_mod.", renamed(lambda name: f"_orig_mod.{name}")),
    Form("other software's prefix base_model.model.", renamed(lambda name: f"base_model.model.{name}")),
    Form("other software's prefix of Lightning", renamed(lambda name: f"model.{name}")),
    Form("a backbone without the prefix", renamed(lambda name: name.removeprefix("model."))),
    Form("TRL's value head", renamed(lambda name: name.replace("score.", "v_head.summary."))),
    Form("a head named value_head", renamed(lambda name: name.replace("score.", "value_head."))),
    Form("a head named classifier", renamed(lambda name: name.replace("score.", "classifier."))),
    Form("a head of two layers", renamed(lambda name: name.replace("score.", "score.2."))),
    Form(
        "no head",
        weights(lambda stored: {name: value for name, value in stored.items() if "score" not in name}),
        has_same_rewards=False,
    ),
    Form(
        "a head of two outputs",
        weights(lambda stored: stored | {"score.weight": stored["score.weight"].repeat(2, 1)}),
        has_same_rewards=False,
    ),
    Form("a head of zeros", scaled(0.0), has_same_rewards=False),
    Form("a head that is not finite", scaled(float("nan")), has_same_rewards=False),
    Form("a layer that is not finite", scaled(float("inf"), "layers.1.mlp.down"), has_same_rewards=False),
    Form(
        "a lost tensor",
        weights(lambda stored: {name: value for name, value in stored.items() if "layers.0.mlp.up" not in name}),
        has_same_rewards=False,
    ),
    Form("another head in an export", scaled(1.5), is_export=True, has_same_rewards=False),
    Form("swapped layers in an export", renamed(swapped_layers), is_export=True, has_same_rewards=False),
    Form("another template in an export", other_template, is_export=True, has_same_rewards=False),
    Form("a tokenizer whose file folds letters in an export", other_words, is_export=True, has_same_rewards=False),
    Form("a token without an embedding", more_tokens, has_same_rewards=False),
    Form(
        "a settings file that is no JSON",
        lambda folder: (folder / "config.json").write_text("{") and None,
        has_same_rewards=False,
    ),
    Form("a file in place of the folder", lambda folder: folder / "config.json", has_same_rewards=False),
    Form("a folder around the folder", lambda folder: folder.parent, has_same_rewards=False),
)


class _Warned(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def outcome(form: Form, folder: Path) -> str:
    """`right`, `refused: …`, `warned: …` or `wrong: …` for the model in a folder of its own."""
    model = tiny_reward_model("llama", decoder_tokenizer(chat_template=TEMPLATE), max_length=64)
    expected = model.score(PROMPTS, RESPONSES)
    stored = folder / "deep" / "model"
    model.save_pretrained(stored)
    if not form.is_export:
        (stored / "export.json").unlink()
    handler, log = _Warned(), logging.getLogger("rm_optimizer")
    path = form.change(stored) or stored
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(action="ignore"):
            found = BradleyTerryRM.from_pretrained(path, max_length=64).score(PROMPTS, RESPONSES)
    except RMOptimizerError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"wrong: {type(error).__name__}: {error}"
    finally:
        log.removeHandler(handler)
    if handler.texts:
        return f"warned: {handler.texts[0]}"
    is_same = torch.allclose(found, expected, atol=TOLERANCE)
    return "right" if form.has_same_rewards and is_same else f"wrong: {found.tolist()} instead of {expected.tolist()}"
