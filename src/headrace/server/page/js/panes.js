// On narrow screens one pane at a time, as tabs; on wide ones both.
import { byId } from "./elements.js";

export function setUpPanes() {
  const tabs = ["talk", "xray"].map((name) => byId(`tab-${name}`));
  for (const tab of tabs) {
    tab.addEventListener("click", () => showPane(tab.id.slice(4)));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = tabs[1 - tabs.indexOf(tab)];
      showPane(other.id.slice(4));
      other.focus();
    });
  }
}

export function showPane(name) {
  document.body.dataset.pane = name;
  for (const one of ["talk", "xray"]) {
    const tab = byId(`tab-${one}`);
    tab.setAttribute("aria-selected", String(one === name));
    tab.tabIndex = one === name ? 0 : -1;
  }
}
