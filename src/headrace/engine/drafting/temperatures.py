"""Sequential temperature scaling: how sure a draft is, place after place of its block, becomes how often it is right.

For k = 1 .. X in order, the parameters of place k are those with the smallest calibration error of the cumulative
products c_1 ... c_k against "the first k guesses were kept", those of earlier places fixed, where

    c_k = sigmoid(z_k / T_k + b_k + g_k max(z_k - q_k, 0)).

T is one of 41 temperatures, evenly spaced in their logarithm from 0.1 to 10, the offset b one of 21 from -2 to 2, the
slope g one of `SLOPES`, and the knee q the quantile `KNEE_QUANTILE` of z_k in the rows that are fitted to.

The published method has temperatures only. Offsets and slopes are here because confidences are trained to say how
likely a guess is kept when both sides sample at temperature 1, and drafts are kept where they are the one token that
the model takes: a temperature cannot move a confidence across one half, where those two differ most, and of the surest
guesses more are kept than the head ever learned to say.

Calibration error: the products fall into 15 bins of equal width (bin floor(15 a), 1 into the last). It is the sum over
bins of the rows' share times |mean product - share kept|.

Source: serving.md section 5.2, training.md section 7.3.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
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
SLOPES = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0)
_TEMPERATURE_STEP, _OFFSET_STEP = 4, 2
KNEE_QUANTILE = 0.85
MAX_FOLDS = 4
_FORMAT = "headrace-draft-temperatures/2"
_MAX_BYTES = 1 << 20
_SEED = 0

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """What makes confidences honest: one of each per place of the block, as the module's formula names them."""

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    knees: tuple[float, ...]
    slopes: tuple[float, ...]

    @classmethod
    def of(cls, temperatures: Sequence[float], offsets: Sequence[float] | None = None) -> "Scale":
        """Return one without slopes, and without offsets unless they are given."""
        none = (0.0,) * len(temperatures)
        return cls(tuple(temperatures), none if offsets is None else tuple(offsets), none, none)

    @classmethod
    def neutral(cls, block_size: int) -> "Scale":
        """Return what leaves confidences as they are."""
        return cls.of((1.0,) * block_size)


def survival_of(logits_RX: Floats, scale: Scale) -> Floats:
    """Return the cumulative products, [R, X]; the scale may be of more places."""
    places = logits_RX.shape[1]
    temperatures, offsets, knees, slopes = (
        np.array(one[:places]) for one in (scale.temperatures, scale.offsets, scale.knees, scale.slopes)
    )
    chances = _sigmoid(logits_RX / temperatures + offsets + slopes * np.maximum(logits_RX - knees, 0))
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


def fit(logits_RX: Floats, kept_RX: NDArray[np.bool_], *, is_plain: bool = False) -> Scale:
    """Return what the module says; of equally good parameters the first: smaller temperature, slope, offset.

    Args:
        logits_RX: [R, X] raw confidences.
        kept_RX: [R, X] whether this guess and all before it were kept.
        is_plain: leave every offset and slope at 0: temperature scaling as published.
    """
    before = np.ones(len(logits_RX))
    found = []
    for k in range(logits_RX.shape[1]):
        knee = float(np.quantile(logits_RX[:, k], KNEE_QUANTILE)) if len(logits_RX) and not is_plain else 0.0
        temperature, slope, offset = _fit_place(before, logits_RX[:, k], kept_RX[:, k], None if is_plain else knee)
        one = Scale((temperature,), (offset,), (knee,), (slope,))
        before = before * survival_of(logits_RX[:, k : k + 1], one)[:, 0]
        found.append((temperature, offset, knee, slope))
    temperatures, offsets, knees, slopes = zip(*found, strict=True)
    return Scale(temperatures, offsets, knees, slopes)


def _fit_place(
    before_R: Floats, logits_R: Floats, kept_R: NDArray[np.bool_], knee: float | None
) -> tuple[float, float, float]:
    """Return temperature, slope and offset of one place; the last two are 0 without a knee.

    Numerics: temperatures alone are tried one by one; with offsets and slopes first every fourth temperature and every
        other offset, then all neighbours of the best.
    """
    rows = (before_R, logits_R, np.maximum(logits_R - (knee or 0.0), 0), kept_R)
    if knee is None:
        return _best(rows, range(len(GRID)), [0.0], np.zeros(1))
    coarse = _best(rows, range(0, len(GRID), _TEMPERATURE_STEP), SLOPES, OFFSETS[::_OFFSET_STEP])
    place, slope, offset = (
        int(np.argmin(np.abs(np.array(values) - one)))
        for values, one in zip((GRID, SLOPES, OFFSETS), coarse, strict=True)
    )
    return _best(
        rows,
        range(max(0, place - _TEMPERATURE_STEP + 1), min(len(GRID), place + _TEMPERATURE_STEP)),
        SLOPES[max(0, slope - 1) : slope + 2],
        OFFSETS[max(0, offset - _OFFSET_STEP + 1) : offset + _OFFSET_STEP],
    )


