"""One optimizer over all rules: one norm, all or nothing, exact resume, state of nobody but owners."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.config import Config
from headrace.train.optim.optimizer import Optimizer, OptimizerSettings
from headrace.train.optim.ownership import Splits
from headrace.train.optim.rules import V41
from headrace.train.optim.sinkhorn import SinkhornSettings
from tests.factories import tiny_config
from tests.train.master_names import master_shapes

RATE = 2e-3
WINDOWED = OptimizerSettings(sinkhorn=SinkhornSettings(touched_window=16))


def masters(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=dtype) for n, s in master_shapes(config).items()}


def give_gradients(parameters: dict[str, Tensor], seed: int, scale: float = 1e-4) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in parameters.values():
        tensor.grad = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * scale


def small() -> Config:
    return tiny_config(vision=False, draft=False)


def optimizer_of(parameters: dict[str, Tensor], config: Config, **options: object) -> Optimizer:
    return Optimizer(parameters, V41, Splits.of(config), **options)  # type: ignore[arg-type]


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_norm_is_one_over_all_rules_and_gradients_are_clipped_together() -> None:
    config = small()
    parameters = masters(config)
    give_gradients(parameters, 1, scale=3.0)
    expected = torch.cat([t.grad.flatten().double() for t in parameters.values()]).norm().item()  # type: ignore[union-attr]
    report = optimizer_of(parameters, config).step(RATE)
    assert report.grad_norm == pytest.approx(expected, rel=1e-6)
    assert report.factor == pytest.approx(1.0 / expected, rel=1e-6)
    assert not report.is_skipped


def test_clipping_equals_gradients_scaled_beforehand() -> None:
    config = small()
    one, two = masters(config), masters(config)
    clipped, scaled = optimizer_of(one, config), optimizer_of(two, config, settings=OptimizerSettings(clip=None))
    for step in range(2):
        give_gradients(one, step, scale=1.0)
        give_gradients(two, step, scale=1.0)
        factor = 1.0 / clipped.grad_norm()
        for tensor in two.values():
            tensor.grad *= factor  # type: ignore[operator]
        assert clipped.step(RATE).factor == factor
        assert scaled.step(RATE).factor == 1.0
    assert all(torch.allclose(one[name], two[name], atol=1e-5) for name in one)


def test_gradients_below_the_bound_are_left_alone() -> None:
    config = small()
    parameters = masters(config)
    give_gradients(parameters, 1, scale=1e-6)
    assert optimizer_of(parameters, config).step(RATE).factor == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("name", ["layers.0.attn.wq_a.weight", "norm.weight", "layers.1.engram.embed.weight"])
def test_a_step_with_a_bad_gradient_changes_nothing_under_any_rule(name: str, bad: float) -> None:
    config = small()
    parameters = masters(config)
    optimizer = optimizer_of(parameters, config, settings=WINDOWED)
    give_gradients(parameters, 1)
    optimizer.step(RATE)
    before, state = copies(parameters), copies(optimizer.state_dict())
    give_gradients(parameters, 2)
    parameters[name].grad.view(-1)[-1] = bad  # type: ignore[union-attr]
    report = optimizer.step(RATE)
    assert report.is_skipped
    assert same_bits(parameters, before)
    assert same_bits(optimizer.state_dict(), state)


def test_a_skipped_step_leaves_no_trace_in_later_ones() -> None:
    config = small()
    one, two = masters(config), masters(config)
    first, second = optimizer_of(one, config), optimizer_of(two, config)
    for step in range(3):
        if step == 1:
            give_gradients(one, 9)
            one["norm.weight"].grad[0] = float("nan")  # type: ignore[index]
            assert first.step(RATE).is_skipped
        for parameters, optimizer in ((one, first), (two, second)):
            give_gradients(parameters, step)
            optimizer.step(RATE)
    assert same_bits(one, two)


@pytest.mark.parametrize("settings", [OptimizerSettings(), WINDOWED], ids=["plain", "windowed"])
def test_resumed_steps_give_the_same_bits(settings: OptimizerSettings) -> None:
    config = small()
    straight = masters(config)
    optimizer = optimizer_of(straight, config, settings=settings)
    saved: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
    for step in range(5):
        if step == 2:
            saved = copies(straight), copies(optimizer.state_dict())
        give_gradients(straight, step)
        optimizer.step(RATE * (step + 1))
    assert saved is not None
    resumed, state = saved
    again = optimizer_of(resumed, config, settings=settings)
    again.load_state_dict(state)
    for step in range(2, 5):
        give_gradients(resumed, step)
        again.step(RATE * (step + 1))
    assert same_bits(resumed, straight)
    assert same_bits(again.state_dict(), optimizer.state_dict())
    fresh = optimizer_of(masters(config), config, settings=settings)
    assert not same_bits(fresh.state_dict(), optimizer.state_dict())


def test_two_threads_give_the_bits_of_one() -> None:
    def run(threads: int) -> dict[str, Tensor]:
        torch.set_num_threads(threads)
        try:
            config = small()
            parameters = masters(config)
            optimizer = optimizer_of(parameters, config)
            give_gradients(parameters, 1, scale=1.0)
            optimizer.step(RATE)
        finally:
            torch.set_num_threads(1)
        return parameters

    assert same_bits(run(1), run(2))


def test_the_order_of_parameters_changes_no_bit_of_an_update() -> None:
    config = small()
    forwards = masters(config)
    backwards = dict(reversed(copies(forwards).items()))
    for parameters in (forwards, backwards):
        give_gradients(forwards, 3)
        for name, tensor in parameters.items():
            tensor.grad = forwards[name].grad
        optimizer_of(parameters, config, settings=OptimizerSettings(clip=None)).step(RATE)
    assert same_bits(dict(sorted(forwards.items())), dict(sorted(backwards.items())))


def test_state_of_frozen_parameters_does_not_exist_and_they_never_move() -> None:
    config = tiny_config(vision=False)
    parameters = masters(config)
    frozen = {name: tensor.clone() for name, tensor in parameters.items() if name.startswith("mtp.")}
    optimizer = optimizer_of(parameters, config, frozen=("mtp.*",))
    assert not [key for key in optimizer.state_dict() if key.startswith("mtp.")]
    give_gradients(parameters, 1)
    for name in frozen:
        parameters[name].grad = None
    optimizer.step(RATE)
    assert all(torch.equal(parameters[name], tensor) for name, tensor in frozen.items())


def test_thawing_starts_fresh_and_keeps_the_state_of_the_others() -> None:
    config = tiny_config(vision=False)
    parameters = masters(config)
    optimizer = optimizer_of(parameters, config, frozen=("mtp.*",))
    give_gradients(parameters, 1)
    optimizer.step(RATE)
    before = copies(optimizer.state_dict())
    optimizer.set_frozen(())
    after = optimizer.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    fresh = [key for key in after if key.startswith("mtp.")]
    assert fresh
    assert all(not after[key].any() for key in fresh)
    optimizer.set_frozen(("mtp.*", "embed.weight"))
    assert optimizer.state_dict().keys() == before.keys() - {"embed.weight/sinkhorn.momentum"}


def test_zero_grad_drops_gradients_of_frozen_parameters_too() -> None:
    config = tiny_config(vision=False)
    parameters = masters(config)
    optimizer = optimizer_of(parameters, config, frozen=("mtp.*",))
    give_gradients(parameters, 1)
    optimizer.zero_grad()
    assert all(tensor.grad is None for tensor in parameters.values())


def test_a_missing_gradient_is_refused_by_name_before_anything_moves() -> None:
    config = small()
    parameters = masters(config)
    optimizer = optimizer_of(parameters, config)
    give_gradients(parameters, 1)
    parameters["norm.weight"].grad = None
    before = copies(parameters)
    with pytest.raises(UserError, match=r"norm\.weight has no gradient"):
        optimizer.step(RATE)
    assert same_bits(parameters, before)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1e-3])
def test_a_learning_rate_that_makes_no_sense_is_refused(rate: float) -> None:
    config = small()
    parameters = masters(config)
    give_gradients(parameters, 1)
    with pytest.raises(UserError, match="Learning rate is"):
        optimizer_of(parameters, config).step(rate)


def test_bytes_of_state_are_reported_beside_those_of_adam() -> None:
    config = small()
    parameters = masters(config)
    rows = {line.update: line for line in optimizer_of(parameters, config).state_bytes()}
    assert sum(line.num_parameters for line in rows.values()) == sum(t.numel() for t in parameters.values())
    assert rows["sinkhorn"].per_parameter == 4.0
    assert rows["muon"].per_parameter == 4.0
    assert 8.0 < rows["adamw"].per_parameter < 9.0
    assert all(line.adam_bytes == 8 * line.num_parameters for line in rows.values())
    windowed = {line.update: line for line in optimizer_of(parameters, config, settings=WINDOWED).state_bytes()}
    tables = [t for name, t in parameters.items() if name.endswith(("embed.weight", "head.weight"))]
    extra = sum(4 * table.shape[0] + 8 for table in tables)  # a step per row and a count
    assert windowed["sinkhorn"].num_bytes == rows["sinkhorn"].num_bytes + extra


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    config = small()
    parameters = masters(config)
    optimizer = optimizer_of(parameters, config)
    give_gradients(parameters, 1)
    optimizer.step(RATE)
    good = copies(optimizer.state_dict())
    key = "embed.weight/sinkhorn.momentum"
    lacking = {name: value for name, value in good.items() if name != key}
    with pytest.raises(UserError, match=r"lacks embed\.weight/sinkhorn\.momentum"):
        optimizer.load_state_dict(lacking)
    with pytest.raises(UserError, match=r"holds other/muon\.momentum"):
        optimizer.load_state_dict(good | {"other/muon.momentum": torch.zeros(1)})
    with pytest.raises(UserError, match=r"embed.weight/sinkhorn.momentum is \[2\]"):
        optimizer.load_state_dict({name: torch.zeros_like(v) for name, v in good.items()} | {key: torch.zeros(2)})
    assert same_bits(optimizer.state_dict(), good)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda p: p | {"norm.weight": torch.zeros(96, dtype=torch.bfloat16)}, "norm.weight is torch.bfloat16"),
        (lambda p: p | {"head.weight": torch.zeros(96, 320).T}, "not contiguous"),
        (lambda p: p | {"head.weight": p["embed.weight"]}, "embed.weight and head.weight share their memory"),
        (lambda p: p | {"strange.weight": torch.zeros(3)}, "strange.weight has no update rule"),
    ],
)
def test_parameters_no_rule_can_move_are_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], part: str
) -> None:
    config = small()
    with pytest.raises(UserError, match=part):
        optimizer_of(change(masters(config)), config)


@pytest.mark.parametrize("clip", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clip_that_makes_no_sense_is_refused(clip: float) -> None:
    with pytest.raises(UserError, match="Gradient clip is"):
        OptimizerSettings(clip=clip)
