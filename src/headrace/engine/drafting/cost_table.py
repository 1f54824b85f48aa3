"""What a step takes by its verify rows and its requests: measured once, kept in a file, read between its points.

A table belongs to one hardware, model and numerics, which its file names. Read `verify_length.py` next.
"""

import hashlib
import json
import math
import os
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.core.errors import UserError
from headrace.core.strict_json import read_json
from headrace.engine.drafting.verify_length import Seconds

_FORMAT = "headrace-cost-table/1"
_MAX_BYTES = 1 << 20
_MAX_SECONDS = 1e6


@dataclass(frozen=True, kw_only=True)
class CostKey:
    """What a table is valid for: plain text of each, compared as it stands."""

    hardware: str
    model: str
    numerics: str


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Measured seconds on a grid.

    Attributes:
        batches: numbers of requests, rising, the first is 1.
        guesses: verified guesses per request, rising, the first is 0.
        verify: [batches][guesses] seconds of a forward pass and acceptance, rising in both.
        draft: [batches] seconds of guessing for so many requests, rising.
    """

    batches: tuple[int, ...]
    guesses: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    draft: tuple[float, ...]

    def verify_seconds(self, batch: int, rows: int) -> float:
        """Return seconds to verify `rows` rows of `batch` requests, at least one row each.

        Numerics: linear between points of the grid, in guesses per request and in requests, and along the last piece
        beyond them.
        """
        depth = rows / batch - 1
        return _between(self.batches, [_between(self.guesses, row, depth) for row in self.verify], batch)

    def draft_seconds(self, batch: int) -> float:
        """Return seconds that guessing takes."""
        return _between(self.batches, self.draft, batch)

    def step_seconds(self, batch: int) -> Seconds:
        """Return seconds of a step that drafts, by its verify rows."""
        drafting = self.draft_seconds(batch)
        return lambda rows: drafting + self.verify_seconds(batch, rows)

    def plain_seconds(self, batch: int) -> float:
        """Return seconds of a step that does not draft."""
        return self.verify_seconds(batch, batch)


def measure(
    verify: Callable[[int, int], object],
    draft: Callable[[int], object],
    *,
    batches: Sequence[int],
    guesses: Sequence[int],
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measure a table.

    Args:
        verify: runs one verify pass of so many requests with so many guesses each.
        draft: guesses once for so many requests.
        batches: numbers of requests, rising from 1.
        guesses: guesses per request, rising from 0.
        repeats: runs of every point behind one to warm up; the table holds medians.
        clock: seconds.

    Numerics: the points take turns, so that a machine that slows down slows all of them. Seconds are then made to rise
        with guesses (the nearest such values in the sense of least squares), and with requests (running maximum).
    """
    points: dict[tuple[int, int | None], list[float]] = {}
    for turn in range(repeats + 1):
        for batch in batches:
            for depth in (None, *guesses):
                began = clock()
                _ = draft(batch) if depth is None else verify(batch, depth)
                if turn:
                    points.setdefault((batch, depth), []).append(clock() - began)
    medians = {point: statistics.median(samples) for point, samples in points.items()}
    rows = [rising([medians[batch, depth] for depth in guesses]) for batch in batches]
    for above, row in pairwise(rows):
        row[:] = [max(pair) for pair in zip(above, row, strict=True)]
    return CostTable(
        batches=tuple(batches),
        guesses=tuple(guesses),
        verify=tuple(map(tuple, rows)),
        draft=tuple(rising([medians[batch, None] for batch in batches])),
    )


def rising(values: Sequence[float]) -> list[float]:
    """Return the nearest values, by least squares, that never fall: neighbours that fall become their mean."""
    pools: list[list[float]] = []  # sum and count
    for value in values:
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + count]
    return [total / count for total, count in pools for _ in range(int(count))]


