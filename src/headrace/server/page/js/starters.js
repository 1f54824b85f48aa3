// Examples to begin with, on the empty page.
import { byId, make } from "./elements.js";
import { say } from "./language.js";
import { settings } from "./settings.js";

const EXAMPLES = {
  continue: [
    { key: "starter.function", text: 'def read_config(path):\n    """Read the configuration file' },
    { key: "starter.class", text: "class Cache:\n    def __init__(self, size):\n" },
    { key: "starter.log.continue", text: "def read_log(path):\n", withSample: true },
  ],
  chat: [
    { key: "starter.question", text: { key: "starter.question.text" } },
    { key: "starter.log", text: { key: "starter.log.text" }, withSample: true },
  ],
};

export function showStarters(fill, words) {
  const buttons = (EXAMPLES[settings.mode] ?? []).map((one) => {
    const act = () => fill(typeof one.text === "string" ? one.text : words(one.text.key), one.withSample);
    const button = make("button", { type: "button", class: "starter", on: { click: act } });
    button.append(say(make("strong"), `${one.key}.title`), say(make("span"), `${one.key}.about`));
    return button;
  });
  byId("starters").replaceChildren(...buttons);
}
