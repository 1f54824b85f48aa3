"""How the page folds X-ray events: rounds with accepted and refused guesses, borrowed selections, sums."""

from typing import Any

import pytest
from playwright.sync_api import Browser

from headrace.cache.prefix_match import Reason
from tests.server.page.browsing import visiting
from tests.server.serving import Served

FOLD = """async (events) => {
  const { XrayState, refusedGuesses, rowsOf } = await import('/page/js/xray/fold.js');
  const state = new XrayState();
  for (const [name, data] of events) state.take(name, data);
  return { drafts: state.drafts(), refused: [...refusedGuesses(state)], rows: state.decoded.map(rowsOf),
           reads: state.readsOf(state.tokens[1]).map((one) => [one.layer.id, one.entries, one.isBorrowed]),
           read: state.entriesRead(state.tokens[1]), memory: state.memory(), half: state.decoderSpans,
           gain: state.draftGain(), expected: state.draftsExpected(),
           encoder: state.encoderRows, cached: state.cachedTokens, first: state.firstRow };
}"""


def layer(layer_id: int, half: str | None, ratio: int, index_source: int | None) -> dict[str, Any]:
    return {"id": layer_id, "half": half, "ratio": ratio, "index_source": index_source}


LAYERS = [layer(0, "encoder", 2, 0), layer(1, "decoder", 1, 1), layer(2, "decoder", 1, 1), layer(3, None, 0, None)]
MODEL = {
    "layers": LAYERS,
    "kv_bytes_per_token": 10,
    "window_bytes_per_sequence": 1000,
    "state_bytes_per_sequence": 24,
    "gqa8_bytes_per_token": 600,
}


def step(start: int, stop: int, decoder_rows: int, **more: Any) -> dict[str, Any]:
    return {
        "start": start,
        "stop": stop,
        "decoder_rows": decoder_rows,
        "replayed_rows": decoder_rows,
        "counts": {},
        **more,
    }


def token(index: int, number: int, proposed: int, *, is_draft: bool, kind: str = "decode") -> dict[str, Any]:
    reads = {"0": {"window": [90, 100], "entries": [[0, 4], [8, 10]]}, "1": {"window": [90, 100], "entries": [[3, 6]]}}
    return {
        "index": index,
        "text": "x",
        "step": number,
        "kind": kind,
        "drafts_proposed": proposed,
        "is_draft": is_draft,
        "draft_chances": [0.75, 0.5, 0.25, 0.25][:proposed],
        "draft_gain": {3: None, 4: 1.5}.get(number),
        "counts": {"index_scored": 10},
        "reads": reads,
    }


@pytest.fixture(scope="module")
def folded(browser: Browser, served: Served) -> dict[str, Any]:
    events = [
        ("start", {"model": MODEL, "prompt_tokens": 100, "prompt_pieces": ["a"] * 100}),
        ("prefill", step(40, 70, 0, cached_tokens=44)),
        ("prefill", step(70, 100, 20)),
        ("token", token(0, 2, 0, is_draft=False, kind="prefill")),
        ("token", token(1, 3, 4, is_draft=True)),
        ("token", token(2, 3, 4, is_draft=True)),
        ("token", token(3, 3, 4, is_draft=False)),
        ("token", token(4, 4, 3, is_draft=False)),
        ("token", token(5, 5, 0, is_draft=False)),
    ]
    with visiting(browser, served) as visit:
        found = visit.open().evaluate(FOLD, events)
        assert visit.trouble == []
    return dict(found)


def test_guesses_are_counted_by_round_and_refusals_stand_behind_its_last_token(folded: dict[str, Any]) -> None:
    assert folded["drafts"] == {"proposed": 7, "accepted": 2, "rounds": 3}
    assert folded["refused"] == [[3, 2], [4, 3], [5, 0]]
    assert folded["rows"] == [5, 5, 5, 4, 1]


def test_the_newest_gain_that_is_known_is_told_and_chances_count_once_a_round(folded: dict[str, Any]) -> None:
    assert folded["gain"] == 1.5
    assert folded["expected"] == (0.75 + 0.5 + 0.25 + 0.25) + (0.75 + 0.5 + 0.25)


def test_a_layer_that_borrows_reads_what_its_source_chose(folded: dict[str, Any]) -> None:
    far, near = [[0, 4], [8, 10]], [[3, 6]]
    assert folded["reads"] == [[0, far, False], [1, near, False], [2, near, True]]
    assert folded["read"] == 3 + 3 + 3, "entries of two tokens count once"


def test_rows_and_bytes_are_summed_over_the_steps(folded: dict[str, Any]) -> None:
    assert (folded["first"], folded["cached"], folded["encoder"]) == (40, 44, 60)
    assert folded["half"] == [[80, 100]]
    assert folded["memory"]["kept"] == 106 * 10 + 1024
    assert folded["memory"]["full"] == 106 * 600


def test_the_page_has_words_for_every_reason_of_the_cache(browser: Browser, served: Served) -> None:
    with visiting(browser, served) as visit:
        said = visit.open().evaluate(
            """async (reasons) => {
              const { sayReason } = await import('/page/js/xray/cache.js');
              return reasons.map((why) => {
                const element = document.createElement('p');
                sayReason(element, why);
                return [element.dataset.t, element.textContent];
              });
            }""",
            [*(f"{reason.value} 70" if "token" in reason.value else reason.value for reason in Reason), "a new one"],
        )
        keys = [key for key, _ in said]
        assert len(set(keys)) == len(Reason) + 1
        assert keys.index("cache.reason.other") == len(Reason)
        assert all("70" in words for (_, words), reason in zip(said, Reason, strict=False) if "token" in reason.value)
        assert not any("{" in words for _, words in said)
        assert visit.trouble == []


def test_while_a_prompt_is_read_shares_are_of_what_was_read(browser: Browser, served: Served) -> None:
    start = {"model": MODEL, "prompt_tokens": 100}
    events = [("start", start), ("prefill", step(0, 40, 0, counts={"layer_rows": 40}))]
    with visiting(browser, served) as visit:
        found = visit.open().evaluate(
            """async (events) => {
              const { XrayState } = await import('/page/js/xray/fold.js');
              const { computedShare, readShare } = await import('/page/js/xray/meters.js');
              const { Strip } = await import('/page/js/xray/strip.js');
              const state = new XrayState();
              const before = computedShare(state);
              for (const [name, data] of events) state.take(name, data);
              const strip = new Strip(10);
              strip.update(state);
              const answers = [...strip.root.querySelectorAll('.lane-answer i')].map((one) => one.hidden);
              return [before, computedShare(state), readShare(state), answers];
            }""",
            events,
        )
        assert found == [None, {"part": 40, "whole": 120}, None, [True] * 4]
        assert visit.trouble == []
