"""A headless Chromium, driven through chromedriver by the WebDriver protocol."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

AXE = Path(sys.prefix, "axe", "node_modules", "axe-core", "axe.min.js")
"""Script of axe-core, which `make test` fetches from npm."""
IS_INSTALLED = all(map(shutil.which, ("chromium", "chromedriver")))
NEEDS_BROWSER = pytest.mark.skipif(
    not IS_INSTALLED, reason="needs chromium and chromedriver (apt-get install chromium-driver)"
)
NEEDS_AXE = pytest.mark.skipif(
    not (IS_INSTALLED and AXE.is_file()), reason=f"needs chromium-driver, and {AXE}, which make test fetches from npm"
)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run")


class Browser:
    """A session of chromedriver.

    Args:
        address: address of chromedriver.
    """

    def __init__(self, address: str) -> None:
        chrome = {"args": OPTIONS, "binary": shutil.which("chromium")}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}}
        self._address = address
        self._address += f"/session/{self._call('/session', {'capabilities': capabilities})['sessionId']}"

    def _call(self, path: str, body: Any = None, method: str | None = None) -> Any:
        content = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self._address + path, content, method=method)) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self._call("/url", {"url": url})

    def run(self, script: str) -> Any:
        return self._call("/execute/sync", {"script": script, "args": []})

    def keys(self, text: str) -> None:
        actions = [{"type": kind, "value": key} for key in text for kind in ("keyDown", "keyUp")]
        self._call("/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def screen(self, width: int, height: int, scheme: str) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)
        self._devtools("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def _devtools(self, command: str, parameters: dict[str, Any]) -> None:
        self._call("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def names(self) -> list[str]:
        """Accessible names of the buttons and regions, as a screen reader gets them."""
        found = self._call("/elements", {"using": "css selector", "value": "button, [role=region], progress"})
        return [self._call(f"/element/{next(iter(one.values()))}/computedlabel") for one in found]

    def errors(self) -> list[str]:
        """Messages of the console since the last call."""
        return [entry["message"] for entry in self._call("/se/log", {"type": "browser"})]

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("/screenshot")))

    def wait(self, script: str, expected: Any, seconds: float = 20.0) -> None:
        """Wait until a script returns what is expected."""
        end = time.monotonic() + seconds
        while (found := self.run(script)) != expected:
            assert time.monotonic() < end, f"{script}: expected {expected!r}, got {found!r}"
            time.sleep(0.02)

    def violations(self) -> list[str]:
        """Serious and critical findings of axe-core on the page: rule, help and the first element."""
        self.run(f"{AXE.read_text(encoding='utf-8')}; window.axeFound = null; axe.run().then(r => window.axeFound = r)")
        self.wait("return window.axeFound !== null", True)
        found = self.run("return window.axeFound.violations")
        grave = [each for each in found if each["impact"] in ("serious", "critical")]
        return [f"{each['id']}: {each['help']}: {each['nodes'][0]['html']}" for each in grave]

    def close(self) -> None:
        self._call("", method="DELETE")


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """A browser that ends with the block."""
    with subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            port = next(
                found[1] for line in driver.stdout or () if (found := re.search(r"started .* on port (\d+)", line))
            )
            browser = Browser(f"http://127.0.0.1:{port}")
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()


SCREENS = ((390, "light"), (390, "dark"), (1280, "light"), (1920, "dark"))


def assert_sound(page: Path) -> None:
    """Assert that nothing of a page overflows, fails to show, is loaded or writes to the console."""
    loaded = "return performance.getEntriesByType('resource').filter(r => !r.name.startsWith('data:')).length"
    with opened_browser() as browser:
        for width, scheme in SCREENS:
            browser.screen(width, 900, scheme)
            browser.open(page.as_uri())
            assert browser.run("return document.documentElement.scrollWidth") <= width
            assert browser.run("return [...document.images].every(i => i.complete && i.naturalWidth > 0)")
            assert browser.run(loaded) == 0
        assert browser.errors() == []


def assert_accessible(page: Path) -> None:
    """Assert that axe-core finds nothing serious or critical."""
    with opened_browser() as browser:
        for width, scheme in ((390, "light"), (1280, "dark")):
            browser.screen(width, 900, scheme)
            browser.open(page.as_uri())
            assert browser.violations() == []
