"""What requests themselves weigh, waiting or running: prompts, answers and the log-probabilities they asked for."""

from headrace.core.errors import CapacityError, OverloadedError
from headrace.engine.logprob_table import ALTERNATIVE_BYTES, ENTRY_BYTES
from headrace.engine.sampling.params import MAX_TOP_LOGPROBS, SamplingParams
from headrace.engine.submission import Submission

PROMPT_BYTES = 32
"""A prompt's token: its id as it came, in chains of keys, and its share of the keys."""
ANSWER_BYTES = 96
"""A generated token: id and log-probability as Python objects, and its place in the chain."""
_LEAST = 16 << 20


class RequestMemory:
    """Owns the bytes that live requests may hold beside blocks and slots; each is charged for the most it can need."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._charges: dict[str, int] = {}
        self._alive: dict[str, int] = {}

    @property
    def used(self) -> int:
        """Bytes that are promised."""
        return sum(self._charges.values())

    def take(self, submission: Submission, max_new_tokens: int) -> None:
        """Charge a request.

        Args:
            submission: the request.
            max_new_tokens: tokens that its context leaves for an answer, at most what it asked for.

        Raises:
            CapacityError: it needs more than there is.
            OverloadedError: others hold too much of it now.
        """
        charge = charge_of(submission, max_new_tokens)
        if charge > self._budget:
            raise CapacityError(
                f"the prompt and the log-probabilities asked for need {charge:,} bytes; accepted are {self._budget:,} "
                "for all requests together"
            )
        used = self.used
        if used + charge > self._budget:
            raise OverloadedError(
                f"requests that wait or run hold {used:,} of {self._budget:,} bytes and this one needs {charge:,}, so "
                "try again later"
            )
        self._charges[submission.request_id] = charge
        self._alive[submission.request_id] = submission.params.n

    def end_one(self, request_id: str) -> None:
        """Note the end of one of a request's answers; after the last its charge is given back."""
        self._alive[request_id] -= 1
        if not self._alive[request_id]:
            del self._charges[request_id], self._alive[request_id]


def charge_of(submission: Submission, max_new_tokens: int) -> int:
    """Return the most bytes that a request's own values can take, its running answers' plain values not counted."""
    params, prompt = submission.params, len(submission.prompt_ids)
    total = prompt * PROMPT_BYTES + sum(image.pixels.nbytes for image in submission.images)
    if params.num_prompt_alternatives is not None:
        total += prompt * _entry_bytes(params.num_prompt_alternatives)
    return total + params.n * max_new_tokens * _answer_report(params)


def _answer_report(params: SamplingParams) -> int:
    return _entry_bytes(params.top_logprobs) if params.top_logprobs else 0


def _entry_bytes(alternatives: int) -> int:
    return ENTRY_BYTES + ALTERNATIVE_BYTES * alternatives


def request_budget(max_context: int) -> int:
    """Return bytes for requests: two of the longest with every log-probability there is, 16 MiB at least."""
    return max(_LEAST, 2 * max_context * (PROMPT_BYTES + _entry_bytes(MAX_TOP_LOGPROBS)))
