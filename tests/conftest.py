"""Rules every test runs under: one seed, one thread, no network, poisoned memory, a bounded hypothesis profile."""

import os
import random
import socket
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

MAX_POISONED_BYTES = 64 << 20  # larger ones stay untouched, so that tests of memory use measure the code and not this

hypothesis.settings.register_profile(
    "headrace",
    deadline=None,  # a shared machine stalls; a slow example is not a wrong one
    max_examples=50,
    derandomize=True,  # the same examples in every run, so a red build can be repeated
    database=None,
)
hypothesis.settings.load_profile("headrace")


def pytest_configure(config: pytest.Config) -> None:
    """Use one thread here and in every process a test starts; a test that needs more says so itself."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a device that is not here, and say why."""
    if torch.cuda.is_available():
        return
    reason = pytest.mark.skip(reason="needs a CUDA device; torch sees none on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(reason)


@pytest.fixture(autouse=True)
def _seed_from_test_id(request: pytest.FixtureRequest) -> None:
    """Seed every generator from the test's own id: order and selection of tests change nothing."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse connections to anything but this machine."""
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        if self.family in {socket.AF_INET, socket.AF_INET6} and address[0] not in {"127.0.0.1", "::1", "localhost"}:
            raise RuntimeError(f"a test tried to reach {address[0]}:{address[1]}; tests use no network")
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    yield


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` returns with 0xFF bytes (NaN as a float, -1 as an integer): unwritten is never zero."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.device.type == "cpu" and 0 < tensor.numel() * tensor.element_size() <= MAX_POISONED_BYTES:
            tensor.untyped_storage().fill_(0xFF)
        return tensor

    return poisoned
