"""How a server is set up, checked once."""

import ipaddress
import math
from dataclasses import dataclass

from headrace.core.errors import UserError

_SECONDS = ("head_timeout_s", "body_timeout_s", "stall_timeout_s", "keep_alive_s", "engine_wait_s", "ready_cache_s")
_LOOPBACK_NAMES = frozenset({"localhost", "localhost.localdomain"})


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of one server.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        api_keys: a request must carry one of them; empty asks for none. With several, each has a cache of its own.
        max_waiting: requests that may wait for a place in the engine; one more is refused with 429.
        max_body_bytes: bytes of a request's body; a larger one is refused with 413.
        max_connections: connections at once; what comes on more is refused with 503.
        max_images: images of one request; max_image_bytes: bytes of one of them, encoded.
        allow_image_urls: whether images are fetched from http(s) addresses.
        request_timeout_s: seconds after which a request is given up, None for never.
        head_timeout_s: seconds in which a new connection must ask for something, line and headers.
        body_timeout_s: seconds in which a request's body must arrive.
        stall_timeout_s: seconds that a client may take to accept a part of an answer.
        keep_alive_s: seconds of silence after which a stream gets a comment.
        engine_wait_s: seconds that a request waits for an engine that is started again.
        ready_cache_s: seconds for which `/ready` believes the newest decoded token.
        cors_origins: origins whose pages may call; empty allows none but the server's own.
        logs_prompts: whether log lines hold the text of prompts.
        default_temperature: where a request names none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 128
    max_body_bytes: int = 32 << 20
    max_connections: int = 1024
    max_images: int = 16
    max_image_bytes: int = 16 << 20
    allow_image_urls: bool = False
    request_timeout_s: float | None = None
    head_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    stall_timeout_s: float = 60.0
    keep_alive_s: float = 1.0
    engine_wait_s: float = 20.0
    ready_cache_s: float = 2.0
    cors_origins: tuple[str, ...] = ()
    logs_prompts: bool = False
    default_temperature: float = 1.0

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            UserError: a value is out of range.
        """
        if not self.host:
            raise UserError("host is empty; accepted is an address or a name, such as 127.0.0.1", param="host")
        _whole("port", self.port, 0, 65_535)
        for name in ("max_waiting", "max_body_bytes", "max_connections", "max_image_bytes"):
            _whole(name, getattr(self, name), 1)
        _whole("max_images", self.max_images, 0)
        for name in _SECONDS:
            _seconds(name, getattr(self, name))
        if self.request_timeout_s is not None:
            _seconds("request_timeout_s", self.request_timeout_s)
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise UserError(
                    "an API key is empty or holds a character that a header cannot carry; accepted are printable "
                    "ASCII characters without spaces at the ends",
                    param="api_key",
                )
        if len(set(self.api_keys)) < len(self.api_keys):
            raise UserError("an API key is given twice; accepted is each key once", param="api_key")
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise UserError(
                    f"cors origin {origin!r} is not understood; accepted is 'https://host' or '*'", param="cors_origin"
                )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address means this machine and nothing else."""
    if host.lower().rstrip(".") in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = "" if high is None else f" to {high}"
        raise UserError(f"{name} is {value!r}; accepted is a whole number from {low}{limit}", param=name)


def _seconds(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise UserError(f"{name} is {value!r}; accepted is a number of seconds above 0", param=name)
