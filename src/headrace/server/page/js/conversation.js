// The turns so far and the requests made from them. A turn is { asked, answer }: what the person gave (null where tool
// results take its place) and the answer. Results of tools are kept with their calls; a call that a later turn passed over
// has an empty one, because servers refuse conversations with open calls.
import { messageOf, newAnswer, takeChunk, takeComment } from "./answer.js";
import { ServerError, stream } from "./api.js";
import { settings } from "./settings.js";

export class Conversation {
  constructor() {
    this.turns = [];
    this.model = null;
    this.running = null; // { turn, abort }
  }

  add(mode, asked) {
    const turn = { mode, asked, answer: newAnswer(mode) };
    this.turns.push(turn);
    return turn;
  }

  // Runs a turn's answer; `onChange` is called after everything that came. Never throws.
  async run(turn, onChange) {
    const abort = new AbortController();
    const answer = (turn.answer = newAnswer(turn.mode));
    this.running = { turn, abort };
    onChange(turn, "start");
    try {
      const path = turn.mode === "chat" ? "/v1/chat/completions" : "/v1/completions";
      for await (const one of stream(path, this.body(turn), abort.signal)) {
        if (one.opened) answer.id = one.id ?? answer.id;
        else if (one.comment !== undefined) takeComment(answer, one.comment);
        else takeChunk(answer, one.document);
        onChange(turn, "news");
      }
      answer.status = "done";
    } catch (problem) {
      answer.status = abort.signal.aborted ? "stopped" : "failed";
      if (answer.status === "failed") answer.problem = asServerError(problem);
    }
    this.running = null;
    onChange(turn, "end");
  }

  stop() {
    this.running?.abort.abort();
  }

  body(turn) {
    const body = {
      model: this.model ?? "headrace-nano",
      stream: true,
      stream_options: { include_usage: true },
      temperature: settings.temperature,
      max_tokens: settings.maxTokens,
      xray: true,
    };
    if (settings.seed) body.seed = Number(settings.seed);
    if (turn.mode === "continue") return { ...body, prompt: turn.asked.whole };
    body.messages = this.messagesBefore(turn);
    if (settings.effort) body.reasoning_effort = effortValue(settings.effort);
    if (settings.tools.trim()) {
      body.tools = JSON.parse(settings.tools);
      if (settings.mustCall) body.tool_choice = "required";
    }
    return body;
  }

  messagesBefore(last) {
    const messages = [];
    for (const turn of this.turns) {
      if (turn.mode !== "chat") continue;
      if (turn.asked) messages.push({ role: "user", content: turn.asked.whole });
      if (turn === last) break;
      messages.push(messageOf(turn.answer));
      for (const call of turn.answer.toolCalls) {
        messages.push({ role: "tool", tool_call_id: call.id, content: call.result ?? "" });
      }
    }
    return messages;
  }
}

function effortValue(effort) {
  return /^\d+$/.test(effort) ? Number(effort) : effort;
}

function asServerError(problem) {
  return problem instanceof ServerError ? problem : new ServerError("broken", String(problem.message ?? problem));
}
