"""Finds text to train on: one document per file, with the licence it came under, in an order that never changes.

Sources are the standard library of the running interpreter, installed packages, and folders the user names. A folder
is the user's own, so a file in it that is not UTF-8 is an error; in the other two such a file is left out and counted.
Read `licences.py` for what is accepted, `documents.py` for what becomes of it.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from headrace.core.errors import UserError
from headrace.train.data.licences import Licence, is_permissive, names_copyleft, package_licence

SUFFIXES = (".py", ".md", ".rst", ".txt")
VENDORED = frozenset({"_vendor", "vendor", "_vendored", "vendored", "vendored_packages", "third_party", "extern"})
"""Folders of other people's packages inside a package: their licence is not the package's."""

STDLIB_EXCLUDED = ("site-packages/*", "lib2to3/tests/data/*", "test/*", "*/test/*", "*/tests/*", "encodings/cp*")


class Document(NamedTuple):
    """One file's text; lines end in a line feed.

    Attributes:
        name: source and path, e.g. "stdlib:json/decoder.py".
        group: what is held out as a whole, e.g. "stdlib:json".
    """

    name: str
    group: str
    text: str


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """Where documents came from and under which licence; goes beside the weights.

    Attributes:
        source: "stdlib", "package:NAME" or "folder:NAME".
        version: of the interpreter or the package, "" for a folder.
        licence: see `licences.Licence`.
        num_documents, num_bytes: taken from it.
        left_out: reason -> number of files.
    """

    source: str
    version: str
    licence: Licence
    num_documents: int
    num_bytes: int
    left_out: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents in a fixed order and the record of every source, refused ones included."""

    documents: tuple[Document, ...]
    records: tuple[SourceRecord, ...]

    def __post_init__(self) -> None:
        """Refuse to be empty.

        Raises:
            UserError: no document was found.
        """
        if not self.documents:
            refused = [record.source for record in self.records if not record.licence.is_accepted]
            reason = f"; refused for their licence: {', '.join(refused)}" if refused else ""
            raise UserError(f"the corpus is empty: no text was found in its sources{reason}", param="corpus")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all names and texts; a run resumes only on the same corpus."""
        digest = hashlib.sha256()
        for document in self.documents:
            for part in (document.name, document.text):
                data = part.encode()
                digest.update(len(data).to_bytes(8, "little"))
                digest.update(data)
        return digest.hexdigest()

    def split(
        self, held_out_share: float, *, salt: str = "", held_out_groups: Collection[str] = ()
    ) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
        """Return (training documents, held-out documents); a group is on one side as a whole.

        Which side depends on the group's name and the salt alone, so a corpus that grows keeps its held-out groups.

        Args:
            held_out_share: wanted share of the groups, 0 to 1.
            salt: any text; another one gives another split.
            held_out_groups: groups to hold out whatever their hash.

        Raises:
            UserError: a named group does not exist, or one side would be empty.
        """
        groups = {document.group for document in self.documents}
        unknown = sorted(set(held_out_groups) - groups)
        if unknown:
            raise UserError(f"the corpus has no group {unknown[0]!r} to hold out", param="held_out_groups")
        held_out = {group for group in groups if _hash_share(salt, group) < held_out_share} | set(held_out_groups)
        train = tuple(document for document in self.documents if document.group not in held_out)
        held = tuple(document for document in self.documents if document.group in held_out)
        if not train or not held:
            side = "training" if not train else "held-out"
            raise UserError(
                f"a held-out share of {held_out_share} of {len(groups)} groups leaves no {side} text; "
                "name held-out groups, change the share or the salt",
                param="held_out_share",
            )
        return train, held


class Source(NamedTuple):
    """Files with a common origin; made by `stdlib_source`, `package_sources` and `folder_source`.

    Attributes:
        files: (path relative to the root, group), sorted.
        is_strict: whether a file that is not UTF-8 is an error.
        left_out: files already left out, by reason.
    """

    name: str
    version: str
    licence: Licence
    root: Path
    files: tuple[tuple[str, str], ...]
    is_strict: bool
    left_out: dict[str, int]


def stdlib_source(excluded: Sequence[str] = STDLIB_EXCLUDED) -> Source:
    """Return the running interpreter's own Python files, without tests and code-page tables.

    Args:
        excluded: patterns of relative paths to leave out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in _walk(root, (".py",)) if not any(fnmatch(path, pattern) for pattern in excluded)]
    files = tuple((path, f"stdlib:{path.partition('/')[0].removesuffix('.py')}") for path in paths)
    licence = Licence("PSF-2.0", "licence of the Python distribution", True)
    return Source("stdlib", platform.python_version(), licence, root, files, False, {})


def package_sources(names: Sequence[str] | None = None, suffixes: Sequence[str] = SUFFIXES) -> list[Source]:
    """Return installed packages; each is one group.

    Args:
        names: packages to take; None takes every installed one whose licence is accepted and records the others.
        suffixes: endings of the files to take.

    Raises:
        UserError: a named package is not installed, or its licence is not accepted.
    """
    if names is None:
        found = {_folded(name): found for found in importlib.metadata.distributions() if (name := _name(found))}
        return [_package_source(found[name], suffixes) for name in sorted(found)]
    sources = []
    for name in names:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise UserError(f"package {name!r} of the corpus is not installed", param="corpus") from error
        sources.append(_package_source(distribution, suffixes))
        licence = sources[-1].licence
        if not licence.is_accepted:
            raise UserError(
                f"package {name!r} has the licence {licence.name!r} ({licence.evidence}), which is not one of the "
                "permissive licences whose text may be trained on",
                param="corpus",
            )
    return sources


