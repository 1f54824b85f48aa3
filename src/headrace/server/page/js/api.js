// The server, as the page uses it. Every failure is a ServerError with a kind that the page has words for.
import { readEvents } from "./sse.js";
import { settings } from "./settings.js";

export class ServerError extends Error {
  constructor(kind, message, { status = 0, retryAfter = null } = {}) {
    super(message);
    this.kind = kind; // "key" | "busy" | "large" | "refused" | "broken" | "stopping" | "restarting" | "away"
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

const KINDS = { overloaded: "busy", stopping: "stopping", engine_down: "restarting" };

function kindOf(status, code = null) {
  if (code in KINDS) return KINDS[code];
  if (status === 401) return "key";
  if (status === 429) return "busy";
  if (status === 413) return "large";
  return status >= 500 ? "broken" : "refused";
}

async function call(path, { body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (settings.key) headers.Authorization = `Bearer ${settings.key}`;
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new ServerError("away", String(problem.message || problem));
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let message = `HTTP ${response.status}`;
  let code = null;
  try {
    const document = await response.json();
    message = document?.error?.message ?? document?.detail ?? message;
    code = document?.error?.code ?? null;
  } catch {
    // the body says nothing; the status must do
  }
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  return new ServerError(kindOf(response.status, code), String(message), { status: response.status, retryAfter });
}

export async function* stream(path, body, signal) {
  const response = await call(path, { body, signal });
  const id = response.headers.get("x-response-id");
  yield { opened: true, id };
  try {
    for await (const one of readEvents(response.body)) {
      if (one.comment !== undefined) yield { comment: one.comment };
      else if (one.data === "[DONE]") return;
      else yield parsed(one);
    }
  } catch (problem) {
    if (problem.name === "AbortError" || problem instanceof ServerError) throw problem;
    throw new ServerError("away", String(problem.message || problem));
  }
}

function parsed(one) {
  const document = JSON.parse(one.data);
  if (document.error) {
    const { code, message } = document.error;
    throw new ServerError(kindOf(Number(code) || 500, code), message ?? "");
  }
  return { event: one.event, document };
}

export async function* streamXray(id, signal) {
  const response = await call(`/v1/xray/${encodeURIComponent(id)}`, { signal });
  for await (const one of readEvents(response.body)) {
    if (one.comment === undefined) yield { event: one.event, document: JSON.parse(one.data) };
  }
}

export async function firstModel() {
  const document = await (await call("/v1/models")).json();
  return document.data?.[0] ?? null;
}

export async function countTokens(model, prompt, signal) {
  const document = await (await call("/tokenize", { body: { model, prompt }, signal })).json();
  return document.count ?? document.tokens?.length ?? null;
}
