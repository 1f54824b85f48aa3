// Where a token's attention read from: per layer over the whole context, and marked in the prompt's own text.
import { drawing, make } from "../elements.js";
import { label, say } from "../language.js";
import { legend, PanelFrame } from "./panel_frame.js";
import { SourceText } from "./source_text.js";

const WIDTH = 1000;
const LEAST = 2.2; // the narrowest mark that is still seen

export class Reads {
  constructor() {
    this.frame = new PanelFrame("reads");
    this.root = this.frame.root;
    this.layer = null; // a layer's id; null is all
    this.source = new SourceText();
    this.lanes = make("div", { class: "read-lanes", role: "radiogroup" });
    label(this.lanes, "reads.layers");
    this.scale = make("div", { class: "read-scale", "aria-hidden": "true" }, make("span", { text: "0" }), make("span"));
    this.frame.picture.append(
      this.lanes,
      this.scale,
      legend(["window", "reads.window"], ["entry", "reads.entry"]),
      this.source.root,
    );
    this.drawn = new Map();
    this.lanes.addEventListener("change", (event) => {
      this.layer = event.target.value === "all" ? null : Number(event.target.value);
      this.redraw();
    });
  }

  update(state, chosen) {
    if (!state.model) return;
    this.state = state;
    if (!this.drawn.size) this.build(state);
    const at = chosen ?? lastWithReads(state);
    const isSame = this.token === state.tokens[at] && this.positions === state.positions && this.isLive === (chosen === null);
    if (isSame) return;
    this.token = state.tokens[at];
    this.positions = state.positions;
    this.isLive = chosen === null;
    this.redraw();
  }

  build(state) {
    this.addLane("all", null);
    for (const layer of state.layers) this.addLane(String(layer.id), layer);
    this.source.load(state.pieces, state.tokens);
  }

  addLane(value, layer) {
    const radio = make("input", { type: "radio", name: "read-layer", value });
    radio.checked = layer === null;
    const name = layer
      ? say(make("span"), `reads.role.${layer.role}`, { layer: layer.id, source: layer.index_source ?? "" })
      : say(make("span"), "reads.all");
    if (!layer) {
      this.lanes.append(make("label", { class: "read-lane read-lane-all" }, radio, name));
      this.drawn.set(value, null);
      return;
    }
    const window = drawing("path", { class: "mark-window" });
    const entries = drawing("path", { class: "mark-entry" });
    const picture = drawing("svg", { viewBox: `0 0 ${WIDTH} 10`, preserveAspectRatio: "none", "aria-hidden": "true" }, window, entries);
    picture.addEventListener("click", (event) => this.jump(event, picture));
    this.lanes.append(make("label", { class: "read-lane" }, radio, name, picture));
    this.drawn.set(value, { window, entries, lane: this.lanes.lastChild });
  }

  redraw() {
    const { state, token } = this;
    if (!state || !token?.reads) {
      say(this.frame.sentence, "reads.none");
      return;
    }
    const reads = state.readsOf(token);
    const total = Math.max(1, state.positions);
    for (const { layer, window, entries } of reads) {
      const drawn = this.drawn.get(String(layer.id));
      drawn.window.setAttribute("d", marks([window], total));
      drawn.entries.setAttribute("d", marks(entries, total));
      drawn.lane.classList.toggle("is-dim", this.layer !== null && this.layer !== layer.id);
    }
    const shown = reads.filter(({ layer }) => this.layer === null || this.layer === layer.id);
    this.source.mark(shown, state);
    say(this.scale.lastChild, "value.number", { value: state.positions });
    this.updateWords(token, shown, reads);
  }

  updateWords(token, shown, all) {
    const windowStart = Math.min(...all.map(({ window }) => window[0]));
    const far = all.flatMap(({ entries }) => entries).filter(([start]) => start < windowStart);
    const furthest = far.length ? token.position - Math.min(...far.map(([start]) => start)) : 0;
    const window = Math.max(...all.map((one) => one.window[1] - one.window[0]));
    const values = {
      token: token.text.trim() ? `“${token.text.trim()}”` : `#${token.index + 1}`,
      window,
      count: Math.round(this.state.entriesRead(token)),
      furthest,
      visible: token.position,
    };
    say(this.frame.sentence, furthest ? "reads.sentence" : "reads.sentence.near", values);
    this.frame.fillTable(
      all.map(({ layer, window: own, entries, isBorrowed }) => [
        `reads.role.${layer.role}`,
        { layer: layer.id, source: layer.index_source ?? "" },
        isBorrowed ? "reads.table.borrowed" : "reads.table.row",
        { window: own[1] - own[0], entries: entries.reduce((sum, [start, stop]) => sum + (stop - start), 0) / (layer.ratio || 1), source: layer.index_source ?? "" },
      ]),
    );
  }

  jump(event, picture) {
    const box = picture.getBoundingClientRect();
    this.source.scrollTo(Math.floor(((event.clientX - box.left) / box.width) * this.state.positions));
  }
}

function lastWithReads(state) {
  for (let index = state.tokens.length - 1; index >= 0; index -= 1) {
    if (state.tokens[index].reads && Object.keys(state.tokens[index].reads).length) return index;
  }
  return -1;
}

function marks(spans, total) {
  return spans
    .map(([start, stop]) => {
      const width = Math.max(LEAST, (WIDTH * (stop - start)) / total);
      const left = Math.min(WIDTH - width, (WIDTH * start) / total);
      return `M${left.toFixed(1)} 0h${width.toFixed(1)}v10h-${width.toFixed(1)}z`;
    })
    .join("");
}
