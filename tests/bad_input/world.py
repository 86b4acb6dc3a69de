"""The folder in which the bad command lines run: good and bad files, good and bad models."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from rm_optimizer.rl_coupling.ensemble import EnsembleReference
from rm_optimizer.rl_coupling.ensemble_folder import save_ensemble
from tests.builders import NARROW, encoder_tokenizer, narrow_reward_model, tiny_config

PAIRS = [{"prompt": f"What is {i} + {i}?", "chosen": f"It is {2 * i}.", "rejected": f"Maybe {i}?"} for i in range(12)]


def lines(rows: list[object]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def build(root: Path) -> None:
    """Fill the folder."""
    _good_files(root)
    _bad_rows(root)
    _bad_files(root)
    _models(root)
    _broken_models(root)
    _ensembles(root)


def _good_files(root: Path) -> None:
    (root / "pairs.jsonl").write_text(lines(list(PAIRS)))
    (root / "other.jsonl").write_text(lines([row | {"prompt": f"Say: {row['prompt']}"} for row in PAIRS]))
    (root / "responses.jsonl").write_text(
        lines([{"prompt": "Hi", "response": "Hello"}, {"prompt": "Hi", "response": "No"}])
    )
    (root / "scored.jsonl").write_text(lines([{"prompt": "Hi", "response": "Hello", "reward": 1.0}]))
    (root / "other.csv").write_text("question,better,worse\n" + "".join(f"q{i},a{i},b{i}\n" for i in range(4)))


def _changed(field: str, value: object, row: int = 5) -> list[object]:
    """The pairs with one field of one row changed; `...` removes it."""
    rows: list[object] = [dict(pair) for pair in PAIRS]
    changed = dict(PAIRS[row]) | {field: value}
    rows[row] = {name: item for name, item in changed.items() if item is not ...}
    return rows


def _bad_rows(root: Path) -> None:
    folder = root / "rows"
    folder.mkdir()
    files = {
        "no_chosen": _changed("chosen", ...),
        "null_chosen": _changed("chosen", None),
        "empty_chosen": _changed("chosen", ""),
        "number_chosen": _changed("chosen", 7),
        "list_chosen": _changed("chosen", ["a", "b"]),
        "same": _changed("rejected", PAIRS[5]["chosen"]),
        "label_two": _changed("label", 2),
        "label_word": _changed("label", "yes"),
        "weight_negative": _changed("weight", -1),
        "weight_zero": _changed("weight", 0),
        "not_a_row": [*PAIRS, ["a", "b"]],
        "surrogate": _changed("chosen", "\ud800"),
        "unlike": [*PAIRS[:3], {"question": "q", "a": "x", "b": "y"}],
        "one_prompt": [{"prompt": "p", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(6)],
        "one_pair": [PAIRS[0]],
        "winners": [
            {"prompt": f"p{i}", "response_a": "x", "response_b": f"y{i}", "winner": "model_a"} for i in range(8)
        ],
        "ranks": [{"prompt": f"p{i}", "responses": ["a", f"b{i}"], "ranks": [1, 2]} for i in range(8)],
        "label_one_two": [dict(pair) | {"label": 1 + i % 2} for i, pair in enumerate(PAIRS)],
        "lengths_differ": [{"prompt": "p", "responses": ["a", "b"], "scores": [1.0]}],
        "alpaca": [{"instruction": "i", "input": "x", "output_1": "a", "output_2": f"b{i}"} for i in range(6)],
        "unknown_role": [
            {
                "prompt": [{"role": "wizard", "content": f"Hi {i}"}],
                "chosen": [{"role": "assistant", "content": "a"}],
                "rejected": [{"role": "assistant", "content": "b"}],
            }
            for i in range(6)
        ],
        "no_response": [{"prompt": "Hi", "response": "a"}, {"prompt": "Hi"}],
        "empty_response": [{"prompt": "Hi", "response": "a"}, {"prompt": "Hi", "response": " "}],
        "empty_turn": _changed("prompt", [{"role": "user", "content": ""}]),
        "null_response": [{"prompt": "Hi", "response": None}],
        "number_response": [{"prompt": "Hi", "response": 3}],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text(lines(list(rows)))


def _bad_files(root: Path) -> None:
    folder = root / "files"
    folder.mkdir()
    good = lines(list(PAIRS))
    (folder / "empty.jsonl").touch()
    (folder / "blank.jsonl").write_text("\n\n\n")
    (folder / "torn.jsonl").write_text(good[:-20])
    (folder / "deep.jsonl").write_text(good + "[" * 100_000 + "]" * 100_000 + "\n")
    (folder / "digits.jsonl").write_text(good + '{"prompt": ' + "9" * 5_000 + "}\n")
    (folder / "binary.jsonl").write_bytes(bytes(range(256)) * 8)
    (folder / "utf16.jsonl").write_bytes(good.encode("utf-16-le"))
    (folder / "latin.csv").write_bytes("prompt,chosen,rejected\nhé,a,b\n".encode("latin-1"))
    (folder / "ragged.csv").write_text("prompt,chosen,rejected\np,a,b\np,a\n")
    (folder / "twice.csv").write_text("prompt,chosen,chosen\np,a,b\n")
    (folder / "quote.csv").write_text('prompt,chosen,rejected\np,"a,b\n')
    (folder / "headless.csv").write_text("p,a,b\nq,c,d\n")
    (folder / "semicolons.csv").write_text("prompt;chosen;rejected\np;a;b\n")
    (folder / "pairs.psv").write_text("prompt\tchosen\trejected\np\ta\tb\n")
    (folder / "pairs.xlsx").write_bytes(b"PK\x03\x04")
    (folder / "data.json").write_text(json.dumps({"data": PAIRS}))
    (folder / "torn.parquet").write_bytes(b"PAR1" + b"\0" * 50)
    (folder / "torn.jsonl.gz").write_bytes(gzip.compress(good.encode())[:40])
    (folder / "binary.jsonl.gz").write_bytes(b"not gzip at all")
    table = pa.table([[r["prompt"] for r in PAIRS]] * 2 + [["x"] * 12], names=["prompt", "chosen", "chosen"])
    pq.write_table(table, folder / "twice.parquet")
    (folder / "folder").mkdir()


def _models(root: Path) -> None:
    model = narrow_reward_model(text for pair in PAIRS for text in pair.values())
    model.save_pretrained(root / "best")
    config = tiny_config("llama", vocab_size=len(model.tokenizer), num_labels=2, **NARROW)
    for name, kind in (("causal", AutoModelForCausalLM), ("two_labels", AutoModelForSequenceClassification)):
        kind.from_config(config).save_pretrained(root / name)
        model.tokenizer.save_pretrained(root / name)
    bert = AutoConfig.for_model(
        "bert", hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=400
    )
    AutoModel.from_config(bert).save_pretrained(root / "encoder")
    encoder_tokenizer().save_pretrained(root / "encoder")


def _ensembles(root: Path) -> None:
    reference = EnsembleReference((0.0, 0.0), (1.0, 1.0), 1.0, 0.05, 40)
    text = save_ensemble(root / "twins", ["best", "best"], reference).read_text()
    (root / "torn_twins").mkdir()
    (root / "torn_twins" / "ensemble.json").write_text(text[:40])


def _broken_models(root: Path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(root / "best", root / "broken" / name))

    weights = load_file(root / "best" / "model.safetensors")
    head = next(name for name in weights if name.startswith("score"))
    _rewrite(copy("headless"), {name: tensor for name, tensor in weights.items() if name != head})
    _rewrite(copy("changed"), weights | {head: weights[head] + 1})
    _rewrite(copy("nan"), {name: torch.full_like(tensor, float("nan")) for name, tensor in weights.items()})
    whole = (root / "best" / "model.safetensors").read_bytes()
    (copy("torn_weights") / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (copy("empty_weights") / "model.safetensors").write_bytes(b"")
    (copy("no_weights") / "model.safetensors").unlink()
    (copy("no_config") / "config.json").unlink()
    (copy("torn_config") / "config.json").write_text('{"model_type": "lla')
    (copy("torn_export") / "export.json").write_text("{")
    no_tokenizer = copy("no_tokenizer")
    for file in no_tokenizer.glob("tokenizer*"):
        file.unlink()
    (root / "broken" / "empty").mkdir()
    (root / "broken" / "garbage.ckpt").write_bytes(b"garbage")
    (root / "broken" / "torn.ckpt").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    (root / "broken" / "text.ckpt").write_text("hello")


def _rewrite(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
