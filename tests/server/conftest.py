"""A real server in a process of its own, one for all tests that do not change it."""

from collections.abc import Iterator

import pytest

from tests.server.serving import Served, serving


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Serve headrace-nano behind an API key."""
    with serving("--api-key", "test-key", api_key="test-key") as found:
        yield found
