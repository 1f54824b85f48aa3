"""Real servers, one of each kind for all tests that do not change it."""

from collections.abc import Iterator

import pytest

from tests.server.inside import Inside, inside
from tests.server.serving import Served, serving


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Serve headrace-nano behind an API key, in a process of its own."""
    with serving("--api-key", "test-key", api_key="test-key") as found:
        yield found


@pytest.fixture(scope="session")
def opened() -> Iterator[Inside]:
    """Serve headrace-nano without a key from this process, so that a test can look into it; four slots, eight wait."""
    with inside(keep_alive_s=0.1, max_waiting=8) as found:
        yield found


@pytest.fixture(scope="session")
def hasty() -> Iterator[Inside]:
    """Serve, in this process, for four connections that say soon what they want and take soon what they get."""
    limits = {"head_timeout_s": 0.3, "body_timeout_s": 0.2, "stall_timeout_s": 0.5, "max_connections": 4}
    with inside(keep_alive_s=0.1, send_buffer=4096, **limits) as found:
        yield found
