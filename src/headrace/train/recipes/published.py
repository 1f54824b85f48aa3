"""The published pre-training settings of V4-Flash, V4-Pro and V4.1-Flash as recipes: to read, print and derive from.

They hold every number the reports state (`train/published.py`). Where a report is silent, a schedule still needs a
number: those are chosen here, and named. They have no corpus and no machine, so they do not run.
"""

from headrace.train.optim.optimizer import OptimizerSettings
from headrace.train.published import PUBLISHED, TRILLION, Published
from headrace.train.recipe import LossSettings, Phase, Recipe
from headrace.train.schedule import BatchRamp, LearningRate, Staircase

_OBSTACLE = (
    "it holds published settings for {tokens} trillion tokens, and neither that corpus nor a machine for the model "
    "comes with headrace; recipes that run are micro, micro-window-only, nano, tiny-v4 and tiny-v41"
)


def _recipe(
    name: str,
    published: Published,
    learning_rate: LearningRate,
    length: Staircase,
    batch: BatchRamp,
    phases: tuple[Phase, ...],
) -> Recipe:
    return Recipe(
        name=name,
        family=published.family,
        model=None,
        obstacle=_OBSTACLE.format(tokens=published.tokens // TRILLION),
        duration=published.tokens,
        unit="tokens",
        learning_rate=learning_rate,
        sequence_length=length,
        batch=batch,
        micro_batch=int(max(length.values)),
        optimizer=OptimizerSettings(clip=1.0),  # no report gives a value
        losses=LossSettings(balance=published.balance_weight, index_pool="picked"),
        bias_speed=Staircase(starts=(0,), values=(published.bias_speed,), unit="tokens"),
        phases=phases,
        numerics="bfloat16",
    )


def _v4(name: str, dense_tokens: int) -> Recipe:
    """Build a V4 recipe; chosen here: decay over the last tenth, lengths at 50, 75 and 90 %, ramp over the first 2 %.

    Also chosen: 64 K begins with a warm-up of 2 billion tokens in which the indexer alone is trained.
    """
    published = PUBLISHED[name]
    tokens = published.tokens
    warmup = 2 * 10**9
    return _recipe(
        name,
        published,
        published.learning_rate(decay_start=tokens * 9 // 10, decay_end=tokens),
        published.sequence_length(tokens // 2, tokens * 3 // 4, tokens * 9 // 10),
        published.batch(first=published.batch_last // 16, until=tokens // 50),
        (
            Phase(attention="dense", trains="backbone"),
            Phase(start=dense_tokens, attention="dense", trains="indexer"),
            Phase(start=dense_tokens + warmup),
        ),
    )


def v4_flash() -> Recipe:
    """Return the settings of V4-Flash: dense attention for a trillion tokens, then sparse."""
    return _v4("v4-flash", TRILLION)


def v4_pro() -> Recipe:
    """Return the settings of V4-Pro; its dense stage is only said to be longer: two trillion tokens are chosen here."""
    return _v4("v4-pro", 2 * TRILLION)


def v41_flash() -> Recipe:
    """Return the settings of V4.1-Flash: sparse from the first step, one batch size, 64 K and then 1 M tokens."""
    published = PUBLISHED["v4.1-flash"]
    return _recipe(
        "v4.1-flash",
        published,
        published.learning_rate(),
        published.sequence_length(),
        published.batch(),
        (
            Phase(frozen=published.frozen_until_decay),
            Phase(start=published.decay_start or 0),
        ),
    )
