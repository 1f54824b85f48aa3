"""Sequential temperature scaling: one temperature per place of the block makes a draft's confidences honest.

For k = 1 .. X in order, T_k is the one of 41 temperatures, evenly spaced in their logarithm from 0.1 to 10, with the
smallest calibration error of the cumulative products sigmoid(z_1 / T_1) ... sigmoid(z_k / T_k) against "the first k
guesses were kept", earlier temperatures fixed.

Calibration error: the products fall into 15 bins of equal width (bin floor(15 a), 1 into the last). It is the sum over
bins of the rows' share times |mean product - share kept|.

Source: serving.md section 5.2, training.md section 7.3.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import UserError
from headrace.core.strict_json import read_json

TEMPERATURES_NAME = "draft_temperatures.json"
"""Stands beside the draft that it belongs to."""

NUM_BINS = 15
GRID = np.logspace(-1, 1, 41)
_FORMAT = "headrace-draft-temperatures/1"
_MAX_BYTES = 1 << 20

Floats = NDArray[np.float64]


def survival_of(logits_RX: Floats, temperatures: Floats | tuple[float, ...]) -> Floats:
    """Return the cumulative products, [R, X]."""
    return np.asarray(np.cumprod(_sigmoid(logits_RX / np.asarray(temperatures)), axis=1), dtype=np.float64)


def calibration_error(predicted_R: Floats, kept_R: NDArray[np.bool_]) -> float:
    """Return the expected calibration error as defined above; 0 without rows."""
    if not len(predicted_R):
        return 0.0
    bins = np.minimum((predicted_R * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gaps = np.bincount(bins, predicted_R - kept_R, NUM_BINS)
    return float(np.abs(gaps).sum() / len(predicted_R))


def calibration_errors(survival_RX: Floats, kept_RX: NDArray[np.bool_]) -> list[float]:
    """Return the error of every place, [X]."""
    return [calibration_error(survival_RX[:, k], kept_RX[:, k]) for k in range(survival_RX.shape[1])]


def fit(logits_RX: Floats, kept_RX: NDArray[np.bool_]) -> tuple[float, ...]:
    """Return the temperatures, one per place; of equally good ones the smaller.

    Args:
        logits_RX: [R, X] raw confidences.
        kept_RX: [R, X] whether this guess and all before it were kept.
    """
    before = np.ones(len(logits_RX))
    found = []
    for k in range(logits_RX.shape[1]):
        products = [before * _sigmoid(logits_RX[:, k] / one) for one in GRID]
        best = int(np.argmin([calibration_error(product, kept_RX[:, k]) for product in products]))
        found.append(float(GRID[best]))
        before = products[best]
    return tuple(found)


def error_by_chance(survival_RX: Floats, seed: int = 0, trials: int = 50) -> list[float]:
    """Return the error that honest confidences would show on so few rows, [X]: a mean over made-up outcomes."""
    numbers = np.random.default_rng(seed)
    chances = survival_RX / np.concatenate([np.ones((len(survival_RX), 1)), survival_RX[:, :-1]], axis=1)
    errors = []
    for _ in range(trials):
        kept = np.logical_and.accumulate(numbers.random(chances.shape) < chances, axis=1)
        errors.append(calibration_errors(survival_RX, kept))
    means: list[float] = np.mean(errors, axis=0).tolist()
    return means


def _sigmoid(values: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-np.clip(values, -500, 500))), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class DraftTemperatures:
    """What was fitted, and to what; see `fit_halves`.

    Attributes:
        temperatures: one per place of the block.
        rows: anchors that were fitted to, and those judged on.
        documents: the same in documents; no document is in both halves.
        before, after: error per place on the judged half, with all temperatures 1 and with the fitted ones.
        by_chance: error that honest confidences would show on the judged half.
        fitted: error per place on the half that was fitted to.
        weights: fingerprint of the checkpoint's weights.
        source: what the rows came from.
    """

    temperatures: tuple[float, ...]
    rows: tuple[int, int]
    documents: tuple[int, int]
    before: tuple[float, ...]
    after: tuple[float, ...]
    by_chance: tuple[float, ...]
    fitted: tuple[float, ...]
    weights: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """Return the file's content."""
        return {
            "format": _FORMAT,
            "temperatures": list(self.temperatures),
            "weights": self.weights,
            "source": self.source,
            "rows": {"fitted": self.rows[0], "judged": self.rows[1]},
            "documents": {"fitted": self.documents[0], "judged": self.documents[1]},
            "ece": {
                "bins": NUM_BINS,
                "before": _rounded(self.before),
                "after": _rounded(self.after),
                "by_chance": _rounded(self.by_chance),
                "fitted": _rounded(self.fitted),
                "mean_before": round(float(np.mean(self.before)), 4),
                "mean_after": round(float(np.mean(self.after)), 4),
            },
        }


def fit_halves(
    logits_RX: Floats, kept_RX: NDArray[np.bool_], document_R: NDArray[np.int64], *, weights: str, source: str
) -> DraftTemperatures:
    """Fit to every other document and judge on those between.

    Raises:
        UserError: there are fewer than two documents, or a confidence is not finite.
    """
    documents = np.unique(document_R)
    if len(documents) < 2:
        raise UserError(
            f"{source} holds {len(documents)} documents; two or more are accepted, to fit to and to judge on"
        )
    if not np.isfinite(logits_RX).all():
        raise UserError(f"{source} holds a confidence that is no finite number; finite ones are accepted")
    first, second = np.isin(document_R, documents[::2]), np.isin(document_R, documents[1::2])
    temperatures = fit(logits_RX[first], kept_RX[first])
    judged = survival_of(logits_RX[second], temperatures)
    plain = survival_of(logits_RX[second], np.ones(logits_RX.shape[1]))
    return DraftTemperatures(
        temperatures=temperatures,
        rows=(int(first.sum()), int(second.sum())),
        documents=(len(documents[::2]), len(documents[1::2])),
        before=tuple(calibration_errors(plain, kept_RX[second])),
        after=tuple(calibration_errors(judged, kept_RX[second])),
        by_chance=tuple(error_by_chance(judged)),
        fitted=tuple(calibration_errors(survival_of(logits_RX[first], temperatures), kept_RX[first])),
        weights=weights,
        source=source,
    )


def read_temperatures(path: Path, block_size: int, weights: str | None = None) -> tuple[float, ...]:
    """Return the temperatures of a file.

    Args:
        path: the file.
        block_size: places that there must be temperatures for.
        weights: fingerprint of the weights that it must belong to; None accepts any.

    Raises:
        UserError: it is missing, damaged, of another draft, or a temperature is not between 0.01 and 100.
    """
    found = read_json(path, max_bytes=_MAX_BYTES)
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise UserError(f"{path} is not a file of draft temperatures; format {_FORMAT} is accepted.")
    values = found.get("temperatures")
    if not isinstance(values, list) or len(values) != block_size or not all(map(_is_temperature, values)):
        raise UserError(f"{path} has temperatures {values!r}; {block_size} numbers from 0.01 to 100 are accepted.")
    if weights is not None and found.get("weights") != weights:
        raise UserError(
            f"{path} was fitted to weights {found.get('weights')!r} and these are {weights!r}; "
            "`headrace calibrate` fits it anew."
        )
    return tuple(float(value) for value in values)


def _is_temperature(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.01 <= value <= 100


def _rounded(values: tuple[float, ...]) -> list[float]:
    return [round(value, 4) if math.isfinite(value) else 0.0 for value in values]
