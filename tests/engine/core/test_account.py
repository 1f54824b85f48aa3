"""Counts of a run are those of its rows one by one, whether these are few or many."""

import pytest

from headrace.core.shipped import SHIPPED_MODEL
from headrace.engine.core.account import Accountant, Run
from headrace.engine.core.trace import RowCounts
from headrace.models.deepseek_v41.config import Config, load_config
from headrace.models.deepseek_v41.load import load_model


@pytest.fixture(scope="module")
def accountant() -> Accountant:
    model = load_model(SHIPPED_MODEL).model
    config: Config = model.config
    assert config == load_config(SHIPPED_MODEL)
    return Accountant(config, model.state_shape, model.ngram_bytes_per_token)


@pytest.mark.parametrize(("start", "stop", "floor"), [(0, 3, 0), (60, 200, 0), (126, 133, 100), (4000, 4100, 3990)])
def test_rows_together_take_what_they_take_alone(accountant: Accountant, start: int, stop: int, floor: int) -> None:
    def run(low: int, high: int) -> RowCounts:
        numbers = {"encoder_floor": floor, "decoder_floor": floor, "write_from": start + 1}
        return accountant.count(Run(start=low, stop=high, decoder_rows=high - low, **numbers))

    total = RowCounts()
    for position in range(start, stop):
        total.add(run(position, position + 1))
    assert run(start, stop) == total
    assert (total.index_scored > 0) == (stop > 128)  # a row that sees no more entries than slots takes them all
