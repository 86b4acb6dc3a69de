"""Seeded differences between two scorings, and the causes that `explain_difference` names.

Three tiny families with random weights are scored by plain transformers in this file, which imports nothing of the
explanation but its entry: callers with one mistake, with two, and such that score as the model does.

    python benchmarks/why.py [CASE …]
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, TaskType, get_peft_model
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    Gemma2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    pipeline,
)
from transformers.utils import logging as transformers_logging

from rm_optimizer import explain_difference

LIMIT = 96
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
CORPUS = (
    "The keeper counted the ships that passed and wrote each name in a book that nobody read.",
    "How do I boil an egg? Put it into boiling water. Wait seven minutes. What is 2 + 2? It is 4.",
    "Prompt: Response: Human: Assistant: system user assistant Be brief. You are a helpful assistant. Name a colour.",
    "def f(x): return 2 * x. Thanks! You are welcome. Write a long story. Tell me which ships passed. Hi Hello Yes",
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{{ '[INFO] Today Date: ' + date_string + '\n' }}"
    "{% for m in messages %}{{ '[' + m.role + ']\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
ROLES = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
SPECIAL = {
    "chatml": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "llama": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
    "bert": {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"},
}
EXTRA = {"chatml": ["<|im_start|>"], "llama": [], "bert": []}
FAMILIES = tuple(SPECIAL)
Messages = list[dict[str, str]]


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer of a family; the one of llama adds BOS to a text, that of bert CLS and SEP."""
    special = [*SPECIAL[family].values(), *EXTRA[family]]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, initial_alphabet=ByteLevel.alphabet())
    backend.train_from_iterator(CORPUS, trainer)
    frame = {"llama": "<s> $A", "bert": "[CLS] $A [SEP]"}.get(family)
    if frame is not None:
        named = [(token, backend.token_to_id(token)) for token in frame.split() if token != "$A"]
        backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=named)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL[family])
    tokenizer.chat_template = {"chatml": CHATML, "llama": LLAMA}.get(family)
    return tokenizer


def build(family: str, folder: Path, *, seed: int, kind: Any = None, **fields: Any) -> Path:
    """Write a tiny classifier of a family with random weights, as plain transformers saves it."""
    tokenizer = tokenizer_of(family)
    kind = kind or {"chatml": Qwen2Config, "llama": LlamaConfig, "bert": BertConfig}[family]
    vocabulary = {"vocab_size": len(tokenizer) + 4, "pad_token_id": tokenizer.pad_token_id}
    config = kind(num_labels=1, **vocabulary, **SIZES, **fields)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25 if "embed" in name else 0.3)
        head = model.score if hasattr(model, "score") else model.classifier
        head.weight.normal_(0, 0.2)
        if head.bias is not None:
            head.bias.fill_(0.37)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def turns_of(prompt: Any, response: str) -> Messages:
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [m.to_dict() for m in prompt]
    return [*before, {"role": "assistant", "content": response}]


def unchanged(value: Any) -> Any:
    """The value."""
    return value


