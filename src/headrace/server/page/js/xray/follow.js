// Follows the X-ray of an answer from the server into a state. Whatever goes wrong here never disturbs the answer.
import { streamXray } from "../api.js";

export async function followXray(id, state, onChange) {
  try {
    for await (const { event, document } of streamXray(id)) {
      state.take(event, document);
      onChange();
    }
  } catch (problem) {
    state.problem = problem;
    state.version += 1;
    onChange();
  }
}
