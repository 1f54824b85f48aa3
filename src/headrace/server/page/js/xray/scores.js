// Positions scored, skipped and read for every token of the answer.
import { drawing } from "../elements.js";
import { say } from "../language.js";
import { rowsOf } from "./fold.js";
import { legend, PanelFrame } from "./panel_frame.js";

const HEIGHT = 100;

export class Scores {
  constructor() {
    this.frame = new PanelFrame("scores");
    this.root = this.frame.root;
    this.skipped = drawing("path", { class: "area-skipped" });
    this.scored = drawing("path", { class: "area-scored" });
    this.read = drawing("path", { class: "area-read" });
    this.cursor = drawing("rect", { class: "cursor", y: 0, height: HEIGHT, width: 1, visibility: "hidden" });
    this.chart = drawing("svg", { class: "score-chart", preserveAspectRatio: "none", "aria-hidden": "true" }, this.skipped, this.scored, this.read, this.cursor);
    this.frame.picture.append(this.chart, legend(["scored", "scores.scored"], ["skipped", "scores.skipped"], ["read", "scores.read"]));
  }

  update(state, chosen) {
    if (!state.model) return;
    const decoded = state.decoded;
    this.chart.classList.toggle("is-empty", !decoded.length);
    if (decoded.length) this.draw(state, decoded, chosen);
    const token = (chosen !== null && decoded.find((one) => one.index === chosen)) || decoded.at(-1);
    if (!token) {
      say(this.frame.sentence, "scores.none");
    } else {
      const { index_scored: scored, index_skipped: skipped } = token.counts;
      const rows = rowsOf(token);
      const values = { scored, skipped, visible: scored + skipped, count: Math.round(state.entriesRead(token)), layers: state.layers.length, rows };
      const key = skipped ? "scores.sentence" : "scores.sentence.all";
      say(this.frame.sentence, rows > 1 ? "scores.sentence.round" : key, values);
    }
    this.updateTable(state, token);
  }

  draw(state, decoded, chosen) {
    const scored = decoded.map((token) => token.counts.index_scored / rowsOf(token));
    const visible = decoded.map((token, index) => scored[index] + token.counts.index_skipped / rowsOf(token));
    const most = Math.max(...visible, 1);
    const scale = (value) => (HEIGHT * value) / most;
    this.chart.setAttribute("viewBox", `0 0 ${decoded.length} ${HEIGHT}`);
    this.skipped.setAttribute("d", steps(visible.map(scale)));
    this.scored.setAttribute("d", steps(scored.map(scale)));
    this.read.setAttribute("d", steps(decoded.map((token) => Math.max(1.2, scale(state.entriesRead(token))))));
    const at = decoded.findIndex((one) => one.index === chosen);
    this.cursor.setAttribute("visibility", at < 0 ? "hidden" : "visible");
    this.cursor.setAttribute("x", Math.max(0, at));
  }

  updateTable(state, token) {
    const rows = [
      ["scores.table.prompt", {}, "scores.table.pair", { scored: state.promptSum("index_scored"), skipped: state.promptSum("index_skipped") }],
    ];
    if (token) {
      for (const [layer, scored] of Object.entries(token.counts.index_scored_by_layer ?? {})) {
        rows.push(["scores.table.layer", { layer }, "value.number", { value: scored }]);
      }
      rows.push(["scores.table.index_bytes", {}, "value.bytes", { value: { bytes: token.counts.index_bytes } }]);
      rows.push(["scores.table.global_bytes", {}, "value.bytes", { value: { bytes: token.counts.global_bytes } }]);
      rows.push(["scores.table.window_bytes", {}, "value.bytes", { value: { bytes: token.counts.window_bytes } }]);
    }
    this.frame.fillTable(rows);
  }
}

function steps(heights) {
  let path = `M0 ${HEIGHT}`;
  heights.forEach((height, index) => {
    path += `V${(HEIGHT - height).toFixed(2)}H${index + 1}`;
  });
  return `${path}V${HEIGHT}Z`;
}
