// Folds the events of /v1/xray into what the panels show. Pure: no elements, no words.

export class XrayState {
  constructor() {
    this.model = null;
    this.layers = []; // the backbone's
    this.promptTokens = 0;
    this.pieces = null; // the prompt, token by token
    this.steps = []; // prefill steps
    this.tokens = [];
    this.end = null;
    this.guessedRead = 0; // from keep-alive comments, until the first step is known
    this.version = 0;
  }

  take(event, document) {
    this.version += 1;
    if (event === "start") this.takeStart(document);
    else if (event === "prefill") this.steps.push(document);
    else if (event === "token") this.tokens.push(document);
    else if (event === "end") this.end = document;
  }

  takeStart(document) {
    this.model = document.model;
    this.layers = document.model.layers.filter((layer) => layer.half !== null);
    this.promptTokens = document.prompt_tokens;
    this.pieces = document.prompt_pieces ?? null;
  }

  guessRead(tokens) {
    if (tokens <= this.guessedRead) return;
    this.guessedRead = tokens;
    this.version += 1;
  }

  get isReading() {
    return this.tokens.length === 0 && !this.end;
  }

  // Where the encoder began (everything before came from the cache) and how far it is.
  get firstRow() {
    return this.steps.length ? this.steps[0].start : 0;
  }

  get cachedTokens() {
    return this.steps.length ? (this.steps[0].cached_tokens ?? 0) : 0;
  }

  get readTo() {
    return this.steps.length ? this.steps[this.steps.length - 1].stop : Math.min(this.guessedRead, this.promptTokens);
  }

  get encoderRows() {
    return this.steps.reduce((sum, step) => sum + step.stop - step.start, 0);
  }

  get decoderRows() {
    return this.steps.reduce((sum, step) => sum + step.decoder_rows, 0);
  }

  get replayedRows() {
    return this.steps.reduce((sum, step) => sum + step.replayed_rows, 0);
  }

  // Spans of prompt rows on which the decoder ran.
  get decoderSpans() {
    return this.steps.filter((step) => step.decoder_rows > 0).map((step) => [step.stop - step.decoder_rows, step.stop]);
  }

  promptSum(name) {
    return this.steps.reduce((sum, step) => sum + (step.counts[name] ?? 0), 0);
  }

  // Tokens whose step was theirs: the first token comes with the last step of the prompt.
  get decoded() {
    return this.tokens.filter((token) => token.counts && token.kind !== "prefill");
  }

  get positions() {
    return this.promptTokens + this.tokens.length;
  }

  memory() {
    const { model } = this;
    const held = Math.min(this.readTo + this.tokens.length, this.positions);
    const global = held * model.kv_bytes_per_token;
    const fixed = model.window_bytes_per_sequence + (model.state_bytes_per_sequence ?? 0);
    return {
      held,
      global,
      window: model.window_bytes_per_sequence,
      state: model.state_bytes_per_sequence ?? 0,
      kept: global + fixed,
      full: held * model.gqa8_bytes_per_token,
    };
  }

  // The rounds of the whole model: one token of each, for what belongs to the round.
  get rounds() {
    return [...new Map(this.decoded.map((token) => [token.step, token])).values()];
  }

  drafts() {
    const { rounds } = this;
    const proposed = rounds.reduce((sum, token) => sum + (token.drafts_proposed ?? 0), 0);
    return { proposed, accepted: this.decoded.filter((token) => token.is_draft).length, rounds: rounds.length };
  }

  // What drafting does for the server lately, as a share of its speed without; null while that is not known.
  draftGain() {
    return this.rounds.reduce((newest, token) => token.draft_gain ?? newest, null);
  }

  // Guesses that the draft itself expected to stay.
  draftsExpected() {
    return this.rounds.reduce((sum, token) => sum + (token.draft_chances ?? []).reduce((all, one) => all + one, 0), 0);
  }

  // What a token read in each layer of the backbone; layers that borrow a selection read what its source selected.
  readsOf(token) {
    const found = [];
    for (const layer of this.layers) {
      const own = token.reads?.[layer.id];
      const source = own ?? token.reads?.[layer.index_source];
      if (source) found.push({ layer, window: source.window, entries: source.entries, isBorrowed: !own });
    }
    return found;
  }

  entriesRead(token) {
    return this.readsOf(token).reduce((sum, { layer, entries }) => {
      const tokens = entries.reduce((all, [start, stop]) => all + stop - start, 0);
      return sum + tokens / Math.max(1, layer.ratio || 1);
    }, 0);
  }

  textOf(index) {
    return this.tokens[index]?.text ?? "";
  }
}

// Guesses refused behind each token: those of its round that no token of the answer is, at the round's last token.
export function refusedGuesses(state) {
  const rounds = new Map();
  for (const token of state.decoded) {
    const round = rounds.get(token.step) ?? { proposed: token.drafts_proposed ?? 0, accepted: 0, last: 0 };
    round.accepted += token.is_draft ? 1 : 0;
    round.last = token.index;
    rounds.set(token.step, round);
  }
  return new Map([...rounds.values()].map(({ proposed, accepted, last }) => [last, Math.max(0, proposed - accepted)]));
}

// Rows that shared a token's counts: its own and those of its round's guesses.
export function rowsOf(token) {
  return 1 + (token.drafts_proposed ?? 0);
}
