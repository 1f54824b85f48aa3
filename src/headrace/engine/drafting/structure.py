"""Guesses that the answer's structure or its end makes useless need no row of the model."""

from headrace.core.errors import HeadraceError
from headrace.engine.drafting.proposal import Proposal
from headrace.engine.sampling.state import SamplerState


def useful_rows(proposal: Proposal, state: SamplerState) -> tuple[Proposal, int]:
    """Return what is to be judged of a proposal, and how many of its first guesses the model has to run on.

    A guess that ends the answer, or that the structure does not allow, is the last one to be judged, and what the model
    says behind it is never asked for. The forbidden guess stays: that it is refused is part of the exact rules, whose
    answers would be skewed if it were swept away after it was drawn. Decide the length of a proposal first and call
    this on what is left; the other way round the length would depend on a guess that it covers.

    Args:
        proposal: the guesses.
        state: at the position of the first; not touched.
    """
    moving = state.copy()
    for place, token_id in enumerate(proposal.token_ids):
        try:
            is_last = moving.accept(token_id)
        except HeadraceError:
            return (proposal.cut(place) if proposal.probabilities is None else proposal.cut(place + 1)), place
        if is_last:
            return proposal.cut(place + 1), place
    return proposal, len(proposal)
