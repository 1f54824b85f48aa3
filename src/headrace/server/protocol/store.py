"""Responses that are kept for later: to be read again, and to be gone on from with `previous_response_id`."""

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from headrace.server.errors import NotFound

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Stored:
    """A finished response, whose it is, and the items of its conversation up to and with it."""

    tenant: str | None
    response: dict[str, Any]
    items: list[dict[str, Any]]
    num_bytes: int


class ResponseStore:
    """Keeps the newest responses in memory. May be used from many threads."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def put(self, tenant: str | None, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response; the oldest go where there are too many. One that is too large alone is not kept."""
        num_bytes = len(json.dumps(items)) + len(json.dumps(response))
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            self._kept[response["id"]] = Stored(tenant, response, items, num_bytes)
            self._bytes += num_bytes
            while len(self._kept) > self._max_responses or self._bytes > self._max_bytes:
                _, gone = self._kept.popitem(last=False)
                self._bytes -= gone.num_bytes

    def get(self, tenant: str | None, response_id: str, param: str = "response_id") -> Stored:
        """Return a response.

        Raises:
            NotFound: there is none of that id, or it is somebody else's.
        """
        with self._lock:
            found = self._kept.get(response_id)
        if found is None or found.tenant != tenant:
            raise NotFound(
                f"there is no response {response_id[:100]!r}; accepted are those that were stored, the newest "
                f"{self._max_responses}",
                param=param,
            )
        return found

    def delete(self, tenant: str | None, response_id: str) -> None:
        """Forget a response.

        Raises:
            NotFound: there is none of that id.
        """
        found = self.get(tenant, response_id)
        with self._lock:
            if self._kept.pop(response_id, None) is not None:
                self._bytes -= found.num_bytes
