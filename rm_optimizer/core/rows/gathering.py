"""K-wise rows gathered from tables of single responses, and from trees of messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rm_optimizer.core.rows.columns import CONTEXT_COLUMNS, OPTIONAL_COLUMNS, UNREAD_COLUMNS, read_number
from rm_optimizer.core.rows.messages import has_messages, is_empty, parsed, require_text
from rm_optimizer.core.rows.readers import Report, Row, each

SINGLE_RESPONSE = frozenset({"response", "score"})
"""Columns of a table with one response a row, which `gather_responses` turns into lists."""
PER_RESPONSE = "(per response)"
"""Name of the values of each response in a gathered row, which no column of a file has."""
_MESSAGE = frozenset({"text", "role", "rank", "replies"})


def gather_responses(
    rows: Iterable[tuple[int, Row]], report: Report, by: Iterable[str] = ()
) -> Iterator[tuple[int, Row]]:
    """K-wise rows of a table with one response and score a row: rows of one prompt become one, at the first's number.

    A prompt is all that the model reads before the response, so columns of context decide with `prompt` which rows
    belong together. Other columns that differ within a prompt go to `PER_RESPONSE`, so that each pair can tell both
    values.

    Args:
        rows: numbered rows with `prompt`, `response` and `score`.
        report: function called for rows without a usable response or score, of which the others of their prompt still
            count, and for the first row of a prompt whose rows differ in a number of the pair.
        by: further columns whose values rows of one prompt must share to belong together.
    """

    def entry(row: Row) -> Row:
        if not has_messages(row.get("response")):
            require_text("response", row.get("response"))
        return row | {"score": read_number("score", row.get("score"))}

    groups: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    context = ("prompt", *sorted({*CONTEXT_COLUMNS, *UNREAD_COLUMNS}), *by)
    for number, row in each(rows, entry, report):
        whole = tuple("" if is_empty(row.get(name)) else repr(row[name]) for name in context)
        groups.setdefault(whole, []).append((number, row))
    for members in groups.values():
        number, first = members[0]
        columns = {name: [row.get(name) for _, row in members] for name in first if name != "prompt"}
        listed = {"responses": columns.pop("response"), "scores": columns.pop("score")}
        differing = {name: cells for name, cells in columns.items() if cells.count(cells[0]) < len(cells)}
        if of_pairs := differing.keys() & OPTIONAL_COLUMNS:
            report(number, f"the rows of its prompt differ in {min(of_pairs)}, which is one number for all of them")
        else:
            shared = {name: first[name] for name in columns if name not in differing}
            yield number, shared | {"prompt": first.get("prompt"), **listed, PER_RESPONSE: differing}


def gather_trees(rows: Iterable[tuple[int, Row]], tree: Mapping[str, str], report: Report) -> Iterator[tuple[int, Row]]:
    """K-wise rows of trees of messages with `role`, `text`, `rank` and `replies`, each at its tree's first row.

    Args:
        rows: numbered rows.
        tree: `{root: column}` where a row holds a whole tree, or `{id: column, parent: column}` where each row is a
            message that names the one it replies to.
        report: function called for trees and messages that cannot be used.
    """

    def groups(row: Row) -> list[Row]:
        shared = {name: value for name, value in row.items() if name not in {*_MESSAGE, *tree.values()}}
        found = list(_turns(parsed(row.get(tree["root"])) if "root" in tree else row, ()))
        if not found:
            raise ValueError("no turn of the tree has two ranked replies")
        return [shared | {"turn": turn} | group for turn, group in enumerate(found, 1)]

    planted = rows if "root" in tree else _planted(rows, tree, report)
    yield from ((number, group) for number, found in each(planted, groups, report) for group in found)


def _planted(rows: Iterable[tuple[int, Row]], tree: Mapping[str, str], report: Report) -> Iterator[tuple[int, Row]]:
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