@dataclass
class Caller:
    """Scoring of conversations by plain transformers, with the mistakes that its fields turn on.

    Args:
        folder: the model's folder.
        cut: `documented` cuts the start of the prompt, then the end of the answer; or `left`, `right`.
    """

    folder: Path
    template: str | None = None
    system: str | None = None
    thinking: bool = False
    strip: bool = False
    strip_text: bool = False
    date: str | None = None
    generation: bool = False
    adds_special: bool = False
    drops_first: bool = False
    drops_end: bool = False
    doubles_end: bool = False
    cut: str = "documented"
    limit: int = LIMIT
    pool: int | str = -1
    padding: str = ""
    dtype: torch.dtype = torch.float32
    after: Callable[[Any], Any] = unchanged
    change: Callable[[Any], Any] = unchanged
    reads_file: bool = False
    as_pair: bool = False

    def __post_init__(self) -> None:
        reader = PreTrainedTokenizerFast if self.reads_file else AutoTokenizer
        self.tokenizer = reader.from_pretrained(self.folder)
        model = AutoModelForSequenceClassification.from_pretrained(self.folder, dtype=self.dtype).eval()
        self.model = self.change(model).eval()
        self.is_encoder = self.tokenizer.cls_token_id is not None
        self.end = self.tokenizer.sep_token_id if self.is_encoder else self.tokenizer.eos_token_id

    def __call__(self, prompts: Sequence[Any], responses: Sequence[str]) -> list[float]:
        """Scores of responses."""
        if self.as_pair:
            with torch.no_grad():
                return torch.cat(list(map(self.paired, prompts, responses))).tolist()
        rows = [self.row(turns_of(prompt, text)) for prompt, text in zip(prompts, responses, strict=True)]
        with torch.no_grad():
            logits = self.batch(rows) if self.padding and len(rows) > 1 else torch.cat([self.alone(r) for r in rows])
        return self.after(logits.float().numpy().astype(float)).tolist()

    def text(self, turns: Messages, *, is_open: bool = False) -> str:
        """The conversation as text, or its prompt with the opening of an answer."""
        if self.is_encoder and self.template is None:
            before = turns if is_open else turns[:-1]
            names = {"user": "Human", "assistant": "Assistant", "system": "System"}
            many = "\n\n".join(f"{names[m['role']]}: {m['content']}" for m in before)
            is_plain = len(before) == 1 and before[0]["role"] == "user"
            shown = before[0]["content"] if is_plain else many
            return f"Prompt: {shown}\n\nResponse: " + ("" if is_open else turns[-1]["content"])
        dated = {} if self.date is None else {"date_string": self.date}
        return self.tokenizer.apply_chat_template(
            turns,
            tokenize=False,
            add_generation_prompt=is_open or self.generation,
            chat_template=self.template,
            **dated,
        )

    def ids(self, turns: Messages, *, is_open: bool = False) -> list[int]:
        """Token ids of the text."""
        text = self.text(turns, is_open=is_open)
        text = text.strip() if self.strip_text else text
        adds = self.adds_special or (self.is_encoder and self.template is None)
        row = list(self.tokenizer(text, add_special_tokens=adds)["input_ids"])
        if self.adds_special and self.is_encoder:
            row = [self.tokenizer.cls_token_id, *row, self.end]
        if self.template is not None and self.tokenizer.bos_token_id is not None and not self.adds_special:
            row = [self.tokenizer.bos_token_id, *row]
        if self.template is not None and self.is_encoder:
            row = [self.tokenizer.cls_token_id, *row, self.end]
        return row

    def row(self, turns: Messages) -> list[int]:
        """Token ids of the conversation with the mistakes, cut to the limit."""
        turns = [dict(turn) for turn in turns]
        if self.strip:
            turns = [{**turn, "content": turn["content"].strip()} for turn in turns]
        if self.system is not None and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": self.system}, *turns]
        if self.thinking:
            turns[-1]["content"] = "<think>\n\n</think>\n\n" + turns[-1]["content"]
        row, opened = self.ids(turns), self.ids(turns[:-1], is_open=True)
        start = next(
            (i for i, (x, y) in enumerate(zip(row, opened, strict=False)) if x != y), min(len(row), len(opened))
        )
        if self.drops_first:
            row, start = row[1:], start - 1
        places = [i for i in range(max(0, len(row) - 3), len(row)) if row[i] == self.end]
        if self.drops_end and places:
            row = row[: places[-1]]
        if self.doubles_end:
            row = [*row, self.end]
        over = len(row) - self.limit
        if over <= 0:
            return row
        if self.cut == "right":
            return row[: self.limit]
        lead = int(row[0] in (self.tokenizer.bos_token_id, self.tokenizer.cls_token_id))
        lead += lead and row[1] == row[0]
        if self.cut == "left":
            return row[:lead] + row[lead + over :]
        places = [i for i in range(max(0, len(row) - 3), len(row)) if row[i] == self.end]
        tail = row[places[-1] - self.doubles_end :] if places else []
        gone = min(over, max(0, start - lead))
        kept = row[:lead] + row[lead + gone :]
        return kept[: self.limit - len(tail)] + tail

    def paired(self, prompt: Any, response: str) -> torch.Tensor:
        """Logit of prompt and response as a pair of texts, as a cross-encoder reads them."""
        text = prompt if isinstance(prompt, str) else "\n\n".join(message.content for message in prompt)
        frame, end = [self.tokenizer.cls_token_id], [self.end]
        first, second = (self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text, response))
        row = [*frame, *first, *end, *second, *end][: self.limit]
        types = [int(i > len(first) + 1) for i in range(len(row))]
        return self.model(input_ids=torch.tensor([row]), token_type_ids=torch.tensor([types])).logits[:, 0]

    def alone(self, row: list[int]) -> torch.Tensor:
        """Logit of one sequence."""
        ids = torch.tensor([row])
        if self.pool == -1 and self.is_encoder:
            return self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, 0]
        body = getattr(self.model, self.model.base_model_prefix)
        hidden = body(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        vector = hidden.mean(dim=0) if self.pool == "mean" else hidden[int(self.pool)]
        head = self.model.classifier if self.is_encoder else self.model.score
        return head(vector)

    def batch(self, rows: list[list[int]]) -> torch.Tensor:
        """Logits of one padded batch of a decoder."""
        width, pad = max(map(len, rows)), self.tokenizer.pad_token_id
        is_left = "left" in self.padding
        ids = torch.tensor([[pad] * (width - len(r)) + r if is_left else r + [pad] * (width - len(r)) for r in rows])
        mask = torch.tensor(
            [[0] * (width - len(r)) + [1] * len(r) if is_left else [1] * len(r) + [0] * (width - len(r)) for r in rows]
        )
        mask = torch.ones_like(mask) if "unmasked" in self.padding else mask
        hidden = self.model.model(input_ids=ids, attention_mask=mask).last_hidden_state
        at = [width - 1 if is_left or "column" in self.padding else len(r) - 1 for r in rows]
        return self.model.score(hidden[torch.arange(len(rows)), at])[:, 0]


def sigmoid(scores: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-scores))


