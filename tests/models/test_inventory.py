from collections import Counter
from dataclasses import replace

import pytest

from headrace.checkpoint.catalog import open_catalog
from headrace.models.deepseek_v41.config import from_json
from headrace.models.deepseek_v41.inventory import expected_tensors
from tests.factories import tiny_config
from tests.golden_mini import FOLDER, config
from tests.release import DOCUMENT


def test_the_released_checkpoint_is_counted_to_the_byte() -> None:
    specs = list(expected_tensors(from_json(DOCUMENT)))
    assert len(specs) == len({spec.name for spec in specs}) == 96_085
    assert sum(spec.name.startswith("mtp.") for spec in specs) == 2_401
    by_dtype: Counter[str] = Counter()
    for spec in specs:
        by_dtype[spec.dtype] += spec.num_bytes
    assert by_dtype.total() == 510_286_023_000
    assert by_dtype == {
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }


def test_the_golden_checkpoint_holds_exactly_the_expected_tensors() -> None:
    expected = {spec.name: spec for spec in expected_tensors(config())}
    assert {name: entry.spec for name, entry in open_catalog(FOLDER).tensors.items()} == expected


@pytest.mark.parametrize("streams", [3, 4])
def test_shapes_follow_the_number_of_streams(streams: int) -> None:
    shapes = {spec.name: spec.shape for spec in expected_tensors(tiny_config(streams))}
    assert shapes["layers.0.hc_attn_fn"] == ((2 + streams) * streams, streams * 96)
    assert shapes["mtp.1.hc_ffn_base"] == ((2 + streams) * streams,)
    assert shapes["layers.1.engram.wkv.weight"] == ((streams + 1) * 96, 6 * 32)
    assert shapes["layers.3.engram.q_weight"] == (streams, 96)


def test_scales_cover_ragged_blocks_too() -> None:
    ragged = replace(tiny_config(), o_lora_rank=17)  # no legal configuration has such rows; the rule holds anyway
    shapes = {spec.name: spec.shape for spec in expected_tensors(ragged)}
    assert shapes["layers.0.attn.wo_a.weight"] == (34, 128)
    assert shapes["layers.0.attn.wo_a.scale"] == (2, 4)
    assert shapes["layers.0.attn.wo_b.scale"] == (3, 2)


def test_parts_that_are_switched_off_have_no_tensors() -> None:
    names = [spec.name for spec in expected_tensors(tiny_config(vision=False, draft=False, engram=False))]
    assert not [name for name in names if name.startswith(("mtp", "vision", "aligner", "image")) or "engram" in name]
