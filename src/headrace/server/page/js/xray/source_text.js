// The prompt and the answer as the model met them, with the places marked that a token read. One text node; marks are
// ranges over it (CSS custom highlights), so marking thousands of tokens costs no elements.
import { make } from "../elements.js";
import { label, say } from "../language.js";

const MAX_PLACES = 5;
const AROUND = 26; // characters shown on each side of a place

export class SourceText {
  constructor() {
    this.text = make("pre", { class: "source", tabindex: "0" });
    label(this.text, "source.label");
    this.places = make("ol", { class: "places" });
    this.root = make("div", { class: "source-box" }, say(make("h4"), "source.places"), this.places, say(make("h4"), "source.title"), this.text);
    this.starts = [];
    this.numPrompt = 0;
    this.canMark = typeof Highlight === "function" && CSS.highlights !== undefined;
  }

  load(pieces, tokens) {
    this.root.hidden = !pieces;
    if (!pieces) return;
    this.starts = [];
    let at = 0;
    for (const piece of pieces) {
      this.starts.push(at);
      at += piece.length;
    }
    this.numPrompt = pieces.length;
    this.node = document.createTextNode(pieces.join(""));
    this.text.replaceChildren(this.node);
    this.numTokens = 0;
    this.grow(tokens);
  }

  grow(tokens) {
    for (; this.numTokens < tokens.length; this.numTokens += 1) {
      this.starts.push(this.node.data.length);
      this.node.appendData(tokens[this.numTokens].text);
    }
  }

  place(position) {
    return position < this.starts.length ? this.starts[position] : this.node.data.length;
  }

  mark(reads, state) {
    if (!this.node) return;
    this.grow(state.tokens);
    const windows = merged(reads.map(({ window }) => window));
    const entries = merged(reads.flatMap((one) => one.entries));
    if (this.canMark) {
      CSS.highlights.set("read-window", new Highlight(...this.ranges(windows)));
      CSS.highlights.set("read-entry", new Highlight(...this.ranges(entries)));
    }
    this.showPlaces(reads, windows);
  }

  ranges(spans) {
    return spans.map(([start, stop]) => {
      const range = new Range();
      range.setStart(this.node, this.place(start));
      range.setEnd(this.node, this.place(stop));
      return range;
    });
  }

  // The places outside the window that most layers read, as buttons that lead to them.
  showPlaces(reads, windows) {
    const edge = windows.length ? windows[windows.length - 1][0] : 0;
    const counts = new Map();
    for (const { entries } of reads) {
      for (const [start, stop] of entries) {
        if (stop <= edge) counts.set(start, [(counts.get(start)?.[0] ?? 0) + 1 + (stop - start) / 1000, stop]);
      }
    }
    const best = [...counts].sort((one, other) => other[1][0] - one[1][0]).slice(0, MAX_PLACES);
    best.sort((one, other) => one[0] - other[0]);
    this.places.previousSibling.hidden = !best.length;
    while (this.places.children.length > best.length) this.places.lastChild.remove();
    best.forEach(([start, [, stop]], index) => {
      const item = this.places.children[index] ?? this.places.appendChild(this.newPlace());
      this.fillPlace(item.firstChild, start, stop);
    });
  }

  newPlace() {
    const button = make("button", { type: "button", class: "place", on: { click: () => this.scrollTo(Number(button.dataset.at)) } }, make("span"), make("code"));
    return make("li", {}, button);
  }

  fillPlace(button, start, stop) {
    button.dataset.at = start;
    const [from, to] = [this.place(start), this.place(stop)];
    const before = this.node.data.slice(Math.max(0, from - AROUND), from);
    const after = this.node.data.slice(to, to + AROUND);
    say(button.firstChild, "source.at", { position: start });
    const clean = (written) => written.replace(/\s+/g, " ");
    button.lastChild.replaceChildren(clean(before), make("mark", { text: clean(this.node.data.slice(from, to)) }), clean(after));
  }

  scrollTo(position) {
    if (!this.node) return;
    const range = new Range();
    range.setStart(this.node, Math.min(this.place(position), this.node.data.length));
    range.collapse(true);
    const box = range.getBoundingClientRect();
    const frame = this.text.getBoundingClientRect();
    this.text.scrollTop += box.top - frame.top - frame.height / 3;
  }
}

function merged(spans) {
  const sorted = [...spans].sort((one, other) => one[0] - other[0]);
  const joined = [];
  for (const [start, stop] of sorted) {
    const last = joined[joined.length - 1];
    if (last && start <= last[1]) last[1] = Math.max(last[1], stop);
    else joined.push([start, stop]);
  }
  return joined;
}
