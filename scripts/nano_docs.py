"""Fetches the documentation that headrace-nano reads: source archives from the package index, documents only.

Run as `python scripts/nano_docs.py OUT`; needs pip and a package index. Versions are fixed, so that the same text comes
out. Licences: all BSD or MIT, see `PROJECTS`; the recipe `nano` names them again for the record of its run.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

PROJECTS = {
    "celery": ("5.7.0", "docs", "BSD-3-Clause"),
    "django": ("5.2", "docs", "BSD-3-Clause"),
    "pytest": ("9.2.0", "doc", "MIT"),
    "sphinx": ("9.0.4", "doc", "BSD-2-Clause"),
}
SUFFIXES = (".rst", ".txt", ".md")
LEFT_OUT = (
    "release",
    "changelog",
    "history",
    "authors",
    "_theme",
    "locale",
    "plugin_list",
)  # lists of names and numbers


def fetch(name: str, version: str, target: Path) -> Path:
    """Download a source archive and return its file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*command, "--dest", str(target), f"{name}=={version}"], check=True)
    (archive,) = target.glob("*.tar.gz")
    return archive


def unpack(archive: Path, folder: str, out: Path) -> int:
    """Write the documents below a folder of an archive; return how many."""
    count = 0
    with tarfile.open(archive) as files:
        for member in files:
            parts = PurePosixPath(member.name).parts
            if not member.isfile() or len(parts) < 3 or parts[1] != folder or not member.name.endswith(SUFFIXES):
                continue
            if ".." in parts or any(word in member.name.lower() for word in LEFT_OUT):
                continue
            stream = files.extractfile(member)
            if stream is None:
                continue
            path = out.joinpath(*parts[2:])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(stream.read())
            count += 1
    return count


def main() -> None:
    """Fetch all projects into the folder named on the command line."""
    out = Path(sys.argv[1])
    for name, (version, folder, licence) in PROJECTS.items():
        with tempfile.TemporaryDirectory() as temporary:
            archive = fetch(name, version, Path(temporary))
            count = unpack(archive, folder, out / name)
        sys.stdout.write(f"{name} {version}: {count} documents, {licence}\n")


if __name__ == "__main__":
    main()
