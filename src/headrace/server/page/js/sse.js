// Reads a stream of server-sent events from a fetch response: { event, data } for events, { comment } for comments.

export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      let end;
      while ((end = blockEnd(held)) !== null) {
        const block = held.slice(0, end.start);
        held = held.slice(end.stop);
        yield* parseBlock(block);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function blockEnd(held) {
  const found = /\r?\n\r?\n/.exec(held);
  return found ? { start: found.index, stop: found.index + found[0].length } : null;
}

export function* parseBlock(block) {
  let event = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
    else if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  if (data.length) yield { event, data: data.join("\n") };
}
