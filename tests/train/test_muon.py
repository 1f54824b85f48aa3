"""The Muon update against singular values and float64, one matrix at a time, in batches, and against torch's own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.train.optim import muon
from headrace.train.optim.muon import EXACT, FAST, HYBRID, Muon, MuonSettings, orthogonalize
from headrace.train.optim.ownership import Owner
from headrace.train.optim.parameter import Owned

BF16 = MuonSettings(precision="bfloat16")
FIVE_FAST = MuonSettings(schedule=(FAST,) * 5)
RATE = 1e-2


def owned(tensor: Tensor, matrices: int = 1, *, rate: float = 1.0, decay: float = 0.0, name: str = "w") -> Owned:
    return Owned(name, tensor, Owner(group="g", update="muon", matrices=matrices, rate=rate, decay=decay))


def conditioned(size: int, condition: float) -> Tensor:
    """Return a square matrix whose singular values fall from 1 to 1 / condition in equal ratios."""
    left, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
    exponents = torch.linspace(0.0, 1.0, size, dtype=torch.float64)
    return (left * condition**-exponents @ right).float()


def singular_values(update: Tensor) -> Tensor:
    return torch.linalg.svdvals(update.double())


def rms_share(update: Tensor) -> float:
    """Root mean square times sqrt(max(m, n)): 1 for a semi-orthogonal matrix."""
    return float(update.double().square().mean().sqrt() * max(update.shape) ** 0.5)


def moved(before: Tensor, parameter: Owned, gradient: Tensor, settings: MuonSettings | None = None) -> Tensor:
    """Return what one step subtracts from a parameter."""
    parameter.tensor.grad = gradient
    Muon([parameter], settings or MuonSettings()).step(RATE, 1.0)
    return before - parameter.tensor


@pytest.mark.parametrize("shape", [(256, 256), (256, 1024), (512, 64), (48, 512)])
def test_singular_values_of_the_hybrid_update_are_one(shape: tuple[int, int]) -> None:
    values = singular_values(orthogonalize(torch.randn(1, *shape), MuonSettings())[0])
    assert values.min() > 0.9995
    assert values.max() < 1.001


@pytest.mark.parametrize("shape", [(256, 1024), (512, 64)])
def test_root_mean_square_is_the_promised_one(shape: tuple[int, int]) -> None:
    x = torch.randn(1, *shape)
    assert rms_share(orthogonalize(x, MuonSettings())[0]) == pytest.approx(1.0, abs=5e-4)
    assert rms_share(orthogonalize(x, BF16)[0]) == pytest.approx(1.0, abs=5e-3)
    assert rms_share(orthogonalize(x, FIVE_FAST)[0]) < 0.97  # five fast iterations fall short: what the hybrid buys


def test_update_equals_the_polar_factor_of_a_float64_decomposition() -> None:
    x = torch.randn(3, 40, 72)
    left, _, right = torch.linalg.svd(x.double(), full_matrices=False)
    assert torch.allclose(orthogonalize(x, MuonSettings()).double(), left @ right, atol=1e-3)


def test_badly_conditioned_matrices_keep_all_but_their_smallest_directions() -> None:
    x = conditioned(256, 1e4)
    values = singular_values(orthogonalize(x[None], MuonSettings())[0])
    assert values.min() > 0.8
    assert values.max() < 1.003
    assert singular_values(orthogonalize(x[None], FIVE_FAST)[0]).min() < 0.05
    assert singular_values(orthogonalize(x[None], BF16)[0]).min() < 0.5  # bfloat16 loses them


@pytest.mark.parametrize(("triple", "image"), [(EXACT, 1.0), (FAST, 0.701)])
def test_only_the_exact_triple_fixes_one(triple: tuple[float, float, float], image: float) -> None:
    a, b, c = triple
    assert a + b + c == pytest.approx(image, abs=1e-12)
    eye = torch.eye(8, 16)[None]
    once = orthogonalize(eye, MuonSettings(schedule=(triple,)))  # divided by its norm, sqrt(8)
    s = 8**-0.5
    assert once[0].diagonal().tolist() == pytest.approx([a * s + b * s**3 + c * s**5] * 8)


def test_schedule_is_eight_fast_and_two_exact_iterations() -> None:
    assert HYBRID == ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_update_does_not_depend_on_the_size_of_the_gradient(scale: float) -> None:
    x = torch.randn(1, 24, 40)
    expected = orthogonalize(x, MuonSettings())
    assert torch.allclose(orthogonalize(x * scale, MuonSettings()), expected, atol=1e-4)


def test_transposed_matrices_get_the_transposed_update() -> None:
    x = torch.randn(2, 24, 56)
    assert torch.equal(orthogonalize(x.mT.contiguous(), MuonSettings()), orthogonalize(x, MuonSettings()).mT)


@pytest.mark.parametrize("settings", [MuonSettings(), BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(5, 7, 33), (4, 32, 96), (3, 24, 384), (2, 1, 19)])
def test_a_matrix_gives_the_same_bits_alone_and_in_a_batch(shape: tuple[int, ...], settings: MuonSettings) -> None:
    x = torch.randn(shape)
    together = orthogonalize(x, settings)
    assert all(torch.equal(orthogonalize(x[i : i + 1], settings)[0], together[i]) for i in range(shape[0]))


@pytest.mark.parametrize("settings", [MuonSettings(), BF16], ids=["float32", "bfloat16"])
def test_two_threads_give_the_bits_of_one(settings: MuonSettings) -> None:
    inputs = [torch.randn(shape) for shape in ((1, 256, 512), (1, 7, 33), (6, 40, 72), (1, 33, 1500))]
    one = [orthogonalize(x, settings) for x in inputs]
    torch.set_num_threads(2)
    try:
        two = [orthogonalize(x, settings) for x in inputs]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_step_is_nesterov_momentum_decay_and_a_scaled_polar_factor() -> None:
    weight = torch.randn(24, 40, dtype=torch.float64)
    parameter = owned(weight.clone(), rate=3.0, decay=0.1)
    rule = Muon([parameter], MuonSettings())
    momentum, expected = torch.zeros_like(weight), weight.clone()
    for _ in range(3):
        gradient = torch.randn_like(weight)
        parameter.tensor.grad = gradient
        rule.step(RATE, 0.5)
        momentum = 0.95 * momentum + 0.5 * gradient
        left, _, right = torch.linalg.svd(0.5 * gradient + 0.95 * momentum, full_matrices=False)
        expected = expected * (1 - 3.0 * RATE * 0.1) - 3.0 * RATE * 0.18 * 40**0.5 * (left @ right)
    assert torch.allclose(parameter.tensor, expected, atol=1e-4)
    assert torch.allclose(rule.state()["w/muon.momentum"], momentum)


def test_update_of_every_head_has_the_promised_root_mean_square() -> None:
    heads, rows, columns = 6, 32, 20
    weight = torch.randn(heads * rows, columns)
    gradient = torch.randn(heads, rows, columns) * torch.logspace(-3, 3, heads)[:, None, None]
    update = moved(weight.clone(), owned(weight, heads), gradient.view(-1, columns)).view(heads, rows, columns)
    share = update.double().square().mean((1, 2)).sqrt() / (0.18 * RATE)
    assert share.tolist() == pytest.approx([1.0] * heads, abs=1e-3)


def test_every_head_moves_as_it_would_alone() -> None:
    weight, gradient = torch.randn(4 * 24, 16), torch.randn(4 * 24, 16)
    update = moved(weight.clone(), owned(weight.clone(), 4), gradient)
    for head in range(4):
        rows = slice(24 * head, 24 * head + 24)
        alone = moved(weight[rows].clone(), owned(weight[rows].clone()), gradient[rows].clone())
        assert torch.equal(update[rows], alone)


def test_a_head_without_gradient_stays_and_changes_no_other_head() -> None:
    weight, gradient = torch.randn(4 * 24, 16), torch.randn(4 * 24, 16)
    silent = gradient.clone()
    silent[24:48] = 0.0
    update, other = (moved(weight.clone(), owned(weight.clone(), 4), g) for g in (gradient, silent))
    assert torch.equal(other[24:48], torch.zeros(24, 16))
    assert torch.equal(torch.cat([update[:24], update[48:]]), torch.cat([other[:24], other[48:]]))


def test_experts_and_projections_move_separately_whatever_shares_their_batch() -> None:
    shapes = {"w1": (3, 16, 24), "w2": (3, 24, 16), "a": (16, 24), "tall": (24, 16)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    gradients = {name: torch.randn(shape) for name, shape in shapes.items()}

    def run(names: tuple[str, ...], max_batch: int) -> dict[str, Tensor]:
        parameters = []
        for name in names:
            tensor = weights[name].clone()
            tensor.grad = gradients[name]
            parameters.append(owned(tensor, tensor.shape[0] if tensor.dim() == 3 else 1, name=name))
        Muon(parameters, MuonSettings(max_batch=max_batch)).step(RATE, 1.0)
        return {p.name: p.tensor for p in parameters}

    together = run(tuple(shapes), 2**24)
    for batch in (1, 2 * 16 * 24):
        cut = run(tuple(shapes), batch)
        assert all(torch.equal(cut[name], together[name]) for name in shapes)
    assert all(torch.equal(run((name,), 2**24)[name], together[name]) for name in shapes)
    expert = weights["w1"][1].clone()
    alone = owned(expert)
    alone.tensor.grad = gradients["w1"][1].clone()
    Muon([alone], MuonSettings()).step(RATE, 1.0)
    assert torch.equal(together["w1"][1], alone.tensor)


@pytest.mark.parametrize(("room", "sizes"), [(1, [1] * 7), (2, [2, 2, 2, 1]), (3, [3, 3, 1]), (100, [7])])
def test_batches_hold_no_more_matrices_than_allowed(
    monkeypatch: pytest.MonkeyPatch, room: int, sizes: list[int]
) -> None:
    seen: list[int] = []

    def count(x_BMN: Tensor, settings: MuonSettings) -> Tensor:
        seen.append(x_BMN.shape[0])
        return x_BMN

    monkeypatch.setattr(muon, "_iterate", count)
    parameters = [owned(torch.zeros(3, 8, 16), 3, name="a"), owned(torch.zeros(4 * 16, 8), 4, name="b")]
    for parameter in parameters:
        parameter.tensor.grad = torch.zeros_like(parameter.tensor)
    Muon(parameters, MuonSettings(max_batch=room * 8 * 16)).step(RATE, 1.0)
    assert seen == sizes


def test_five_fast_iterations_agree_with_the_optimizer_of_torch() -> None:
    settings = MuonSettings(schedule=(FAST,) * 5, precision="bfloat16", rms=0.2)
    for shape in ((48, 96), (96, 48), (64, 64)):
        start = torch.randn(shape)
        theirs = torch.nn.Parameter(start.clone())
        ours = owned(start.clone(), decay=0.1)
        optimizer = torch.optim.Muon([theirs], lr=RATE, adjust_lr_fn="match_rms_adamw")
        rule = Muon([ours], settings)
        for _ in range(4):
            gradient = torch.randn(shape)
            theirs.grad, ours.tensor.grad = gradient.clone(), gradient.clone()
            optimizer.step()
            rule.step(RATE, 1.0)
        difference = (theirs.detach() - ours.tensor).norm() / (theirs.detach() - start).norm()
        assert difference < 0.02  # theirs rounds to bfloat16 before dividing by the norm; 8 + 2 iterations give 0.2


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda: MuonSettings(momentum=1.0), "momentum is 1.0"),
        (lambda: MuonSettings(rms=0.0), "rms is 0.0"),
        (lambda: MuonSettings(precision="float16"), "precision is 'float16'"),  # type: ignore[arg-type]
        (lambda: MuonSettings(schedule=()), "at least one iteration"),
    ],
)
def test_constants_outside_their_range_are_refused(change: Callable[[], MuonSettings], part: str) -> None:
    with pytest.raises(UserError, match=part):
        change()
