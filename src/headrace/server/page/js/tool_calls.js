// The tool calls of an answer. The page runs no tools: the person reads the call and types what the tool would say.
import { make } from "./elements.js";
import { say } from "./language.js";

export class ToolCalls {
  constructor(turn, send) {
    this.turn = turn;
    this.send = send;
    this.root = make("div", { class: "tool-calls" });
    this.cards = [];
    this.button = make("button", { type: "button", class: "send small", on: { click: () => this.sendAll() } });
    say(this.button, "tools.send");
    this.root.append(this.button);
    this.button.hidden = true;
  }

  update(canAnswer) {
    const calls = this.turn.answer.toolCalls;
    while (this.cards.length > calls.length) this.cards.pop().root.remove();
    calls.forEach((call, index) => this.updateCard(call, index));
    const isOpen = canAnswer && calls.length > 0 && this.turn.answer.status === "done";
    this.button.hidden = !isOpen;
    for (const card of this.cards) card.answer.hidden = !isOpen && !card.result.value;
    for (const card of this.cards) card.result.readOnly = !isOpen;
  }

  updateCard(call, index) {
    if (!this.cards[index]) {
      const card = { name: make("code"), given: make("pre"), result: make("textarea", { rows: 2, spellcheck: "false" }) };
      card.root = make(
        "section",
        { class: "tool-call" },
        make("header", {}, say(make("span"), "tools.call"), card.name),
        card.given,
        (card.answer = make("label", {}, say(make("span"), "tools.result"), card.result)),
      );
      card.result.addEventListener("input", () => (this.turn.answer.toolCalls[index].result = card.result.value));
      this.button.before(card.root);
      this.cards[index] = card;
    }
    this.cards[index].name.textContent = call.name;
    this.cards[index].given.textContent = readable(call.arguments);
  }

  sendAll() {
    this.send(this.turn);
  }
}

function readable(written) {
  try {
    return JSON.stringify(JSON.parse(written), null, 2);
  } catch {
    return written; // still being written, or no JSON at all
  }
}
