"""Every figure of the reports is reproduced, and none of them by heart."""

from dataclasses import replace
from functools import cache

import pytest

from headrace.plan.families import read, released
from headrace.plan.ledger.arithmetic import decode_growth, prefill_saving, stream_traffic, with_fp4_experts
from headrace.plan.ledger.figure import Figure, Live
from headrace.plan.ledger.figures import M1, Models, ledger, shipped_models
from headrace.plan.released import released_config

PROMISED = {
    "decode-growth": "1.25",
    "prefill-saving": "1.9747",
    "deepseek-v4-pro-flops-over-v3.2": "27",
    "deepseek-v4-flash-flops-over-v3.2": "10",
    "deepseek-v4-pro-kv-over-v3.2": "10",
    "deepseek-v4-flash-kv-over-v3.2": "7",
    "deepseek-v4-flash-over-gqa8": "2",
    "deepseek-v4-pro-over-gqa8": "2",
    "persistent-kv": "7.9",
    "window-over-entries": "7.95",
    "deepseek-v4-flash-stream-traffic": "20",
    "deepseek-v4.1-flash-stream-traffic": "10",
    "deepseek-v1-67b-over-v4.1": "437",
    "deepseek-v3.2-over-v4.1": "54",
    "deepseek-v4-flash-over-v4.1": "3.95",
    "deepseek-v4-flash-recompute": "5,504",
    "deepseek-v4-pro-recompute": "7,808",
    "deepseek-v4.1-flash-recompute": "5,120",
    "deepseek-v1-67b-kv-per-token": "389,120",
    "deepseek-v3.2-kv-per-token": "48,068",
    "deepseek-v4-flash-kv-per-token": "3,514",
    "deepseek-v4.1-flash-kv-per-token": "890",
    "kv-128k": "111.3",
    "kv-1m": "0.869",
    "kv-32x1m": "27.8",
    "ngram-tables": "203",
    "routed-experts": "289",
}


@cache
def figures() -> dict[str, Figure]:
    return {figure.key: figure for figure in ledger(shipped_models())}


@pytest.mark.parametrize("key", PROMISED)
def test_the_configurations_give_the_reports_figure(key: str) -> None:
    figure = figures()[key]
    assert figure.reported == PROMISED[key]
    assert figure.shown == PROMISED[key], f"{figure.formula} = {figure.ours}"
    assert figure.agrees


def test_every_entry_agrees_and_says_where_it_is_from() -> None:
    for figure in figures().values():
        assert figure.agrees, figure.key
        assert figure.formula
        assert figure.source
        assert figure.configs


def perturbed() -> Models:
    """Configurations that differ from the released ones in nearly every size that a figure rests on."""
    v41 = released_config("deepseek-v4.1-flash")
    v41["text_config"] |= {
        "sliding_window": 96,
        "head_dim": 480,
        "o_lora_rank": 768,
        "index_topk": 256,
        "candidate_topk_blocks": 512,
        "num_experts_per_tok": 9,
        "moe_intermediate_size": 1024,
        "hc_mult": 3,
        "compress_ratios": [0] + [2] * 11 + [1] * 28 + [0] * 3,
        "kv_source_layer_ids": [1, 8, 12],
        "index_source_layer_ids": [1, 8, 12, 20, 28],
        "candidate_source_layer_id": 12,
        "engram_layer_ids": [1, 8],
        "engram_head_dim": 128,
    }
    others = {}
    for name in ("deepseek-v4-flash", "deepseek-v4-pro"):
        document = released_config(name)
        ratios = document["compress_ratios"]
        document |= {"compress_ratios": ratios[4:], "num_hidden_layers": len(ratios) - 5, "hc_mult": 5, "head_dim": 256}
        others[name] = read(document, name)
    v32 = released("deepseek-v3.2")
    halved = replace(v32, growing=v32.growing[:1], scans=v32.scans[:1])
    v1 = released("deepseek-v1-67b")
    return Models(
        v41=read(v41, "deepseek-v4.1-flash"), flash=others["deepseek-v4-flash"], pro=others["deepseek-v4-pro"],
        v32=halved, v1=replace(v1, growing=tuple(replace(part, layers=90) for part in v1.growing)),
    )  # fmt: skip


def test_no_figure_survives_other_configurations() -> None:
    changed = {figure.key: figure for figure in ledger(perturbed())}
    assert changed.keys() == figures().keys()
    unmoved = {key for key, figure in changed.items() if figure.ours == figures()[key].ours}
    assert unmoved == set()


def test_the_other_reading_of_decode_growth_is_the_one_the_specification_names() -> None:
    facts = released("deepseek-v4.1-flash")
    assert round(decode_growth(with_fp4_experts(facts), 4096, M1), 2) == 1.31


def test_prefill_saves_nothing_within_a_window_and_half_in_the_end() -> None:
    facts = released("deepseek-v4.1-flash")
    assert prefill_saving(facts, 100) == 1.0
    assert 1.99 < prefill_saving(facts, 100_000) < 2.0


def test_a_family_without_replay_saves_nothing() -> None:
    facts = released("deepseek-v4-flash")
    assert prefill_saving(facts, 10_000) == 1.0


@pytest.mark.parametrize("streams", [1, 2, 4, 7])
def test_stream_traffic_is_the_formula_of_the_reports(streams: int) -> None:
    assert stream_traffic(streams, is_single_pass=False) == 4 * streams + 4
    assert stream_traffic(streams, is_single_pass=True) == 2 * streams + 2


def test_an_entry_agrees_only_to_the_decimals_that_the_report_gives() -> None:
    figure = figures()["decode-growth"]
    assert replace(figure, ours=1.2549).agrees
    assert not replace(figure, ours=1.2551).agrees
    assert replace(figure, reported="1.25500", ours=1.255).agrees


def test_json_holds_difference_and_live_values() -> None:
    figure = figures()["prefill-saving"]
    document = figure.to_json(Live(what="prefill", arithmetic=1.5, measured=1.25, how="layer_rows"))
    assert document["difference"] == figure.ours - 1.9747
    assert document["live"]["difference"] == -0.25
    assert figure.to_json(None)["live"] is None
