"""The plan: sizes that were promised, rates that follow from the bytes."""

from typing import Any

import pytest

from headrace.core.errors import UserError
from headrace.plan.families import read, released
from headrace.plan.released import RELEASED, released_config
from headrace.plan.report import Wanted, make_plan
from headrace.plan.sizes import rounded
from headrace.plan.text import plan_lines

V41 = released("deepseek-v4.1-flash")
GB = 10**9


def plan(**wanted: Any) -> dict[str, Any]:
    return make_plan(V41, Wanted(**({"context": 1 << 20, "sessions": 1} | wanted)))


def test_sizes_of_v41_are_the_promised_ones() -> None:
    result = plan(sessions=32)
    sizes = {one["tokens"]: one["bytes"] for one in result["global_kv"]["contexts"]}
    assert rounded(sizes[131_072] / 2**20, 1) == "111.3"
    assert rounded(sizes[1_048_576] / 2**30, 3) == "0.869"
    assert rounded(result["global_kv"]["bytes"] / 2**30, 1) == "27.8"
    assert rounded(result["ngram_tables"]["bytes"] / GB, 0) == "203"
    (experts,) = (row for row in result["weights"]["by_kind"] if row["kind"] == "routed experts")
    assert rounded(experts["bytes"] / GB, 0) == "289"
    assert [one["bytes_per_token"] for one in result["earlier_generations"]] == [389_120, 48_068, 3_514.25, 890]


def test_a_bound_is_bandwidth_over_bytes() -> None:
    (step,) = plan(bandwidth=400 * GB)["decode"]["steps"]
    assert step["bytes"] == sum(step["by_part"].values())
    assert step["tokens_per_second"] == pytest.approx(400 * GB / step["bytes"])
    assert step["bound_by"] == "memory"
    assert step["disk_bytes"] == 0


def test_several_sequences_in_a_step_read_weights_once() -> None:
    alone, together = plan(sessions=32, bandwidth=400 * GB)["decode"]["steps"]
    assert (alone["sessions"], together["sessions"]) == (1, 32)
    assert together["bytes"] < 32 * alone["bytes"]
    assert together["tokens_per_second"] > alone["tokens_per_second"]
    assert together["tokens_per_second_per_session"] < alone["tokens_per_second"]


def test_experts_on_disk_are_bound_by_the_disk() -> None:
    budget = {"memory": 100 * GB, "bandwidth": 400 * GB}
    (unknown,) = plan(**budget)["decode"]["steps"]
    assert unknown["disk_bytes"] > 0
    assert unknown["tokens_per_second"] is None
    (step,) = plan(**budget, disk_bandwidth=7 * GB)["decode"]["steps"]
    assert step["bound_by"] == "disk"
    assert step["tokens_per_second"] == pytest.approx(7 * GB / step["disk_bytes"])
    from_memory = step["bytes"] - step["disk_bytes"]  # but for n-gram rows, whose blocks are larger than they
    assert step["bounds_tokens_per_second"]["memory"] == pytest.approx(400 * GB / from_memory, rel=1e-4)


def test_ngram_rows_on_disk_cost_whole_blocks() -> None:
    rows = sum(table.rows_per_token for table in V41.tables)
    without_tables = V41.weight_bytes - sum(table.num_bytes for table in V41.tables)
    memory = without_tables + V41.kv_bytes(1 << 20) + V41.window_bytes + V41.state_bytes
    (step,) = plan(memory=memory)["decode"]["steps"]
    assert step["disk_row_reads"] == rows == 48
    assert step["disk_bytes"] == 48 * 4096


def test_nothing_is_bound_where_no_sequence_fits() -> None:
    result = plan(memory=GB, disk=GB, bandwidth=400 * GB, disk_bandwidth=7 * GB)
    assert not result["placement"]["fits"]
    assert len(result["placement"]["problems"]) == 2
    assert result["decode"]["steps"][0]["tokens_per_second"] is None
    text = "\n".join(plan_lines(result))
    assert text.count("DOES NOT FIT") == 2
    assert "it does not fit into memory" in text


@pytest.mark.parametrize("name", RELEASED)
def test_every_released_model_has_a_table(name: str) -> None:
    facts = released(name)
    result = make_plan(facts, Wanted(context=4096, sessions=3, memory=64 * GB, bandwidth=GB, disk_bandwidth=GB))
    text = "\n".join(plan_lines(result))
    for row in result["weights"]["by_kind"]:
        assert row["kind"] in text
    for part in result["placement"]["parts"]:
        assert part["name"] in text
    assert "tokens/s" in text


def test_a_context_beyond_the_configuration_is_noted() -> None:
    facts = released("qwen3.8-flash-next")
    (vision, beyond) = make_plan(facts, Wanted(context=1 << 20, sessions=1))["notes"]
    assert "vision" in vision
    assert "262,144" in beyond


@pytest.mark.parametrize(("context", "sessions", "word"), [(0, 1, "--context"), (1, 0, "--sessions"), (-1, 1, "-1")])
def test_counts_out_of_range_are_refused(context: int, sessions: int, word: str) -> None:
    with pytest.raises(UserError, match=word):
        Wanted(context=context, sessions=sessions)


def test_a_model_without_tables_and_drafts_has_a_plan() -> None:
    document = released_config("deepseek-v4.1-flash")
    document["text_config"] |= {"engram_layer_ids": [], "dspark_block_size": 0}
    document["vision_config"] = {"num_hidden_layers": 0}
    result = make_plan(read(document, "bare"), Wanted(context=1000, sessions=2))
    assert result["ngram_tables"] is None
    assert "n-gram" not in "\n".join(plan_lines(result))
