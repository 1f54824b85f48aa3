"""PyTorch's threads while kernels run: one where kernels do everything, and as before afterwards."""

from collections.abc import Iterator

import pytest
import torch

from headrace.core.errors import UserError
from headrace.kernels.native.library import load, why_absent
from headrace.kernels.native.threads import kernel_threads

pytestmark = pytest.mark.skipif(why_absent() is not None, reason="no native kernels here")


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)
    load().use_threads(1)


def test_pytorch_takes_one_thread_where_kernels_do_everything() -> None:
    with kernel_threads(load(), is_whole=True):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("is_there", [True, False])
def test_pytorch_keeps_its_threads_where_it_does_a_part(is_there: bool) -> None:
    with kernel_threads(load() if is_there else None, is_whole=False):
        assert torch.get_num_threads() == 3
    assert torch.get_num_threads() == 3


def test_an_error_leaves_pytorch_with_its_threads() -> None:
    with pytest.raises(UserError), kernel_threads(load(), is_whole=True):
        raise UserError("a token id is outside the vocabulary")
    assert torch.get_num_threads() == 3