def _best(
    rows: tuple[Floats, Floats, Floats, NDArray[np.bool_]],
    places: Iterable[int],
    slopes: Sequence[float],
    offsets: Floats,
) -> tuple[float, float, float]:
    """Return temperature, slope and offset with the smallest error; `places` are those of temperatures in `GRID`."""
    before_R, logits_R, above_R, kept_R = rows
    best = (np.inf, 1.0, 0.0, 0.0)
    for place in places:
        for slope in slopes:
            # sigmoid(a + b) is 1 / (1 + exp(-a) exp(-b)), so offsets need no exponential of their own
            falling_R = np.exp(-np.clip(logits_R / GRID[place] + slope * above_R, -500, 500))
            for offset in offsets:
                error = calibration_error(before_R / (1 + falling_R * np.exp(-offset)), kept_R)
                if error < best[0]:
                    best = (error, float(GRID[place]), float(slope), float(offset))
    return best[1:]


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
    """What was fitted, to what, and how well such a fit does on documents that it has not seen; see `fit_documents`.

    Attributes:
        scale: fitted to all rows.
        rows, documents: what there was.
        folds: in how many parts the documents were put to judge.
        before, plain, after: error per place: of confidences as they are, with temperatures alone, and with all.
        by_chance: error that honest confidences would show on as many rows if these were independent.
        weights: digest of the checkpoint's weights.
        source: what the rows came from.
    """

    scale: Scale
    rows: int
    documents: int
    folds: int
    before: tuple[float, ...]
    plain: tuple[float, ...]
    after: tuple[float, ...]
    by_chance: tuple[float, ...]
    weights: str
    source: str

    def to_json(self) -> dict[str, Any]:
        """Return the file's content."""
        errors = {
            "before": self.before,
            "temperatures_alone": self.plain,
            "after": self.after,
            "by_chance": self.by_chance,
        }
        return {
            "format": _FORMAT,
            **{name: [round(one, 6) for one in values] for name, values in asdict(self.scale).items()},
            "weights": self.weights,
            "source": self.source,
            "rows": self.rows,
            "documents": self.documents,
            "ece": {
                "bins": NUM_BINS,
                "folds": self.folds,
                **{name: [round(one, 4) for one in values] for name, values in errors.items()},
                "mean": {name: round(float(np.mean(values)), 4) for name, values in errors.items()},
            },
        }


def fit_documents(
    logits_RX: Floats, kept_RX: NDArray[np.bool_], document_R: NDArray[np.int64], *, weights: str, source: str
) -> DraftTemperatures:
    """Fit to all documents; judge by fits of the same kind that have not seen what they are judged on.

    The documents are put into `MAX_FOLDS` parts (as many as there are documents, if those are fewer), drawn with a
    fixed seed. What each row is judged with was fitted to the other parts; then the rows are judged together.

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
    parts = folds_of(document_R)
    judged, plain = np.zeros(logits_RX.shape), np.zeros(logits_RX.shape)
    for is_judged in parts:
        rows, kept, others = logits_RX[~is_judged], kept_RX[~is_judged], logits_RX[is_judged]
        judged[is_judged] = survival_of(others, fit(rows, kept))
        plain[is_judged] = survival_of(others, fit(rows, kept, is_plain=True))
    neutral = Scale.neutral(logits_RX.shape[1])
    return DraftTemperatures(
        scale=fit(logits_RX, kept_RX),
        rows=len(logits_RX),
        documents=len(documents),
        folds=len(parts),
        before=tuple(calibration_errors(survival_of(logits_RX, neutral), kept_RX)),
        plain=tuple(calibration_errors(plain, kept_RX)),
        after=tuple(calibration_errors(judged, kept_RX)),
        by_chance=tuple(error_by_chance(judged)),
        weights=weights,
        source=source,
    )


def folds_of(document_R: NDArray[np.int64]) -> list[NDArray[np.bool_]]:
    """Return the rows of each part, [R]; no document is in two."""
    documents = np.unique(document_R)
    # drawn, because neighbours in a file may take turns between kinds of text
    order = np.random.default_rng(_SEED).permutation(documents)
    count = min(MAX_FOLDS, len(documents))
    return [np.isin(document_R, order[place::count]) for place in range(count)]


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
    given = found.get("format") if isinstance(found, dict) else None
    if not isinstance(found, dict) or given != _FORMAT:
        raise UserError(
            f"{path} is not a file of draft temperatures that can be used: its format is {given!r}, and {_FORMAT!r} is "
            "accepted; `headrace calibrate` writes it anew."
        )
    temperatures = _numbers(found, "temperatures", block_size, (0.01, 100.0), path)
    offsets = _numbers(found, "offsets", block_size, (-100.0, 100.0), path)
    knees = _numbers(found, "knees", block_size, (-1e6, 1e6), path)
    slopes = _numbers(found, "slopes", block_size, (0.0, 100.0), path)
    if weights is not None and found.get("weights") != weights:
        raise UserError(
            f"{path} was fitted to weights {found.get('weights')!r} and these are {weights!r}; "
            "`headrace calibrate` fits it anew."
        )
    return Scale(temperatures, offsets, knees, slopes)


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
