"""The page `/docs`: Swagger's page, or one sentence in its place without the internet."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse

_OFFLINE = (
    "<p>This page takes its scripts from cdn.jsdelivr.net. Where it stays empty, read "
    '<a href="/openapi.json">/openapi.json</a>, which needs no internet.</p>'
)


def add_api_page(app: FastAPI) -> None:
    """Add the route `/docs`."""
    page = get_swagger_ui_html(openapi_url="/openapi.json", title=app.title).body
    place = b'<div id="swagger-ui">'
    assert place in page, "Swagger's page has the place that its script fills"
    html = bytes(page).replace(place, place + _OFFLINE.encode())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(html)
