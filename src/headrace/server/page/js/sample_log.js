// A log of a made-up service, about 7,000 tokens to headrace-nano, the same every time.

const SOURCES = ["cache", "worker", "reader", "router", "store", "session"];
const ACTIONS = [
  ["INFO", (n) => `opened session for client ${name(n)}`],
  ["INFO", (n) => `read the config file from ${path(n)}`],
  ["INFO", () => "request finished and the connection was returned to the pool"],
  ["DEBUG", (n) => `cache hit for key ${name(n)}, value returned without a lookup`],
  ["DEBUG", (n) => `scheduled task ${name(n)} on the next free worker`],
  ["WARNING", (n) => `the response from ${name(n)} was slow, a retry was scheduled`],
  ["WARNING", () => "queue is nearly full, new requests have to wait"],
  ["ERROR", (n) => `could not write ${path(n)}: permission denied`],
  ["INFO", (n) => `the handler for ${name(n)} returned a response`],
  ["DEBUG", () => "no message was found in the queue, the worker is waiting"],
];
const NAMES = ["alpha", "server", "default", "index", "target", "report", "python", "project", "module", "archive"];
const FOLDERS = ["config", "static", "template", "session", "message", "source"];

function name(n) {
  return NAMES[n % NAMES.length];
}

function path(n) {
  return `/${FOLDERS[n % FOLDERS.length]}/${name(n >>> 4)}.json`;
}

// mulberry32: a small generator with a fixed course
function* draws(seed) {
  let state = seed >>> 0;
  for (;;) {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    yield (mixed ^ (mixed >>> 14)) >>> 0;
  }
}

export function sampleLog(numLines = 265) {
  const numbers = draws(41);
  const next = () => numbers.next().value;
  const lines = [];
  let seconds = 8 * 3600;
  for (let line = 0; line < numLines; line += 1) {
    seconds += next() % 7;
    const [level, action] = ACTIONS[next() % ACTIONS.length];
    const source = SOURCES[next() % SOURCES.length];
    lines.push(`${clock(seconds)} ${level} ${source}: ${action(next())}`);
  }
  return lines.join("\n") + "\n";
}

function clock(seconds) {
  const two = (value) => String(value).padStart(2, "0");
  return `${two(Math.floor(seconds / 3600) % 24)}:${two(Math.floor(seconds / 60) % 60)}:${two(seconds % 60)}`;
}
