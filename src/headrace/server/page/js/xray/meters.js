// How little it took, at a glance: what was computed, kept and read, each as a share of what the plain way takes.
import { make, setStyle } from "../elements.js";
import { say } from "../language.js";

const KINDS = ["computed", "kept", "read"];

export class Meters {
  constructor() {
    this.root = make("ul", { class: "meters" });
    this.meters = new Map(KINDS.map((kind) => [kind, meter(kind)]));
    this.root.append(...[...this.meters.values()].map((one) => one.root));
  }

  update(state) {
    const shares = { computed: computedShare(state), kept: keptShare(state), read: readShare(state) };
    for (const [kind, one] of this.meters) show(one, kind, shares[kind]);
  }
}

// Layers run on tokens of the prompt, of all layers on all that were read so far.
export function computedShare(state) {
  if (!state.steps.length) return null;
  return { part: state.promptSum("layer_rows"), whole: state.readTo * state.layers.length };
}

// Bytes kept, of what full attention would keep.
export function keptShare(state) {
  const { kept, full } = state.memory();
  return kept < full ? { part: kept, whole: full, isBytes: true } : null;
}

// Entries that the answer's newest token read, of all stored ones that its layers could see.
export function readShare(state) {
  const token = state.decoded.at(-1);
  if (!token) return null;
  const rows = 1 + (token.drafts_proposed ?? 0);
  const visible = (token.counts.index_scored + token.counts.index_skipped) / rows;
  const part = Math.round(state.entriesRead(token));
  return part < visible ? { part, whole: Math.round(visible) } : null;
}

function meter(kind) {
  const share = make("b");
  const fill = make("i", { class: "fill" });
  const about = make("span", { class: "meter-about" });
  const name = say(make("span", { class: "meter-name" }), `meter.${kind}`);
  const root = make("li", { class: "meter" }, name, share, make("span", { class: "track", "aria-hidden": "true" }, fill), about);
  return { root, share, fill, about };
}

function show(one, kind, found) {
  one.root.hidden = found === null;
  if (found === null) return;
  const share = found.part / found.whole;
  const size = (value) => (found.isBytes ? { bytes: value } : value);
  say(one.share, "value.percent", { value: { percent: share } });
  say(one.about, `meter.${kind}.about`, { part: size(found.part), whole: size(found.whole) });
  setStyle(one.fill, { width: `${100 * Math.min(1, share)}%` });
}
