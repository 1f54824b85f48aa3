"""A tight pool beside a full prefix cache: duplicates and partial swaps must not keep cached blocks from going."""

from typing import Any

import pytest

from headrace.engine.core.memory_plan import block_bytes, slot_bytes
from tests.engine.core.serving import Client, alone, core, params, prompt, said, tiny

LIMIT = 900


def finish(client: Client) -> None:
    client.finish(LIMIT)
    client.core.audit()
    pool = client.core.free_blocks + client.core.cache.index.num_evictable
    assert pool == client.core.memory.num_blocks


@pytest.mark.parametrize(
    "second", [{"mode": "full"}, {"mode": "full", "n": 2}, {}], ids=["full", "full, two answers", "no window state"]
)
def test_recomputed_tokens_do_not_pin_their_cached_copies(second: dict[str, Any]) -> None:
    budget = {} if second else {"snapshot_bytes": 0}
    client, ids = Client(core(cache_tokens=512, max_context=512, num_slots=2, **budget)), prompt(300)
    client.submit("first", ids[:130], params(max_tokens=1))
    client.finish()
    count = 80 if "n" in second else 150
    client.submit("second", ids, params(max_tokens=count, **second))
    finish(client)
    assert not client.errors
    assert said(client.results["second"][0]) == alone(tuple(ids), second.get("mode", "replay"), count=count)


@pytest.mark.parametrize("young", [(250, 120), (380, 20)])
def test_a_request_that_leaves_with_some_of_its_blocks_does_not_pin_the_others(young: tuple[int, int]) -> None:
    shape = tiny().state_shape
    one_block = slot_bytes(shape) + block_bytes(shape)
    options = {"num_slots": 2, "cache_tokens": 512, "max_context": 512, "host_bytes": one_block, "headroom_blocks": 0}
    client = Client(core(chunk=200, **options))
    client.submit("old", prompt(250), params(max_tokens=120, priority=1))
    client.submit("young", prompt(young[0], seed=1), params(max_tokens=young[1]))
    finish(client)
    assert not client.errors
    assert said(client.results["old"][0]) == alone(tuple(prompt(250)), count=120)
    assert said(client.results["young"][0]) == alone(tuple(prompt(young[0], seed=1)), count=young[1])
