import pytest

from headrace.models.deepseek_v41.config import from_json
from headrace.models.deepseek_v41.inspect import report
from tests.factories import tiny_config
from tests.release import DOCUMENT

RELEASE = report(from_json(DOCUMENT))


def test_the_released_configuration_gives_the_published_figures() -> None:
    assert RELEASE["model_type"] == "deepseek_v41"
    assert RELEASE["num_tensors"] == 96_085
    assert RELEASE["total_bytes"] == sum(RELEASE["bytes_by_dtype"].values()) == 510_286_023_000
    assert RELEASE["bytes_by_dtype"]["I8"] == 278_585_671_680
    assert RELEASE["kv_bytes_per_token"] == 890
    assert isinstance(RELEASE["kv_bytes_per_token"], int)
    assert RELEASE["contexts"] == [
        {"tokens": 131_072, "bytes": 890 * 131_072},
        {"tokens": 1_048_576, "bytes": 933_232_640},
    ]
    assert RELEASE["window_bytes_per_sequence"] == 43 * 128 * 528 == 1_351_680 * 2 + 202_752
    assert RELEASE["state_bytes_per_sequence"] == 12_288


def test_parameters_are_the_published_ones() -> None:
    billions = {kind: count / 1e9 for kind, count in RELEASE["parameters"].items()}
    published = {
        "total": 763.2,
        "backbone": 552,
        "routed_experts": 543.58,
        "other_layers": 6.66,
        "embed": 0.66,
        "head": 0.66,
        "engram_tables": 196.61,
        "engram_projections": 0.31,
        "draft": 14.23,
        "vision": 0.485,
    }
    assert set(billions) == set(published)
    for kind, count in published.items():
        digits = len(str(count).partition(".")[2])
        assert round(billions[kind], digits) == count, kind
    parts = RELEASE["parameters"]
    assert parts["total"] == parts["backbone"] + parts["engram_tables"] + parts["draft"] + parts["vision"]


def test_active_parameters_are_the_published_ones() -> None:
    assert round(RELEASE["active_parameters"]["decode"] / 1e9, 2) == 16.13
    assert round(RELEASE["active_parameters"]["prefill"] / 1e9, 2) == 7.90


def test_active_parameters_count_routed_experts_and_nothing_else_by_share() -> None:
    few, many = report(tiny_config(num_experts_per_tok=2)), report(tiny_config(num_experts_per_tok=3))
    one_expert = 3 * 96 * 64
    grown = {mode: many["active_parameters"][mode] - few["active_parameters"][mode] for mode in ("decode", "prefill")}
    assert grown == {"decode": 7 * one_expert, "prefill": 4 * one_expert}
    without = report(tiny_config(vision=False, draft=False))
    assert without["active_parameters"] == few["active_parameters"]
    # embedding and head alike grow by 96 a token, only the head is active
    larger = report(tiny_config(vocab_size=321))
    assert larger["active_parameters"]["decode"] - few["active_parameters"]["decode"] == 96
    assert larger["active_parameters"]["prefill"] == few["active_parameters"]["prefill"]


def test_the_layer_table_has_exactly_the_promised_fields() -> None:
    assert [layer["id"] for layer in RELEASE["layers"]] == list(range(43))
    assert RELEASE["layers"][24] == {
        "id": 24,
        "half": "decoder",
        "role": "reindex",
        "ratio": 1,
        "kv_source": 20,
        "index_source": 24,
        "has_candidates": False,
        "has_ngram": False,
    }
    assert RELEASE["layers"][42] == {
        "id": 42,
        "half": None,
        "role": "window",
        "ratio": 0,
        "kv_source": None,
        "index_source": None,
        "has_candidates": False,
        "has_ngram": False,
    }


@pytest.mark.parametrize(
    ("overrides", "per_token"),
    [
        ({}, 36 + 17 + (36 + 17)),  # ratio 2 twice, ratio 1 once, of 36 + 17 bytes an entry
        ({"head_dim": 32, "qk_rope_head_dim": 8}, 2 * (18 + 17)),
        ({"index_head_dim": 64}, 2 * (36 + 34)),
        (
            {
                "compress_ratios": [0, 0, 0, 2, 1, 1, 1, 0, 0],
                "kv_source_layer_ids": [3, 4],
                "index_source_layer_ids": [3, 4],
            },
            (36 + 17) * 1.5,
        ),
    ],
)
def test_bytes_per_token_follow_the_entry_sizes(overrides: dict, per_token: float) -> None:
    result = report(tiny_config(**overrides))
    assert result["kv_bytes_per_token"] == per_token
    assert result["contexts"][0]["bytes"] == per_token * 131_072


def test_parts_that_are_switched_off_are_not_counted() -> None:
    result = report(tiny_config(vision=False, draft=False, engram=False))
    assert not {"draft", "vision", "engram_tables", "engram_projections"} & set(result["parameters"])
    assert result["window_bytes_per_sequence"] == 7 * 8 * 66
    assert len(result["layers"]) == 7
