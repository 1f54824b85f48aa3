"""Temperatures make confidences honest, one place after the other, and their file is read or refused."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import UserError
from headrace.engine.drafting.proposal import Proposal
from headrace.engine.drafting.survival import KeptSoFar, survival
from headrace.engine.drafting.temperatures import (
    GRID,
    KNEE_QUANTILE,
    DraftTemperatures,
    Scale,
    calibration_error,
    calibration_errors,
    error_by_chance,
    fit,
    fit_documents,
    folds_of,
    read_temperatures,
    survival_of,
)

TRUE = (float(GRID[26]), float(GRID[14]), float(GRID[20]))  # 2.0, 0.5 and 1.0
ADDED = (0.0, -0.7, 0.4)
HONEST = Scale.of(TRUE, ADDED)
PLAIN = Scale.neutral(3)


def rows_of(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits whose honest scale is `HONEST`, and what was kept."""
    numbers = np.random.default_rng(seed)
    logits = numbers.normal(1.0, 2.0, size=(count, 3)) * TRUE
    kept = numbers.random((count, 3)) < 1 / (1 + np.exp(-(logits / TRUE + ADDED)))
    return logits, np.logical_and.accumulate(kept, axis=1)


def test_the_error_is_the_gap_of_each_bin_weighted_by_its_rows() -> None:
    predicted = np.array([0.01, 0.05, 0.5, 0.52, 0.52, 0.9, 0.94, 1.0])
    kept = np.array([True, False, True, False, False, True, False, True])
    # bins 0 (two rows), 7 (three rows: 0.5 and 0.52 lie in 7/15 .. 8/15), 13 (0.9) and 14 (two rows)
    wanted = (abs(0.06 - 1) + abs(1.54 - 1) + abs(0.9 - 1) + abs(1.94 - 1)) / 8
    assert calibration_error(predicted, kept) == pytest.approx(wanted)
    assert calibration_error(np.zeros(0), np.zeros(0, dtype=bool)) == 0


def test_temperatures_that_are_honest_are_found() -> None:
    logits, kept = rows_of(12_000)
    found = fit(logits, kept)
    assert np.abs(np.log(found.temperatures) - np.log(TRUE)).max() < 0.25  # two steps of the grid
    assert np.abs(np.array(found.offsets) - ADDED).max() < 0.25
    after = calibration_errors(survival_of(logits, found), kept)
    alone = calibration_errors(survival_of(logits, fit(logits, kept, is_plain=True)), kept)
    before = calibration_errors(survival_of(logits, PLAIN), kept)
    assert max(after) < 0.015 < max(alone) < max(before)


def test_a_knee_that_is_honest_is_found() -> None:
    numbers = np.random.default_rng(3)
    logits = numbers.normal(1.0, 2.0, size=(16_000, 2))
    knee = float(np.quantile(logits[:, 0], KNEE_QUANTILE))
    true = Scale((1.0, 1.0), (-0.8, -0.8), (knee, knee), (2.0, 1.0))
    chances = 1 / (1 + np.exp(-(logits - 0.8 + np.array([2.0, 1.0]) * np.maximum(logits - knee, 0))))
    assert survival_of(logits, true) == pytest.approx(np.cumprod(chances, axis=1))
    kept = np.logical_and.accumulate(numbers.random(logits.shape) < chances, axis=1)
    found = fit(logits, kept)
    assert found.knees[0] == pytest.approx(knee)
    assert found.slopes[0] >= 0.5
    assert max(calibration_errors(survival_of(logits, found), kept)) < 0.012
    plain = fit(logits, kept, is_plain=True)
    assert (plain.offsets, plain.slopes) == ((0.0, 0.0), (0.0, 0.0))
    assert calibration_errors(survival_of(logits, plain), kept)[0] > 0.025


def test_each_place_is_the_best_of_the_grid_with_those_before_it_fixed() -> None:
    logits, kept = rows_of(3000, 4)
    found = fit(logits, kept, is_plain=True).temperatures
    for place in range(3):
        scales = [Scale.of((*found[:place], float(one))) for one in GRID]
        errors = [
            calibration_error(survival_of(logits[:, : place + 1], scale)[:, place], kept[:, place]) for scale in scales
        ]
        assert errors[int(np.argmin(np.abs(GRID - found[place])))] == min(errors)


def test_honest_confidences_show_the_error_of_chance() -> None:
    logits, kept = rows_of(2000, 5)
    honest = survival_of(logits, HONEST)
    by_chance = np.array(error_by_chance(honest))
    assert (np.array(calibration_errors(honest, kept)) < 1.6 * by_chance).all()
    assert (np.array(calibration_errors(survival_of(logits, Scale.of((10.0,) * 3, ADDED)), kept)) > 2 * by_chance).any()


