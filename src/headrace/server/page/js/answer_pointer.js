// From a point of an answer's text to the token that wrote it, and back: the token in hand is marked in the answer too.

export class AnswerPointer {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.canMark = typeof Highlight === "function" && CSS.highlights !== undefined;
  }

  watch(turn, element) {
    const point = (event) => {
      const at = offsetAt(event, element);
      const index = at === null ? null : tokenAt(turn, at);
      if (index !== null) this.onChoose(turn, index);
    };
    element.addEventListener("pointermove", point);
    element.addEventListener("click", point);
    turn.answerElement = element;
  }

  mark(turn, index) {
    if (!this.canMark) return;
    CSS.highlights.delete("token-in-hand");
    const node = turn?.answerElement?.firstChild;
    const token = index === null ? null : turn?.xray?.tokens[index];
    if (!node || !token) return;
    const start = startOf(turn) + sumBefore(turn, index);
    const stop = start + token.text.length;
    if (start < 0 || stop > node.data.length || start === stop) return;
    const range = new Range();
    range.setStart(node, start);
    range.setEnd(node, stop);
    CSS.highlights.set("token-in-hand", new Highlight(range));
  }
}

function offsetAt(event, element) {
  const found = document.caretPositionFromPoint
    ? document.caretPositionFromPoint(event.clientX, event.clientY)
    : document.caretRangeFromPoint?.(event.clientX, event.clientY);
  const node = found?.offsetNode ?? found?.startContainer;
  return node && node === element.firstChild ? (found.offset ?? found.startOffset) : null;
}

// Where the tokens' joined text begins relative to the shown answer: reasoning and markup come before what is shown.
function startOf(turn) {
  const all = turn.xray.tokens.map((token) => token.text).join("");
  const shown = turn.answer.content;
  const at = all.lastIndexOf(shown);
  return at < 0 ? 0 : -at;
}

function sumBefore(turn, index) {
  let sum = 0;
  for (let one = 0; one < index; one += 1) sum += turn.xray.tokens[one].text.length;
  return sum;
}

function tokenAt(turn, offset) {
  const tokens = turn.xray?.tokens;
  if (!tokens?.length) return null;
  let end = startOf(turn);
  for (const token of tokens) {
    end += token.text.length;
    if (end > offset) return token.index;
  }
  return tokens.length - 1;
}
