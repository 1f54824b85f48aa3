"""Sampler states without a model, and a check of distributions. No test lives here."""

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from headrace.engine.sampling.params import SamplingParams
from headrace.engine.sampling.state import SamplerState
from headrace.engine.sampling.structured import Matcher

VOCAB = 400
EOS = 399
# chance of a larger value by luck is below 1e-5; the noise is keyed, so a run that passes passes always
CHI_SQUARE_LIMIT = {1: 19.5, 2: 23.0, 3: 25.9, 4: 28.5, 5: 30.9, 6: 33.2, 7: 35.9, 8: 38.0}


def state_of(
    params: SamplingParams | None = None,
    *,
    prompt: Sequence[int] = (),
    answer: Sequence[int] = (),
    position: int | None = None,
    seed: int = 7,
    eos: int = EOS,
    matcher: Matcher | None = None,
) -> SamplerState:
    """Return a state after a prompt and an answer; `position` puts it elsewhere."""
    state = SamplerState(
        params or SamplingParams(), list(prompt), seed=seed, eos_token_id=eos, vocab_size=VOCAB, matcher=matcher
    )
    for token_id in answer:
        state.accept(token_id)
    if position is not None:
        state.position = position
    return state


def chi_square(found: Iterable[int], probabilities: Tensor) -> None:
    """Check that draws of ids follow the probabilities, where those are not zero, and nothing else comes."""
    counts, total = Counter(found), 0.0
    possible = [i for i, p in enumerate(probabilities.tolist()) if p > 0]
    assert set(counts) <= set(possible)
    drawn = sum(counts.values())
    for i in possible:
        expected = drawn * float(probabilities[i])
        total += (counts[i] - expected) ** 2 / expected
    assert total < CHI_SQUARE_LIMIT[len(possible) - 1]
