"""Makes up a tokenizer with a given number of entries and a given number of classes that read alike.

For random checkpoints: any vocabulary size must come with a `tokenizer.json` whose token map has exactly the classes
the configuration names. Where there is room the tokenizer is a byte-level one that encodes every text; where there is
not, it knows only the words w0, w1, ... The classes are those of `text/token_map.py`, which checks the result.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import count, product
from typing import Any

from headrace.core.errors import InternalError, UserError

_NUM_BYTES = 256
# of the 256 single bytes: A-Z read like a-z, and tab, line feed and carriage return read like a space
_LETTERS = "etaoinshrdlucmfwypvbgkjxqz"
_BYTE_CLASSES = _NUM_BYTES - 26 - 3
_BLANKS = "ĠĊĉč"  # space, line feed, tab, carriage return, as byte-level vocabularies write them
_SPACE = _BLANKS[0]


def make_tokenizer(size: int, num_classes: int | None, special_ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the document of a `tokenizer.json`.

    Args:
        size: number of ids, at least 1.
        num_classes: classes of its token map, 1 to `size`; None where nobody asks.
        special_ids: wanted id of each special token, most important first; one is left out where there is no room for
            it or where its id is taken.

    Raises:
        UserError: `num_classes` is not between 1 and `size`.
    """
    if num_classes is not None and not 1 <= num_classes <= size:
        raise UserError(f"a tokenizer of {size} entries cannot have {num_classes} classes; 1 to {size} are accepted.")
    if size >= _NUM_BYTES and (num_classes is None or _BYTE_CLASSES <= num_classes <= size - 29):
        free_ids = size - _NUM_BYTES
        free_classes = free_ids if num_classes is None else num_classes - _BYTE_CLASSES
        specials = _choose(special_ids, size, min(free_ids, free_classes))
        return _byte_level(size, free_classes - len(specials), specials)
    classes = size if num_classes is None else num_classes
    return _word_level(size, classes, _choose(special_ids, size, classes - 1))


def tokenizer_bytes(document: dict[str, Any]) -> bytes:
    """Return the bytes of a `tokenizer.json`; the same document always gives the same bytes."""
    return (json.dumps(document, ensure_ascii=False, indent=1) + "\n").encode()


def _choose(wanted: Mapping[str, int], size: int, room: int) -> dict[int, str]:
    chosen: dict[int, str] = {}
    for token, token_id in wanted.items():
        if len(chosen) < room and 0 <= token_id < size and token_id not in chosen:
            chosen[token_id] = token
    return chosen


def _place(size: int, specials: Mapping[int, str], ordinary: Iterator[str]) -> dict[str, int]:
    """Give every id a token: the special one it is reserved for, or the next ordinary one."""
    vocab = {specials.get(token_id) or next(ordinary): token_id for token_id in range(size)}
    if len(vocab) != size:
        raise InternalError(f"a made-up vocabulary of {size} entries holds only {len(vocab)} different ones")
    return vocab


def _byte_level(size: int, new_classes: int, specials: Mapping[int, str]) -> dict[str, Any]:
    """Bytes first, then `new_classes` letter strings, mixed with further spellings of the same strings."""
    variants = size - _NUM_BYTES - len(specials) - new_classes
    ordinary = _byte_tokens() + _words_and_variants(new_classes, variants)
    vocab = _place(size, specials, iter(ordinary))
    merges = [pair for token in ordinary[_NUM_BYTES:] if (pair := _merge(token, vocab))]
    return _document(
        {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a word that is an entry is that entry, in whatever order pairs would join
            "vocab": vocab,
            "merges": merges,
        },
        specials,
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    )


def _byte_tokens() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(_NUM_BYTES) if byte not in printable)
    table = {byte: chr(byte) for byte in printable} | {byte: chr(_NUM_BYTES + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(_NUM_BYTES)]


def _words_and_variants(num_words: int, num_variants: int) -> list[str]:
    """Interleave new words with other spellings of words that came before, in the wanted numbers."""
    words, tokens = _words(), []
    spellings = _spellings([next(words) for _ in range(num_words)])
    fresh = _words()
    for index in range(num_words):
        tokens.append(next(fresh))
        while len(tokens) - index - 1 < num_variants * (index + 1) // num_words:
            tokens.append(next(spellings))
    tokens.extend(next(spellings) for _ in range(num_words + num_variants - len(tokens)))
    return tokens


def _words() -> Iterator[str]:
    """Strings of two letters, then of three, and so on; frequent letters first."""
    for length in count(2):
        ranks = sorted(product(range(26), repeat=length), key=sum)
        yield from ("".join(_LETTERS[rank] for rank in word) for word in ranks)


def _spellings(words: list[str]) -> Iterator[str]:
    """Other spellings that read like a word, a letter or a space; the last kind never ends."""
    for form in ("{0}{1}", "{0}{2}", "{2}", "{0}{3}", "{3}"):
        yield from (form.format(_SPACE, word, word.capitalize(), word.upper()) for word in words)
    yield from (f"{_SPACE}{letter}" for letter in _LETTERS + _LETTERS.upper())
    yield from _blanks(_BLANKS, 2)


def _blanks(kinds: str, shortest: int) -> Iterator[str]:
    """Strings of white space, shortest first, without end."""
    for length in count(shortest):
        yield from ("".join(blank) for blank in product(kinds, repeat=length))


def _merge(token: str, vocab: Mapping[str, int]) -> list[str] | None:
    """The two entries that join to a token, None where no pair of entries does."""
    for cut in (1, len(token) - 1) if token.startswith(_SPACE) else (len(token) - 1,):
        if token[:cut] in vocab and token[cut:] in vocab:
            return [token[:cut], token[cut:]]
    return None


def _word_level(size: int, num_classes: int, specials: Mapping[int, str]) -> dict[str, Any]:
    """Words w0, w1, ...; further spellings of one have white space in front, or a capital."""
    num_words, ordinary_ids = num_classes - len(specials), size - len(specials)

    def tokens() -> Iterator[str]:
        whole, extra = divmod(ordinary_ids, num_words)
        for word in range(num_words):
            blanks, lead = _blanks(" \t", 0), ""
            for spelling in range(whole + (word < extra)):
                if spelling % 2 == 0:
                    lead = next(blanks)
                yield f" {lead}W{word}" if spelling % 2 else f"{lead}w{word}"

    vocab = _place(size, specials, tokens())
    return _document({"type": "WordLevel", "vocab": vocab, "unk_token": ""}, specials, None)


def _document(model: dict[str, Any], specials: Mapping[int, str], byte_level: dict[str, Any] | None) -> dict[str, Any]:
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id, token in sorted(specials.items())
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
