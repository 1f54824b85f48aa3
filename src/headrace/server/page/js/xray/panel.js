// The X-ray: a summary in plain words, and a panel for each mechanism. Draws at most once per frame.
import { make } from "../elements.js";
import { say } from "../language.js";
import { Cache } from "./cache.js";
import { Memory } from "./memory.js";
import { Reads } from "./reads.js";
import { Scores } from "./scores.js";
import { Strip } from "./strip.js";
import { Summary } from "./summary.js";
import { Tokens } from "./tokens.js";

const REDRAW_MS = 120;

export class XrayPanel {
  constructor(root, onChoose) {
    this.root = root;
    this.onChoose = onChoose;
    this.state = null;
    this.drawnAt = 0;
    this.title = say(make("h2", { id: "xray-title" }), "xray.title");
    this.which = make("p", { class: "xray-which" });
    this.empty = make("div", { class: "xray-empty" }, say(make("p"), "xray.empty"), ghost());
    this.problem = make("p", { class: "problem", hidden: true });
    this.body = make("div", { class: "xray-body" });
    root.append(make("header", { class: "xray-head" }, this.title, this.which), this.empty, this.problem, this.body);
  }

  // Shows an answer's X-ray; `maxTokens` scales the answer's part of the strip.
  show(state, maxTokens, which = null) {
    this.state = state;
    this.which.hidden = !which;
    if (which) say(this.which, which.key, which);
    this.summary = new Summary();
    this.tokens = new Tokens((index) => {
      this.draw();
      this.onChoose(index);
    });
    this.panels = [new Strip(maxTokens), new Memory(), this.tokens, new Reads(), new Scores(), new Cache()];
    this.body.replaceChildren(this.summary.root, ...this.panels.map((panel) => panel.root));
    this.drawnVersion = -1;
    this.watchPanels();
    this.changed();
  }

  choose(index) {
    this.tokens?.choose(index);
  }

  changed() {
    if (this.isPlanned) return;
    this.isPlanned = true;
    const wait = Math.max(0, this.drawnAt + REDRAW_MS - performance.now());
    setTimeout(() => requestAnimationFrame(() => this.drawIfStale()), wait);
  }

  drawIfStale() {
    this.isPlanned = false;
    if (this.state && this.drawnVersion !== this.state.version) this.draw();
  }

  draw() {
    const { state } = this;
    this.drawnVersion = state.version;
    this.drawnAt = performance.now();
    this.empty.hidden = Boolean(state.model);
    this.body.hidden = !state.model;
    this.problem.hidden = !state.problem;
    if (state.problem) say(this.problem, "xray.problem", { why: state.problem.message });
    if (!state.model) return;
    this.summary.update(state);
    this.tokens.update(state); // holds the token in hand, so it is never behind
    for (const panel of this.panels) if (this.inView.has(panel.root)) panel.update(state, this.tokens.chosen);
  }

  // Panels out of view are drawn when they come into it: a running answer should not pay for what nobody sees.
  watchPanels() {
    this.inView = new Set();
    this.observer?.disconnect();
    this.observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) this.inView.delete(target);
        else {
          this.inView.add(target);
          const panel = this.panels.find((one) => one.root === target);
          if (this.state.model) panel?.update(this.state, this.tokens.chosen);
        }
      }
    }, { rootMargin: "300px" });
    for (const panel of this.panels) this.observer.observe(panel.root);
  }
}

// Before the first answer: the shape of what will be seen.
function ghost() {
  const rows = (kind) => [0, 1, 2].map(() => make("i", { class: `ghost-${kind}`, "aria-hidden": "true" }));
  return make(
    "div",
    { class: "ghost" },
    say(make("p"), "xray.sketch.first"),
    ...rows("long"),
    say(make("p"), "xray.sketch.second"),
    ...rows("short"),
    say(make("p", { class: "ghost-note" }), "xray.sketch.note"),
  );
}
