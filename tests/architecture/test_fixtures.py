"""Frozen files are what their provenance says, and every one of them is read by a test."""

import hashlib
import json

from tests.architecture.tree import ROOT

GOLDEN = ROOT / "tests" / "golden"
PROVENANCE = json.loads((GOLDEN / "provenance.json").read_text(encoding="utf-8"))


def test_every_golden_folder_has_a_provenance() -> None:
    assert sorted(PROVENANCE) == sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def test_golden_files_have_their_recorded_checksums() -> None:
    for name, record in PROVENANCE.items():
        found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (GOLDEN / name).iterdir()}
        assert found == record["sha256"]


def test_every_golden_file_is_read_by_a_test() -> None:
    folders = [path for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "architecture"]
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")]
    sources += [path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py")]
    for name in PROVENANCE:
        assert any(name in source for source in sources), f"no test names the golden folder {name}"
    unread = [
        file for record in PROVENANCE.values() for file in record["sha256"] if not any(file in s for s in sources)
    ]
    assert unread == []
