"""Rendering of generated conversations by published chat templates: tokens equal to transformers' own, and losses.

    python benchmarks/rendering.py --conversations 1000

Each conversation is plain, with tools, with tool calls, with reasoning, or with documents and template arguments. Every
text in it has a word of its own. Each template of `FAMILIES`, which TRL ships, renders it, or refuses it with a reason.
An accepted conversation counts as equal if its tokens are those of `apply_chat_template` on the row as it was
generated, by the template and by the one in which the rule for control tokens is stored. It counts as a silent loss if
a word is missing from the text.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerFast

from rm_optimizer.core.rows.messages import read_messages, response_of
from rm_optimizer.core.rows.prompts import with_context
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.core.tokens.tokenizer import train_tokenizer
from rm_optimizer.core.tokens.written_template import TemplateWriter
from rm_optimizer.errors import ConversationRefused
from rm_optimizer.schema.data import SpecialTokens

FAMILIES = (
    "qwen2_5",
    "qwen3",
    "llama3_1",
    "gemma3",
    "gptoss",
    "glm4moe",
    "deepseekv3",
    "lfm2",
    "nemotron_3_nano",
    "phi3",
)
"""Templates by the names of TRL's files."""
GROUNDED = (
    "{% if documents %}<|start_of_role|>documents<|end_of_role|>{% for document in documents %}"
    "<|document|>{{ document.title }}\n{{ document.text }}{% endfor %}<|end_of_text|>{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
"""Template with documents, in Granite's form."""
KINDS = ("plain", "tools", "calls", "reasoning", "context")
MAX_LENGTH = 16384


class Conversations:
    """Random conversations in which every text has a word that no other text has.

    Args:
        seed: seed of the conversations.
    """

    def __init__(self, seed: int) -> None:
        self._random, self._numbers = Random(seed), count()
        self.words: list[str] = []

    def row(self, kind: str) -> dict[str, Any]:
        """A prompt, a response and what stands beside them, of one of `KINDS`."""
        self.words = []
        turns = [{"role": "user", "content": self._text()}]
        for _ in range(self._random.randrange(3)):
            turns += [{"role": "assistant", "content": self._text()}, {"role": "user", "content": self._text()}]
        if self._random.random() < 0.3:
            turns.insert(0, {"role": "system", "content": self._text()})
        row: dict[str, Any] = {"prompt": turns, "response": [{"role": "assistant", "content": self._text()}]}
        if kind in ("tools", "calls"):
            row["tools"] = [self._tool() for _ in range(self._random.randint(1, 3))]
        if kind == "calls":
            row["response"] = [*self._called(row["tools"]), *row["response"]]
        if kind == "reasoning":
            place = self._random.choice([row["response"][-1], *(t for t in turns if t["role"] == "assistant")])
            place["reasoning_content"] = self._text()
        if kind == "context":
            if self._random.random() < 0.5:
                row["documents"] = [{"title": self._text(), "text": self._text()}]
            else:
                row["chat_template_kwargs"] = {"enable_thinking": self._random.random() < 0.5}
        return row

    def _text(self) -> str:
        word = f"w{next(self._numbers)}q"
        self.words.append(word)
        around = ["Why so?", 'Say "one".', "a\nb", "ünd 中文", "  indented", "{x}", "x < y & z", ""]
        return f"{self._random.choice(around)} {word} {self._random.choice(around)}".strip()

    def _tool(self) -> dict[str, Any]:
        names = [self._name() for _ in range(self._random.randint(1, 3))]
        parameters = {"type": "object", "properties": {}, "required": names[:1]}
        parameters["properties"] = {name: {"type": "string", "description": self._text()} for name in names}
        return {
            "type": "function",
            "function": {"name": self._name(), "description": self._text(), "parameters": parameters},
        }

    def _name(self) -> str:
        self.words.append(name := f"n{next(self._numbers)}q")
        return name

    def _called(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = []
        for _ in range(self._random.randint(1, 2)):
            function, number = self._random.choice(tools)["function"], f"call{next(self._numbers):05}"
            arguments = {name: self._argument() for name in function["parameters"]["properties"]}
            call = {"id": number, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
            content = self._text() if self._random.random() < 0.3 else ""
            turns.append({"role": "assistant", "content": content, "tool_calls": [call]})
            turns.append({"role": "tool", "name": function["name"], "tool_call_id": number, "content": self._text()})
        return turns

    def _argument(self) -> Any:
        return self._random.choice([self._text, lambda: [self._text()], lambda: {"inner": self._text(), "n": 3}])()


def templates() -> dict[str, str]:
    """The templates of `FAMILIES` that an installed TRL ships, and one that reads documents."""
    spec = find_spec("trl")
    places = [] if spec is None else spec.submodule_search_locations or []
    files = {path.stem: path for place in places for path in Path(place, "chat_templates").glob("*.jinja")}
    found = {name: files[name].read_text(encoding="utf-8") for name in FAMILIES if name in files}
    return found | {"grounded": GROUNDED}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """A small tokenizer with the template, completed for training."""
    tokenizer = train_tokenizer(["Why so? Say one. a b x < y"], 300)
    tokenizer.chat_template = template
    TemplateWriter(tokenizer).write_for_training()
    return tokenizer


def outcomes(
    num_conversations: int, seed: int, special_tokens: SpecialTokens = SpecialTokens.keep
) -> Iterator[tuple[str, str, str]]:
    """Template, kind of row and outcome of each: `equal`, `other tokens`, `lost WORD` or `refused: REASON`.

    Args:
        num_conversations: number of conversations.
        seed: their seed.
        special_tokens: rule for control tokens, which the conversations do not hold.
    """
    generated = Conversations(seed)
    plain = {name: tokenizer_of(text) for name, text in templates().items()}
    renderers = {name: ConversationRenderer(deepcopy(tokenizer), MAX_LENGTH) for name, tokenizer in plain.items()}
    for renderer in renderers.values():
        renderer.store_rules(None, special_tokens)
    for number in range(num_conversations):
        kind = KINDS[number % len(KINDS)]
        row = generated.row(kind)
        prompt = with_context(read_messages("prompt", row["prompt"]), row)
        response = response_of(read_messages("response", row["response"]))
        for name, renderer in renderers.items():
            yield name, kind, _outcome(renderer, plain[name], row, prompt, response, generated.words)


def _outcome(
    renderer: ConversationRenderer,
    plain: PreTrainedTokenizerFast,
    row: dict[str, Any],
    prompt: Any,
    response: str,
    words: list[str],
) -> str:
    try:
        text, ids = renderer.text(prompt, response), list(renderer.encode(prompt, response).ids)
    except ConversationRefused as error:
        return f"refused: {error}"
    if lost := next((word for word in words if word not in text), None):
        return f"lost {lost}"
    options = {name: row[name] for name in ("tools", "documents") if name in row} | row.get("chat_template_kwargs", {})
    reasoning = "thinking" if "message.thinking" in str(plain.chat_template) else "reasoning_content"
    turns = [
        {(reasoning if name == "reasoning_content" else name): part for name, part in turn.items()}
        for turn in [*row["prompt"], *row["response"]]
    ]
    own = (each.apply_chat_template(turns, return_dict=True, **options) for each in (plain, renderer.tokenizer))
    return "equal" if all(ids == list(each["input_ids"]) for each in own) else "other tokens"


def main() -> None:
    """Print the counts, by template and in all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--special-tokens", type=SpecialTokens, choices=SpecialTokens, default=SpecialTokens.keep)
    args = parser.parse_args()
    tried = outcomes(args.conversations, args.seed, args.special_tokens)
    found = Counter((name, kind, outcome.split()[0].rstrip(":")) for name, kind, outcome in tried)
    for name in templates():
        accepted = {kind: found[name, kind, "equal"] for kind in KINDS}
        refused = {kind: found[name, kind, "refused"] for kind in KINDS}
        print(f"{name:>18}: " + ", ".join(f"{kind} {accepted[kind]} equal {refused[kind]} refused" for kind in KINDS))
    totals = Counter[str]()
    for (_, _, outcome), number in found.items():
        totals[outcome] += number
    accepted_total = sum(totals[name] for name in ("equal", "other", "lost"))
    print(f"conversations tried: {args.conversations}")
    print(f"template families: {len(templates())}")
    print(f"renderings accepted: {accepted_total}")
    print(f"renderings refused with a reason: {totals['refused']}")
    print(f"token-equal share: {totals['equal'] / max(1, accepted_total):.4f}")
    print(f"silent losses: {totals['lost']}")


if __name__ == "__main__":
    main()
