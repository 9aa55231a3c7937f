"""A headless Chromium, driven through the WebDriver protocol: there is nothing to install but both."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from tests.installed import installed_once

__all__ = ["Browser", "axe_core", "chromium"]

_PATIENCE_SECONDS: Final = 60.0

_STARTS: Final = 5
"""A driver ends if its port is free in only one of the two families of addresses."""

_AXE: Final = "axe-core@4.14.1"

_KEYS: Final = {"TAB": "\ue004", "ENTER": "\ue007"}


class Browser:
    """One tab."""

    def __init__(self, driver_url: str, binary: str) -> None:
        self._driver_url = driver_url
        options = {
            "binary": binary,
            "args": ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        }
        capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self._request("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{answer['sessionId']}"

    def open(self, url: str) -> None:
        self._request("POST", f"{self._session}/url", {"url": url})

    def reload(self) -> None:
        self._request("POST", f"{self._session}/refresh", {})

    def take_cookies(self, other: Browser) -> None:
        """Become the visitor of another browser; both show a page of the same site."""
        for cookie in other._request("GET", f"{other._session}/cookie"):
            self._request("POST", f"{self._session}/cookie", {"cookie": cookie})

    def click(self, selector: str) -> None:
        self._request("POST", f"{self._element(selector)}/click", {})

    def fill(self, selector: str, text: str) -> None:
        """Type a text into an empty field."""
        self._request("POST", f"{self._element(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Press keys one after the other, such as ``TAB``."""
        codes = [_KEYS.get(key, key) for key in keys]
        moves = [{"type": kind, "value": code} for code in codes for kind in ("keyDown", "keyUp")]
        keyboard = {"type": "key", "id": "keyboard", "actions": moves}
        self._request("POST", f"{self._session}/actions", {"actions": [keyboard]})

    def _element(self, selector: str) -> str:
        using = {"using": "css selector", "value": selector}
        element = self._request("POST", f"{self._session}/element", using)
        (element_id,) = element.values()
        return f"{self._session}/element/{element_id}"

    def text(self, selector: str) -> str:
        """The text of an element; nothing when there is none."""
        script = "return document.querySelector(arguments[0])?.textContent ?? ''"
        return str(
            self._request("POST", f"{self._session}/execute/sync", {"script": script, "args": [selector]})
        )

    def run(self, script: str) -> Any:
        """What a script returns."""
        return self._request("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def resize(self, width: int, height: int) -> None:
        """The size of the page. Set like this because a window has a least width."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        self._request("POST", f"{self._session}/goog/cdp/execute", command)

    def prefer(self, scheme: str) -> None:
        """Prefer the light or the dark colour scheme."""
        command = {
            "cmd": "Emulation.setEmulatedMedia",
            "params": {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        }
        self._request("POST", f"{self._session}/goog/cdp/execute", command)

    def content_width(self) -> int:
        """The width of the page with what one has to scroll to."""
        return int(self.run("return document.documentElement.scrollWidth"))

    def screenshot(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self._request("GET", f"{self._session}/screenshot"))

    def complaints(self) -> list[str]:
        """What the console has shown as an error, blocked content among it."""
        entries = self._request("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def until(
        self, selector: str, *, at_least: int = 0, equals: str | None = None, contains: str = ""
    ) -> str:
        """Wait for an element's text, by length, as a whole or in part, and return it."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            text = self.text(selector)
            if len(text) >= at_least and (equals is None or text == equals) and contains in text:
                return text
            assert time.monotonic() < deadline, f"{selector} still shows {text!r}"
            time.sleep(0.02)

    def until_complaints(self) -> list[str]:
        """Wait until the console shows an error."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (complaints := self.complaints()):
            assert time.monotonic() < deadline, "the console shows no error"
            time.sleep(0.02)
        return complaints

    def address(self) -> str:
        return str(self._request("GET", f"{self._session}/url"))

    def until_address(self, matches: Callable[[str], bool]) -> None:
        """Wait for an address: a click that sends a form may return before the next page is there."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not matches(address := self.address()):
            assert time.monotonic() < deadline, f"the address is still {address}"
            time.sleep(0.02)

    def violations(self, axe: str) -> list[str]:
        """The serious and critical findings of axe-core on this page, each with an example."""
        self._request("POST", f"{self._session}/execute/sync", {"script": f"{axe};", "args": []})
        script = """
            const done = arguments[arguments.length - 1];
            axe.run(document, {resultTypes: ["violations"]}).then((found) => done(
              found.violations.filter((each) => ["serious", "critical"].includes(each.impact))
                .map((each) => `${each.id} (${each.nodes.length}): ${each.nodes[0].html.slice(0, 200)}`)));
        """
        found = self._request("POST", f"{self._session}/execute/async", {"script": script, "args": []})
        return [str(each) for each in found]

    def quit(self) -> None:
        self._request("DELETE", self._session)

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310  the driver on this machine
            self._driver_url + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_SECONDS) as response:  # noqa: S310
                return json.load(response)["value"]
        except urllib.error.HTTPError as refused:
            problem = json.load(refused)["value"]
            raise AssertionError(f"{path}: {problem['error']}: {problem['message']}") from refused


def axe_core() -> str:
    """The script of axe-core, or a skip with the reason."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed: install Node to check the pages with axe-core")
    folder = installed_once(_AXE, [npm, "install", "--silent", "--prefix", ".", _AXE])
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text()


@contextmanager
def chromium() -> Iterator[Browser]:
    """A fresh browser; skips the test where there is none."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium with its driver on this machine: install chromium and chromium-driver")
    with _driver(driver) as address:
        browser = Browser(address, binary)
        try:
            yield browser
        finally:
            browser.quit()


@contextmanager
def _driver(program: str) -> Iterator[str]:
    """Start a driver, and yield its address."""
    for _ in range(_STARTS):
        with subprocess.Popen(
            [program, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if found := re.search(r"started successfully on port (\d+)", line):
                        yield f"http://127.0.0.1:{found[1]}"
                        return
            finally:
                process.kill()
    raise AssertionError(f"the driver ended {_STARTS} times")
