// The dialog with sampling settings, tools and the API key.
import { byId } from "./elements.js";
import { say } from "./language.js";
import { changeSettings, problemOf, resetSettings, settings } from "./settings.js";

export function setUpSettingsDialog(onKey) {
  const dialog = byId("settings");
  const form = byId("settings-form");
  const problem = byId("settings-problem");
  byId("open-settings").addEventListener("click", () => openSettings());
  byId("settings-reset").addEventListener("click", () => {
    resetSettings();
    fill(form);
  });
  form.addEventListener("submit", (event) => {
    const found = problemOf(form.tools.value, form.seed.value.trim(), form.effort.value.trim());
    if (found) {
      event.preventDefault();
      problem.hidden = false;
      say(problem, found);
      return;
    }
    const hadKey = settings.key;
    changeSettings({
      key: form.key.value,
      temperature: Number(form.temperature.value),
      maxTokens: Math.max(1, Math.round(Number(form.maxTokens.value)) || 1),
      effort: form.effort.value.trim(),
      seed: form.seed.value.trim(),
      tools: form.tools.value,
      mustCall: form.mustCall.checked,
    });
    if (settings.key !== hadKey) onKey();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}

export function openSettings(field = null, said = null) {
  fill(byId("settings-form"));
  const problem = byId("settings-problem");
  problem.hidden = said === null;
  if (said) say(problem, said);
  byId("settings").showModal();
  if (field) byId(field).focus();
}

// Where the server wants a key, or another one.
export function askForKey() {
  openSettings("api-key", keyProblem());
}

export function keyProblem() {
  return settings.key ? "problem.key.wrong" : "problem.key";
}

function fill(form) {
  form.key.value = settings.key;
  form.temperature.value = settings.temperature;
  form.maxTokens.value = settings.maxTokens;
  form.effort.value = settings.effort;
  form.seed.value = settings.seed;
  form.tools.value = settings.tools;
  form.mustCall.checked = settings.mustCall;
}
