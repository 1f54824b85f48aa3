// Bytes kept for this answer, by kind, against what full attention would keep.
import { make, setStyle } from "../elements.js";
import { say } from "../language.js";
import { legend, PanelFrame } from "./panel_frame.js";

export class Memory {
  constructor() {
    this.frame = new PanelFrame("memory");
    this.root = this.frame.root;
    this.full = bar("full");
    this.kept = bar("kept");
    this.kinds = make("div", { class: "kinds", "aria-hidden": "true" }, ...["global", "window", "state"].map((kind) => make("i", { class: `kind kind-${kind}` })));
    this.zoom = say(make("p", { class: "zoom" }), "memory.zoom");
    this.frame.picture.append(
      this.full.root,
      this.kept.root,
      this.zoom,
      this.kinds,
      legend(["global", "memory.global"], ["window", "memory.window"], ["state", "memory.state"]),
    );
  }

  update(state) {
    if (!state.model) return;
    const memory = state.memory();
    const most = Math.max(memory.full, memory.kept, 1);
    show(this.full, "memory.bar.full", memory.full, most);
    show(this.kept, "memory.bar.kept", memory.kept, most);
    const kinds = { global: memory.global, window: memory.window, state: memory.state };
    for (const [index, kind] of ["global", "window", "state"].entries()) {
      setStyle(this.kinds.children[index], { width: `${(100 * kinds[kind]) / Math.max(1, memory.kept)}%` });
    }
    const { model } = state;
    const values = { kept: { bytes: memory.kept }, full: { bytes: memory.full }, times: { times: memory.full / memory.kept }, layers: model.num_layers, held: memory.held };
    say(this.frame.sentence, memory.full > memory.kept ? "memory.sentence" : "memory.sentence.small", values);
    const bytes = (value) => ["value.bytes", { value: { bytes: value } }];
    this.frame.fillTable([
      ["memory.table.per_token", {}, ...bytes(model.kv_bytes_per_token)],
      ["memory.table.full_per_token", { heads: model.gqa8_heads ?? 8, layers: model.num_layers }, ...bytes(model.gqa8_bytes_per_token)],
      ["memory.table.global", { held: memory.held }, ...bytes(memory.global)],
      ["memory.table.window", { window: model.window }, ...bytes(memory.window)],
      ["memory.table.state", {}, ...bytes(memory.state)],
      ["memory.table.limit", { tokens: model.max_positions ?? memory.held }, ...bytes((model.max_positions ?? memory.held) * model.kv_bytes_per_token + memory.window + memory.state)],
    ]);
  }
}

function bar(kind) {
  const name = make("span", { class: "bar-name" });
  const size = make("b", { class: "bar-size" });
  const fill = make("i", { class: `fill fill-${kind}` });
  const root = make("div", { class: "size-bar" }, make("div", { class: "size-text" }, name, size), make("div", { class: "track", "aria-hidden": "true" }, fill));
  return { root, name, size, fill };
}

function show(one, key, bytes, most) {
  say(one.name, key);
  say(one.size, "value.bytes", { value: { bytes } });
  setStyle(one.fill, { width: `${(100 * bytes) / most}%` });
}
