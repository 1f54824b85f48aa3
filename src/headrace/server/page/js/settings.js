// What the person chose: sampling, key, tools, mode. The key lives as long as the tab, the rest in the browser.
import { recall, remember, untilTabCloses } from "./storage.js";

const NUMBERS = { temperature: [0, 2], maxTokens: [1, Infinity] };
const DEFAULTS = { temperature: 0.8, maxTokens: 256, effort: "", seed: "", tools: "", mustCall: false, mode: null, modeChosen: false };

export const settings = { ...DEFAULTS, key: "" };

export function startSettings() {
  try {
    Object.assign(settings, cleaned(JSON.parse(recall("settings") ?? "{}")));
  } catch {
    // unreadable: the defaults stay
  }
  settings.key = recall("key", untilTabCloses()) ?? "";
}

function cleaned(stored) {
  const kept = {};
  for (const name of Object.keys(DEFAULTS)) {
    if (typeof stored[name] === typeof DEFAULTS[name] || (name === "mode" && typeof stored[name] === "string")) {
      kept[name] = stored[name];
    }
  }
  for (const [name, [low, high]] of Object.entries(NUMBERS)) {
    if (name in kept && !(kept[name] >= low && kept[name] <= high)) delete kept[name];
  }
  return kept;
}

export function changeSettings(changes) {
  Object.assign(settings, changes);
  const { key, ...rest } = settings;
  remember("settings", JSON.stringify(rest));
  remember("key", key || null, untilTabCloses());
}

export function resetSettings() {
  const { mode, modeChosen, key } = settings;
  changeSettings({ ...DEFAULTS, mode, modeChosen, key });
}

// Returns the key of a sentence that says what is wrong, or null.
export function problemOf(tools, seed, effort) {
  if (tools.trim()) {
    try {
      if (!Array.isArray(JSON.parse(tools))) return "settings.tools.list";
    } catch {
      return "settings.tools.json";
    }
  }
  if (seed && !/^\d{1,18}$/.test(seed)) return "settings.seed.wrong";
  const number = Number(effort);
  const isNumber = Number.isInteger(number) && number >= 1 && number <= 100;
  if (effort && !isNumber && !["none", "low", "medium", "high", "max"].includes(effort)) return "settings.effort.wrong";
  return null;
}
