"""A headless Chromium, driven by WebDriver: what a person does at a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of WebDriver's that an element's number has."""
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")


class Page:
    def __init__(self, address: str) -> None:
        self._address = address
        options = {"binary": BROWSER, "args": ["--headless=new", "--no-sandbox", "--disable-gpu",
                                               "--disable-dev-shm-usage", "--window-size=900,900"]}
        found = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}})
        self._address += f"/session/{found['sessionId']}"

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"},
                                         method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def _element(self, css: str) -> str:
        return str(self._ask("POST", "/element", {"using": "css selector", "value": css})[ELEMENT])

    def type(self, css: str, text: str) -> None:
        """In place of what is there."""
        element = self._element(css)
        self._ask("POST", f"/element/{element}/clear")
        self._ask("POST", f"/element/{element}/value", {"text": text})

    def click(self, css: str) -> None:
        self._ask("POST", f"/element/{self._element(css)}/click")

    def text(self, css: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", css))

    def wait_for(self, css: str, pattern: str) -> str:
        deadline = time.monotonic() + 20
        while not re.search(pattern, self.text(css)):
            assert time.monotonic() < deadline, (css, self.text(css))
            time.sleep(0.05)
        return self.text(css)

    def complaints(self) -> list[str]:
        """Of the browser's console."""
        return [line["message"] for line in self._ask("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._ask("DELETE", "")


@contextmanager
def browser() -> Iterator[Page]:
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        try:
            port = next(match[1] for line in driver.stdout if (match := re.search(r"successfully on port (\d+)", line)))
            page = Page(f"http://127.0.0.1:{port}")
            try:
                yield page
            finally:
                page.close()
        finally:
            driver.terminate()
