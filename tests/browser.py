"""A headless Chromium that shows the router's page, for tests; none where none is installed."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

PATIENCE_SECONDS = 20.0
_TEXT = """
const found = document.querySelector(arguments[0]);
return found?.checkVisibility() ? found.innerText : "";
"""
_ROW = """
return [...document.querySelectorAll(arguments[0] + " tr")].map(
  (row) => [...row.children].map((cell) => cell.innerText.trim()));
"""


@contextmanager
def browser() -> "Iterator[Browser]":
    """One that is ended afterwards; the test is skipped where there is none."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    service = pytest.importorskip("selenium.webdriver.chrome.service")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium with its chromedriver is installed (scripts/setup-browser)")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for argument in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
        "--window-size=1280,800",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ):
        options.add_argument(argument)
    chrome = selenium.Chrome(options=options, service=service.Service(driver))
    try:
        chrome.set_page_load_timeout(PATIENCE_SECONDS)
        yield Browser(chrome)
    finally:
        chrome.quit()


class Browser:
    """What somebody in front of it sees and does."""

    def __init__(self, chrome: "Chrome") -> None:
        self.chrome = chrome

    def open(self, url: str) -> None:
        """A page, with nothing left of those before."""
        self.chrome.get("about:blank")
        self.chrome.get_log("browser")
        self.chrome.get_log("performance")
        self.chrome.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.chrome.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """What one reads there; nothing while it is hidden."""
        return str(self.run(_TEXT, selector))

    def rows(self, table_body: str) -> list[list[str]]:
        found: list[list[str]] = self.run(_ROW, table_body)
        return found

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"the page never showed {what}"
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """What the console has to say since `open`."""
        return [entry["message"] for entry in self.chrome.get_log("browser")]

    def origins(self) -> set[str]:
        """Whom the page has asked for anything since `open`."""
        asked: set[str] = set()
        for entry in self.chrome.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = urlsplit(message["params"]["request"]["url"])
                asked.add(f"{url.scheme}://{url.netloc}")
        return asked - {"about://"}
