"""The page's files by themselves: no code that a policy would forbid, no other hosts, two languages in step."""

import json
import re
from email.message import Message
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from headrace.server.routes.page import CONTENT_SECURITY_POLICY, page_files
from tests.architecture.test_size import MAX_FILE_LINES
from tests.server.serving import Served

TEXTS = {name: file.content.decode("utf-8") for name, file in page_files().items()}
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js")}
ENGLISH, KOREAN = (json.loads(TEXTS[f"strings/{language}.json"]) for language in ("en", "ko"))
MADE_UP = {  # keys that scripts put together: every one of these must be there
    "composer": ("chat", "continue"),
    "problem": ("key", "busy", "large", "refused", "broken", "away"),
    "reads.role": ("full", "reindex", "reuse", "window"),
    "strip.group": ("encoder", "producer", "decoder"),
    "cache.tier": ("device", "host", "disk"),
    "cache.reason": ("nothing_cached", "no_window_state", "full_mode"),
}


def keys_used() -> set[str]:
    """Return the keys of texts that the page's files name."""
    used = set()
    for name, text in TEXTS.items():
        if name.endswith(".html"):
            used |= set(re.findall(r'data-t(?:-label|-placeholder)?="([^"]+)"', text))
        if name.endswith(".js"):
            used |= set(re.findall(r'"([a-z_]+(?:\.[a-z_]+)+)"', text))
    used = {
        key for key in used if not key.endswith((".js", ".html", ".json", ".log")) and not key.startswith("headrace.")
    }
    starters = {key for key in used if key.startswith("starter.") and not key.endswith(".text")}
    return used - starters | {f"{key}.{part}" for key in starters for part in ("title", "about")}


def test_every_file_is_short_enough_to_read() -> None:
    assert {name: text.count("\n") for name, text in TEXTS.items() if text.count("\n") > MAX_FILE_LINES} == {}


def test_every_text_that_is_used_exists_in_english() -> None:
    made = {f"{start}.{end}" for start, ends in MADE_UP.items() for end in ends}
    panels = {name for text in SCRIPTS.values() for name in re.findall(r'new PanelFrame\("(\w+)"\)', text)}
    made |= {f"{panel}.{part}" for panel in panels for part in ("title", "why")}
    assert sorted((keys_used() | made) - set(ENGLISH)) == []


def test_both_languages_have_the_same_texts_with_the_same_values() -> None:
    """Korean has no singular, so the forms for one thing exist in English only."""
    assert {key for key in ENGLISH if not key.endswith(".one")} == set(KOREAN)
    values = {
        key: (sorted(re.findall(r"{(\w+)}", ENGLISH[key])), sorted(re.findall(r"{(\w+)}", text)))
        for key, text in KOREAN.items()
    }
    unequal = {key: pair for key, pair in values.items() if set(pair[0]) != set(pair[1])}
    assert unequal == {}
    assert [key for key, text in {**ENGLISH, **KOREAN}.items() if not text.strip()] == []


def test_every_panel_has_its_explanation() -> None:
    mechanisms = re.findall(r'"(\w+)"', re.search(r"MECHANISMS = \[(.*?)\]", SCRIPTS["js/explain.js"]).group(1))
    linked = {name for text in SCRIPTS.values() for name in re.findall(r'new PanelFrame\("(\w+)"\)', text)}
    linked |= {name for text in SCRIPTS.values() for name in re.findall(r'"/explain#(\w+)"', text)}
    assert linked == set(mechanisms)
    for name in mechanisms:
        assert {f"explain.{name}.title", f"explain.{name}.body", f"explain.{name}.more"} <= set(ENGLISH)


def test_scripts_write_no_markup_and_run_no_text() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(\"on"
    )
    assert [name for name, text in SCRIPTS.items() if forbidden.search(text)] == []


def test_pages_hold_no_script_and_no_style_of_their_own() -> None:
    for name, text in TEXTS.items():
        if name.endswith(".html"):
            assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text) == []


def test_no_file_names_another_host() -> None:
    found = {name: re.findall(r"https?://[\w./]+|//[\w-]+\.\w+", text) for name, text in TEXTS.items()}
    hosts = {host for all_of_it in found.values() for host in all_of_it}
    assert hosts <= {"http://www.w3.org/2000/svg"}


def test_everything_that_is_imported_ships() -> None:
    missing = []
    for name, text in TEXTS.items():
        for target in re.findall(r'(?:from|import\() ?"([^"]+)"|(?:href|src)="(/page/[^"]+)"', text):
            path = "".join(target)
            folder = name.rpartition("/")[0]
            while path.startswith(("./", "../")):
                step, _, path = path.partition("/")
                folder = folder.rpartition("/")[0] if step == ".." else folder
            whole = path.removeprefix("/page/") if path.startswith("/page/") else f"{folder}/{path}"
            if whole not in TEXTS:
                missing.append((name, whole))
    assert missing == []


def get(served: Served, path: str, **headers: str) -> tuple[int, Message]:
    """Return status and headers of a file."""
    try:
        with urlopen(Request(served.base_url + path, headers=headers), timeout=10) as answer:
            return answer.status, answer.headers
    except HTTPError as refused:
        with refused:
            return refused.code, refused.headers


@pytest.mark.parametrize("path", ["/", "/explain", "/page/js/main.js", "/page/icon.svg"])
def test_files_are_open_to_all_and_carry_the_policy(served: Served, path: str) -> None:
    status, headers = get(served, path)
    assert status == 200
    assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert get(served, path, **{"if-none-match": headers["etag"]})[0] == 304


@pytest.mark.parametrize("name", ["../routes/page.py", "%2e%2e/routes/page.py", "js", "", "no.js"])
def test_nothing_but_the_pages_files_is_given_away(served: Served, name: str) -> None:
    assert get(served, f"/page/{name}")[0] == 404
