"""The checkpoint's own draft module behind the interface that the engine's step knows."""

from collections.abc import Iterable, Sequence

from headrace.cache.sequence_state import SequenceState
from headrace.core.errors import InternalError
from headrace.engine.drafting.drafter import Committed, Wanted
from headrace.engine.drafting.proposal import Proposal
from headrace.models.deepseek_v41.draft import Block, Drafter
from headrace.models.deepseek_v41.model import DeepseekV41

NAME = "dspark"


class DSpark:
    """Guesses with the draft layers. Holds nothing of a sequence: context entries live in the state's draft rings.

    Source: spec section 3.11; serving.md section 5.1.
    """

    name = NAME
    wants_taps = True

    def __init__(self, model: DeepseekV41, vocab_size: int) -> None:
        """Take the draft module of a model that was loaded with it; guesses are ids below `vocab_size`.

        Raises:
            InternalError: the model has none.
        """
        if model.config.draft is None:
            raise InternalError("drafts were asked of a model without a draft module")
        self.max_guesses = model.config.draft.block_size
        self._vocab_size = vocab_size
        self._drafter = Drafter(model.config, model.parameters, model.frequencies.plain)

    def observe(self, committed: Sequence[Committed]) -> None:
        """Write the context entries of the newest positions; where some were never seen, the context begins anew."""
        for one in committed:
            if one.taps is None or not len(one.taps):
                continue
            state = _state(one.name, one.state)
            first = one.first + len(one.token_ids) - len(one.taps)
            if any(ring.end != first for ring in state.draft_rings):
                for ring in state.draft_rings:
                    ring.restart(first)
            self._drafter.observe(state, first, one.taps)

    def propose(self, wanted: Sequence[Wanted]) -> list[Proposal]:
        """Return guesses; none for a sequence whose newest position was not observed."""
        states = [_state(one.name, one.state) for one in wanted]
        ready = [place for place, state in enumerate(states) if _is_observed(state)]
        found = [Proposal(NAME)] * len(wanted)
        if ready:
            blocks = self._drafter.blocks([(states[place], wanted[place].token_id) for place in ready])
            for place, block in zip(ready, blocks, strict=True):
                found[place] = self._guess(wanted[place], block)
        return found

    def forget(self, names: Iterable[str]) -> None:
        """Nothing is kept beside the states."""

    def _guess(self, wanted: Wanted, block: Block) -> Proposal:
        ids: list[int] = []
        confidences: list[float] = []
        pick, size = wanted.choice.pick, self._vocab_size
        for guess in self._drafter.guesses_of(block, lambda logits_V: pick(logits_V[:size])):
            ids.append(guess.token_id)
            confidences.append(guess.confidence)
            if len(ids) == wanted.count:
                break
        probabilities = wanted.choice.probabilities()
        rows = None if probabilities is None else probabilities[: len(ids)]
        return Proposal(NAME, tuple(ids), rows, tuple(confidences))


def _is_observed(state: SequenceState) -> bool:
    ring = state.draft_rings[0]
    return ring.end == state.length and ring.end != ring.oldest


def _state(name: str, state: SequenceState | None) -> SequenceState:
    if state is None:
        raise InternalError(f"sequence {name} was given to the draft module without its state")
    return state
