"""What a run says while it goes on: a line a person can read, a JSON line per step, TensorBoard files if installed.

Nothing here prints; `cli/train.py` shows the lines.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from headrace.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a run goes: share of it that is done, its steps and tokens, tokens and seconds of this process."""

    share: float
    step: int
    last_step: int | None
    tokens: int
    tokens_here: int
    share_here: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained on per second since this process began to train."""
        return self.tokens_here / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the end at this pace; None before anything is done."""
        if self.share_here <= 0:
            return None
        return (1.0 - self.share) * self.seconds / self.share_here


def progress_line(pace: Pace, loss: float, bits_per_byte: float | None) -> str:
    """Return e.g. `step 120/600 | 368,640 tokens | loss 2.345 | 2.910 bits/byte | 8,123 tokens/s | 3:12 left`."""
    steps = f"step {pace.step}" if pace.last_step is None else f"step {pace.step}/{pace.last_step}"
    parts = [steps, f"{pace.tokens:,} tokens", f"loss {loss:.3f}"]
    if bits_per_byte is not None:
        parts.append(f"{bits_per_byte:.3f} bits/byte")
    parts.append(f"{pace.tokens_per_second:,.0f} tokens/s")
    left = pace.seconds_left
    parts.append("time left unknown" if left is None else f"{clock(left)} left")
    return " | ".join(parts)


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds as 1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def evaluation_line(step: int, values: Mapping[str, float]) -> str:
    """Return e.g. `after step 300: held_out_loss 3.210, accuracy.pairs 0.981`."""
    return f"after step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())


class MetricsSink(Protocol):
    """Takes records of a run."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Keep one record; it has a `type` and a `step`."""

    def close(self) -> None:
        """Write out what is held back."""


class MetricsFile:
    """One JSON document per line; a run that resumes goes on in the same file.

    State: the file. Lines of steps after the resumed one, from a run that was killed, are removed first.
    """

    def __init__(self, path: Path, *, resumed_step: int | None) -> None:
        """Open the file, new or behind the lines of the steps up to `resumed_step`.

        Raises:
            UserError: it cannot be written.
        """
        partial = path.with_name(f"{path.name}.partial")
        try:
            kept = [] if resumed_step is None or not path.exists() else _lines_up_to(path, resumed_step)
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as problem:
            with suppress(OSError):
                partial.unlink()
            raise UserError(f"cannot write {path}: {problem.strerror or problem}.", param="out") from None
        self._path = path

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; numbers that JSON does not know become null.

        Raises:
            UserError: the file cannot be written.
        """
        try:
            self._file.write(json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as problem:
            raise UserError(f"cannot write {self._path}: {problem.strerror or problem}.", param="out") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines_up_to(path: Path, step: int) -> list[str]:
    """Return the whole lines of steps up to `step`; a last line that was cut off is dropped."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and isinstance(record, dict) and record.get("step", 0) <= step:
            kept.append(line)
    return kept


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


class TensorBoardFile:
    """The numbers of every record as TensorBoard scalars."""

    def __init__(self, folder: Path, *, resumed_step: int | None) -> None:
        """Open a file of events in a folder; `is_available` says whether that is possible.

        Events of steps after the resumed one, from a run that was killed, are no longer shown.
        """
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  # an optional package

        self._writer: Any = SummaryWriter(str(folder), purge_step=None if resumed_step is None else resumed_step + 1)

    @staticmethod
    def is_available() -> bool:
        """Whether the tensorboard package is installed."""
        return find_spec("tensorboard") is not None

    def write(self, record: Mapping[str, Any]) -> None:
        """Add every number of the record."""
        for name, value in _flat(record):
            if name != "step" and isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value):
                self._writer.add_scalar(f"{record['type']}/{name}", value, record["step"])

    def close(self) -> None:
        """Write out and close."""
        self._writer.close()


def _flat(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in record.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found