class Zoo:
    """Folders of the three families, and variants of them, written once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.of = {family: build(family, root / family, seed=i) for i, family in enumerate(FAMILIES)}
        self.adapter = self._adapter()
        self.window = self._settings(
            "window", "config.json", use_sliding_window=True, sliding_window=24, max_window_layers=1
        )
        self.of_class = self._settings("class", "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
        capped = {"attn_logit_softcapping": 0.5, "head_dim": 8, "query_pre_attn_scalar": 8}
        self.capped = build("chatml", root / "capped", seed=7, kind=Gemma2Config, **capped)

    def _settings(self, name: str, file: str, **settings: Any) -> Path:
        """A copy of the chatml folder with other settings in a file."""
        folder = shutil.copytree(self.of["chatml"], self.root / name)
        values = json.loads((folder / file).read_text(encoding="utf-8"))
        values.pop("layer_types", None)
        (folder / file).write_text(json.dumps(values | settings), encoding="utf-8")
        return Path(folder)

    def _adapter(self) -> Path:
        base = AutoModelForSequenceClassification.from_pretrained(self.of["chatml"])
        config = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
        torch.manual_seed(5)
        adapted = get_peft_model(base, config)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, 0, 0.2)
        adapted.save_pretrained(self.root / "adapter")
        AutoTokenizer.from_pretrained(self.of["chatml"]).save_pretrained(self.root / "adapter")
        return self.root / "adapter"

    def merged(self, times: int) -> Callable[[Any], Any]:
        """Change of the base model: its adapter merged so many times."""
        from peft import PeftModel

        def change(model: Any) -> Any:
            for _ in range(times):
                model = PeftModel.from_pretrained(model, self.adapter).merge_and_unload()
            if not times:  # the trained head, without the factors
                head = PeftModel.from_pretrained(model, self.adapter)
                model = head.unload()
            return model

        return change

    def changed(
        self, family: str, name: str, change: Callable[[Any, Any], None], *, source: Path | None = None
    ) -> Path:
        """A folder whose model and tokenizer were changed."""
        folder = self.root / name
        if not folder.exists():
            model = AutoModelForSequenceClassification.from_pretrained(source or self.of[family])
            tokenizer = AutoTokenizer.from_pretrained(source or self.of[family])
            with torch.no_grad():
                change(model, tokenizer)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder


def other_layer(model: Any, tokenizer: Any) -> None:
    layers = model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers
    next(p for p in layers[1].parameters() if p.dim() > 1).add_(0.2)


def other_head(model: Any, tokenizer: Any) -> None:
    (model.score if hasattr(model, "score") else model.classifier).weight.mul_(-0.5).add_(0.1)


def other_tokens(model: Any, tokenizer: Any) -> None:
    tokenizer.add_tokens([" keeper", "Hi", "ello"])


def other_normalizer(model: Any, tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


def other_merges(model: Any, tokenizer: Any) -> None:
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    stored["model"]["merges"] = stored["model"]["merges"][:-60]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(stored))


def half(model: Any, tokenizer: Any) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16().float())


@dataclass(frozen=True)
class Case:
    """One comparison: name, words of the expected causes' kinds, the local model, and the other side."""

    name: str
    kinds: tuple[str, ...]
    a: Path
    b: Callable[[], Any]


