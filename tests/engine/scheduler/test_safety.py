"""The rule that everybody who has started can run to the end."""

from headrace.engine.scheduler.entry import Entry, Phase
from headrace.engine.scheduler.holdings import Holdings
from headrace.engine.scheduler.safety import everyone_can_end
from tests.engine.scheduler.drive import ask, small

CONFIG = small()
A, B, AB = frozenset("a"), frozenset("b"), frozenset("ab")


def running(name: str, arrival: int, held: int, most: int) -> Entry:
    """Return a request in decode that holds some blocks of the many it may need."""
    request = ask(name, arrival, 1, most * 4)
    return Entry(request=request, phase=Phase.DECODE, slot=arrival, computed=held * 4, generated=1, blocks=held)


def test_what_is_obtainable_must_be_enough_for_the_first() -> None:
    pair, held = [running("a", 1, 2, 6), running("b", 2, 3, 4)], Holdings({A: 2, B: 3})
    assert everyone_can_end(CONFIG, pair, held, available=4, host_free=0)
    assert not everyone_can_end(CONFIG, pair, held, available=3, host_free=0)


def test_the_second_counts_on_what_only_the_first_holds() -> None:
    pair = [running("a", 1, 3, 4), running("b", 2, 3, 7)]
    assert everyone_can_end(CONFIG, pair, Holdings({A: 3, B: 3}), available=1, host_free=0)
    assert not everyone_can_end(CONFIG, pair, Holdings({A: 1, AB: 2, B: 1}), available=1, host_free=0)


def test_the_first_counts_on_swapping_the_second_as_far_as_host_memory_goes() -> None:
    pair, held = [running("a", 1, 2, 6), running("b", 2, 3, 4)], Holdings({A: 2, B: 3})
    assert everyone_can_end(CONFIG, pair, held, available=3, host_free=17)
    assert not everyone_can_end(CONFIG, pair, held, available=3, host_free=16)
    assert everyone_can_end(CONFIG, pair, held, available=1, host_free=37)
    assert not everyone_can_end(CONFIG, pair, held, available=0, host_free=999)


def test_host_memory_is_used_up_by_the_last_one_first() -> None:
    three = [running("a", 1, 2, 6), running("b", 2, 1, 1), running("c", 3, 3, 3)]
    held = Holdings({A: 2, B: 1, frozenset("c"): 3})
    assert not everyone_can_end(CONFIG, three, held, available=0, host_free=53)
    assert everyone_can_end(CONFIG, three, held, available=0, host_free=54)


def test_blocks_shared_with_one_ahead_are_not_gained_by_a_swap() -> None:
    pair = [running("a", 1, 2, 6), running("b", 2, 3, 4)]
    assert not everyone_can_end(CONFIG, pair, Holdings({AB: 2, B: 1}), available=2, host_free=999)
    assert everyone_can_end(CONFIG, pair, Holdings({AB: 2, B: 1}), available=3, host_free=999)
