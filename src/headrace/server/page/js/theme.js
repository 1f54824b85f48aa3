// Light and dark: the system's choice until the person makes one.
import { recall, remember } from "./storage.js";

export function setUpTheme(button) {
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const shown = () => document.documentElement.dataset.theme || (system.matches ? "dark" : "light");
  const mark = () => button.setAttribute("aria-pressed", String(shown() === "dark"));
  const stored = recall("theme");
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
  button.addEventListener("click", () => {
    const next = shown() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    remember("theme", next);
    mark();
  });
  system.addEventListener("change", mark);
  mark();
}