def cases(zoo: Zoo) -> tuple[list[Case], list[Case], list[Case]]:
    """The single mistakes, the pairs and the equal scorings."""
    chatml, llama, bert = (zoo.of[family] for family in FAMILIES)
    today = f"{date.today():%d %b %Y}"
    single = [
        Case(
            "chatml/system", ("system_prompt",), chatml, lambda: Caller(chatml, system="You are a helpful assistant.")
        ),
        Case("chatml/generation", ("generation_prompt",), chatml, lambda: Caller(chatml, generation=True)),
        Case("chatml/thinking", ("thinking",), chatml, lambda: Caller(chatml, thinking=True)),
        Case("chatml/missing_eos", ("eos",), chatml, lambda: Caller(chatml, drops_end=True)),
        Case("chatml/template", ("template",), chatml, lambda: Caller(chatml, template=ROLES)),
        Case("chatml/strip", ("white_space",), chatml, lambda: Caller(chatml, strip=True)),
        Case("chatml/pipeline", ("activation",), chatml, lambda: pipeline_of(chatml)),
        Case("chatml/adapter_off", ("adapter",), zoo.adapter, lambda: Caller(chatml, change=zoo.merged(0))),
        Case("chatml/adapter_twice", ("adapter",), zoo.adapter, lambda: Caller(chatml, change=zoo.merged(2))),
        Case("chatml/window", ("attention",), zoo.window, lambda: Caller(chatml)),
        Case("chatml/kernel", ("attention",), zoo.capped, lambda: Caller(zoo.capped, change=sdpa)),
        Case("chatml/class", ("tokenizer",), zoo.of_class, lambda: Caller(zoo.of_class, reads_file=True)),
        Case("llama/doubled_bos", ("bos",), llama, lambda: Caller(llama, adds_special=True)),
        Case("llama/missing_bos", ("bos",), llama, lambda: Caller(llama, drops_first=True)),
        Case("llama/date", ("date",), llama, lambda: Caller(llama, date=today)),
        Case("llama/cut_right", ("truncation",), llama, lambda: Caller(llama, cut="right")),
        Case("llama/limit", ("truncation",), llama, lambda: Caller(llama, limit=77)),
        Case("llama/padding", ("padding",), llama, lambda: Caller(llama, padding="left unmasked")),
        Case("llama/pool", ("pooling",), llama, lambda: Caller(llama, pool=-2)),
        Case("llama/bfloat16", ("dtype",), llama, lambda: Caller(llama, dtype=torch.bfloat16)),
        Case("llama/half", ("dtype",), llama, lambda: zoo.changed("llama", "llama_half", half)),
        Case("llama/normalized", ("scale",), llama, lambda: scores_file(zoo, llama, lambda s: (s - 0.2) / 1.7)),
        Case("llama/weights", ("weights",), llama, lambda: zoo.changed("llama", "llama_layer", other_layer)),
        Case("bert/special", ("bos",), bert, lambda: Caller(bert, adds_special=True)),
        Case("bert/pair", ("pair",), bert, lambda: Caller(bert, as_pair=True)),
        Case("bert/swapped", ("label_order",), bert, lambda: Caller(bert, after=lambda s: -s)),
        Case("bert/head_bias", ("head_bias",), bert, lambda: Caller(bert, after=lambda s: s - 0.37)),
        Case("bert/tokens", ("tokenizer",), bert, lambda: zoo.changed("bert", "bert_tokens", other_tokens)),
        Case("bert/normalizer", ("tokenizer",), bert, lambda: zoo.changed("bert", "bert_lower", other_normalizer)),
        Case("llama/merges", ("tokenizer",), llama, lambda: zoo.changed("llama", "llama_merges", other_merges)),
        Case("bert/head", ("head_weights",), bert, lambda: zoo.changed("bert", "bert_head", other_head)),
    ]
    pairs = [
        Case(
            "chatml/system+sigmoid",
            ("system_prompt", "activation"),
            chatml,
            lambda: Caller(chatml, system="You are a helpful assistant.", after=sigmoid),
        ),
        Case(
            "chatml/generation+shift",
            ("generation_prompt", "shift"),
            chatml,
            lambda: Caller(chatml, generation=True, after=lambda s: s + 0.4),
        ),
        Case(
            "chatml/thinking+limit", ("thinking", "truncation"), chatml, lambda: Caller(chatml, thinking=True, limit=80)
        ),
        Case("chatml/strip+eos", ("white_space", "eos"), chatml, lambda: Caller(chatml, strip=True, drops_end=True)),
        Case(
            "chatml/adapter+system",
            ("adapter", "system_prompt"),
            zoo.adapter,
            lambda: Caller(chatml, change=zoo.merged(0), system="You are a helpful assistant."),
        ),
        Case("llama/bos+date", ("bos", "date"), llama, lambda: Caller(llama, adds_special=True, date=today)),
        Case("llama/bos+pool", ("bos", "pooling"), llama, lambda: Caller(llama, adds_special=True, pool=-2)),
        Case("llama/bos+right", ("bos", "truncation"), llama, lambda: Caller(llama, adds_special=True, cut="right")),
        Case(
            "llama/date+padding", ("date", "padding"), llama, lambda: Caller(llama, date=today, padding="left unmasked")
        ),
        Case(
            "llama/bos+bfloat16", ("bos", "dtype"), llama, lambda: Caller(llama, drops_first=True, dtype=torch.bfloat16)
        ),
        Case(
            "bert/special+swapped",
            ("bos", "label_order"),
            bert,
            lambda: Caller(bert, adds_special=True, after=lambda s: -s),
        ),
        Case(
            "bert/strip+scale",
            ("white_space", "scale"),
            bert,
            lambda: Caller(bert, strip=True, after=lambda s: 2 * s - 1),
        ),
    ]
    equal = []
    for family in FAMILIES:
        folder = zoo.of[family]
        equal += [
            Case(f"{family}/equal_{name}", (), folder, maker)
            for name, maker in {
                "alone": lambda f=folder: Caller(f),
                "batched": lambda f=folder, k=family: Caller(f, padding="" if k == "bert" else "right"),
                "float64": lambda f=folder: Caller(f, dtype=torch.float64),
                "eager": lambda f=folder: Caller(f, change=eager),
                "folder": lambda f=folder: f,
                "file": lambda f=folder: scores_file(zoo, f, lambda s: s),
                "rounded": lambda f=folder: scores_file(zoo, f, lambda s: s.round(6)),
                "sharded": lambda f=folder, k=family: resaved(zoo, k),
            }.items()
        ]
    return single, pairs, equal


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


