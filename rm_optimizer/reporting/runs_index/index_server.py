"""Server of the index and the pages of its runs and studies, for this machine only; it writes no files."""

from __future__ import annotations

import re
from http import HTTPStatus
from pathlib import Path
from threading import Lock

from rm_optimizer.errors import RMOptimizerError
from rm_optimizer.reporting.pages.exhibits import Exhibits
from rm_optimizer.reporting.pages.folder_page import folder_page
from rm_optimizer.reporting.pages.html import page, paragraph
from rm_optimizer.reporting.runs_index.index_page import SPARKLINE, as_name, index_page, sparkline
from rm_optimizer.reporting.runs_index.listing import ListedFolder, Listing
from rm_optimizer.serving.http.local_pages import HOST, LocalHandler, LocalServer, page_policy

_PAGE, _SVG = "text/html; charset=utf-8", "image/svg+xml"
_DRAWN_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Content policy of pages with figures, whose elements have inline styles; these pages have no script."""


class IndexServer(LocalServer):
    """Index of a folder on a port of this machine.

    Only folders in the current list have a page, so no address leads to other folders.

    Args:
        root: the folder.
        port: port; 0 takes a free one.

    Raises:
        ConfigError: if the port is taken.
    """

    def __init__(self, root: Path, port: int = 0) -> None:
        self.listing = Listing(root)
        self._lock = Lock()
        super().__init__(_Handler, port)

    @property
    def url(self) -> str:
        """Address of the index, with its token."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def index(self) -> str:
        """The index of the folder's current contents."""
        with self._lock:
            return index_page(self.listing.root, self.listing.look(), self.listing.num_passed)

    def listed(self, name: str) -> ListedFolder | None:
        """A run or study of the list; None for any other name."""
        with self._lock:
            if not self.listing.entries:
                self.listing.look()
            return self.listing.entries.get(name)

    def page_of(self, name: str) -> str:
        """The page of a listed folder or the reason why there is none, with a link back to the index."""
        with self._lock:  # matplotlib's settings are global
            try:
                shown = folder_page(self.listing.root / name, Exhibits())
            except (RMOptimizerError, OSError) as error:
                shown = page(name or ".", [paragraph(f"There is no page: {error}.")])
        return shown.replace("<main>", '<main><p><a href="../../">All runs and studies</a></p>', 1)


class _Handler(LocalHandler):
    server: IndexServer

    def do_GET(self) -> None:
        found = re.fullmatch(r"/([^/?#]+)/(?:folder/([^/?#]+)/([^/?#]*))?", self.path)
        if not self.is_own_request or found is None or not self.server.is_token(found[1]):
            self._refuse(HTTPStatus.FORBIDDEN, "open the address that rm-opt report printed")
        elif found[2] is None:
            content = self.server.index().encode("utf-8", "backslashreplace")
            self.send_content(HTTPStatus.OK, _PAGE, content, page_policy(content, {"img-src": "'self' data:"}))
        else:
            self._folder(as_name(found[2]), found[3])

    def _folder(self, name: str, part: str) -> None:
        listed = self.server.listed(name)
        if listed is None or part not in ("", SPARKLINE):
            self._refuse(HTTPStatus.NOT_FOUND, "no such run or study; reload the index")
        elif part == SPARKLINE:
            drawn = sparkline(self.server.listing.root / name).encode()
            self.send_content(HTTPStatus.OK, _SVG, drawn, _DRAWN_POLICY)
        else:
            content = self.server.page_of(name).encode("utf-8", "backslashreplace")
            self.send_content(HTTPStatus.OK, _PAGE, content, _DRAWN_POLICY)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.send_content(status, "text/plain; charset=utf-8", f"{why}\n".encode(), "default-src 'none'")
