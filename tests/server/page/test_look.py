"""Themes, languages, keyboard, widths: what makes the page usable by everybody."""

import pytest
from playwright.sync_api import Browser, Page

from tests.server.page.browsing import NARROW, WIDE, visiting
from tests.server.serving import Served

READABLE = 4.5  # contrast that the accessibility guidelines ask of text
WIDTHS = (320, NARROW[0], 768, WIDE[0])
CONTRAST = """(selector) => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [r, g, b] = rgb(colour).map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paperOf = (one) => {
    while (one && rgb(getComputedStyle(one).backgroundColor)[3] < 255) one = one.parentElement;
    return getComputedStyle(one ?? document.body).backgroundColor;
  };
  return [...document.querySelectorAll(selector)].filter((one) => one.checkVisibility()).map((one) => {
    const [ink, paper] = [light(getComputedStyle(one).color), light(paperOf(one))];
    const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    return [contrast, `${one.tagName}.${one.className} ${one.textContent.slice(0, 30)}`];
  });
}"""
WIDER = """() => {
  const xray = document.getElementById('xray');
  return Math.max(document.documentElement.scrollWidth - innerWidth, xray ? xray.scrollWidth - xray.clientWidth : 0);
}"""


def background(page: Page) -> str:
    return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(browser: Browser, served: Served, theme: str) -> None:
    with visiting(browser, served, color_scheme=theme) as visit:
        page = visit.open()
        found = page.evaluate(CONTRAST, "p, h1, h2, h3, button, a, label, span[data-t]")
        visit.write("import os\n")
        visit.until_answered()
        visit.until_xrayed()
        found += page.evaluate(
            CONTRAST, "p, h2, h3, h4, button, a, dt, dd, li span, .given, .answer-text, summary, .token"
        )
        assert len(found) > 60
        assert [what for what in found if what[0] < READABLE] == []


def test_a_chosen_theme_is_remembered_and_overrules_the_system(browser: Browser, served: Served) -> None:
    with visiting(browser, served, color_scheme="light") as visit:
        page = visit.open()
        light = background(page)
        page.click("#theme")
        dark = background(page)
        assert dark != light
        assert page.locator("#theme").get_attribute("aria-pressed") == "true"
        page.reload()
        assert background(page) == dark
        visit.open("/explain")
        assert background(page) == dark
        page.emulate_media(color_scheme="dark")
        page.click("#theme")
        assert background(page) == light
        assert visit.trouble == []


def test_the_page_follows_the_system_until_a_theme_is_chosen(browser: Browser, served: Served) -> None:
    with visiting(browser, served, color_scheme="light") as visit:
        page = visit.open()
        light = background(page)
        page.emulate_media(color_scheme="dark")
        assert background(page) != light


def test_a_language_is_switched_everywhere_and_remembered(browser: Browser, served: Served) -> None:
    with visiting(browser, served) as visit:
        page = visit.open()
        visit.write("import os\n")
        visit.until_answered()
        visit.until_xrayed()
        page.click("#language")
        page.wait_for_selector("html[lang=ko]")
        assert page.locator("#send").text_content() == "보내기"
        assert "토큰" in (page.locator(".summary-main").text_content() or "")
        assert "토큰" in (page.locator(".facts").text_content() or "")
        assert (
            page.locator("#prompt").get_attribute("placeholder")
            == "글의 앞부분을 쓰거나 파일을 끌어다 놓으세요. Ctrl+Enter로 보냅니다."
        )
        visit.open("/explain#cache")
        assert page.locator("html").get_attribute("lang") == "ko"
        assert page.locator("h1").text_content() == "작동 원리"
        assert page.locator("#cache").is_visible()
        assert visit.trouble == []


def test_korean_readers_get_korean_at_once(browser: Browser, served: Served) -> None:
    with visiting(browser, served, locale="ko-KR") as visit:
        assert visit.open().locator("html").get_attribute("lang") == "ko"


def test_everything_can_be_done_by_keyboard(browser: Browser, served: Served) -> None:
    with visiting(browser, served) as visit:
        page = visit.open()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # the link that skips to the prompt
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.keyboard.type("import os")
        page.keyboard.press("Control+Enter")
        visit.until_answered()
        visit.until_xrayed()
        order = walk(page, "tokens")
        assert {"send", "sample", "attach"} <= set(order)
        chosen = page.locator(".token.is-chosen")
        last = chosen.get_attribute("data-index")
        page.keyboard.press("ArrowLeft")
        assert int(chosen.get_attribute("data-index") or -1) == int(last or 0) - 1
        page.keyboard.press("Escape")
        assert chosen.count() == 0
        page.keyboard.press("Shift+Tab")
        assert visit.trouble == []


def walk(page: Page, until: str) -> list[str]:
    """Press Tab until an element of that class has the focus; every stop must show it. Return the stops' ids."""
    stops = []
    for _ in range(60):
        page.keyboard.press("Tab")
        stop = page.evaluate(
            """() => { const one = document.activeElement; const style = getComputedStyle(one);
                const shown = one.matches('.choice input') ? getComputedStyle(one.nextElementSibling) : style;
                return [one.id, one.className, shown.outlineStyle, one.matches('#prompt')]; }"""
        )
        assert stop[2] != "none" or stop[3], f"the focus cannot be seen on {stop}"
        stops.append(stop[0])
        if stop[1] == until:
            return stops
    raise AssertionError(f"Tab never reached {until}: {stops}")


@pytest.mark.parametrize("locale", ["en-US", "ko-KR"])
def test_nothing_is_wider_than_the_screen(browser: Browser, served: Served, locale: str) -> None:
    with visiting(browser, served, NARROW, locale=locale) as visit:
        page = visit.open()
        empty = {width: overhang(page, width) for width in WIDTHS}
        visit.write("x" * 300)
        visit.until_answered()
        answered = {width: overhang(page, width) for width in WIDTHS}
        page.set_viewport_size({"width": NARROW[0], "height": NARROW[1]})
        page.click("#tab-xray")
        assert page.locator("#talk").is_hidden()
        visit.until_xrayed()
        xrayed = {width: overhang(page, width) for width in WIDTHS}
        visit.open("/explain")
        explained = {width: overhang(page, width) for width in WIDTHS}
        none = dict.fromkeys(WIDTHS, 0)
        assert [empty, answered, xrayed, explained] == [none] * 4


def overhang(page: Page, width: int) -> int:
    """Return by how many pixels the page is wider than a screen of that width."""
    page.set_viewport_size({"width": width, "height": 800})
    return max(0, int(page.evaluate(WIDER)))


def test_nothing_moves_where_less_motion_is_wanted(browser: Browser, served: Served) -> None:
    with visiting(browser, served, reduced_motion="reduce", settings={"maxTokens": 400}) as visit:
        page = visit.open()
        visit.write("import os\n")
        page.wait_for_selector(".answer-text.is-writing")
        moving = "getComputedStyle(document.querySelector('.answer-text.is-writing'), '::after').animationName"
        assert page.evaluate(moving) == "none"
        page.click("#stop")
        visit.until_answered()
