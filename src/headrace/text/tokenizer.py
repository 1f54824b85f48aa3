"""Reads any `tokenizer.json` and turns text into ids and back.

The only thing between headrace and the `tokenizers` library, so its silent habits end here: unknown ids are not
dropped, text is not cut at a length the file happens to name. Read `text/detokenize.py` for text that streams.
"""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import tokenizers

from headrace.core.errors import CheckpointError, UserError

FILE_NAME = "tokenizer.json"
_LONG_TEXT = 4096  # characters
_PRINTABLE = frozenset((*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)))
_MOVED = (byte for byte in range(256) if byte not in _PRINTABLE)
# the byte behind each character of a byte-level vocabulary: printable ones are themselves, others move up
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_MOVED)}


class Tokenizer:
    """Owns one loaded tokenizer file. Immutable; may be shared between threads.

    Attributes:
        size: number of token ids, i.e. the highest id + 1.
        added_ids: ids that the file adds to those of its model, special or not; plain text is possible without them.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Take over a loaded backend and switch off the truncation and padding its file may ask for."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Load a tokenizer.

        Args:
            path: a `tokenizer.json`, or the folder that holds one.

        Raises:
            CheckpointError: there is no such file, it cannot be read, or it is not a tokenizer.
        """
        file = pathlib.Path(path)
        if file.is_dir():
            file = file / FILE_NAME
        try:
            text = file.read_bytes().decode("utf-8")
        except FileNotFoundError as error:
            raise CheckpointError(f"tokenizer file {file} does not exist") from error
        except OSError as error:
            raise CheckpointError(f"tokenizer file {file} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise CheckpointError(f"tokenizer file {file} is not UTF-8 text (byte {error.start})") from error
        return cls.from_text(text, f"tokenizer file {file}")

    @classmethod
    def from_text(cls, text: str, name: str = "this text") -> "Tokenizer":
        """Load a tokenizer from the text of its file.

        Args:
            text: what a `tokenizer.json` holds.
            name: what an error message calls it.

        Raises:
            CheckpointError: it is not a tokenizer.
        """
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:
            raise CheckpointError(f"{name} is not a valid tokenizer: {error}") from error
        return cls(backend)

    def document(self) -> str:
        """Return the text of the file, as the library writes it."""
        return str(self._backend.to_str())

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that an id stands for in a byte-level vocabulary; those of its spelling in any other.

        Raises:
            UserError: the id is not in the vocabulary.
        """
        self.check_id(token_id)
        token = str(self._backend.id_to_token(token_id))
        if token_id in self.added_ids or not set(token) <= _BYTE_OF.keys():
            return token.encode()
        return bytes(_BYTE_OF[character] for character in token)

    def decoder_stages(self) -> list[dict[str, Any]]:
        """Return the steps of the file's `decoder`, in order, as its JSON describes them; empty where it has none."""
        if self._backend.decoder is None:
            return []
        return _flat_stages(json.loads(self._backend.decoder.__getstate__()))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of a text; special tokens written in it become their own ids.

        Args:
            text: any text.
            add_special_tokens: also add what the file's post-processor adds around a text, such as a begin token.

        Raises:
            UserError: the text holds half of a surrogate pair, or a word the vocabulary cannot express.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, "
                "which is not Unicode text",
                param="prompt",
            ) from error
        try:
            if len(text) > _LONG_TEXT:  # the call for many lets other threads run meanwhile, the call for one does not
                (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            else:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except Exception as error:
            raise UserError(f"the tokenizer cannot encode this text: {error}", param="prompt") from error
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of all ids at once; bytes that are not UTF-8 become U+FFFD.

        Raises:
            UserError: an id is not in the vocabulary.
        """
        for token_id in ids:
            self.check_id(token_id)
        return self.decode_checked(list(ids), skip_special_tokens)

    def decode_checked(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decode ids that are known to be in the vocabulary; `decode` without the check."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def decode_each(self) -> list[str]:
        """Return the text of every id decoded alone, special tokens kept; ids without a token give ''."""
        texts: list[str] = self._backend.decode_batch(
            [[token_id] for token_id in range(self.size)], skip_special_tokens=False
        )
        return texts

    def id_to_token(self, token_id: int) -> str | None:
        """Return the raw vocabulary string of an id, None where the vocabulary has no such id."""
        if not 0 <= token_id < self.size:
            return None
        token: str | None = self._backend.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a raw vocabulary string, None where there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Return whether the file marks this id as special, i.e. not part of a text."""
        return token_id in self._special

    def check_id(self, token_id: int) -> None:
        """Refuse an id that is not in the vocabulary.

        Raises:
            UserError: negative, too large, or a gap in the vocabulary.
        """
        if self.id_to_token(token_id) is None:
            raise UserError(
                f"token id {token_id} is not in the tokenizer's vocabulary; accepted are 0 to {self.size - 1}",
                param="token_ids",
            )


def _flat_stages(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [stage for part in decoder["decoders"] for stage in _flat_stages(part)]
