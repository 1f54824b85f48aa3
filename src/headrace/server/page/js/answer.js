// One answer: what was asked, what has come so far, and how it stands. Folds the chunks of both streaming dialects.

export function newAnswer(mode) {
  return {
    mode, // "chat" | "continue"
    status: "waiting", // waiting, reading, writing, done, stopped, failed
    id: null,
    reasoning: "",
    content: "",
    toolCalls: [],
    finish: null,
    usage: null,
    problem: null,
    read: null, // { done, total } while a prompt is read
  };
}

export function isRunning(answer) {
  return ["waiting", "reading", "writing"].includes(answer.status);
}

const PROGRESS = /reading (\d+) of (\d+) tokens/;

export function takeComment(answer, comment) {
  const found = PROGRESS.exec(comment);
  if (found) takeProgress(answer, Number(found[1]), Number(found[2]));
}

export function takeProgress(answer, done, total) {
  if (answer.status !== "waiting" && answer.status !== "reading") return;
  answer.status = "reading";
  answer.read = { done, total };
}

export function takeChunk(answer, chunk) {
  if (chunk.id) answer.id = chunk.id;
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  if (answer.mode === "continue") takeText(answer, choice.text);
  else takeDelta(answer, choice.delta ?? {});
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

function takeText(answer, text) {
  if (!text) return;
  answer.status = "writing";
  answer.content += text;
}

function takeDelta(answer, delta) {
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (reasoning) answer.reasoning += reasoning;
  if (delta.content) answer.content += delta.content;
  for (const part of delta.tool_calls ?? []) takeToolCall(answer, part);
  if (reasoning || delta.content || delta.tool_calls?.length) answer.status = "writing";
}

function takeToolCall(answer, part) {
  const call = (answer.toolCalls[part.index] ??= { id: "", name: "", arguments: "" });
  if (part.id) call.id = part.id;
  if (part.function?.name) call.name = part.function.name;
  if (part.function?.arguments) call.arguments += part.function.arguments;
}

// The message of the conversation that this answer is.
export function messageOf(answer) {
  const message = { role: "assistant", content: answer.content };
  if (answer.reasoning) message.reasoning_content = answer.reasoning;
  if (answer.toolCalls.length) {
    message.tool_calls = answer.toolCalls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}
