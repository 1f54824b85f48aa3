// The list of turns: makes their views, keeps them fresh once per frame, stays at the bottom while text comes.
import { byId } from "./elements.js";
import { TurnView } from "./turn_view.js";
import { factsOf } from "./xray/summary.js";

const NEAR_BOTTOM = 120; // pixels

export class Transcript {
  constructor(conversation, acts) {
    this.conversation = conversation;
    this.acts = acts;
    this.root = byId("transcript");
    this.scroller = byId("talk-scroll");
    this.views = new Map();
    this.stale = new Set();
  }

  add(turn) {
    const view = new TurnView(turn, this.acts);
    this.views.set(turn, view);
    this.root.append(view.root);
    this.changed(turn);
    requestAnimationFrame(() => this.toBottom());
  }

  restart(turn) {
    this.views.get(turn).clearProblem();
    this.changed(turn);
  }

  changed(turn) {
    this.stale.add(turn);
    if (this.isPlanned) return;
    this.isPlanned = true;
    requestAnimationFrame(() => {
      this.isPlanned = false;
      this.draw();
    });
  }

  changedAll() {
    for (const turn of this.conversation.turns) this.changed(turn);
  }

  draw() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    const wasAtBottom = scrollHeight - scrollTop - clientHeight < NEAR_BOTTOM;
    const last = this.conversation.turns.at(-1);
    for (const turn of this.stale) {
      this.views.get(turn)?.update({
        isLast: turn === last,
        isBusy: this.conversation.running !== null,
        facts: factsOf(turn.xray),
        hasXray: Boolean(turn.xray?.tokens.length),
      });
    }
    this.stale.clear();
    if (wasAtBottom) this.toBottom();
  }

  toBottom() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}
