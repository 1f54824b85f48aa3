// What came from caches and tables instead of being computed: cached blocks by tier, replayed rows, n-gram rows.
import { make, setStyle } from "../elements.js";
import { say } from "../language.js";
import { rowsOf } from "./fold.js";
import { legend, PanelFrame } from "./panel_frame.js";

// What the engine says, and the name under which the page has words for it. A token's number may follow.
const REASONS = {
  "nothing cached": "nothing_cached",
  "diverges at token": "diverges",
  "cached up to token": "ends",
  "within one window of its start": "short",
  "no window state": "no_window_state",
  "window state only at token": "window_before",
  "windows rebuilt from token": "rebuilt",
  "approximate lineage": "approximate",
  "full mode": "full_mode",
};

export class Cache {
  constructor() {
    this.frame = new PanelFrame("cache");
    this.root = this.frame.root;
    this.track = make("div", { class: "track cache-track", "aria-hidden": "true" }, make("i", { class: "fill run-cached" }), make("i", { class: "fill fill-again" }), make("i", { class: "fill run-encoder" }));
    this.reason = make("p", { class: "hint" });
    this.ngramTitle = say(make("h4", { id: "panel-ngram" }), "ngram.title");
    this.ngram = make("p", { class: "panel-sentence" });
    this.ngramLink = say(make("a", { class: "panel-link", href: "/explain#ngram", target: "_blank" }), "ngram.why");
    this.frame.picture.append(
      this.track,
      legend(["cached", "cache.cached"], ["again", "cache.again"], ["encoder", "cache.new"]),
      this.reason,
      make("div", { class: "sub-panel" }, make("header", {}, this.ngramTitle, this.ngramLink), this.ngram),
    );
  }

  update(state) {
    if (!state.model) return;
    const total = Math.max(1, state.promptTokens);
    const cached = state.cachedTokens;
    const again = state.promptSum("reencoded_rows");
    const widths = [Math.min(cached, state.firstRow), again, Math.max(0, state.readTo - state.firstRow - again)];
    widths.forEach((rows, index) => setStyle(this.track.children[index], { width: `${(100 * rows) / total}%` }));
    const values = { cached, count: state.promptTokens, share: { percent: cached / total } };
    say(this.frame.sentence, cached ? "cache.sentence" : "cache.sentence.none", values);
    const why = state.steps[0]?.cache_reason;
    this.reason.hidden = !why;
    if (why) sayReason(this.reason, why);
    this.updateNgram(state);
    this.updateTable(state, again);
  }

  updateNgram(state) {
    const perToken = state.model.ngram_rows_per_token ?? 0;
    const { rounds } = state;
    const rows = (state.encoderRows + rounds.reduce((sum, token) => sum + rowsOf(token), 0)) * perToken;
    const bytes = state.promptSum("ngram_bytes") + rounds.reduce((sum, token) => sum + token.counts.ngram_bytes, 0);
    const key = bytes ? (perToken ? "ngram.sentence" : "ngram.sentence.bytes") : "ngram.none";
    say(this.ngram, key, { rows, per: perToken, size: { bytes } });
  }

  updateTable(state, again) {
    const blocks = Object.entries(state.steps[0]?.cached_blocks ?? {});
    const number = (value) => ["value.number", { value }];
    this.frame.fillTable([
      ...blocks.map(([tier, count]) => ["cache.table.tier", { tier: TIERS.includes(tier) ? { key: `cache.tier.${tier}` } : tier }, "cache.table.blocks", { count }]),
      ["cache.table.tokens", {}, ...number(state.cachedTokens)],
      ["cache.table.replayed", {}, ...number(state.replayedRows)],
      ["cache.table.again", {}, ...number(again)],
      ["cache.table.written", {}, "value.bytes", { value: { bytes: state.promptSum("global_bytes_written") } }],
    ]);
  }
}

const TIERS = ["device", "host", "disk"];

export function sayReason(element, why) {
  const [, words, at] = /^(.*?)(?: (\d+))?$/.exec(why);
  if (words in REASONS) say(element, `cache.reason.${REASONS[words]}`, at ? { at: Number(at) } : undefined);
  else say(element, "cache.reason.other", { why });
}
