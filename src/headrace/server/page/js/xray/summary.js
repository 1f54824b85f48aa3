// Plain words about the whole answer: the first thing to read, and the line under each answer.
import { make } from "../elements.js";
import { say } from "../language.js";
import { Meters } from "./meters.js";

const WORTH_TELLING = 5; // from this many times as much on, full attention is worth a comparison

export class Summary {
  constructor() {
    this.main = make("p", { class: "summary-main" });
    this.more = make("p", { class: "summary-more" });
    this.meters = new Meters();
    this.figures = make("dl", { class: "figures" });
    this.root = make("div", { class: "summary" }, this.main, this.more, this.meters.root, this.figures);
  }

  update(state) {
    if (!state.model) return;
    const memory = state.memory();
    const values = {
      count: state.promptTokens,
      read: state.readTo,
      kept: { bytes: memory.kept },
      full: { bytes: memory.full },
      times: { times: memory.full / memory.kept },
      decoder: state.decoderRows,
      cached: state.cachedTokens,
      written: state.tokens.length,
      ran: state.encoderRows,
    };
    if (state.isReading) {
      say(this.main, "summary.reading", values);
      say(this.more, state.cachedTokens ? "summary.reading.cached" : "summary.reading.more", values);
    } else {
      say(this.main, memory.full >= WORTH_TELLING * memory.kept ? "summary.main" : "summary.main.small", values);
      say(this.more, secondSentence(state), values);
    }
    this.meters.update(state);
    this.updateFigures(state);
  }

  updateFigures(state) {
    const rate = decodeRate(state);
    const timings = state.end?.timings;
    const first = timings?.ttft_s;
    const wanted = [
      ["figures.read", "value.number", { value: state.readTo }],
      ["figures.written", "value.number", { value: state.tokens.length }],
      first === undefined ? null : ["figures.first", "value.seconds", { value: { seconds: first } }],
      rate === null ? null : ["figures.rate", "value.number", { value: rate }],
    ].filter(Boolean);
    while (this.figures.children.length > wanted.length) this.figures.lastChild.remove();
    wanted.forEach(([name, value, given], index) => {
      const box = this.figures.children[index] ?? this.figures.appendChild(make("div", {}, make("dt"), make("dd")));
      say(box.firstChild, name);
      say(box.lastChild, value, given);
    });
  }
}

function secondSentence(state) {
  if (state.cachedTokens) return state.cachedTokens < state.promptTokens ? "summary.cached" : "summary.cached.all";
  return state.decoderRows < state.promptTokens ? "summary.half" : "summary.whole";
}

export function decodeRate(state) {
  const timings = state.end?.timings;
  if (timings?.decode_s > 0 && state.tokens.length > 1) return (state.tokens.length - 1) / timings.decode_s;
  return null;
}

// The line under an answer.
export function factsOf(state) {
  if (!state?.model || !state.tokens.length) return null;
  const memory = state.memory();
  const key = state.cachedTokens ? "facts.cached" : "facts.line";
  return {
    key,
    read: state.promptTokens,
    kept: { bytes: memory.kept },
    written: state.tokens.length,
    cached: state.cachedTokens,
  };
}