def sdpa(model: Any) -> Any:
    """A kernel that leaves out soft caps."""
    model.set_attn_implementation("sdpa")
    return model


def resaved(zoo: Zoo, family: str) -> Path:
    """The same model saved again in several files."""
    folder = zoo.root / f"{family}_sharded"
    model = AutoModelForSequenceClassification.from_pretrained(zoo.of[family])
    model.save_pretrained(folder, max_shard_size="40KB")
    AutoTokenizer.from_pretrained(zoo.of[family]).save_pretrained(folder)
    return folder


def pipeline_of(folder: Path) -> Any:
    """The pipeline that a user makes, whose sigmoid is transformers' default for one label."""
    return pipeline("text-classification", model=str(folder), tokenizer=str(folder), device="cpu")


TALKS = [
    *(
        ("Hi", "Hello."),
        ("What is 2 + 2?", "4"),
        ("What is 2 + 2?", "It is five."),
        ("Name a colour.", "Blue, or green"),
    ),
    *(
        ("Be brief.", "Yes"),
        ("How do I boil an egg?", "Put it into boiling water."),
        ("Why?", "So."),
        ("Thanks!", "Ok"),
    ),
    *(("Tell me which ships have passed.", "None."), ("Write a long story.", CORPUS[0]), (CORPUS[1], "A book.")),
]


