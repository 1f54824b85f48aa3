// Text in the reader's language. `say` writes a text and remembers which, so that a switch rewrites it everywhere.
import { formatBytes, formatNumber, formatPercent, formatSeconds, formatTimes } from "./format.js";
import { recall, remember } from "./storage.js";

export const LANGUAGES = ["en", "ko"];

const values = new WeakMap(); // element -> what its text was made with
const listeners = [];
const loaded = {};
let language = "en";
let strings = {};

export function currentLanguage() {
  return language;
}

export async function startLanguage() {
  const stored = recall("language");
  const wished = (navigator.languages || [navigator.language]).map((one) => one.slice(0, 2));
  const first = wished.find((one) => LANGUAGES.includes(one)) || "en";
  await useLanguage(LANGUAGES.includes(stored) ? stored : first);
}

export async function useLanguage(name) {
  if (!loaded[name]) {
    const response = await fetch(`/page/strings/${name}.json`);
    loaded[name] = await response.json();
  }
  language = name;
  strings = loaded[name];
  document.documentElement.lang = name;
  rewrite(document);
  for (const listener of listeners) listener(name);
}

export async function switchLanguage() {
  const next = LANGUAGES[(LANGUAGES.indexOf(language) + 1) % LANGUAGES.length];
  await useLanguage(next);
  remember("language", next);
}

export function onLanguage(listener) {
  listeners.push(listener);
}

export function text(key, given = {}) {
  const single = given.count === 1 ? strings[`${key}.one`] : undefined;
  const pattern = single ?? strings[key];
  if (pattern === undefined) return key;
  return pattern.replace(/\{(\w+)\}/g, (whole, name) => (name in given ? shown(given[name]) : whole));
}

function shown(value) {
  if (typeof value === "number") return formatNumber(value, language, Number.isInteger(value) ? 0 : 1);
  if (value === null || typeof value !== "object") return String(value);
  if ("bytes" in value) return formatBytes(value.bytes, language);
  if ("seconds" in value) return formatSeconds(value.seconds, language);
  if ("times" in value) return formatTimes(value.times, language);
  if ("percent" in value) return formatPercent(value.percent, language);
  if ("key" in value) return text(value.key, value);
  return String(value);
}

export function say(element, key, given) {
  element.dataset.t = key;
  if (given) values.set(element, given);
  else values.delete(element);
  const next = text(key, given);
  if (element.textContent !== next) element.textContent = next;
  return element;
}

export function label(element, key, given) {
  element.dataset.tLabel = key;
  if (given) values.set(element, given);
  element.setAttribute("aria-label", text(key, given));
  return element;
}

function rewrite(root) {
  for (const element of root.querySelectorAll("[data-t]")) {
    element.textContent = text(element.dataset.t, values.get(element));
  }
  for (const element of root.querySelectorAll("[data-t-label]")) {
    element.setAttribute("aria-label", text(element.dataset.tLabel, values.get(element)));
  }
  for (const element of root.querySelectorAll("[data-t-placeholder]")) {
    element.setAttribute("placeholder", text(element.dataset.tPlaceholder));
  }
}
