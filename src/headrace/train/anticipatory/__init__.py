"""Anticipatory routing of V4: experts chosen with older parameters, and the way in and out of it.

A training loop uses four parts: `routes.py` (where a pass takes its experts from), `lookahead.py` (batches fetched
early, so that their experts can be chosen early), `detector.py` (is this step a spike) and `rollback.py` (which
snapshot to go back to, for how long to anticipate). V4.1 was trained without it; it is off unless a recipe asks.

One step of a loop that anticipates, `queue` a `LookAhead` of delta batches:

    for place, batch in queue.unrouted():       # one batch once the queue is filled
        record = RouteRecord()
        forward(batch, record.recorder(micro_batch))  # no gradient, today's parameters
        queue.store(place, record)
    queued = queue.advance()
    train(queued.batch, queued.routes.player(micro_batch))

The model takes a source as `PassRouter(source, ...)`, made anew for every pass. When anticipation ends, the queue is
told to forget its routes. `benchmarks/anticipatory_routing.py` measures what the forward-only passes cost.
"""

from headrace.train.anticipatory.detector import Alarm, Detector, DetectorSettings, Observation
from headrace.train.anticipatory.lookahead import BatchSource, LookAhead, Queued
from headrace.train.anticipatory.rollback import Decision, RollbackSettings, RollbackState, after_step
from headrace.train.anticipatory.routes import LiveRoutes, PassRouter, RouteRecord, RouteSource
from headrace.train.anticipatory.stability import Stability

__all__ = [
    "Alarm",
    "BatchSource",
    "Decision",
    "Detector",
    "DetectorSettings",
    "LiveRoutes",
    "LookAhead",
    "Observation",
    "PassRouter",
    "Queued",
    "RollbackSettings",
    "RollbackState",
    "RouteRecord",
    "RouteSource",
    "Stability",
    "after_step",
]
