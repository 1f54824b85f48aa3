// The frame that all panels share: a title, one plain sentence, the picture, the numbers behind it, and a link.
import { make } from "../elements.js";
import { say } from "../language.js";

export class PanelFrame {
  constructor(name) {
    this.name = name;
    this.sentence = make("p", { class: "panel-sentence" });
    this.picture = make("div", { class: "picture" });
    this.table = make("table");
    const title = say(make("h3", { id: `panel-${name}` }), `${name}.title`);
    const link = make("a", { class: "panel-link", href: `/explain#${name}`, target: "_blank" });
    this.details = make(
      "details",
      { class: "numbers" },
      say(make("summary"), "panel.numbers"),
      make("div", { class: "table-scroll" }, this.table),
    );
    this.root = make(
      "section",
      { class: `panel panel-${name}`, "aria-labelledby": `panel-${name}` },
      make("header", {}, title, say(link, `${name}.why`)),
      this.sentence,
      this.picture,
      this.details,
    );
  }

  // Rows are [key of the name, values of the name, key of the value, values of the value].
  fillTable(rows) {
    while (this.table.rows.length > rows.length) this.table.deleteRow(-1);
    rows.forEach(([name, nameValues, value, given], index) => {
      const row = this.table.rows[index] ?? this.newRow();
      say(row.cells[0], name, nameValues);
      say(row.cells[1], value, given);
    });
  }

  newRow() {
    const row = this.table.insertRow();
    row.append(make("th", { scope: "row" }), make("td"));
    return row;
  }
}

export function legend(...entries) {
  const list = make("ul", { class: "legend" });
  for (const [kind, key] of entries) {
    list.append(make("li", {}, make("i", { class: `key key-${kind}`, "aria-hidden": "true" }), say(make("span"), key)));
  }
  return list;
}
