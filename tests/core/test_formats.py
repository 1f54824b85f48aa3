import pytest
import torch

from headrace.core.formats import FORMATS
from headrace.core.spec import TensorSpec


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_takes_as_many_bytes_as_its_torch_dtype(name: str) -> None:
    entry = FORMATS[name]
    assert entry.name == name
    assert entry.num_bytes == torch.empty(1, dtype=entry.torch_dtype).element_size()


def test_a_specification_counts_elements_and_bytes() -> None:
    spec = TensorSpec("a", (3, 5), "BF16")
    assert (spec.num_elements, spec.num_bytes) == (15, 30)
    assert TensorSpec("scalar", (), "F32").num_bytes == 4
    assert TensorSpec("none", (0, 7), "F32").num_bytes == 0
