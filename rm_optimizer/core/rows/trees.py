"""Trees of messages, in which the ranked replies to a user's turn are the responses of a k-wise row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rm_optimizer.core.rows.messages import is_empty
from rm_optimizer.core.rows.readers import Report, Row

_MESSAGE = frozenset({"text", "role", "rank", "replies"})


def gather_trees(rows: Iterable[tuple[int, Row]], tree: Mapping[str, str], report: Report) -> Iterator[tuple[int, Row]]:
    """K-wise rows of trees of messages with `role`, `text`, `rank` and `replies`, each at its tree's first row.

    Args:
        rows: numbered rows.
        tree: `{root: column}` where a row holds a whole tree, or `{id: column, parent: column}` where each row is a
            message that names the one it replies to.
        report: function called for trees and messages that cannot be used.
    """
    for number, row in _planted(rows, tree, report) if "parent" in tree else rows:
        root = row if "parent" in tree else row.get(tree["root"])
        shared = {name: value for name, value in row.items() if name not in {*_MESSAGE, *tree.values()}}
        try:
            found = list(_turns(root, ()))
        except (ValueError, RecursionError) as error:
            report(number, str(error) if isinstance(error, ValueError) else "its replies are nested too deeply")
            continue
        if not found:
            report(number, "no turn of the tree has two ranked replies")
        yield from ((number, shared | {"turn": turn} | each) for turn, each in enumerate(found, 1))


def _planted(
    rows: Iterable[tuple[int, Row]], tree: Mapping[str, str], report: Report
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The first messages of all trees, with the replies in place."""
    nodes = {row.get(tree["id"]): (number, {**row, "replies": []}) for number, row in rows}
    for number, node in nodes.values():
        parent = node.get(tree["parent"])
        if not is_empty(parent) and parent in nodes:
            nodes[parent][1]["replies"].append(node)
        elif not is_empty(parent):
            report(number, f"its parent {parent} is no row of the file")
    yield from (numbered for numbered in nodes.values() if is_empty(numbered[1].get(tree["parent"])))


def _turns(node: Any, before: tuple[dict[str, str], ...]) -> Iterator[Row]:
    if not isinstance(node, Mapping) or not isinstance(node.get("text"), str) or not isinstance(node.get("role"), str):
        raise ValueError(f"a message of a tree must have role and text, got {str(node)[:60]}")
    prompt = (*before, {"role": node["role"], "content": node["text"]})
    replies = node.get("replies") or []
    ranked = [reply for reply in replies if not is_empty(reply.get("rank")) and reply.get("role") == "assistant"]
    if len(ranked) > 1:
        responses, ranks = ([reply.get(name) for reply in ranked] for name in ("text", "rank"))
        yield {"prompt": list(prompt), "responses": responses, "ranks": ranks}
    for reply in replies:
        yield from _turns(reply, prompt)
