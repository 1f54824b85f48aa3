"""The published pre-training settings of V4-Flash, V4-Pro and V4.1-Flash, as data.

What the reports leave open is None here, and whoever builds a schedule from it has to choose: nothing is filled in
silently. Numbers are as printed in the reports, which round them.
"""

from dataclasses import dataclass
from typing import Literal

from headrace.core.errors import UserError
from headrace.train.schedule import BatchRamp, Constant, Cosine, LearningRate, Staircase, Warmup

TRILLION = 10**12
KILO = 1024


@dataclass(frozen=True, kw_only=True)
class Published:
    """Pre-training settings of one released model; None means that no report states it.

    Attributes:
        family: table of update rules, see `optim.rules`.
        tokens: tokens of the whole run.
        warmup_steps: steps of the linear warm-up.
        peak: learning rate after it.
        final: learning rate at the end of the cosine and after it.
        decay_start, decay_end: tokens seen where the cosine begins and ends.
        batch_first, batch_last: tokens of the first step and of a step after the ramp.
        batch_until: tokens seen at the end of the ramp.
        lengths: sequence lengths in order.
        length_starts: tokens seen where each length begins.
        dense_tokens: tokens trained with dense attention before the index is used; 0 for none.
        next_token_weights: weight of the loss of the next-token module, before and after the decay starts.
        bias_speed: u of the loss-free balance.
        balance_weight: alpha of the sequence-wise balance loss.
        has_image_bias: whether image tokens have a routing bias of their own.
        frozen_until_decay: parameters that nothing moves before the decay starts.
    """

    family: Literal["v4", "v4.1"]
    tokens: int
    warmup_steps: int
    peak: float
    final: float
    decay_start: int | None
    decay_end: int | None
    batch_first: int | None
    batch_last: int
    batch_until: int | None
    lengths: tuple[int, ...]
    length_starts: tuple[int | None, ...]
    dense_tokens: int | None
    next_token_weights: tuple[float, float] | None
    bias_speed: float
    balance_weight: float
    has_image_bias: bool
    frozen_until_decay: tuple[str, ...]

    def learning_rate(self, *, decay_start: int | None = None, decay_end: int | None = None) -> LearningRate:
        """Return the published learning rate over tokens.

        Args:
            decay_start: tokens seen where the cosine begins, where the report does not say.
            decay_end: likewise where it ends.

        Raises:
            UserError: a border is neither published nor given, or both.
        """
        start = _choose("decay_start", self.decay_start, decay_start)
        end = _choose("decay_end", self.decay_end, decay_end)
        parts = (Constant(value=self.peak, until=start), Cosine(first=self.peak, last=self.final, until=end))
        tail = (Constant(value=self.final, until=self.tokens),) if end < self.tokens else ()
        return LearningRate(warmup=Warmup(steps=self.warmup_steps), parts=(*parts, *tail), unit="tokens")

    def sequence_length(self, *starts: int) -> Staircase:
        """Return the sequence length over tokens.

        Args:
            starts: tokens seen where each length begins that has no published start, in order.

        Raises:
            UserError: not as many starts as are open.
        """
        num_open = self.length_starts.count(None)
        if len(starts) != num_open:
            raise UserError(
                f"{num_open} sequence lengths have no published start and {len(starts)} were given.", param="starts"
            )
        given = iter(starts)
        places = tuple(next(given) if start is None else start for start in self.length_starts)
        return Staircase(starts=places, values=self.lengths, unit="tokens")

    def batch(self, *, first: int | None = None, until: int | None = None) -> BatchRamp:
        """Return the batch over tokens.

        Args:
            first: tokens of the first step, where the report does not say.
            until: tokens seen at the end of the ramp, likewise.

        Raises:
            UserError: a value is neither published nor given, or both.
        """
        return BatchRamp(
            first=_choose("first", self.batch_first, first),
            last=self.batch_last,
            until=_choose("until", self.batch_until, until),
        )

    def next_token_weight(self, *, decay_start: int | None = None) -> Staircase:
        """Return the weight of the next-token loss over tokens; 0 for a model without that loss.

        Raises:
            UserError: the start of the decay matters and is neither published nor given, or both.
        """
        if self.next_token_weights is None:
            return Staircase(starts=(0,), values=(0.0,), unit="tokens")
        start = _choose("decay_start", self.decay_start, decay_start)
        return Staircase(starts=(0, start), values=self.next_token_weights, unit="tokens")


def _choose(name: str, published: int | None, given: int | None) -> int:
    """Take the published value, or the given one where there is none."""
    if published is None and given is None:
        raise UserError(f"No report states {name}; give one.", param=name)
    if published is not None and given is not None:
        raise UserError(f"{name} is published as {published}; {given} cannot replace it.", param=name)
    return published if published is not None else given or 0


V4_FLASH = Published(
    family="v4",
    tokens=32 * TRILLION,
    warmup_steps=2000,
    peak=2.7e-4,
    final=2.7e-5,
    decay_start=None,
    decay_end=None,
    batch_first=None,
    batch_last=75_500_000,
    batch_until=None,
    lengths=(4 * KILO, 16 * KILO, 64 * KILO, KILO**2),
    length_starts=(0, None, None, None),
    dense_tokens=TRILLION,
    next_token_weights=(0.3, 0.1),
    bias_speed=1e-3,
    balance_weight=1e-4,
    has_image_bias=False,
    frozen_until_decay=(),
)

V4_PRO = Published(
    family="v4",
    tokens=33 * TRILLION,
    warmup_steps=2000,
    peak=2.0e-4,
    final=2.0e-5,
    decay_start=None,
    decay_end=None,
    batch_first=None,
    batch_last=94_400_000,
    batch_until=None,
    lengths=(4 * KILO, 16 * KILO, 64 * KILO, KILO**2),
    length_starts=(0, None, None, None),
    dense_tokens=None,  # "longer" than V4-Flash
    next_token_weights=(0.3, 0.1),
    bias_speed=1e-3,
    balance_weight=1e-4,
    has_image_bias=False,
    frozen_until_decay=(),
)

V41_FLASH = Published(
    family="v4.1",
    tokens=45 * TRILLION,
    warmup_steps=2000,
    peak=2.6e-4,
    final=2.6e-5,
    decay_start=28 * TRILLION,
    decay_end=40 * TRILLION,
    batch_first=100_600_000,
    batch_last=100_600_000,
    batch_until=0,
    lengths=(64 * KILO, KILO**2),
    length_starts=(0, 34 * TRILLION),
    dense_tokens=0,
    next_token_weights=None,
    bias_speed=1e-3,
    balance_weight=1e-4,
    has_image_bias=True,
    # the tower but its last norm; the projector trains from the start
    frozen_until_decay=("vision.patch_embed.*", "vision.blocks.*"),
)

PUBLISHED = {"v4-flash": V4_FLASH, "v4-pro": V4_PRO, "v4.1-flash": V41_FLASH}
