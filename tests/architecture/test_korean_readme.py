"""README.ko.md says what README.md says: the same commands, headings, tables, maps and links."""

import re

from tests.architecture.tree import ROOT

ENGLISH, KOREAN = (ROOT / name for name in ("README.md", "README.ko.md"))
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
HANGUL = re.compile(r"[가-힣]")


def parts(pattern: str) -> tuple[list[str], list[str]]:
    """Return what a pattern finds outside of fences, in both documents."""
    texts = (FENCE.sub("", path.read_text(encoding="utf-8")) for path in (ENGLISH, KOREAN))
    english, korean = (re.findall(pattern, text, re.M) for text in texts)
    assert english, f"README.md has nothing like {pattern}"
    return english, korean


def test_code_is_the_same_line_by_line() -> None:
    english, korean = parts(r"^ {4}\S.*$")
    assert korean == english


def test_tables_list_the_same_commands() -> None:
    english, korean = parts(r"^\| (`[^|]+`) \|")
    assert korean == english


def test_headings_are_as_many_and_as_deep() -> None:
    english, korean = parts(r"^(#+) .+$")
    assert korean == english


def test_headings_and_table_cells_are_translated() -> None:
    _, headings = parts(r"^#{2,} (.+)$")
    _, cells = parts(r"^\| `[^|]+` \| (.+) \|$")
    assert [text for text in headings + cells if not HANGUL.search(text)] == []


def test_maps_name_the_same_folders() -> None:
    english, korean = (
        [re.findall(r"^ *([\w./]+)(?= |$)", block, re.M) for block in FENCE.findall(path.read_text(encoding="utf-8"))]
        for path in (ENGLISH, KOREAN)
    )
    assert english
    assert korean == english


def test_both_point_to_the_same_documents() -> None:
    english, korean = parts(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
    images = {"docs/images/page.png", "docs/images/page-ko.png"}
    assert sorted(set(korean) - images - {"README.md"}) == sorted(set(english) - images)


def test_code_spelled_in_text_is_the_same() -> None:
    english, korean = parts(r"(`[^`\n]+`)")
    assert sorted(set(korean)) == sorted(set(english))
