"""Appends records to a segment of this process."""

import os
import time
from pathlib import Path

from headrace.cache.tiers.files import Files
from headrace.cache.tiers.segment import SEGMENT_HEADER_BYTES, SUFFIX, Record, pack_segment


class SegmentWriter:
    """A segment that is being written. Owns its file and, until it is sealed, the lock that says so to others."""

    def __init__(self, files: Files, folder: Path, namespace: bytes, created: int) -> None:
        """Create the file.

        Raises:
            OSError: it cannot be created or written; nothing is left of it then.
        """
        self._files = files
        self.name = f"{created:015x}-{os.getpid():x}-{time.monotonic_ns() & 0xFFFFFFFF:08x}{SUFFIX}"
        self.path = folder / self.name
        self.namespace = namespace
        self._descriptor = files.create(self.path)
        try:
            files.try_lock(self._descriptor)
            files.write(self._descriptor, pack_segment(namespace, created), 0)
        except OSError:
            files.close(self._descriptor)
            files.remove(self.path)
            raise
        self.size = SEGMENT_HEADER_BYTES

    def append(self, record: Record, payload: bytes) -> int:
        """Write a record and return where its header is.

        Raises:
            OSError: it could not be written whole; the file is cut back to what it was, if that is possible.
        """
        offset = self.size
        try:
            self._files.write(self._descriptor, record.pack() + payload, offset)
        except OSError:
            self.cut()
            raise
        self.size += record.nbytes
        return offset

    def cut(self) -> None:
        """Take off whatever follows the last whole record; a torn end is harmless where that fails."""
        try:
            self._files.truncate(self._descriptor, self.size)
        except OSError:
            return

    def abandon(self) -> None:
        """Let go of a file that nobody can find any more."""
        self._files.close(self._descriptor)

    def seal(self) -> None:
        """Write nothing more: bring the content to the device and let go of the file.

        Raises:
            OSError: the device did not take it; the file is closed all the same.
        """
        try:
            self._files.sync(self._descriptor)
        finally:
            self._files.close(self._descriptor)
