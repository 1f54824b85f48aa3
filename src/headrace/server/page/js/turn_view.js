// How one turn looks: what was asked, the answer as it comes, and what can be done with it.
import { isRunning } from "./answer.js";
import { make } from "./elements.js";
import { label, say } from "./language.js";
import { keyProblem } from "./settings_dialog.js";
import { ToolCalls } from "./tool_calls.js";

const SHOWN_PROMPT_LINES = 14;

export class TurnView {
  constructor(turn, acts) {
    this.turn = turn;
    this.acts = acts;
    this.root = make("article", { class: `turn turn-${turn.mode}` });
    this.text = make("div", { class: "answer-text" });
    this.thought = make("pre", { class: "thought" });
    this.thinkingTitle = make("summary");
    this.thinking = make("details", { class: "thinking", hidden: true }, this.thinkingTitle, this.thought);
    this.tools = new ToolCalls(turn, acts.sendResults);
    this.progress = make("progress");
    this.statusText = make("span");
    this.status = make("div", { class: "status" }, this.statusText, this.progress);
    this.problem = make("div", { class: "problem", role: "alert", hidden: true });
    this.facts = make("button", { type: "button", class: "facts", on: { click: () => acts.showXray(turn) } });
    this.actions = this.makeActions();
    const answer = make("div", { class: "answer" }, this.thinking, this.text, this.tools.root);
    if (turn.mode === "continue") this.addPaper(answer);
    else this.root.append(this.makeAsked(), answer);
    this.root.append(this.status, this.problem, make("footer", { class: "turn-foot" }, this.facts, this.actions));
    acts.watchText(turn, this.text);
  }

  addPaper(answer) {
    const { whole } = this.turn.asked;
    const lines = whole.split("\n");
    const hidden = Math.max(0, lines.length - SHOWN_PROMPT_LINES);
    const given = make("span", { class: "given", text: lines.slice(hidden).join("\n") });
    const paper = make("div", { class: "paper" });
    if (hidden > 0) {
      const summary = say(make("summary"), "turn.hidden", { count: hidden });
      const before = make("pre", { text: `${lines.slice(0, hidden).join("\n")}\n` });
      paper.append(make("details", { class: "before" }, summary, before));
    }
    this.text = make("span", { class: "answer-text" });
    paper.append(make("div", { class: "paper-text" }, given, this.text));
    answer.replaceChildren(paper);
    this.root.append(answer);
  }

  makeAsked() {
    const asked = make("div", { class: "asked" });
    if (!this.turn.asked) return asked;
    for (const file of this.turn.asked.files) {
      const summary = say(make("summary"), "turn.file", { name: file.name, size: { bytes: file.text.length } });
      asked.append(make("details", { class: "asked-file" }, summary, make("pre", { text: file.text })));
    }
    if (this.turn.asked.text) asked.append(make("div", { class: "asked-text", text: this.turn.asked.text }));
    return asked;
  }

  makeActions() {
    const action = (key, act) => say(make("button", { type: "button", class: "quiet small", on: { click: act } }), key);
    this.again = action("turn.again", () => this.acts.regenerate(this.turn));
    this.further = action("turn.further", () => this.acts.goOn(this.turn));
    this.copy = action("turn.copy", async () => {
      await navigator.clipboard?.writeText(this.turn.answer.content).catch(() => {});
      this.acts.announce("turn.copied");
    });
    return make("div", { class: "turn-actions" }, this.again, this.further, this.copy);
  }

  update({ isLast, isBusy, facts, hasXray }) {
    const { answer } = this.turn;
    setText(this.text, answer.content);
    this.text.classList.toggle("is-writing", isRunning(answer));
    this.updateThinking(answer);
    this.tools.update(isLast && !isBusy);
    this.updateStatus(answer);
    this.updateProblem(answer);
    const over = !isRunning(answer);
    this.again.hidden = !over || isBusy || !(isLast || this.turn.mode === "continue");
    this.further.hidden = !over || isBusy || this.turn.mode !== "continue" || !answer.content;
    this.copy.hidden = !over || !answer.content;
    this.facts.hidden = !hasXray;
    if (facts) say(this.facts, facts.key, facts);
    this.root.setAttribute("aria-busy", String(!over));
  }

  updateThinking(answer) {
    this.thinking.hidden = !answer.reasoning;
    if (!answer.reasoning) return;
    setText(this.thought, answer.reasoning);
    const isThinking = isRunning(answer) && !answer.content && !answer.toolCalls.length;
    const words = answer.reasoning.trim().split(/\s+/).length;
    say(this.thinkingTitle, isThinking ? "turn.thinking" : "turn.thought", { count: words });
  }

  updateStatus(answer) {
    const isShown = answer.status === "waiting" || answer.status === "reading" || answer.status === "stopped";
    this.status.hidden = !isShown && answer.finish !== "length" && answer.finish !== "cancelled";
    this.progress.hidden = answer.status !== "reading" && answer.status !== "waiting";
    label(this.progress, "turn.progress");
    if (answer.status === "reading") {
      this.progress.max = answer.read.total;
      this.progress.value = answer.read.done;
      say(this.statusText, "turn.reading", answer.read);
      return;
    }
    this.progress.removeAttribute("value");
    if (answer.status === "waiting") say(this.statusText, "turn.waiting");
    else if (answer.status === "stopped") say(this.statusText, "turn.stopped");
    else if (answer.finish === "length") say(this.statusText, "turn.length");
  }

  updateProblem(answer) {
    this.problem.hidden = !answer.problem;
    if (!answer.problem || this.problem.firstChild) return;
    const { kind, message, retryAfter } = answer.problem;
    this.problem.append(say(make("strong"), kind === "key" ? keyProblem() : `problem.${kind}`));
    if (kind === "key") this.problem.append(this.keyButton());
    else if (kind === "away") this.problem.append(say(make("p"), "problem.away.help"));
    else this.problem.append(make("p", { text: sentence(message), lang: "en" }));
    if (retryAfter) this.problem.append(say(make("p"), "problem.retry", { count: retryAfter }));
  }

  keyButton() {
    return say(make("button", { type: "button", class: "stop small", on: { click: this.acts.askForKey } }), "problem.enter");
  }

  clearProblem() {
    this.problem.replaceChildren();
    this.problem.hidden = true;
  }
}

// What the server says, as a sentence.
function sentence(message) {
  const first = message.charAt(0).toUpperCase() + message.slice(1);
  return /[.!?)]$/.test(first) ? first : `${first}.`;
}

// Adds to a text node where the text only grew, so that a long answer costs no more per token than a short one.
function setText(element, next) {
  const node = element.firstChild;
  if (!node) {
    if (next) element.append(document.createTextNode(next));
  } else if (next.length >= node.data.length && next.startsWith(node.data)) {
    if (next.length > node.data.length) node.appendData(next.slice(node.data.length));
  } else {
    node.data = next;
  }
}
