"""Sequential temperature scaling: a temperature and an offset per place of the block make a draft's confidences honest.

For k = 1 .. X in order, T_k and b_k are those with the smallest calibration error of the cumulative products
sigmoid(z_1 / T_1 + b_1) ... sigmoid(z_k / T_k + b_k) against "the first k guesses were kept", earlier ones fixed. T is
one of 41 temperatures, evenly spaced in their logarithm from 0.1 to 10, b one of 21 offsets from -2 to 2.

The published method has no offsets. They are here because confidences are trained to say how likely a guess is kept
when both sides sample at temperature 1, and drafts are kept where they are the one token that the model takes; a
temperature cannot move a confidence across one half, where those two differ most.

Calibration error: the products fall into 15 bins of equal width (bin floor(15 a), 1 into the last). It is the sum over
bins of the rows' share times |mean product - share kept|.

Source: serving.md section 5.2, training.md section 7.3.
"""

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
OFFSETS = np.linspace(-2, 2, 21)
_FORMAT = "headrace-draft-temperatures/1"
_MAX_BYTES = 1 << 20
_SEED = 0

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """What makes confidences honest: sigmoid(z / temperature + offset), one of each per place of the block."""

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]

    @classmethod
    def neutral(cls, block_size: int) -> "Scale":
        """Return what leaves confidences as they are."""
        return cls((1.0,) * block_size, (0.0,) * block_size)


def survival_of(logits_RX: Floats, scale: Scale) -> Floats:
    """Return the cumulative products, [R, X]; the scale may be of more places."""
    places = logits_RX.shape[1]
    chances = _sigmoid(logits_RX / np.array(scale.temperatures[:places]) + np.array(scale.offsets[:places]))
    return np.asarray(np.cumprod(chances, axis=1), dtype=np.float64)


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


def fit(logits_RX: Floats, kept_RX: NDArray[np.bool_], *, has_offsets: bool = True) -> Scale:
    """Return temperatures and offsets; of equally good ones the smaller.

    Args:
        logits_RX: [R, X] raw confidences.
        kept_RX: [R, X] whether this guess and all before it were kept.
        has_offsets: False leaves every offset at 0: temperature scaling as published.
    """
    before = np.ones(len(logits_RX))
    temperatures, offsets = [], []
    for k in range(logits_RX.shape[1]):
        tried = [(float(one), float(add)) for one in GRID for add in (OFFSETS if has_offsets else (0.0,))]
        errors = [calibration_error(before * _sigmoid(logits_RX[:, k] / t + b), kept_RX[:, k]) for t, b in tried]
        temperature, offset = tried[int(np.argmin(errors))]
        before = before * _sigmoid(logits_RX[:, k] / temperature + offset)
        temperatures.append(temperature)
        offsets.append(offset)
    return Scale(tuple(temperatures), tuple(offsets))


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
        scale: what was fitted.
        rows: anchors that were fitted to, and those judged on.
        documents: the same in documents; no document is in both halves.
        before, without_offsets, after: error per place on the judged half: of confidences as they are, with
            temperatures alone, and with `scale`.
        by_chance: error that honest confidences would show on the judged half if its rows were independent.
        weights: digest of the checkpoint's weights.
        source: what the rows came from.
    """

    scale: Scale
    rows: tuple[int, int]
    documents: tuple[int, int]
    before: tuple[float, ...]
    without_offsets: tuple[float, ...]
    after: tuple[float, ...]
    by_chance: tuple[float, ...]
    weights: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """Return the file's content."""
        errors = {name: getattr(self, name) for name in ("before", "without_offsets", "after", "by_chance")}
        return {
            "format": _FORMAT,
            "temperatures": [round(one, 6) for one in self.scale.temperatures],
            "offsets": [round(one, 6) for one in self.scale.offsets],
            "weights": self.weights,
            "source": self.source,
            "rows": {"fitted": self.rows[0], "judged": self.rows[1]},
            "documents": {"fitted": self.documents[0], "judged": self.documents[1]},
            "ece": {
                "bins": NUM_BINS,
                **{name: [round(one, 4) for one in values] for name, values in errors.items()},
                "mean": {name: round(float(np.mean(values)), 4) for name, values in errors.items()},
            },
        }


def fit_halves(
    logits_RX: Floats, kept_RX: NDArray[np.bool_], document_R: NDArray[np.int64], *, weights: str, source: str
) -> DraftTemperatures:
    """Fit to one half of the documents and judge on the other; which is which is drawn with a fixed seed.

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
    # drawn, because neighbours in a file may take turns between kinds of text
    halves = np.array_split(np.random.default_rng(_SEED).permutation(documents), 2)
    first, second = (np.isin(document_R, half) for half in halves)
    logits, kept = logits_RX[second], kept_RX[second]
    scale = fit(logits_RX[first], kept_RX[first])
    plain = fit(logits_RX[first], kept_RX[first], has_offsets=False)
    judged = survival_of(logits, scale)
    return DraftTemperatures(
        scale=scale,
        rows=(int(first.sum()), int(second.sum())),
        documents=(len(halves[0]), len(halves[1])),
        before=tuple(calibration_errors(survival_of(logits, Scale.neutral(logits.shape[1])), kept)),
        without_offsets=tuple(calibration_errors(survival_of(logits, plain), kept)),
        after=tuple(calibration_errors(judged, kept)),
        by_chance=tuple(error_by_chance(judged)),
        weights=weights,
        source=source,
    )


def read_temperatures(path: Path, block_size: int, weights: str | None = None) -> Scale:
    """Return what a file holds.

    Args:
        path: the file.
        block_size: places of the block that it must be for.
        weights: digest of the weights that it must belong to; None accepts any.

    Raises:
        UserError: it is missing, damaged, of another draft, or a number is out of range.
    """
    found = read_json(path, max_bytes=_MAX_BYTES)
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise UserError(f"{path} is not a file of draft temperatures; format {_FORMAT} is accepted.")
    temperatures = _numbers(found, "temperatures", block_size, (0.01, 100.0), path)
    offsets = _numbers(found, "offsets", block_size, (-100.0, 100.0), path)
    if weights is not None and found.get("weights") != weights:
        raise UserError(
            f"{path} was fitted to weights {found.get('weights')!r} and these are {weights!r}; "
            "`headrace calibrate` fits it anew."
        )
    return Scale(temperatures, offsets)


def _numbers(
    found: dict[str, Any], name: str, count: int, limits: tuple[float, float], path: Path
) -> tuple[float, ...]:
    low, high = limits
    values = found.get(name)
    is_list = isinstance(values, list) and len(values) == count
    is_sound = is_list and all(
        isinstance(one, int | float) and not isinstance(one, bool) and low <= one <= high for one in values or ()
    )
    if not is_sound:
        raise UserError(f"{path} has {name} {values!r}; {count} numbers from {low:g} to {high:g} are accepted.")
    return tuple(float(one) for one in values or ())
