"""A request as the front hands it to the engine."""

from dataclasses import dataclass

import numpy as np

from headrace.engine.images import PlacedImage
from headrace.engine.sampling.params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Everything that decides an answer, and when it was asked for.

    Attributes:
        request_id: unique while it lives.
        prompt_ids: [N] int64, checked.
        params: how to sample; `seed` is the seed to use, drawn if none was given.
        submitted: seconds of the monotonic clock, which all processes of a machine share.
        images: what the image tokens of the prompt stand for.
    """

    request_id: str
    prompt_ids: np.ndarray
    params: SamplingParams
    seed: int
    submitted: float
    images: tuple[PlacedImage, ...] = ()

    @property
    def deadline(self) -> float | None:
        """When it is given up."""
        return None if self.params.deadline_s is None else self.submitted + self.params.deadline_s
