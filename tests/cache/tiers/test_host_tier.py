"""Blocks in host memory stay within their budget, and a load is made only where it pays."""

from headrace.cache.tiers.host_tier import HostTier
from headrace.cache.tiers.rates import LoadRule

KEYS = [bytes([place] * 16) for place in range(20)]


def test_the_budget_holds_and_the_least_recently_used_goes() -> None:
    tier = HostTier(1000)
    for place in range(10):
        assert tier.put(KEYS[place], bytes(100))
    assert tier.get(KEYS[0]) == bytes(100)
    assert tier.put(KEYS[10], bytes([1]) * 100)
    assert (tier.get(KEYS[1]), tier.get(KEYS[10])) == (None, bytes([1]) * 100)
    assert tier.find(KEYS[:3]) == {KEYS[0], KEYS[2]}
    assert (tier.nbytes, tier.count, tier.evicted) == (1000, 10, 1)
    assert not tier.put(KEYS[11], bytes(1001))
    tier.clear()
    assert (tier.nbytes, tier.count) == (0, 0)


def test_what_follows_goes_before_what_it_follows() -> None:
    tier = HostTier(500)
    for place in range(5):
        tier.put(KEYS[place], bytes(100))
    tier.touch(KEYS[:5])  # a chain, its root first
    for place in range(5, 9):
        tier.put(KEYS[place], bytes(100))
        assert tier.find(KEYS[:5]) == set(KEYS[: 9 - place])


def test_a_load_pays_if_it_is_measured_to_be_faster() -> None:
    rule = LoadRule()
    assert rule.pays(1 << 40, 1)  # nothing is measured yet
    assert not rule.pays(0, 0)
    rule.load_bytes.note(1000, 1.0)
    assert rule.pays(1 << 40, 1)
    rule.prefill_rows.note(100, 1.0)
    assert rule.pays(1000, 101)
    assert not rule.pays(1000, 99)
    assert rule.refused == 1


def test_a_source_that_was_slow_once_is_measured_again() -> None:
    rule = LoadRule()
    rule.load_bytes.note(1, 1.0)
    rule.prefill_rows.note(100, 1.0)
    asked = [rule.pays(1000, 50) for _ in range(40)]
    assert asked.count(True) == 2
    rule.load_bytes.note(10_000_000, 1.0)
    assert rule.pays(1000, 50)
