"""A short name for the weights of a checkpoint, from its content: what was fitted to them is good for no others."""

import hashlib
from pathlib import Path

from headrace.checkpoint.catalog import open_catalog
from headrace.core.errors import CheckpointError

_SAMPLE_BYTES = 64
_SPREAD_TENSORS = 512  # the largest ones are looked at in more places
_SPREAD_PLACES = 16


def weights_digest(path: Path, *, spread: bool = False) -> str:
    """Return 32 hexadecimal digits over every tensor's name, format, shape and first 64 bytes, in order of names.

    The same for any way to cut the weights into files. It tells trainings and formats apart; it does not prove that
    bytes further on are whole. With `spread` the largest tensors are looked at in 16 places each, which is another
    digest: an n-gram table of which the beginning stayed the same is another table.

    Raises:
        CheckpointError: the folder holds no sound checkpoint, or cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    tensors = open_catalog(path).tensors
    by_size = sorted(tensors, key=lambda name: (-tensors[name].nbytes, name))
    large = set(by_size[:_SPREAD_TENSORS]) if spread else set()
    by_file: dict[Path, list[str]] = {}
    for name in sorted(tensors):
        by_file.setdefault(tensors[name].file, []).append(name)
    samples: dict[str, bytes] = {}
    for file, names in by_file.items():
        try:
            with file.open("rb") as opened:
                for name in sorted(names, key=lambda name: tensors[name].offset):
                    samples[name] = b""
                    for place in range(_SPREAD_PLACES if name in large else 1):
                        within = tensors[name].nbytes * place // _SPREAD_PLACES
                        opened.seek(tensors[name].offset + within)
                        samples[name] += opened.read(min(_SAMPLE_BYTES, tensors[name].nbytes - within))
        except OSError as problem:
            raise CheckpointError(f"{file} cannot be read: {problem.strerror or problem}.") from None
    for name in sorted(tensors):
        digest.update(f"{name}:{tensors[name].dtype}:{list(tensors[name].shape)}:".encode())
        digest.update(samples[name])
    return digest.hexdigest()
