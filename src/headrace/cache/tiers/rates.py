"""Is loading faster than computing? Answered by what both took so far, never by a guess."""

from threading import Lock

_WEIGHT = 0.3  # of the newest measurement
_TRY_AGAIN = 16  # refusals after which a slow source is measured once more


class Rate:
    """Units per second, smoothed; None until something was measured. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._value: float | None = None

    @property
    def value(self) -> float | None:
        """The rate."""
        return self._value

    def note(self, units: float, seconds: float) -> None:
        """Take one measurement in."""
        if units <= 0 or seconds <= 0:
            return
        new = units / seconds
        with self._lock:
            self._value = new if self._value is None else (1 - _WEIGHT) * self._value + _WEIGHT * new


class LoadRule:
    """Decides whether a load pays. Owns the two rates and how often it said no."""

    def __init__(self) -> None:
        self.load_bytes = Rate()
        self.prefill_rows = Rate()
        self.refused = 0
        self._in_a_row = 0

    def pays(self, nbytes: int, rows: int) -> bool:
        """Say whether reading `nbytes` is faster than computing `rows` rows; what was never measured is tried."""
        load, prefill = self.load_bytes.value, self.prefill_rows.value
        if rows <= 0:
            return False
        if load is None or prefill is None or nbytes / load < rows / prefill or self._in_a_row >= _TRY_AGAIN:
            self._in_a_row = 0
            return True
        self.refused += 1
        self._in_a_row += 1
        return False
