// Where a person writes: the prompt, files dropped in or chosen, the sample, and the mode.
import { countTokens } from "./api.js";
import { byId, make } from "./elements.js";
import { label, say, text } from "./language.js";
import { sampleLog } from "./sample_log.js";
import { changeSettings, settings } from "./settings.js";

const MAX_FILE_BYTES = 8 << 20;

export class Composer {
  constructor({ onSend, onStop, announce, model }) {
    this.files = [];
    this.isBusy = false;
    this.model = model;
    this.announce = announce;
    this.onSend = onSend;
    this.field = byId("prompt");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("stop").addEventListener("click", onStop);
    byId("sample").addEventListener("click", () => this.addSample());
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", () => this.addFiles(byId("file").files));
    this.field.addEventListener("keydown", (event) => this.onKey(event, onStop));
    this.field.addEventListener("input", () => this.grow());
    for (const radio of document.querySelectorAll("input[name=mode]")) {
      radio.addEventListener("change", () => {
        changeSettings({ mode: radio.value, modeChosen: true });
        this.showMode();
      });
    }
    this.setUpDrop();
  }

  onKey(event, onStop) {
    if (event.isComposing) return;
    if (event.key === "Escape" && this.isBusy) onStop();
    if (event.key !== "Enter" || event.shiftKey) return;
    if (settings.mode === "continue" && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    this.send();
  }

  showMode() {
    for (const radio of document.querySelectorAll("input[name=mode]")) radio.checked = radio.value === settings.mode;
    this.field.dataset.tPlaceholder = `composer.${settings.mode}`;
    this.field.placeholder = text(this.field.dataset.tPlaceholder);
    this.field.classList.toggle("is-code", settings.mode === "continue");
  }

  send() {
    const written = this.field.value;
    if (this.isBusy || (!written.trim() && !this.files.length)) return;
    const parts = [...this.files.map((file) => file.text), ...(written ? [written] : [])];
    const asked = { text: written, files: this.files, whole: parts.join("\n\n") };
    this.files = [];
    this.field.value = "";
    this.showFiles();
    this.grow();
    this.onSend(settings.mode, asked);
  }

  fill(written, withSample = false) {
    this.field.value = written;
    this.files = [];
    if (withSample) this.addSample();
    else this.showFiles();
    this.grow();
    this.field.focus();
  }

  setBusy(isBusy) {
    const hadFocus = document.activeElement === byId("stop") || document.activeElement === byId("send");
    this.isBusy = isBusy;
    byId("stop").hidden = !isBusy;
    byId("send").hidden = isBusy;
    if (hadFocus) (isBusy ? byId("stop") : byId("send")).focus();
  }

  addSample() {
    if (!this.files.some((file) => file.name === "sample.log")) this.addFile("sample.log", sampleLog());
  }

  async addFiles(list) {
    for (const file of list) {
      if (file.size > MAX_FILE_BYTES) this.announce("composer.too_large", { name: file.name });
      else this.addFile(file.name, await file.text());
    }
    byId("file").value = "";
  }

  async addFile(name, content) {
    const file = { name, text: content, tokens: null };
    this.files.push(file);
    this.showFiles();
    try {
      file.tokens = await countTokens(this.model(), content);
    } catch {
      return; // the size in bytes stands there already
    }
    if (this.files.includes(file)) this.showFiles();
  }

  showFiles() {
    const chips = this.files.map((file) => {
      const size = { name: file.name, size: { bytes: file.text.length }, count: file.tokens ?? 0 };
      const about = say(make("span"), file.tokens === null ? "composer.file" : "composer.file.tokens", size);
      const remove = make("button", { type: "button", text: "×", on: { click: () => this.removeFile(file) } });
      label(remove, "composer.remove", { name: file.name });
      return make("span", { class: "file" }, about, remove);
    });
    byId("attachments").replaceChildren(...chips);
  }

  removeFile(file) {
    this.files = this.files.filter((one) => one !== file);
    this.showFiles();
    this.field.focus();
  }

  grow() {
    this.field.style.setProperty("height", "auto");
    this.field.style.setProperty("height", `${Math.min(this.field.scrollHeight + 2, window.innerHeight * 0.35)}px`);
  }

  setUpDrop() {
    const zone = byId("talk");
    const hint = byId("drop-hint");
    let depth = 0;
    const carriesFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    zone.addEventListener("dragenter", (event) => {
      if (carriesFiles(event)) hint.hidden = ++depth < 1;
    });
    zone.addEventListener("dragleave", (event) => {
      if (carriesFiles(event)) hint.hidden = --depth < 1;
    });
    zone.addEventListener("dragover", (event) => event.preventDefault());
    zone.addEventListener("drop", (event) => {
      event.preventDefault();
      depth = 0;
      hint.hidden = true;
      this.addFiles(event.dataTransfer?.files ?? []);
    });
  }
}
