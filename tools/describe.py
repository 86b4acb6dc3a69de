"""Tables of the manual that are made from the code: options with defaults and meanings, and public names.

`python tools/describe.py` in the checkout writes them between two marks in the files listed here.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import MISSING as UNSET
from omegaconf import OmegaConf

from rm_optimizer import PUBLIC_MODULES
from rm_optimizer.schema.checks import in_words
from rm_optimizer.schema.composition import GROUPS, config_root
from rm_optimizer.schema.config import TrainConfig
from rm_optimizer.schema.diagnose import LIBRARIES, counterparts
from rm_optimizer.schema.landscape import AnalyzeConfig
from rm_optimizer.schema.optimizers import OPTIMIZER_OPTIONS, OptimizerConfig

BEGIN = "<!-- made by tools/describe.py: begin -->"
END = "<!-- end -->"
SCALED = re.compile(r"\$\{(peak_lr|by_adapter):([^,]+),([^}]+)\}")


def option_reference() -> str:
    """Tables of the options of a run, of an analysis and of each group."""
    groups: Mapping[str, type] = {"optimizer": OptimizerConfig, **GROUPS}
    parts = [
        _table("Options of a run", _rows("", TrainConfig, groups)),
        _table("Options of an analysis", _rows("", AnalyzeConfig, groups)),
    ]
    parts += [_table(f"Options of `{name}`", _rows(f"{name}.", kind)) for name, kind in sorted(groups.items())]
    return "\n".join(parts)


def optimizer_reference() -> str:
    """Tables of each registered optimizer's own options, with the values of its preset and the memory of its state."""
    from rm_optimizer.optim import OPTIMIZERS  # needs torch

    parts = []
    for name, kind in OPTIMIZER_OPTIONS.items():
        size = OPTIMIZERS[name].state_bytes_per_param
        amount = f"{size:g} bytes" if size else "Less than a byte"
        text = f"{kind.__doc__} {amount} of state for each weight of a hidden matrix."
        parts.append(_table(f"`optimizer={name}`", _optimizer_rows(name, kind), " ".join(text.split())))
    return "\n".join(parts)


def public_names() -> str:
    """Table of the names of `rm_optimizer` with meanings, and for each other module a table of its further names."""
    described: set[str] = set()
    parts = []
    for module in PUBLIC_MODULES:
        loaded = import_module(module)
        again = [f"`{name}`" for name in loaded.__all__ if name in described]
        rows = [f"| `{name}` | {_meaning(getattr(loaded, name))} |" for name in loaded.__all__ if name not in described]
        parts += [f"**`{module}`**" + (f", beside {', '.join(again)}" if again and rows else ""), ""]
        parts += ["| name | meaning |", "| --- | --- |", *rows, ""] if rows else [", ".join(again), ""]
        described |= set(loaded.__all__)
    return "\n".join(parts)


def coming_from() -> str:
    """Table of other libraries' options beside ours."""
    head = [f"| here | meaning | {' | '.join(LIBRARIES)} |", "| --- " * (2 + len(LIBRARIES)) + "|"]
    return "\n".join(
        [
            *head,
            *(
                f"| `{row['ours']}` | {row['meaning']} | "
                + " | ".join(", ".join(f"`{name}`" for name in row[library].split()) for library in LIBRARIES)
                + " |"
                for row in counterparts()
            ),
        ]
    )


def _meaning(value: Any) -> str:
    """First sentence of a docstring; for a dictionary, its keys."""
    if isinstance(value, Mapping):
        return ", ".join(f"`{key}`" for key in value)
    paragraph = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".").replace("|", "\\|")


REFERENCES: Mapping[str, Callable[[], str]] = {
    "docs/coming-from.md": coming_from,
    "docs/optimizers.md": optimizer_reference,
    "docs/options.md": option_reference,
    "docs/public-names.md": public_names,
}
"""Functions that make the tables, by file."""


def write_references(root: Path) -> None:
    """Replace the text between the marks in each file of a checkout."""
    for name, reference in REFERENCES.items():
        before, _, rest = (root / name).read_text(encoding="utf-8").partition(BEGIN)
        text = f"{before}{BEGIN}\n{reference()}\n{END}{rest.partition(END)[2]}"
        (root / name).write_text(text, encoding="utf-8")


def _table(title: str, rows: Iterator[tuple[str, ...]], text: str = "") -> str:
    lines = [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in rows]
    head = [f"### {title}", "", *([text, ""] if text else [])]
    return "\n".join([*head, "| option | default | range | meaning |", "| --- | --- | --- | --- |", *lines, ""])


def _rows(prefix: str, kind: type, skip: Collection[str] = ()) -> Iterator[tuple[str, ...]]:
    texts, hints = field_docs(kind), get_type_hints(kind)
    for item in fields(kind):
        if item.name in skip:
            continue
        if is_dataclass(hints[item.name]):
            yield from _rows(f"{prefix}{item.name}.", hints[item.name])
        else:
            allowed = in_words(item.metadata["interval"]) if "interval" in item.metadata else ""
            yield f"{prefix}{item.name}", _default(item), allowed, texts.get(item.name, "").replace("|", "\\|")


def _optimizer_rows(name: str, kind: type) -> Iterator[tuple[str, ...]]:
    preset = OmegaConf.to_container(OmegaConf.load(Path(config_root(), "optimizer", f"{name}.yaml")))
    assert isinstance(preset, dict), "a preset is a mapping"
    shared = {item.name for item in fields(OptimizerConfig)} - set(preset)
    for option, default, *cells in _rows("optimizer.", kind, shared):
        own = option.removeprefix("optimizer.")
        yield option, _preset_value(preset[own]) if own in preset else default, *cells


def _preset_value(value: object) -> str:
    """A preset's value in words: the option that a factor scales, and the value with an adapter."""
    scaled = SCALED.fullmatch(str(value))
    if scaled is None:
        return _shown(value)
    full, lora = (f"{float(number):g}" for number in scaled.groups()[1:])
    if scaled[1] == "peak_lr":
        return f"{full} × `model.adamw_lr`; with an adapter {lora} × `model.lora_lr`"
    return f"`{full}`; with an adapter `{lora}`"


def _default(item: Field[Any]) -> str:
    value = item.default_factory() if item.default_factory is not MISSING else item.default
    return "preset" if value == UNSET or value is MISSING else _shown(value)


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return f"`{value.value}`"
    return "null" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def field_docs(kind: type) -> dict[str, str]:
    """Docstring under each field of a dataclass; a field redefined without one keeps its base's."""
    found: dict[str, str] = {}
    for base in reversed([part for part in kind.__mro__ if is_dataclass(part)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef), "a dataclass is a class"
        for before, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(before.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found[before.target.id] = " ".join(str(after.value.value).split())
    return found


if __name__ == "__main__":
    write_references(Path.cwd())