def folder_source(path: str | os.PathLike[str], licence: str, suffixes: Sequence[str] = SUFFIXES) -> Source:
    """Return the files below a folder; its first-level folders and files are the groups.

    Args:
        path: the folder. Hidden files and folders are left out.
        licence: what the text is under, an SPDX expression; the caller answers for it.
        suffixes: endings of the files to take.

    Raises:
        UserError: there is no such folder, it cannot be read, or the licence is not accepted.
    """
    root = Path(path)
    if not root.is_dir():
        raise UserError(f"folder {root} of the corpus does not exist or is not a folder", param="corpus")
    if not is_permissive(licence):
        raise UserError(
            f"folder {root} of the corpus is said to be under {licence!r}, which is not one of the permissive "
            "licences whose text may be trained on",
            param="corpus",
        )
    name = f"folder:{root.resolve().name}"
    files = tuple((path, f"{name}/{path.partition('/')[0]}") for path in _walk(root, tuple(suffixes)))
    return Source(name, "", Licence(licence, "stated by the user", True), root, files, True, {})


def collect(sources: Iterable[Source], min_bytes: int = 64) -> Corpus:
    """Read all files of all sources, in the given order of sources and sorted order of paths.

    Left out and counted: files of sources whose licence is refused, files that name a licence of the GPL family, files
    shorter than `min_bytes`, and files whose text came before.

    Raises:
        UserError: nothing is left, a file cannot be read, or a file of a folder is not UTF-8.
    """
    seen: set[bytes] = set()
    documents: list[Document] = []
    records: list[SourceRecord] = []
    for source in sources:
        left_out = Counter(source.left_out)
        first = len(documents)
        if source.licence.is_accepted:
            documents.extend(_accepted(source, min_bytes, seen, left_out))
        else:
            left_out["licence of the source"] += len(source.files)
        records.append(
            SourceRecord(
                source=source.name,
                version=source.version,
                licence=source.licence,
                num_documents=len(documents) - first,
                num_bytes=sum(len(document.text.encode()) for document in documents[first:]),
                left_out=dict(sorted(left_out.items())),
            )
        )
    return Corpus(documents=tuple(documents), records=tuple(records))


def _accepted(source: Source, min_bytes: int, seen: set[bytes], left_out: Counter[str]) -> Iterator[Document]:
    for path, group in source.files:
        text = _read(source.root / path, source.is_strict)
        if text is None:
            left_out["not UTF-8"] += 1
            continue
        data = text.encode()
        digest = hashlib.sha256(data).digest()
        if len(data) < min_bytes:
            left_out["too short"] += 1
        elif digest in seen:
            left_out["same text as before"] += 1
        elif names_copyleft(text):
            left_out["names a copyleft licence"] += 1
        else:
            seen.add(digest)
            yield Document(f"{source.name}:{path}", group, text)


def _read(file: Path, is_strict: bool) -> str | None:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"file {file} of the corpus cannot be read: {error.strerror}", param="corpus") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if is_strict:
            raise UserError(
                f"file {file} of the corpus is not UTF-8 text (byte {error.start}); convert it or take it out",
                param="corpus",
            ) from error
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _walk(root: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the relative paths of the files below a folder, sorted by their parts; links to folders are not followed.

    Raises:
        UserError: a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise UserError(f"folder {error.filename} of the corpus cannot be read: {error.strerror}", param="corpus")

    found: list[tuple[str, ...]] = []
    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        parts = Path(folder).relative_to(root).parts
        found.extend((*parts, name) for name in files if name.endswith(suffixes) and not name.startswith("."))
    return ["/".join(parts) for parts in sorted(found)]


def _package_source(distribution: importlib.metadata.Distribution, suffixes: Sequence[str]) -> Source:
    name = _folded(_name(distribution))
    left_out: Counter[str] = Counter()
    taken: list[str] = []
    for file in distribution.files or ():
        if file.suffix not in suffixes or ".." in file.parts or file.parts[0].endswith((".dist-info", ".egg-info")):
            continue
        if VENDORED.intersection(file.parts[:-1]):
            left_out["vendored"] += 1
        elif not Path(str(distribution.locate_file(file))).is_file():
            left_out["not there"] += 1
        else:
            taken.append(file.as_posix())
    group = f"package:{name}"
    return Source(
        name=group,
        version=distribution.version,
        licence=package_licence(distribution.metadata),  # type: ignore[arg-type]  # a Message at run time
        root=Path(str(distribution.locate_file(""))),
        files=tuple((path, group) for path in sorted(taken)),
        is_strict=False,
        left_out=dict(left_out),
    )


def _name(distribution: importlib.metadata.Distribution) -> str:
    return str(distribution.metadata["Name"] or "")


def _folded(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _hash_share(salt: str, group: str) -> float:
    digest = hashlib.sha256(f"{salt}\n{group}".encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2**64