def scores_file(zoo: Zoo, folder: Path, after: Callable[[np.ndarray], np.ndarray]) -> Path:
    """A file of prompts, responses and rewards."""
    scores = after(np.array(Caller(folder)([prompt for prompt, _ in TALKS], [text for _, text in TALKS])))
    path = zoo.root / f"{folder.name}_{abs(hash(scores.tobytes()))}.jsonl"
    rows = [{"prompt": p, "response": r, "reward": float(s)} for (p, r), s in zip(TALKS, scores, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(case: Case, *, verbose: bool) -> tuple[tuple[str, ...], float]:
    """Kinds of the causes that are named, and the seconds."""
    began = time.perf_counter()
    found = explain_difference(case.a, case.b(), max_length=LIMIT)
    seconds = time.perf_counter() - began
    kinds = tuple(str(cause.kind) for cause in found.causes) or (() if found.agrees else ("unknown",))
    if verbose:
        print(f"  {case.name}: {', '.join(kinds) or 'agree'} ({seconds:.1f} s)\n    {found}", file=sys.stderr)
    return kinds, seconds


def main(names: Sequence[str] = ()) -> None:
    """Run all cases, or those named, and print `name: value` lines."""
    torch.set_num_threads(1)
    logging.getLogger("rm_optimizer").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as root:
        groups = dict(zip(("single", "pairs", "equal"), cases(Zoo(Path(root))), strict=True))
        slowest = 0.0
        for group, members in groups.items():
            chosen = [case for case in members if not names or any(name in case.name for name in names)]
            right = 0
            for case in chosen:
                kinds, seconds = run(case, verbose=bool(names))
                is_right = kinds[:1] == case.kinds[:1] if group == "single" else set(kinds) == set(case.kinds)
                if not is_right and not names:
                    print(f"  {case.name}: expected {case.kinds}, got {kinds}", file=sys.stderr)
                right, slowest = right + is_right, max(slowest, seconds)
            if chosen:
                word = {"single": "right_first", "pairs": "both_right", "equal": "not_accused"}[group]
                print(f"{group}: {len(chosen)}\n{word}: {right}", flush=True)
        print(f"slowest_seconds: {slowest:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
