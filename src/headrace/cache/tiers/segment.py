"""Bytes of a segment: a header, then records, each with a header of its own and a payload.

All numbers are little-endian. A record is valid if its header's checksum and its payload's digest are right; nothing
else is believed. Segments are only appended to, so a torn end is the only harm that an interrupted writer can do.
"""

import hashlib
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

SUFFIX = ".segment"
KEY_BYTES = 16
NAMESPACE_BYTES = 32
_SEGMENT_MAGIC = b"HRSEGM01"
RECORD_MAGIC = b"HRrc"
_SEGMENT = struct.Struct("<8s32sQ12x")
_RECORD = struct.Struct("<4sBBHI16s16sI16s")
_CRC = struct.Struct("<I")
SEGMENT_HEADER_BYTES = _SEGMENT.size + _CRC.size
RECORD_HEADER_BYTES = _RECORD.size + _CRC.size


class Kind(IntEnum):
    """What a payload is: entries of a block, window rows that end at it, or the name of an equal record."""

    BLOCK = 0
    WINDOW = 1
    ALIAS = 2


class Damaged(Exception):  # noqa: N818 - a finding, not a failure of the program
    """Say what is wrong with bytes that were read; the tier turns it into a miss."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record's header.

    Attributes:
        key: of the chain after the block (or derived from it, for windows).
        parent: key of what must be there for this to be of use.
        kind: what the payload is.
        is_approximate: the lineage.
        num_tokens: tokens of the sequence up to the end of this record.
        tokens: tokens that it stands for.
        length: bytes of the payload.
        digest: BLAKE2b-128 of the payload.
    """

    key: bytes
    parent: bytes
    kind: Kind
    is_approximate: bool
    num_tokens: int
    tokens: int
    length: int
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return RECORD_HEADER_BYTES + self.length

    def pack(self) -> bytes:
        """Return the header's bytes."""
        head = _RECORD.pack(
            RECORD_MAGIC,
            self.kind,
            self.is_approximate,
            self.tokens,
            self.num_tokens,
            self.key,
            self.parent,
            self.length,
            self.digest,
        )
        return head + _CRC.pack(zlib.crc32(head))


def digest_of(payload: bytes) -> bytes:
    """Return the digest that a record's header has of its payload."""
    return hashlib.blake2b(payload, digest_size=KEY_BYTES).digest()


def unpack_record(head: bytes) -> Record:
    """Return a record's header.

    Raises:
        Damaged: it is short or changed.
    """
    if len(head) < RECORD_HEADER_BYTES:
        raise Damaged("a record's header is cut off")
    if zlib.crc32(head[: _RECORD.size]) != _CRC.unpack_from(head, _RECORD.size)[0]:
        raise Damaged("a record's header does not fit its checksum")
    magic, kind, flag, tokens, num_tokens, key, parent, length, digest = _RECORD.unpack_from(head)
    if magic != RECORD_MAGIC or kind not in set(Kind) or flag > 1:
        raise Damaged("a record's header is of an unknown form")
    return Record(
        key=key,
        parent=parent,
        kind=Kind(kind),
        is_approximate=bool(flag),
        num_tokens=num_tokens,
        tokens=tokens,
        length=length,
        digest=digest,
    )


def pack_segment(namespace: bytes, created: int) -> bytes:
    """Return a segment's header: whose it is, and when it was begun (microseconds since 1970)."""
    head = _SEGMENT.pack(_SEGMENT_MAGIC, namespace, created)
    return head + _CRC.pack(zlib.crc32(head))


def unpack_segment(head: bytes) -> tuple[bytes, int]:
    """Return a segment's namespace and time.

    Raises:
        Damaged: it is short, changed, or of another format.
    """
    if len(head) < SEGMENT_HEADER_BYTES:
        raise Damaged("the file is shorter than a segment's header")
    if zlib.crc32(head[: _SEGMENT.size]) != _CRC.unpack_from(head, _SEGMENT.size)[0]:
        raise Damaged("the segment's header does not fit its checksum")
    magic, namespace, created = _SEGMENT.unpack_from(head)
    if magic != _SEGMENT_MAGIC:
        raise Damaged("the segment is of another format")
    return namespace, created


def namespace_digest(parts: dict[str, str]) -> bytes:
    """Return the digest of everything that must be equal for payloads to be of use."""
    text = "".join(f"{len(part)}:{part}" for item in sorted(parts.items()) for part in item)
    return hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES, person=b"segments").digest()
