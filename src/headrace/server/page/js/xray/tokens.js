// The answer token by token: which were drafted, and, for the one in hand, where its attention read from.
import { make } from "../elements.js";
import { label, say } from "../language.js";
import { refusedGuesses } from "./fold.js";
import { legend, PanelFrame } from "./panel_frame.js";

export class Tokens {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.chosen = null; // index of the token in hand; null follows the newest
    this.frame = new PanelFrame("tokens");
    this.root = this.frame.root;
    this.list = make("div", { class: "tokens", role: "listbox", tabindex: "0", "aria-orientation": "horizontal" });
    label(this.list, "tokens.list");
    this.hint = say(make("p", { class: "hint" }), "tokens.hint");
    this.legend = legend(["accepted", "tokens.accepted"], ["own", "tokens.own"], ["refused", "tokens.refused"]);
    this.gain = make("p", { class: "hint", hidden: true });
    this.frame.picture.append(this.list, this.legend, this.gain, this.hint);
    this.chips = [];
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    this.list.addEventListener("pointerover", (event) => this.onPoint(event));
    this.list.addEventListener("click", (event) => this.onPoint(event));
    this.list.addEventListener("focus", () => this.choose(this.chosen ?? this.chips.length - 1));
  }

  update(state) {
    this.state = state;
    const isBehind = this.chips.length < state.tokens.length;
    for (let index = this.chips.length; index < state.tokens.length; index += 1) this.addChip(state.tokens[index]);
    if (isBehind && this.chosen === null) this.list.scrollTop = this.list.scrollHeight;
    const drafts = state.drafts();
    this.legend.hidden = drafts.proposed === 0;
    if (drafts.proposed) this.markDrafts(state);
    this.updateSentence(state, drafts);
    this.updateGain(state.draftGain());
  }

  updateGain(gain) {
    this.gain.hidden = gain === null;
    if (gain !== null) say(this.gain, "tokens.gain", { gain: { percent: gain } });
  }

  addChip(token) {
    const written = token.text === "" ? "·" : token.text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥");
    const chip = make("span", { class: "token", role: "option", id: `token-${token.index}`, "aria-selected": "false", text: written });
    chip.dataset.index = token.index;
    this.chips.push(chip);
    this.list.append(chip);
  }

  markDrafts(state) {
    const refused = refusedGuesses(state);
    for (const token of state.decoded) {
      const chip = this.chips[token.index];
      chip.classList.toggle("is-drafted", token.is_draft);
      chip.dataset.refused = "•".repeat(Math.min(refused.get(token.index) ?? 0, 8));
    }
  }

  updateSentence(state, drafts) {
    if (!state.tokens.length) say(this.frame.sentence, "tokens.none");
    else if (!drafts.proposed) say(this.frame.sentence, "tokens.sentence.plain", { count: state.tokens.length });
    else {
      const values = { ...drafts, count: state.tokens.length, share: { percent: drafts.accepted / drafts.proposed } };
      say(this.frame.sentence, "tokens.sentence", values);
    }
    const number = (value) => ["value.number", { value }];
    this.frame.fillTable([
      ["tokens.table.written", {}, ...number(state.tokens.length)],
      ["tokens.table.rounds", {}, ...number(drafts.rounds)],
      ["tokens.table.proposed", {}, ...number(drafts.proposed)],
      ["tokens.table.expected", {}, ...number(Math.round(state.draftsExpected()))],
      ["tokens.table.accepted", {}, ...number(drafts.accepted)],
    ]);
  }

  onPoint(event) {
    const chip = event.target.closest(".token");
    if (chip) this.choose(Number(chip.dataset.index), { scrolls: false }); // scrolling would move the pointer's token away
  }

  onKey(event) {
    const last = this.chips.length - 1;
    const at = this.chosen ?? last;
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + 10, ArrowUp: at - 10, Home: 0, End: last };
    if (event.key === "Escape") this.choose(null);
    else if (event.key in moves) this.choose(Math.max(0, Math.min(last, moves[event.key])));
    else return;
    event.preventDefault();
  }

  choose(index, { scrolls = true } = {}) {
    if (index !== null && !this.chips[index]) return;
    if (this.chosen !== null) this.mark(this.chips[this.chosen], false);
    this.chosen = index;
    if (index === null) this.list.removeAttribute("aria-activedescendant");
    else {
      this.mark(this.chips[index], true);
      this.list.setAttribute("aria-activedescendant", this.chips[index].id);
      if (scrolls) keepInView(this.list, this.chips[index]);
    }
    this.onChoose(index);
  }

  mark(chip, isChosen) {
    chip?.classList.toggle("is-chosen", isChosen);
    chip?.setAttribute("aria-selected", String(isChosen));
  }
}

// Scrolls the list alone, never the page around it.
function keepInView(list, chip) {
  const top = chip.offsetTop; // the list is what it is measured from
  if (top < list.scrollTop) list.scrollTop = top - 8;
  else if (top + chip.offsetHeight > list.scrollTop + list.clientHeight) {
    list.scrollTop = top + chip.offsetHeight - list.clientHeight + 8;
  }
}