def test_documents_are_judged_by_fits_that_have_not_seen_them() -> None:
    logits, kept = rows_of(240, 6)
    document = np.repeat(np.arange(8), 30)
    found = fit_documents(logits, kept, document, weights="w", source="rows")
    assert (found.rows, found.documents, found.folds) == (240, 8, 4)
    assert found.scale == fit(logits, kept)
    parts = folds_of(document)
    assert np.sum(parts, axis=0).tolist() == [1] * 240
    assert all(part[document == one].all() or not part[document == one].any() for part in parts for one in range(8))
    judged = np.zeros(logits.shape)
    for part in parts:
        judged[part] = survival_of(logits[part], fit(logits[~part], kept[~part]))
    assert found.after == tuple(calibration_errors(judged, kept))
    seen = calibration_errors(survival_of(logits, found.scale), kept)
    assert np.mean(seen) < np.mean(found.after)  # what was seen is no judgement


def test_few_documents_are_as_many_parts() -> None:
    assert len(folds_of(np.array([4, 4, 9]))) == 2
    assert len(folds_of(np.arange(3))) == 3


def test_rows_that_nothing_can_be_fitted_to_are_refused() -> None:
    logits, kept = rows_of(10)
    with pytest.raises(UserError, match="rows holds 1 documents"):
        fit_documents(logits, kept, np.zeros(10, dtype=np.int64), weights="w", source="rows")
    logits[3, 1] = np.nan
    with pytest.raises(UserError, match="no finite number"):
        fit_documents(logits, kept, np.arange(10), weights="w", source="rows")


# -------------------------------------------------------------------------------------------------------------- files


@cache
def made() -> DraftTemperatures:
    logits, kept = rows_of(400)
    return fit_documents(logits, kept, np.repeat(np.arange(2), 200), weights="w", source="rows")


def written(tmp_path: Path, **change: object) -> Path:
    document = made().to_json()
    path = tmp_path / "draft_temperatures.json"
    path.write_text(json.dumps({**document, **change}))
    return path


def test_temperatures_come_back_from_their_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    scale = made().scale
    found = read_temperatures(path, 3, "w")
    assert found == read_temperatures(path, 3)
    assert found.temperatures == pytest.approx(scale.temperatures, abs=1e-6)
    assert found.offsets == pytest.approx(scale.offsets, abs=1e-6)
    assert found.knees == pytest.approx(scale.knees, abs=1e-6)
    assert found.slopes == pytest.approx(scale.slopes, abs=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "another"},
        {"temperatures": [1.0, 1.0]},
        {"temperatures": [1.0, 1.0, 0]},
        {"temperatures": [1.0, 1.0, 1e9]},
        {"temperatures": [1.0, 1.0, True]},
        {"temperatures": "1.0"},
        {"offsets": [0.0, 0.0]},
        {"offsets": None},
        {"knees": [0.0, 0.0, 1e9]},
        {"slopes": [0.0, 0.0, -0.5]},
        {"weights": "others"},
    ],
)
def test_a_file_that_is_not_of_this_draft_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"draft_temperatures\.json"):
        read_temperatures(written(tmp_path, **change), 3, "w")


def test_a_file_of_the_format_before_is_refused_by_name(tmp_path: Path) -> None:
    old = written(tmp_path, format="headrace-draft-temperatures/1")
    with pytest.raises(UserError, match=r"draft-temperatures/1'.*draft-temperatures/2'.*headrace calibrate"):
        read_temperatures(old, 3)


# ----------------------------------------------------------------------------------------------------------- survival


def test_survival_is_the_product_of_calibrated_confidences() -> None:
    proposal = Proposal("draft", (1, 2), confidences=(2.0, -1.0))
    history = KeptSoFar(5)
    first, second = 1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(2.0))
    assert survival(proposal, Scale.of((2.0, 0.5, 1.0)), history) == pytest.approx((first, first * second))
    assert survival(Proposal("draft", (1,), confidences=(1e9,)), PLAIN, history) == pytest.approx((1.0,))
    assert survival(Proposal("draft", (1,), confidences=(float("nan"),)), PLAIN, history) == pytest.approx((0.5,))


def test_a_drafter_without_confidences_is_judged_by_what_was_kept() -> None:
    history = KeptSoFar(3)
    lookup = Proposal("lookup", (1, 2, 3))
    assert survival(lookup, PLAIN, history) == pytest.approx((0.5, 0.25, 0.125))
    for _ in range(300):
        history.add(3, 2)
    good = survival(lookup, PLAIN, history)
    assert good[1] > 0.9
    assert good[2] < 0.1
    for _ in range(300):
        history.add(3, 0)
    assert survival(lookup.cut(2), PLAIN, history)[0] < 0.1


def test_places_that_were_not_reached_learn_nothing() -> None:
    history = KeptSoFar(3)
    for _ in range(50):
        history.add(3, 0)
    chances = history.survival(3)
    assert chances[1] / chances[0] == pytest.approx(0.5)
    history.add(0, 0)
    assert history.survival(3) == chances
