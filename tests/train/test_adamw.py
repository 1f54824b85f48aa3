"""AdamW against torch's own, and what its decay touches."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.train.optim import adamw
from headrace.train.optim.adamw import AdamW, AdamWSettings
from headrace.train.optim.ownership import Owner
from headrace.train.optim.parameter import Owned

RATE = 3e-3


def owned(tensor: Tensor, *, rate: float = 1.0, decay: float = 0.1, name: str = "w") -> Owned:
    return Owned(name, tensor, Owner(group="g", update="adamw", matrices=1, rate=rate, decay=decay))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_equal_those_of_torch(dtype: torch.dtype) -> None:
    start = torch.randn(3, 17, dtype=dtype)
    theirs, ours = torch.nn.Parameter(start.clone()), owned(start.clone())
    optimizer = torch.optim.AdamW([theirs], lr=RATE, betas=(0.9, 0.95), eps=1e-20, weight_decay=0.1)
    rule = AdamW([ours], AdamWSettings())
    for _ in range(12):
        gradient = torch.randn_like(start) * 10.0 ** torch.randint(-8, 3, ()).item()
        theirs.grad, ours.tensor.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        rule.step(RATE, 1.0)
    tolerance = {"rtol": 1e-6, "atol": 1e-8} if dtype == torch.float32 else {"rtol": 1e-13, "atol": 1e-15}
    assert torch.allclose(ours.tensor, theirs.detach(), **tolerance)


def test_rate_and_decay_are_those_of_each_parameter() -> None:
    plain, fast, gain, both = (
        owned(torch.ones(5), rate=r, decay=d, name=n)
        for r, d, n in ((1, 0, "p"), (5, 0, "f"), (1, 0.1, "g"), (5, 0.1, "b"))
    )
    for parameter in (plain, fast, gain, both):
        parameter.tensor.grad = torch.full((5,), 2.0)
    AdamW([plain, fast, gain, both], AdamWSettings()).step(RATE, 1.0)
    assert plain.tensor.tolist() == pytest.approx([1 - RATE] * 5)
    assert fast.tensor.tolist() == pytest.approx([1 - 5 * RATE] * 5)
    assert gain.tensor.tolist() == pytest.approx([(1 - RATE * 0.1) - RATE] * 5)
    assert both.tensor.tolist() == pytest.approx([(1 - 5 * RATE * 0.1) - 5 * RATE] * 5)


def test_large_parameters_are_moved_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    start, gradient = torch.randn(7, 31), torch.randn(7, 31)
    whole, parts = owned(start.clone()), owned(start.clone())
    for parameter, part in ((whole, 2**18), (parts, 10)):
        monkeypatch.setattr(adamw, "_PART", part)
        parameter.tensor.grad = gradient.clone()
        AdamW([parameter], AdamWSettings()).step(RATE, 1.0)
    assert torch.equal(whole.tensor, parts.tensor)
    assert not torch.equal(whole.tensor, start)


def test_gradients_are_multiplied_with_the_factor_first() -> None:
    first, second = owned(torch.zeros(4)), owned(torch.zeros(4))
    rules = [AdamW([p], AdamWSettings()) for p in (first, second)]
    for step in range(3):
        gradient = torch.arange(4.0) + step
        first.tensor.grad, second.tensor.grad = gradient, gradient * 0.25
        rules[0].step(RATE, 0.25)
        rules[1].step(RATE, 1.0)
    assert torch.equal(first.tensor, second.tensor)
    assert torch.equal(rules[0].state()["w/adamw.square"], rules[1].state()["w/adamw.square"])


def test_a_gradient_of_zeros_from_the_start_moves_nothing_but_decay() -> None:
    parameter = owned(torch.ones(3))
    parameter.tensor.grad = torch.zeros(3)
    AdamW([parameter], AdamWSettings()).step(RATE, 1.0)
    assert parameter.tensor.tolist() == pytest.approx([1 - RATE * 0.1] * 3)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda: AdamWSettings(mean_decay=1.0), "mean_decay is 1.0"),
        (lambda: AdamWSettings(square_decay=-0.1), "square_decay is -0.1"),
        (lambda: AdamWSettings(eps=0.0), "eps is 0.0"),
    ],
)
def test_constants_outside_their_range_are_refused(change: Callable[[], AdamWSettings], part: str) -> None:
    with pytest.raises(UserError, match=part):
        change()
