import pytest
import torch

from headrace.kernels.precision import wide_dtype, widen


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_sums_are_float32_unless_the_input_is_float64(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert wide_dtype(dtype) == wide
    x = torch.tensor([1.0, 0.1], dtype=dtype)
    assert widen(x).dtype == wide
    assert torch.equal(widen(x).to(dtype), x)
    if dtype == wide:
        assert widen(x) is x
