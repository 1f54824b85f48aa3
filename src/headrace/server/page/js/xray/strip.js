// Layers as a strip: which rows of the prompt and the answer ran in each. Reading stops half-way, and one sees it.
import { make, setStyle } from "../elements.js";
import { say } from "../language.js";
import { legend, PanelFrame } from "./panel_frame.js";

export class Strip {
  constructor(maxTokens) {
    this.maxTokens = maxTokens;
    this.frame = new PanelFrame("strip");
    this.root = this.frame.root;
    this.rows = make("div", { class: "strip-rows", "aria-hidden": "true" });
    this.scale = make("div", { class: "strip-scale", "aria-hidden": "true" }, make("span"), make("span"));
    this.frame.picture.append(
      this.rows,
      this.scale,
      legend(["encoder", "strip.encoder"], ["producer", "strip.producer"], ["decoder", "strip.decoder"], ["cached", "strip.cached"], ["never", "strip.never"]),
    );
    this.lanes = [];
  }

  build(state) {
    this.rows.replaceChildren();
    this.lanes = [];
    const encoder = state.layers.filter((layer) => layer.half === "encoder");
    const decoder = state.layers.filter((layer) => layer.half === "decoder");
    this.rows.classList.toggle("is-dense", state.layers.length > 16);
    this.addGroup("encoder", encoder);
    this.addGroup("producer", decoder.slice(0, 1));
    this.addGroup("decoder", decoder);
  }

  addGroup(kind, layers) {
    if (!layers.length) return;
    const title = say(make("span", { class: "strip-name" }), `strip.group.${kind}`, { first: layers[0].id, last: layers.at(-1).id });
    const count = make("span", { class: "strip-count" });
    const lanes = make("div", { class: "strip-lanes" });
    for (const layer of layers) {
      const prompt = make("div", { class: "lane-prompt" });
      const answer = make("div", { class: "lane-answer" }, make("i", { class: `run run-${kind}` }));
      lanes.append(make("div", { class: "lane", title: `${layer.id}` }, prompt, answer));
      this.lanes.push({ kind, prompt, answer: answer.firstChild });
    }
    this.rows.append(make("div", { class: `strip-group strip-${kind}` }, make("div", { class: "strip-head" }, title, count), lanes));
    this.lanes.at(-1).count = count;
  }

  update(state) {
    if (!state.model) return;
    if (!this.lanes.length) this.build(state);
    const total = Math.max(1, state.promptTokens);
    const first = state.firstRow;
    const encoded = state.readTo > first ? [[first, state.readTo]] : [];
    const spans = { encoder: encoded, producer: encoded, decoder: state.decoderSpans };
    const counts = { encoder: state.encoderRows || state.readTo, producer: state.encoderRows || state.readTo, decoder: state.decoderRows };
    for (const lane of this.lanes) {
      const cached = lane.kind !== "decoder" && first > 0 ? [[0, first]] : [];
      paint(lane.prompt, [...cached.map((span) => ["cached", span]), ...spans[lane.kind].map((span) => [lane.kind, span])], total);
      lane.answer.hidden = state.tokens.length === 0;
      setStyle(lane.answer, { width: `${Math.min(100, (100 * state.tokens.length) / this.maxTokens)}%` });
      if (lane.count) say(lane.count, "strip.rows", { count: counts[lane.kind], total: state.promptTokens });
    }
    say(this.scale.firstChild, "strip.prompt", { count: state.promptTokens });
    say(this.scale.lastChild, "strip.answer", { count: state.tokens.length });
    this.updateSentence(state);
    this.updateTable(state);
  }

  updateSentence(state) {
    const values = {
      read: state.encoderRows || state.readTo,
      decoder: state.decoderRows,
      count: state.promptTokens,
      skipped: state.firstRow,
      again: state.cachedTokens - state.firstRow,
    };
    const isDone = !state.isReading || state.readTo >= state.promptTokens;
    say(this.frame.sentence, isDone ? sentenceOf(state) : "strip.sentence.reading", values);
  }

  updateTable(state) {
    const layers = state.promptSum("layer_rows");
    const whole = state.promptTokens * state.layers.length;
    const number = (value) => ["value.number", { value }];
    this.frame.fillTable([
      ["strip.table.encoder", {}, ...number(state.encoderRows)],
      ["strip.table.decoder", {}, ...number(state.decoderRows)],
      ["strip.table.replayed", {}, ...number(state.replayedRows)],
      ["strip.table.producer", {}, ...number(state.promptSum("producer_rows"))],
      ["strip.table.layers", {}, "strip.table.of", { value: layers, whole, share: { percent: whole ? layers / whole : 0 } }],
    ]);
  }
}

function sentenceOf(state) {
  if (state.firstRow > 0 && state.cachedTokens > state.firstRow) return "strip.sentence.again";
  if (state.firstRow > 0) return "strip.sentence.cached";
  return state.decoderRows < state.promptTokens ? "strip.sentence" : "strip.sentence.whole";
}

function paint(lane, spans, total) {
  while (lane.children.length > spans.length) lane.lastChild.remove();
  spans.forEach(([kind, [start, stop]], index) => {
    const run = lane.children[index] ?? lane.appendChild(make("i"));
    run.className = `run run-${kind}`;
    setStyle(run, { left: `${(100 * start) / total}%`, width: `${(100 * (stop - start)) / total}%` });
  });
}
