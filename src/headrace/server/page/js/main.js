// Puts the page together.
import { takeProgress } from "./answer.js";
import { AnswerPointer } from "./answer_pointer.js";
import { firstModel } from "./api.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { byId } from "./elements.js";
import { onLanguage, say, startLanguage, switchLanguage, text } from "./language.js";
import { setUpPanes, showPane } from "./panes.js";
import { changeSettings, settings, startSettings } from "./settings.js";
import { askForKey, setUpSettingsDialog } from "./settings_dialog.js";
import { showStarters } from "./starters.js";
import { setUpTheme } from "./theme.js";
import { Transcript } from "./transcript.js";
import { XrayState } from "./xray/fold.js";
import { followXray } from "./xray/follow.js";
import { XrayPanel } from "./xray/panel.js";

const BASE_MODELS = ["headrace-nano"]; // they continue text and know no chat

class Page {
  constructor() {
    this.conversation = new Conversation();
    this.xray = new XrayPanel(byId("xray"), (index) => this.pointer.mark(this.shownTurn, index));
    this.pointer = new AnswerPointer((turn, index) => this.point(turn, index));
    this.transcript = new Transcript(this.conversation, {
      regenerate: (turn) => this.run(turn),
      goOn: (turn) => this.ask("continue", { text: "", files: [], whole: turn.asked.whole + turn.answer.content }),
      sendResults: () => this.ask("chat", null),
      showXray: (turn) => this.showXray(turn, true),
      watchText: (turn, element) => this.pointer.watch(turn, element),
      announce: (key, given) => this.announce(key, given),
      askForKey,
    });
    this.composer = new Composer({
      onSend: (mode, asked) => this.ask(mode, asked),
      onStop: () => this.conversation.stop(),
      announce: (key, given) => this.announce(key, given),
      model: () => this.conversation.model,
    });
    for (const radio of document.querySelectorAll("input[name=mode]")) {
      radio.addEventListener("change", () => this.showMode());
    }
    onLanguage(() => this.transcript.changedAll());
  }

  async start() {
    if (!settings.mode) settings.mode = "continue";
    this.showMode();
    await this.findModel();
    document.body.dataset.ready = "true";
  }

  async findModel() {
    try {
      const model = await firstModel();
      this.conversation.model = model?.id ?? null;
      byId("model").textContent = model?.id ?? "";
      byId("model").hidden = !model;
      this.isBase = BASE_MODELS.includes(model?.id);
      byId("honest").hidden = !this.isBase;
      if (this.isBase) say(byId("honest"), "welcome.nano");
      if (!settings.modeChosen) this.chooseFor(this.isBase);
      this.showMode();
    } catch (problem) {
      if (problem.kind === "key") askForKey();
      else this.announce(`problem.${problem.kind ?? "broken"}`);
    }
  }

  chooseFor(isBase) {
    changeSettings({ mode: isBase ? "continue" : "chat" });
    if (isBase && !settings.effort) changeSettings({ effort: "none" });
  }

  showMode() {
    this.composer.showMode();
    showStarters((written, withSample) => this.composer.fill(written, withSample), text);
  }

  async ask(mode, asked) {
    if (this.conversation.running) return;
    byId("welcome").hidden = true;
    const turn = this.conversation.add(mode, asked);
    this.transcript.add(turn);
    await this.run(turn);
  }

  async run(turn) {
    if (this.conversation.running) return;
    turn.xray = new XrayState();
    turn.isFollowed = false;
    this.transcript.restart(turn);
    this.composer.setBusy(true);
    this.announce("announce.started");
    this.showXray(turn);
    await this.conversation.run(turn, (changed) => this.onNews(changed));
    this.composer.setBusy(false);
    this.transcript.changedAll();
    this.announceEnd(turn.answer);
  }

  onNews(turn) {
    const { answer, xray } = turn;
    if (answer.id && !turn.isFollowed) {
      turn.isFollowed = true;
      followXray(answer.id, xray, () => {
        if (xray.isReading && xray.steps.length) takeProgress(answer, xray.readTo, xray.promptTokens);
        this.transcript.changed(turn);
        if (this.shownTurn === turn) this.xray.changed();
      });
    }
    if (answer.read) xray.guessRead(answer.read.done);
    this.transcript.changed(turn);
  }

  announceEnd(answer) {
    const words = { done: "announce.done", stopped: "announce.stopped", failed: "announce.failed" };
    this.announce(words[answer.status], { count: answer.usage?.completion_tokens ?? 0 });
  }

  showXray(turn, onPurpose = false) {
    this.shownTurn = turn;
    const number = this.conversation.turns.indexOf(turn) + 1;
    this.xray.show(turn.xray, settings.maxTokens, { key: "xray.which", number });
    this.pointer.mark(turn, null);
    if (onPurpose) showPane("xray");
  }

  point(turn, index) {
    if (this.shownTurn !== turn) this.showXray(turn);
    this.xray.choose(index);
  }

  announce(key, given) {
    say(byId("announcer"), key, given);
  }
}

async function main() {
  startSettings();
  await startLanguage();
  setUpTheme(byId("theme"));
  byId("language").addEventListener("click", () => switchLanguage());
  setUpPanes();
  const page = new Page();
  setUpSettingsDialog(() => page.findModel());
  await page.start();
}

main();
