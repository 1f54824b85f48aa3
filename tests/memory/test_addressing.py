import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from headrace.core.errors import CheckpointError, InternalError, UserError
from headrace.memory import addressing
from headrace.memory.addressing import DEAD, Addressing, hash_primes

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "deepseek_v41_mini" / "golden.safetensors"
CLASSES = 99092

# published constants, kept here so that a random generator whose stream changes cannot go unnoticed
RELEASED_MULTIPLIERS = [
    [76632096046245, 4839876093313, 35959672319349, 73987337458391],
    [67716810739261, 51510806800915, 30921347202721, 82619226485591],
]
RELEASED_PRIMES = """
16000057 16000079 16000081 16000097 16000121 16000129 16000133 16000183
16000189 16000207 16000211 16000253 16000277 16000289 16000307 16000321
16000339 16000381 16000393 16000399 16000403 16000409 16000447 16000463
16000477 16000487 16000499 16000507 16000511 16000573 16000609 16000627
16000667 16000669 16000693 16000697 16000711 16000729 16000759 16000769
16000781 16000799 16000813 16000819 16000841 16000877 16000879 16000889
"""
RELEASED_OFFSETS_LAYER_1 = """
0 16000057 32000136 48000217 64000314 80000435 96000564 112000697 128000880 144001069 160001276 176001487 192001740
208002017 224002306 240002613 256002934 272003273 288003654 304004047 320004446 336004849 352005258 368005705
"""
RELEASED_ROWS_50_40_30_20 = [
    """5457301 26470289 42926785 62582378 68079542 85915763 102834638 114358063 130605657 156377119 174550172 181396638
    194477994 217026077 226856678 250510400 261515048 274655344 296704228 307730068 331081547 342108941 363969460
    377395685""",
    """12112771 17594806 40177035 60567362 78763383 80843792 100677074 126606474 142726201 145257379 175637107 180701399
    198428675 221226053 227233095 255906954 259419700 284922264 302986529 306158514 323132060 342210866 353939203
    380580960""",
]
RELEASED = {
    "layer_ids": [1, 14],
    "num_embeddings": [384006168, 384016682],
    "max_ngram": 4,
    "first_prime_above": 16_000_000,
    "num_hashes": 8,
    "pad_token_id": 2,
    "compressed_vocab_size": CLASSES,
}
MINI = {
    "layer_ids": [1, 4],
    "num_embeddings": None,  # filled from the golden primes
    "max_ngram": 4,
    "first_prime_above": 200,
    "num_hashes": 2,
    "pad_token_id": 2,
    "compressed_vocab_size": 256,
}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def golden(*names: str) -> list[np.ndarray]:
    with safe_open(GOLDEN, framework="numpy") as file:
        return [file.get_tensor(name) for name in names]


@pytest.fixture(scope="module")
def released() -> Addressing:
    return Addressing(**RELEASED, token_map=np.arange(CLASSES))


@pytest.fixture(scope="module")
def mini() -> Addressing:
    token_map, primes = golden("token_map", "engram_primes")
    return Addressing(**{**MINI, "num_embeddings": primes.sum(axis=(1, 2)).tolist()}, token_map=token_map)


def rows_by_hand(hashing: Addressing, ids: list[int]) -> list[list[list[int]]]:
    """The definition in Python integers, which cannot overflow: token by token, column by column."""
    rows = []
    for p in range(len(ids)):
        blocked, taus = False, []
        for s in range(hashing.lookback + 1):
            blocked = blocked or p - s < 0 or ids[p - s] == DEAD
            taus.append(hashing.pad if blocked else ids[p - s])
        token = []
        for multipliers, primes in zip(hashing.multipliers.tolist(), hashing.primes.tolist(), strict=True):
            columns, offset = [], 0
            value = taus[0] * multipliers[0]
            for n, heads in enumerate(primes, start=1):
                value ^= taus[n] * multipliers[n]
                for prime in heads:
                    columns.append(value % prime + offset)
                    offset += prime
            token.append(columns)
        rows.append(token)
    return rows


def rows_in_chunks(hashing: Addressing, compressed: np.ndarray, cuts: list[int]) -> np.ndarray:
    previous, parts = hashing.fresh(), []
    for chunk in np.split(compressed, cuts):
        parts.append(hashing.row_ids(hashing.history(chunk, previous)))
        previous = hashing.advance(chunk, previous)
    return np.concatenate(parts)


