"""The X-ray of a long prompt: what it says in words, what it draws, and where a token's reading is shown."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.server.page.browsing import Visit, visiting
from tests.server.serving import Served


@pytest.fixture(scope="module")
def seen(browser: Browser, served: Served) -> Iterator[Visit]:
    """The sample log, dropped in, with an answer to it."""
    with visiting(browser, served, settings={"maxTokens": 16}) as visit:
        page = visit.open()
        page.get_by_role("button", name="A long log").click()
        page.wait_for_selector(".file:has-text('tokens')")
        page.press("#prompt", "Control+Enter")
        visit.until_answered()
        visit.until_xrayed()
        yield visit


def numbers(text: str | None) -> list[float]:
    return [float(one.replace(",", "")) for one in re.findall(r"\d[\d,.]*\d|\d", text or "")]


def test_the_sample_log_has_about_7000_tokens_and_is_the_same_every_time(seen: Visit) -> None:
    assert 6800 < numbers(seen.page.locator(".figures dd").first.text_content())[0] < 7400
    same = "async () => { const m = await import('/page/js/sample_log.js'); return m.sampleLog() === m.sampleLog(); }"
    assert seen.page.evaluate(same)


def test_the_summary_says_what_was_read_and_kept_against_full_attention(seen: Visit) -> None:
    words = seen.page.locator(".summary-main").text_content() or ""
    read, written, kept_kb, full_mb, times = numbers(words)
    assert words.startswith("It read ")
    assert 6800 < read < 7400
    assert written == 16
    assert times == pytest.approx(full_mb * 1000 / kept_kb, rel=0.05)
    assert "second half of the layers ran on just 128" in (seen.page.locator(".summary-more").text_content() or "")


def test_what_was_computed_kept_and_read_is_a_small_share(seen: Visit) -> None:
    shares, bars, about = seen.page.evaluate(
        """() => { const all = [...document.querySelectorAll('.meter')];
          const width = (one) => one.getBoundingClientRect().width;
          return [all.map((one) => one.querySelector('b').textContent),
                  all.map((one) => width(one.querySelector('.fill')) / width(one.querySelector('.track'))),
                  all.map((one) => one.querySelector('.meter-about').textContent)]; }"""
    )
    computed, kept, read = [float(share.rstrip("%")) / 100 for share in shares]
    assert 0.5 <= computed < 0.53
    assert kept < 0.03
    assert read < 0.03
    assert bars == pytest.approx([computed, kept, read], abs=0.02)
    parts = [numbers(words) for words in about]
    assert parts[0][0] / parts[0][1] == pytest.approx(computed, abs=0.005)
    assert parts[2][0] == 384


def test_the_list_of_tokens_scrolls_to_the_token_that_the_keyboard_chose(seen: Visit) -> None:
    page = seen.page
    page.evaluate("document.querySelector('.tokens').style.setProperty('max-height', '3.2rem')")
    shown = """() => { const list = document.querySelector('.tokens').getBoundingClientRect();
      const chip = document.querySelector('.token.is-chosen').getBoundingClientRect();
      return chip.top >= list.top - 1 && chip.bottom <= list.bottom + 1; }"""
    page.locator(".tokens").focus()
    for key in ("End", "Home", "End"):
        page.keyboard.press(key)
        assert page.evaluate(shown), key
    page.keyboard.press("Escape")
    page.evaluate("document.querySelector('.tokens').style.removeProperty('max-height')")


def test_the_strip_shows_that_the_decoder_ran_on_the_last_rows_only(seen: Visit) -> None:
    widths = seen.page.evaluate(
        """() => ['encoder', 'producer', 'decoder'].map((kind) =>
             [...document.querySelectorAll(`.strip-${kind} .lane-prompt`)].map((lane) =>
               [...lane.children].reduce((sum, run) => sum + run.getBoundingClientRect().width, 0) /
               lane.getBoundingClientRect().width))"""
    )
    encoder, producer, decoder = widths
    assert len(encoder) == 3
    assert len(decoder) == 3
    assert encoder + producer == pytest.approx([1.0] * 4, abs=0.01)
    assert all(0.005 < width < 0.05 for width in decoder)


def test_every_panel_leads_to_its_explanation_and_has_numbers(seen: Visit) -> None:
    links = seen.page.eval_on_selector_all(".panel-link", "(all) => all.map((one) => one.getAttribute('href'))")
    assert links == [f"/explain#{name}" for name in ("strip", "memory", "tokens", "reads", "scores", "cache", "ngram")]
    for summary in seen.page.locator(".numbers summary").all():
        summary.click()
    rows = seen.page.eval_on_selector_all(".numbers table", "(all) => all.map((one) => one.rows.length)")
    assert min(rows) >= 4
    assert "{" not in (seen.page.locator(".xray").text_content() or "").replace("{}", "")


def test_a_token_in_hand_shows_where_it_read_in_layers_text_and_answer(seen: Visit) -> None:
    page = seen.page
    page.locator(".panel-reads").scroll_into_view_if_needed()
    texts = []
    for index in (3, 9):
        page.locator(".token").nth(index).dispatch_event("pointerover")
        seen.until(f"document.querySelectorAll('.token')[{index}].matches('.is-chosen')")
        texts.append(page.locator(".panel-reads .mark-entry").first.get_attribute("d"))
    assert texts[0] != texts[1], "the two tokens chose other entries"
    marked = page.evaluate("['read-window', 'read-entry', 'token-in-hand'].map((one) => CSS.highlights.get(one)?.size)")
    assert marked[0] == 1
    assert marked[1] > 20
    assert marked[2] == 1
    assert page.locator(".place").count() == 5
    page.locator(".place").last.click()
    assert page.evaluate("document.querySelector('.source').scrollTop") > 0
    assert "furthest" in (page.locator(".panel-reads .panel-sentence").text_content() or "")


def test_one_layer_alone_can_be_marked(seen: Visit) -> None:
    page = seen.page
    everything = page.evaluate("CSS.highlights.get('read-entry').size")
    page.locator(".read-lane input").nth(1).check()
    assert page.evaluate("CSS.highlights.get('read-entry').size") < everything
    assert page.locator(".read-lane.is-dim").count() == 5
    page.locator(".read-lane input").first.check()


def test_a_point_in_the_answer_is_the_token_that_wrote_it(seen: Visit) -> None:
    page = seen.page
    page.evaluate(
        """() => {
          const element = [...document.querySelectorAll('.answer-text')].at(-1);
          const range = new Range();
          range.setStart(element.firstChild, 12);
          range.setEnd(element.firstChild, 13);
          const box = range.getBoundingClientRect();
          const at = { clientX: box.left + 1, clientY: box.top + box.height / 2, bubbles: true };
          element.dispatchEvent(new PointerEvent('pointermove', at));
        }"""
    )
    before = page.evaluate(
        """() => { const chips = [...document.querySelectorAll('.token')];
          const at = chips.findIndex((one) => one.matches('.is-chosen'));
          const plain = (one) => one.textContent.replaceAll('⏎\\n', '\\n').replaceAll('⇥', '\\t');
          const length = (stop) => chips.slice(0, stop).map(plain).join('').length;
          return [length(at), length(at + 1)]; }"""
    )
    assert before[0] <= 13
    assert before[1] > 11


def test_the_same_prompt_again_comes_from_the_cache(seen: Visit) -> None:
    page = seen.page
    page.locator(".turn-actions button").first.click()
    seen.until_answered()
    seen.until_xrayed()
    assert "known from the cache" in (page.locator(".summary-more").text_content() or "")
    assert float((page.locator(".meter b").first.text_content() or "").rstrip("%")) < 10
    assert page.locator(".strip-encoder .run-cached").count() == 3
    assert "from the cache" in (page.locator(".facts").last.text_content() or "")
    assert seen.trouble == []
