"""One browser for all tests of the page; none of them runs where there is no browser."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.server.page.browsing import CHROMIUM


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Start the system's Chromium."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; `apt-get install chromium` brings one")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()
