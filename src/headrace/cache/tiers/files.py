"""What the disk tier asks of a file system, in one place, so that a test can let any of it fail."""

import fcntl
import os
from pathlib import Path


class Files:
    """The operations, as the system does them. Owns nothing: descriptors belong to who opened them.

    Every operation may raise `OSError`; the tier survives each.
    """

    def make_folder(self, folder: Path) -> None:
        """Create a folder and what is above it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def names(self, folder: Path, suffix: str) -> list[str]:
        """Return the names in a folder that end so, sorted."""
        return sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(suffix))

    def create(self, path: Path) -> int:
        """Create a file that must not exist; return a descriptor to write to."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def open_or_create(self, path: Path) -> int:
        """Open a file for writing, whether it exists or not."""
        return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def open(self, path: Path, *, is_writable: bool = False) -> int:
        """Open a file that exists."""
        return os.open(path, (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self, descriptor: int) -> None:
        """Close a descriptor, which lets go of its lock too."""
        os.close(descriptor)

    def read(self, descriptor: int, count: int, offset: int) -> bytes:
        """Return up to `count` bytes; fewer only at the end of the file."""
        parts = []
        while count > 0:
            part = os.pread(descriptor, count, offset)
            if not part:
                break
            parts.append(part)
            count, offset = count - len(part), offset + len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, descriptor: int, content: bytes, offset: int) -> None:
        """Write all bytes at an offset."""
        view = memoryview(content)
        while view:
            done = os.pwrite(descriptor, view, offset)
            view, offset = view[done:], offset + done

    def size(self, descriptor: int) -> int:
        """Return the bytes of an open file."""
        return os.fstat(descriptor).st_size

    def truncate(self, descriptor: int, size: int) -> None:
        """Cut a file."""
        os.ftruncate(descriptor, size)

    def sync(self, descriptor: int) -> None:
        """Bring a file's content to the device."""
        os.fdatasync(descriptor)

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is removed already."""
        path.unlink(missing_ok=True)

    def free_bytes(self, folder: Path) -> int:
        """Return what the file system has left for this user."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize

    def try_lock(self, descriptor: int) -> bool:
        """Lock a file for this descriptor alone unless another has it; the lock ends with the descriptor."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
