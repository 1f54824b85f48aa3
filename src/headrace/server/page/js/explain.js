// The page of explanations: one section for each mechanism, under the name its panel links to.
import { byId, make } from "./elements.js";
import { say, startLanguage, switchLanguage } from "./language.js";
import { setUpTheme } from "./theme.js";

const MECHANISMS = ["strip", "memory", "tokens", "reads", "scores", "cache", "ngram"];

async function main() {
  await startLanguage();
  setUpTheme(byId("theme"));
  byId("language").addEventListener("click", () => switchLanguage());
  for (const name of MECHANISMS) {
    byId("contents").append(say(make("a", { href: `#${name}` }), `explain.${name}.title`));
    const title = say(make("h2", { id: `title-${name}` }), `explain.${name}.title`);
    const body = say(make("p"), `explain.${name}.body`);
    const more = say(make("p"), `explain.${name}.more`);
    byId("mechanisms").append(make("section", { id: name, "aria-labelledby": title.id }, title, body, more));
  }
  byId(window.location.hash.slice(1))?.scrollIntoView();
  document.body.dataset.ready = "true";
}

main();