def _between(places: Sequence[int], values: Sequence[float], at: float) -> float:
    if len(places) == 1:
        return values[0]
    high = min(max(bisect_right(places, at), 1), len(places) - 1)
    share = (at - places[high - 1]) / (places[high] - places[high - 1])
    return values[high - 1] + share * (values[high] - values[high - 1])


# ------------------------------------------------------------------------------------------------------------- files


def default_path(key: CostKey) -> Path:
    """Return where a table is kept: in the user's cache folder, named by its key."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(root) if root.startswith("/") else Path.home() / ".cache"  # the standard ignores relative ones
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:16]
    return folder / "headrace" / "cost-tables" / f"{digest}.json"


def write_cost_table(path: Path, table: CostTable, key: CostKey) -> None:
    """Write a table so that it is there whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    body: dict[str, Any] = {"format": _FORMAT, "key": asdict(key), **asdict(table)}
    text = json.dumps({**body, "sha256": _digest(body)}, indent=2) + "\n"
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as problem:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(f"cannot write the cost table {path}: {problem.strerror or problem}.") from None


def read_cost_table(path: Path, key: CostKey | None = None) -> CostTable:
    """Read a table.

    Args:
        path: the file.
        key: what it must be valid for; None accepts any, as for a table that was recorded elsewhere.

    Raises:
        UserError: the file is missing, damaged or for something else.
    """
    found = read_json(path, max_bytes=_MAX_BYTES)
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise UserError(f"{path} is not a cost table; format {_FORMAT} is accepted.")
    body = {name: value for name, value in found.items() if name != "sha256"}
    if found.get("sha256") != _digest(body):
        raise UserError(
            f"{path} is damaged: its content does not have the checksum it names; a fresh table is accepted."
        )
    table = _table(body)
    if table is None:
        raise UserError(f"{path} holds no grid of seconds that rise; a table that was measured is accepted.")
    if key is not None and body.get("key") != asdict(key):
        raise UserError(f"{path} was measured for {body.get('key')}; one for {asdict(key)} is accepted.")
    return table


def cached_cost_table(path: Path, key: CostKey, fresh: Callable[[], CostTable]) -> tuple[CostTable, str | None]:
    """Return the table of a file, measured and written if there is none that can be used, and why it was measured.

    A folder that cannot be written costs the next start a measurement, nothing else.
    """
    why = "no table was kept"
    if path.exists():
        try:
            return read_cost_table(path, key), None
        except UserError as problem:
            why = problem.message
    table = fresh()
    try:
        write_cost_table(path, table, key)
    except UserError as problem:
        why = f"{why}; {problem.message}"
    return table, why


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _table(body: dict[str, Any]) -> CostTable | None:
    """Return the table of a file's content, None where that is no grid of seconds that rise."""
    lists = [body.get(name) for name in ("batches", "guesses", "verify", "draft")]
    if not all(isinstance(one, list) for one in lists):
        return None
    batches, guesses, verify, draft = (list(one or ()) for one in lists)
    is_grid = _is_axis(batches, 1) and _is_axis(guesses, 0) and len(verify) == len(batches) == len(draft)
    if not is_grid or not all(isinstance(row, list) and len(row) == len(guesses) for row in verify):
        return None
    if not all(_is_time(row) for row in (draft, *verify, *zip(*verify, strict=True))):
        return None
    return CostTable(
        batches=tuple(batches), guesses=tuple(guesses), verify=tuple(map(tuple, verify)), draft=tuple(draft)
    )


def _is_axis(values: Sequence[Any], first: int) -> bool:
    """Return whether these are whole numbers that rise from `first`."""
    is_whole = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    return is_whole and list(values[:1]) == [first] and all(low < high for low, high in pairwise(values))


def _is_time(values: Sequence[Any]) -> bool:
    """Return whether these are seconds that never fall."""
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    is_sound = is_number and all(math.isfinite(value) and 0 <= value < _MAX_SECONDS for value in values)
    return is_sound and all(low <= high for low, high in pairwise(values))
