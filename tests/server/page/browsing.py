"""A headless Chromium on the page, and what it noticed that it should not have."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, Page

from tests.server.serving import Served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDE, NARROW = (1440, 900), (390, 844)
PATIENCE_MS = 30_000
SETTINGS = {"temperature": 0.8, "maxTokens": 24, "effort": "none", "seed": "7", "mode": "continue", "modeChosen": True}


@dataclass
class Visit:
    """A page in a browser, and the trouble it made: errors on the console, requests to other hosts."""

    page: Page
    base_url: str
    trouble: list[str] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)

    def open(self, path: str = "/") -> Page:
        """Go to a path of the server and wait until the page works."""
        self.page.goto(self.base_url + path)
        self.page.wait_for_selector("body[data-ready]")
        return self.page

    def write(self, text: str) -> None:
        """Send a prompt by keyboard."""
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Control+Enter")

    def until(self, condition: str) -> None:
        """Wait until an expression is true in the page; the page's policy forbids what the driver waits with."""
        eventually(lambda: self.page.evaluate(condition), PATIENCE_MS / 1000)

    def until_answered(self) -> str:
        """Wait until an answer has come and ended; return its text."""
        self.until("!document.querySelector('#transcript').lastElementChild.matches('[aria-busy=true]')")
        self.page.wait_for_selector("#send:visible")
        return self.page.locator(".answer-text").last.text_content() or ""

    def until_xrayed(self) -> None:
        """Wait until the X-ray of the newest answer has all of it."""
        self.until("document.querySelectorAll('.token').length > 0")
        self.until("document.querySelectorAll('.figures div').length >= 3")


def _watch(visit: Visit) -> None:
    page = visit.page
    page.on("console", lambda said: visit.trouble.append(said.text) if said.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: visit.trouble.append(str(error)))

    def requested(request: Any) -> None:
        if not request.url.startswith(visit.base_url):
            visit.trouble.append(f"request to {request.url}")
        if request.method == "POST" and "/v1/" in request.url:
            visit.sent.append(request.post_data_json)

    page.on("request", requested)


@contextmanager
def visiting(
    browser: Browser,
    served: Served,
    size: tuple[int, int] = WIDE,
    *,
    settings: dict[str, Any] | None = None,
    has_key: bool = True,
    **context: Any,
) -> Iterator[Visit]:
    """Open a page of its own: nothing is remembered from others. `settings` go over those of these tests."""
    wanted = {"viewport": {"width": size[0], "height": size[1]}, "locale": "en-US", **context}
    made = browser.new_context(**wanted)
    made.set_default_timeout(PATIENCE_MS)
    stored = json.dumps(json.dumps({**SETTINGS, **(settings or {})}))
    script = f"localStorage.getItem('headrace.settings') ?? localStorage.setItem('headrace.settings', {stored});"
    if has_key:
        script += f"sessionStorage.setItem('headrace.key', {json.dumps(served.api_key)});"
    made.add_init_script(script)
    visit = Visit(made.new_page(), served.base_url)
    _watch(visit)
    try:
        yield visit
    finally:
        made.close()


def eventually(check: Any, seconds: float = 10.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)