def test_released_multipliers_primes_and_offsets_are_the_published_ones(released: Addressing) -> None:
    assert released.multipliers.tolist() == RELEASED_MULTIPLIERS
    assert released.primes.ravel().tolist() == numbers(RELEASED_PRIMES)
    assert released.primes.shape == (2, 3, 8)
    assert released.offsets[0].tolist() == numbers(RELEASED_OFFSETS_LAYER_1)
    assert released.columns == 24


def test_released_row_ids_are_the_published_ones(released: Addressing) -> None:
    rows = released.row_ids(np.array([[50, 40, 30, 20], [CLASSES - 1, 0, 12345, 2]]))
    assert rows[0].tolist() == [numbers(text) for text in RELEASED_ROWS_50_40_30_20]
    assert rows[1, :, [0, -1]].T.tolist() == [[13293893, 381123068], [1723341, 383089261]]


def test_products_near_two_to_the_63_are_exact(released: Addressing) -> None:
    ids = [CLASSES - 1, CLASSES - 1, CLASSES - 2, CLASSES - 1, 77777, CLASSES - 1]
    assert max(ids) * int(released.multipliers.max()) > 2**62
    assert rows_in_chunks(released, np.array(ids), []).tolist() == rows_by_hand(released, ids)


def test_golden_tables_are_reproduced(mini: Addressing) -> None:
    multipliers, primes, offsets = golden("engram_multipliers", "engram_primes", "engram_offsets")
    np.testing.assert_array_equal(mini.multipliers, multipliers)
    np.testing.assert_array_equal(mini.primes, primes)
    np.testing.assert_array_equal(mini.offsets, offsets)


@pytest.mark.parametrize("run", ["text", "image"])
def test_golden_row_ids_are_reproduced(mini: Addressing, run: str) -> None:
    ids, expected = golden(f"{run}.input_ids", f"{run}.engram_hash_ids")
    is_dead = golden("image.token_types")[0][0] >= 0 if run == "image" else None
    compressed = mini.compress(ids[0], is_dead)
    np.testing.assert_array_equal(mini.row_ids(mini.history(compressed, mini.fresh())), expected[0])


@st.composite
def cut_sequences(draw: st.DrawFn) -> tuple[np.ndarray, list[int]]:
    ids = draw(st.lists(st.one_of(st.just(DEAD), st.integers(0, 255)), max_size=20))
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=6).map(sorted))
    return np.array(ids, dtype=np.int64), cuts


@given(cut_sequences())
def test_row_ids_do_not_depend_on_chunking(mini: Addressing, case: tuple[np.ndarray, list[int]]) -> None:
    compressed, cuts = case
    assert rows_in_chunks(mini, compressed, cuts).tolist() == rows_by_hand(mini, compressed.tolist())


@pytest.mark.parametrize("cuts", [[], [1], [2], [3], [4], list(range(1, 9))])
def test_two_interleaved_sequences_do_not_leak_into_each_other(mini: Addressing, cuts: list[int]) -> None:
    first, second = np.arange(10, 19), np.arange(40, 49)
    states, rows = [mini.fresh(), mini.fresh()], [[], []]
    for chunks in zip(np.split(first, cuts), np.split(second, cuts), strict=True):
        for which, chunk in enumerate(chunks):
            rows[which].append(mini.row_ids(mini.history(chunk, states[which])))
            states[which] = mini.advance(chunk, states[which])
    for which, ids in enumerate((first, second)):
        assert np.concatenate(rows[which]).tolist() == rows_by_hand(mini, ids.tolist())


def test_image_span_blocks_every_ngram_that_would_cross_it(mini: Addressing) -> None:
    # a b c IMG IMG d e f g
    history = mini.history(np.array([11, 12, 13, DEAD, DEAD, 14, 15, 16, 17]), mini.fresh())
    pad = mini.pad
    assert history[2].tolist() == [13, 12, 11, pad]
    assert history[3].tolist() == history[4].tolist() == [pad] * 4
    assert history[5].tolist() == [14, pad, pad, pad]
    assert history[7].tolist() == [16, 15, 14, pad]
    assert history[8].tolist() == [17, 16, 15, 14]


def test_advance_keeps_the_newest_ids_and_copies_them(mini: Addressing) -> None:
    chunk = np.array([1, 2])
    state = mini.advance(chunk, [7, 8, 9])
    chunk[:] = 100
    assert state.tolist() == [9, 1, 2]
    assert state.base is None, "a view would keep a whole long chunk in memory"
    assert mini.advance([], state).tolist() == [9, 1, 2]


@pytest.mark.parametrize("bad", [-1, 512, 10**12])
def test_id_outside_the_token_map_is_refused_by_name(mini: Addressing, bad: int) -> None:
    with pytest.raises(UserError, match=rf"token id {bad} at index 1 .*0 to 511"):
        mini.compress([5, bad, 7])


