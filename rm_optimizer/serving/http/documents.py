"""Page of the API at `/docs`, made from its OpenAPI document; it needs no script and no internet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}pre{background:#f4f4f4;padding:.8em;"
    "overflow:auto}code{font-size:.95em}h3{border-top:1px solid #ddd;padding-top:.8em}"
)


def api_page(document: Mapping[str, Any]) -> str:
    """Page in HTML with the operations of an OpenAPI document by their tags, an example of each and all schemas."""
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            shown = "".join(_operation(f"{method.upper()} {path}", operation, document))
            by_tag.setdefault((operation.get("tags") or ["other"])[0], []).append(shown)
    parts = [f"<h2>{escape(tag)}</h2>{''.join(shown)}" for tag, shown in by_tag.items()]
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    schemas = escape(json.dumps(document.get("components", {}).get("schemas", {}), indent=2, ensure_ascii=False))
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f'</head><body><h1>{title}</h1><p>The same as <a href="/openapi.json">/openapi.json</a>, which tools read.</p>'
        f"{''.join(parts)}<h2>schemas</h2><details><summary>All types in JSON Schema</summary><pre>{schemas}</pre>"
        "</details></body></html>"
    )


def _operation(name: str, operation: Mapping[str, Any], document: Mapping[str, Any]) -> Iterator[str]:
    """Parts of the page about an operation: its description, its request with an example, and its answers."""
    yield f"<h3><code>{escape(name)}</code></h3><p>{escape(operation.get('description', ''))}</p>"
    content = operation.get("requestBody", {}).get("content", {})
    kind = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
    if kind:
        schema = document["components"]["schemas"][kind]
        yield f"<p>Body: <code>{escape(kind)}</code>. {escape(schema.get('description', ''))}</p>"
        for example in schema.get("examples", ()):
            yield f"<pre>{escape(json.dumps(example, indent=2, ensure_ascii=False))}</pre>"
    yield f"<p>Answers: {escape(', '.join(operation.get('responses', {})))}</p>"
