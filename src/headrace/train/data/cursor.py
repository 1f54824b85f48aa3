"""Walks through tokenized text, epoch after epoch, and fills rows from it by best fit.

A pool of pieces waits to be used. Each row starts with a random one of them, so that the pieces of one document lie
apart, and is filled up with the longest pieces that still fit. Read `packing.py` before, `stream.py` after.
"""

from typing import Any, NamedTuple

from headrace.core.errors import UserError
from headrace.train.data.documents import TokenizedText
from headrace.train.data.draws import Draws
from headrace.train.data.packing import Ids, PackedRow, best_fitting, pack_row, pre_split

POOL_PIECES = 1024


class Piece(NamedTuple):
    """Tokens start to start + length - 1 of a document."""

    document: int
    start: int
    length: int


class TextCursor:
    """Owns a place in the text: the epoch, the next document of its order, and the pieces taken but not yet used.

    Invariant: what was used and what waits in the pool are together a whole number of epochs and a part of one, each
    token once per epoch, whatever the lengths of the rows.
    """

    def __init__(self, text: TokenizedText, seed: int, pool_pieces: int = POOL_PIECES) -> None:
        """Stand before the first document.

        Args:
            text: the documents.
            seed: of the run; decides the order of each epoch.
            pool_pieces: pieces to choose from; more fill rows better and mix documents over a longer stretch.
        """
        self._text, self._seed, self._pool_pieces = text, seed, pool_pieces
        self._pool: list[Piece] = []
        self._epoch, self._next, self._row = 0, 0, 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """How many times the whole text was taken into the pool."""
        return self._epoch

    def next_row(self, row_tokens: int, pad_id: int) -> PackedRow:
        """Return the next row, at most padding away from full; advances the cursor."""
        self._refill(row_tokens)
        pieces = [self._take(Draws(self._seed, "row", self._row).integer(len(self._pool)), row_tokens)]
        room = row_tokens - pieces[0].length
        while room and (best := best_fitting([piece.length for piece in self._pool], room)) is not None:
            pieces.append(self._pool.pop(best))
            room -= pieces[-1].length
        self._row += 1
        return pack_row([self._text.piece(*piece) for piece in pieces], row_tokens, pad_id)

    def state(self) -> dict[str, Any]:
        """Return the place as plain numbers and lists."""
        pool = [list(piece) for piece in self._pool]
        return {"epoch": self._epoch, "next": self._next, "row": self._row, "pool": pool}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a place that `state` described.

        Raises:
            UserError: it is not a place in this text.
        """
        try:
            epoch, position, row = (int(state[name]) for name in ("epoch", "next", "row"))
            pool = [Piece(*(int(number) for number in piece)) for piece in state["pool"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the resume state of the text is damaged: {error!r}", param="resume") from error
        is_inside = min(epoch, row) >= 0 and 0 <= position < len(self._text) and all(map(self._has, pool))
        if not is_inside:
            raise UserError("the resume state of the text names places that this text does not have", param="resume")
        self._epoch, self._next, self._row, self._pool = epoch, position, row, pool
        self._order = self._order_of(epoch)

    def _has(self, piece: Piece) -> bool:
        is_document = 0 <= piece.document < len(self._text)
        return is_document and 0 <= piece.start < piece.start + piece.length <= self._text.length(piece.document)

    def _order_of(self, epoch: int) -> Ids:
        return Draws(self._seed, "epoch", epoch).permutation(len(self._text))

    def _take(self, index: int, row_tokens: int) -> Piece:
        """Take a piece out of the pool; of one made for longer rows, take a row's worth and leave the rest."""
        piece = self._pool[index]
        if piece.length <= row_tokens:
            return self._pool.pop(index)
        self._pool[index] = Piece(piece.document, piece.start + row_tokens, piece.length - row_tokens)
        return Piece(piece.document, piece.start, row_tokens)

    def _refill(self, row_tokens: int) -> None:
        while len(self._pool) < self._pool_pieces:
            document = int(self._order[self._next])
            self._pool += [Piece(document, *span) for span in pre_split(self._text.length(document), row_tokens)]
            self._next += 1
            if self._next == len(self._order):
                self._epoch, self._next = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
