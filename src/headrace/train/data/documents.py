"""Documents as tokens, in memory: begin token, text or its fill-in-the-middle form, end token.

Very long documents are cut at line ends before anything else, so that a fill-in-the-middle document stays in one row.
Read `fim.py` before, `stream.py` after.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import UserError
from headrace.text.bpe import Encoder
from headrace.train.data import special_tokens
from headrace.train.data.corpus import Document
from headrace.train.data.fim import draw_cut, encode_cut
from headrace.train.data.packing import Sample, pre_split, text_sample

_CHUNK_DOCUMENTS = 256  # encoded at once


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenizedText:
    """Owns the tokens of many documents, one after another. Nothing may change them.

    Attributes:
        token_ids: [sum of lengths] int32.
        offsets: [documents + 1] where each document starts.
        names: one per document; parts of a cut file are NAME#0, NAME#1, ...
        num_bytes: bytes of all texts.
    """

    token_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    names: tuple[str, ...]
    num_bytes: int

    def __len__(self) -> int:
        return len(self.names)

    def length(self, document: int) -> int:
        """Return the tokens of a document, begin and end included."""
        return int(self.offsets[document + 1] - self.offsets[document])

    def piece(self, document: int, start: int, length: int) -> Sample:
        """Return tokens start to start + length - 1 of a document as a document of its own."""
        first = int(self.offsets[document]) + start
        return text_sample(self.token_ids[first : first + length].astype(np.int64))

    def samples(self, row_tokens: int) -> list[Sample]:
        """Return everything as documents of at most `row_tokens` tokens, in order, e.g. to pack held-out text."""
        return [
            self.piece(document, *span)
            for document in range(len(self))
            for span in pre_split(self.length(document), row_tokens)
        ]


def tokenize(
    documents: Sequence[Document],
    encoder: Encoder,
    *,
    seed: int = 0,
    fim_rate: float = 0.0,
    max_characters: int | None = None,
) -> TokenizedText:
    """Encode documents.

    Args:
        documents: the texts; special tokens spelled out in them stay plain text.
        encoder: the vocabulary, with the special tokens of `special_tokens.py`.
        seed: of the run; decides which documents are rearranged, and how.
        fim_rate: share of documents in fill-in-the-middle form, see `fim.py`; 0 for text to be judged by.
        max_characters: longer documents are cut before; None leaves them whole.

    Raises:
        UserError: there is no document, or a number is out of range.
    """
    if max_characters is not None and max_characters < 1:
        raise UserError(f"max_characters is {max_characters}; accepted is a number of at least 1", "max_characters")
    begin, end = encoder.token_id(special_tokens.BEGIN), encoder.token_id(special_tokens.END)
    parts = [part for document in documents for part in _parts(document, max_characters)]
    if not parts:
        raise UserError("there are no documents to tokenize", param="corpus")
    arrays: list[NDArray[np.int32]] = []
    for first in range(0, len(parts), _CHUNK_DOCUMENTS):
        for ids in _encoded(parts[first : first + _CHUNK_DOCUMENTS], encoder, seed, fim_rate):
            arrays.append(np.array([begin, *ids, end], dtype=np.int32))
    return TokenizedText(
        token_ids=np.concatenate(arrays),
        offsets=np.cumsum([0, *map(len, arrays)]),
        names=tuple(name for name, _ in parts),
        num_bytes=sum(len(text.encode()) for _, text in parts),
    )


def cut_at_line_ends(text: str, max_characters: int) -> Iterator[str]:
    """Cut a text into parts of at most `max_characters`, after a line end where a part holds one. Joined: the text."""
    start = 0
    while len(text) - start > max_characters:
        line_end = text.rfind("\n", start, start + max_characters)
        stop = start + max_characters if line_end < start else line_end + 1
        yield text[start:stop]
        start = stop
    yield text[start:]


def _parts(document: Document, max_characters: int | None) -> Iterable[tuple[str, str]]:
    if max_characters is None or len(document.text) <= max_characters:
        return [(document.name, document.text)]
    parts = cut_at_line_ends(document.text, max_characters)
    return [(f"{document.name}#{index}", part) for index, part in enumerate(parts)]


def _encoded(parts: Sequence[tuple[str, str]], encoder: Encoder, seed: int, fim_rate: float) -> Iterator[list[int]]:
    """Yield the ids of each part, rearranged or not."""
    cuts = [draw_cut(text, name, seed, fim_rate) for name, text in parts]
    whole = iter(encoder.plain([text for (_, text), cut in zip(parts, cuts, strict=True) if cut is None]))
    for cut in cuts:
        yield next(whole) if cut is None else encode_cut(cut, encoder)
