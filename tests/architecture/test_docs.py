"""Documents point at things that exist, and the maps in them equal the tree on disk."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.architecture.tree import PACKAGE, ROOT, documents, name_of

LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
PATH_IN_TEXT = re.compile(
    r"`((?:src|tests|benchmarks|configs|docs|scripts|tools|\.ci)/[\w./-]*[\w/]|[A-Z_]+\.md|run\.sh|test\.sh)`"
)
PLACEHOLDER = re.compile(r"/(?:test_)?[A-Z]{2,}\b(?!\.md)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def anchors(path: Path) -> set[str]:
    """Return the heading anchors of a Markdown file, spelled as code hosts spell them."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+?) *$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(document: str, heading: str) -> str:
    """Return the text of one section of a document at the root of the checkout, up to the next heading."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.search(rf"^#+ +{re.escape(heading)} *$\n(.*?)(?=^#+ |\Z)", text, re.M | re.S)
    assert found, f"{document} has no section {heading!r}"
    return found.group(1)


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_links_resolve(document: Path) -> None:
    broken = []
    for target in LINK.findall(FENCE.sub("", document.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file, _, anchor = target.partition("#")
        path = (document.parent / file).resolve() if file else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("document", documents(), ids=name_of)
def test_paths_named_in_text_exist(document: Path) -> None:
    """A part in capitals (`kernels/OP.py`) is a placeholder for the reader to fill in."""
    named = [
        path for path in PATH_IN_TEXT.findall(document.read_text(encoding="utf-8")) if not PLACEHOLDER.search(path)
    ]
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_readme_package_map_equals_the_tree() -> None:
    listed = re.findall(r"^ {4}(\w+)/ ", section("README.md", "Package map"), re.M)
    on_disk = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    assert sorted(listed) == on_disk


def test_readme_project_map_equals_the_tree() -> None:
    listed = re.findall(r"^([\w.]+)/? ", section("README.md", "Project map").replace("```", ""), re.M)
    missing = [name for name in listed if not (ROOT / name).exists()]
    tracked = {"src", "tests", "benchmarks", "configs", "scripts", "docs"} & {path.name for path in ROOT.iterdir()}
    assert missing == []
    assert tracked <= set(listed)


def test_architecture_layer_map_equals_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    wanted = [re.findall(r"\w+", layer) for layer in layers if layer != "__main__"]
    rows = re.findall(r"^ {4}((?:\w+)(?: \| \w+)*) {2,}", section("ARCHITECTURE.md", "Layers"), re.M)
    assert [row.split(" | ") for row in rows] == wanted


def test_documents_of_the_root_are_all_there() -> None:
    wanted = ["README", "ARCHITECTURE", "CONTRIBUTING", "FIDELITY", "CHANGELOG", "THIRD_PARTY"]
    assert [name for name in wanted if not (ROOT / f"{name}.md").exists()] == []
