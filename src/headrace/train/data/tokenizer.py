"""Makes the vocabulary of a trained model: byte-level merges behind the special tokens of the chat encoding.

The file it writes is read back by `headrace.text.tokenizer`, like the released one. `text/bpe.py` does the training;
this module fixes the ids, the exact size, and what a decoder shows.
"""

import json
import os
import pathlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from headrace.core.errors import UserError
from headrace.text.bpe import NUM_BYTES, Encoder, train_document
from headrace.text.token_map import build_token_map
from headrace.text.tokenizer import FILE_NAME, Tokenizer
from headrace.train.data import special_tokens
from headrace.train.data.packing import Ids

NUM_RESERVED = 64


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A trained vocabulary.

    Attributes:
        document: the text of its `tokenizer.json`.
        size: number of ids; every id below it has a token.
        num_reserved: reserved tokens directly behind the named special ones, see `special_tokens.FIRST_RESERVED_ID`.
        num_merges: tokens made of other tokens.
        num_fillers: further reserved tokens at the end, where the texts gave too few merges for the wanted size.
        num_classes: classes of its n-gram map, the `engram_compressed_vocab_size` of a model that uses it.
    """

    document: str
    size: int
    num_reserved: int
    num_merges: int
    num_fillers: int
    num_classes: int

    def encoder(self) -> Encoder:
        """Return the encoder that makes training data of this vocabulary."""
        return Encoder(self.document)

    def save(self, folder: str | os.PathLike[str]) -> pathlib.Path:
        """Write `tokenizer.json` into a folder, whole or not at all, and return its path.

        Raises:
            UserError: the file cannot be written.
        """
        target = pathlib.Path(folder) / FILE_NAME
        part = target.with_name(f".{FILE_NAME}.{secrets.token_hex(4)}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(self.document, encoding="utf-8")
            part.replace(target)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise UserError(f"tokenizer file {target} cannot be written: {error.strerror}", param="out") from error
        return target


def train_vocabulary(texts: Iterable[str], size: int, num_reserved: int = NUM_RESERVED) -> Vocabulary:
    """Train a vocabulary of exactly `size` ids.

    Args:
        texts: training texts, read once; the same texts in the same order give the same bytes.
        size: number of ids.
        num_reserved: tokens without a meaning yet, e.g. for the generated tasks of `tasks/pairs.py`.

    Raises:
        UserError: `size` has no room for the special tokens and the 256 bytes.
    """
    specials = [*special_tokens.ALL, *map(special_tokens.reserved_token, range(num_reserved))]
    smallest = len(specials) + NUM_BYTES
    if num_reserved < 0 or size < smallest:
        raise UserError(
            f"a vocabulary of {size} ids has no room for {len(specials)} special and reserved tokens and "
            f"{NUM_BYTES} bytes; accepted are {smallest} ids or more",
            param="vocab_size",
        )
    document = train_document(texts, size, specials)
    trained = len(document["model"]["vocab"])
    fillers = [special_tokens.reserved_token(num_reserved + index) for index in range(size - trained)]
    template = document["added_tokens"][0]
    document["added_tokens"] += [
        {**template, "id": trained + index, "content": token} for index, token in enumerate(fillers)
    ]
    for token in document["added_tokens"]:
        token["special"] = token["content"] not in special_tokens.SHOWN
    text = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
    _, num_classes = build_token_map(Tokenizer.from_text(text))
    return Vocabulary(
        document=text,
        size=size,
        num_reserved=num_reserved,
        num_merges=trained - smallest,
        num_fillers=len(fillers),
        num_classes=num_classes,
    )


def token_bytes(tokenizer: Tokenizer) -> Ids:
    """Return [V] how many bytes of text each token stands for; 0 for special tokens.

    With it, bits per byte = (sum of losses in nats / ln 2) / sum of `token_bytes[labels]` over the same labels.
    """
    lengths = np.zeros(tokenizer.size, dtype=np.int64)
    shown = {tokenizer.token_to_id(token) for token in special_tokens.SHOWN}
    for token_id in range(tokenizer.size):
        if not tokenizer.is_special(token_id) and token_id not in shown:
            # a byte-level vocabulary spells every byte as one character
            lengths[token_id] = len(tokenizer.id_to_token(token_id) or "")
    return lengths
