"""What went wrong with the cache on disk: counted always, told once."""

import logging
from collections import Counter
from enum import Enum
from threading import Lock

_LOG = logging.getLogger("headrace.cache")


class Incident(Enum):
    """Kinds of harm; each is a metric, and none changes an answer."""

    SHORT_FILE = "short_file"
    BAD_HEADER = "bad_header"
    BAD_PAYLOAD = "bad_payload"
    EMPTY_FILE = "empty_file"
    WRONG_NAMESPACE = "wrong_namespace"
    MISSING_PAYLOAD = "missing_payload"
    UNINDEXED = "unindexed_payload"
    TORN_END = "torn_end"
    CONFLICT = "conflicting_record"
    CLOCK = "clock_set_back"
    READ_ONLY = "read_only"
    NO_SPACE = "no_space"
    WRITE_ERROR = "write_error"
    READ_ERROR = "read_error"
    BAD_INDEX = "bad_index"
    BUSY = "index_busy"


class Incidents:
    """Owns the counts, and which kinds of which file were told. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[Incident] = Counter()
        self._told: set[tuple[Incident, str]] = set()

    def note(self, kind: Incident, where: str, what: str) -> None:
        """Count an incident; warn unless this kind was told of this place."""
        with self._lock:
            self._counts[kind] += 1
            is_new = (kind, where) not in self._told
            self._told.add((kind, where))
        if is_new:
            _LOG.warning("cache on disk, %s: %s; what is lost is computed again", where, what)

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind came, by its name; kinds that never came are left out."""
        with self._lock:
            return {kind.value: count for kind, count in self._counts.items()}