def test_dead_position_may_not_hide_an_id_outside_the_map(mini: Addressing) -> None:
    with pytest.raises(UserError, match="token id 512"):
        mini.compress([5, 512], np.array([False, True]))


@pytest.mark.parametrize("mask", [np.array([True]), np.zeros((5, 1), bool), np.array([0, 1, 0, 0, 0])])
def test_dead_mask_of_another_shape_or_type_is_refused_not_broadcast(mini: Addressing, mask: np.ndarray) -> None:
    with pytest.raises(UserError, match="dead-position mask"):
        mini.compress([1, 2, 3, 4, 5], mask)


@pytest.mark.parametrize("ids", [[[1, 2]], [1.0, 2.0], [True, False], ["a"]])
def test_ids_that_are_not_a_list_of_integers_are_refused(mini: Addressing, ids: list) -> None:
    with pytest.raises(UserError, match="token ids have shape"):
        mini.compress(ids)


def test_compressed_ids_outside_the_classes_are_refused(mini: Addressing) -> None:
    with pytest.raises(UserError, match=r"compressed id 256 .* -1 to 255"):
        mini.history([1, 256], mini.fresh())
    with pytest.raises(UserError, match=r"compressed id -2 "):
        mini.history([1], [DEAD, DEAD, -2])
    with pytest.raises(UserError, match=r"compressed id -1 .* 0 to 255"):
        mini.row_ids(np.array([[1, 2, 3, DEAD]]))


def test_look_back_and_history_of_wrong_width_are_refused(mini: Addressing) -> None:
    with pytest.raises(UserError, match="holds 2 ids; accepted are exactly 3"):
        mini.history([1], [DEAD, DEAD])
    with pytest.raises(UserError, match=r"shape \[tokens, 4\]"):
        mini.row_ids(np.zeros((2, 3), dtype=np.int64))


def test_no_tokens_give_no_rows(mini: Addressing) -> None:
    assert mini.row_ids(mini.history(mini.compress([]), mini.fresh())).shape == (0, 2, 6)


def test_token_map_with_other_classes_is_refused_naming_both_numbers() -> None:
    with pytest.raises(CheckpointError, match="99091 classes but the configuration says 99092"):
        Addressing(**RELEASED, token_map=np.arange(CLASSES - 1))
    gap = np.arange(CLASSES)
    gap[-1] += 1
    with pytest.raises(CheckpointError, match="run from 0 to 99092"):
        Addressing(**RELEASED, token_map=gap)


def test_short_token_map_is_refused_naming_both_numbers(released: Addressing) -> None:
    with pytest.raises(CheckpointError, match="covers 99092 token ids but the model needs 129265"):
        released.require(129265)
    released.require(CLASSES)
    with pytest.raises(CheckpointError, match="covers 99092 token ids but the model needs 99093"):
        Addressing(**{**RELEASED, "pad_token_id": CLASSES}, token_map=np.arange(CLASSES))


def test_table_rows_that_differ_from_the_prime_sum_are_refused_naming_layer_and_both() -> None:
    with pytest.raises(CheckpointError, match=r"layer 14: .* 384016681 rows .* sum to 384016682"):
        Addressing(**{**RELEASED, "num_embeddings": [384006168, 384016681]}, token_map=np.arange(CLASSES))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_embeddings", [1], "1 entries for 2"),
        ("layer_ids", [1, 1], r"\[1, 1\]"),
        ("max_ngram", 1, "engram_max_ngram_size is 1"),
        ("num_hashes", 0, "engram_n_heads is 0"),
        ("first_prime_above", 1, "engram_vocab_size is 1"),
        ("pad_token_id", -1, "engram_pad_token_id is -1"),
    ],
)
def test_impossible_field_is_refused_by_its_checkpoint_name(field: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Addressing(**{**RELEASED, field: value}, token_map=np.arange(CLASSES))


def test_changed_random_stream_is_noticed_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = np.random.default_rng
    monkeypatch.setattr(addressing.np.random, "default_rng", lambda seed: real(seed + 1))
    with pytest.raises(InternalError, match="does not reproduce the published"):
        Addressing(**RELEASED, token_map=np.arange(CLASSES))


def test_primes_start_at_the_bound_itself_and_are_never_used_twice() -> None:
    assert hash_primes(2, 3, 2, 2).ravel().tolist() == [2, 3, 5, 7, 11, 13, 17, 19]
    assert hash_primes(1, 2, 1, 211).item() == 211


def test_importing_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import headrace.memory.addressing"
    subprocess.run([sys.executable, "-c", code], check=True)
