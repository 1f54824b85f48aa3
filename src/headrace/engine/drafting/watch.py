"""How honest confidences are in service: what was predicted of the newest guesses against what became of them."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from headrace.engine.drafting.temperatures import calibration_error

WINDOW = 2048


class CalibrationWatch:
    """Keeps (predicted survival, kept) of the newest `window` guesses that were judged, places and requests mixed."""

    def __init__(self, window: int = WINDOW) -> None:
        self._judged: deque[tuple[float, bool]] = deque(maxlen=window)

    def __len__(self) -> int:
        """Return the number of guesses that are kept."""
        return len(self._judged)

    def add(self, chances: Sequence[float], num_kept: int) -> None:
        """Take one round of one sequence: of the guesses with these chances the first `num_kept` stayed."""
        self._judged.extend((chance, place < num_kept) for place, chance in enumerate(chances))

    def error(self) -> float | None:
        """Return the calibration error as `temperatures` defines it; None without any guess."""
        if not self._judged:
            return None
        predicted, kept = zip(*self._judged, strict=True)
        return calibration_error(np.array(predicted, dtype=np.float64), np.array(kept, dtype=np.bool_))
