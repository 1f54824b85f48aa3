"""The text a model is judged on: a file of documents it was never trained on, as tokens.

One JSON object a line: `name`, `licence` and `text`, all strings. Read `bits_per_byte.py` next.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from headrace.core.errors import UserError
from headrace.core.strict_json import parse_json
from headrace.text.bpe import Encoder
from headrace.train.data.corpus import Document
from headrace.train.data.documents import TokenizedText, tokenize
from headrace.train.data.packing import Ids

_MAX_BYTES = 64 << 20
_FIELDS = ("name", "licence", "text")
_SHIPPED_CHARACTERS = (2_000, 16_000)  # of one document: long enough to be cut, short enough that many fit


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Held-out documents.

    Attributes:
        path: where they came from.
        licences: those named in the file, each once.
        text: their tokens, begin and end included, one document each.
    """

    path: Path
    licences: tuple[str, ...]
    text: TokenizedText

    def ids(self, document: int) -> Ids:
        """Return the tokens of a document, [S] int64."""
        low, high = self.text.offsets[document : document + 2]
        return self.text.token_ids[low:high].astype(np.int64)

    def code(self) -> list[int]:
        """Return the documents that are Python source; all of them where none is."""
        named = [place for place, name in enumerate(self.text.names) if name.endswith((".py", ".pyi"))]
        return named or list(range(len(self.text)))


def read_held_out(path: Path, encoder: Encoder) -> HeldOut:
    """Read and encode the file.

    Raises:
        UserError: it cannot be read, is too large, a line is not such an object, or there is no text in it.
    """
    try:
        size = path.stat().st_size
        data = b"" if size > _MAX_BYTES else path.read_bytes()
    except OSError as problem:
        raise UserError(f"cannot read the held-out text {path}: {problem.strerror or problem}.", "text") from None
    if size > _MAX_BYTES:
        raise UserError(f"the held-out text {path} has {size:,} bytes; up to {_MAX_BYTES:,} are accepted.", "text")
    documents, licences = [], {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        name, licence, text = _fields(line, f"line {number} of {path}")
        licences[licence] = True
        if text:
            documents.append(Document(name, name, text))
    if not documents:
        raise UserError(f"{path} holds no text; one JSON object with {', '.join(_FIELDS)} a line is accepted.", "text")
    return HeldOut(path, tuple(licences), tokenize(documents, encoder))


def _fields(line: bytes, where: str) -> tuple[str, str, str]:
    found = parse_json(line, where)
    if not isinstance(found, dict) or any(not isinstance(found.get(field), str) for field in _FIELDS):
        raise UserError(f"{where} is not held-out text; an object with the strings {', '.join(_FIELDS)} is.", "text")
    name, licence, text = (found[field] for field in _FIELDS)
    return name, licence, text


def held_out_lines(documents: Sequence[Document], licences: Mapping[str, str], max_bytes: int) -> Iterator[str]:
    """Yield the lines of such a file: one document of every group, then a second one of each, as long as they fit.

    Args:
        documents: to choose from; those of less or more than `_SHIPPED_CHARACTERS` are left out.
        licences: of every group.
        max_bytes: of all lines together.

    Numerics: order within a group by a hash of the names, so that a file stays what it is when documents join.
    """
    groups: dict[str, list[Document]] = {}
    for one in sorted(documents, key=lambda one: (one.group, hashlib.sha256(one.name.encode()).digest())):
        if _SHIPPED_CHARACTERS[0] <= len(one.text) <= _SHIPPED_CHARACTERS[1]:
            groups.setdefault(one.group, []).append(one)
    for taken in zip_longest(*groups.values()):
        for document in taken:
            if document is None:
                continue
            fields = {"name": document.name, "licence": licences[document.group], "text": document.text}
            line = json.dumps(fields, ensure_ascii=False) + "\n"
            if len(line.encode()) <= max_bytes:
                max_bytes -= len(line.encode())
                yield line
