import numpy as np
import pytest
import torch

from headrace.checkpoint.nonfinite import describe, first_bad
from headrace.core.formats import FORMATS

NARROW = ["BF16", "F16", "F8_E4M3", "F8_E8M0"]


@pytest.mark.parametrize("name", NARROW)
def test_every_code_is_judged_as_torch_judges_it(name: str) -> None:
    width = FORMATS[name].num_bytes
    codes = torch.arange(256**width, dtype=torch.int32).to(torch.uint16 if width == 2 else torch.uint8)
    values = codes.view(FORMATS[name].torch_dtype).to(torch.float32)
    for code in (~values.isfinite()).nonzero().flatten().tolist():
        row = codes[code : code + 1].view(torch.uint8).numpy()
        assert first_bad(row, name) == 0, code
    good = codes[values.isfinite()].view(torch.uint8).numpy()
    assert first_bad(good, name) is None


@pytest.mark.parametrize("name", [*NARROW, "F32", "F64"])
def test_the_place_is_that_of_the_first_bad_element_across_slices(name: str) -> None:
    count, place = 2**20 + 77, 2**20 + 5
    width = FORMATS[name].num_bytes
    data = np.zeros(count * width + 1, dtype=np.uint8)
    part = data[1:]  # not aligned to the element
    part[place * width : (place + 1) * width] = 0xFF
    part[(place + 3) * width : (place + 4) * width] = 0xFF
    assert first_bad(part, name) == place
    assert first_bad(part[: place * width], name) is None


@pytest.mark.parametrize("name", ["I8", "U8", "BOOL", "I64", "I32", "I16"])
def test_every_code_of_an_integer_format_is_a_number(name: str) -> None:
    assert first_bad(np.full(64, 0xFF, dtype=np.uint8), name) is None


def test_infinity_and_nan_of_float32_are_both_found() -> None:
    for value in (np.inf, -np.inf, np.nan):
        data = np.array([0, 1e38, value], dtype=np.float32)
        assert first_bad(data.view(np.uint8), "F32") == 2
    assert "255" in describe("F8_E8M0")
