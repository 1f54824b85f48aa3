"""Tell a spike from noise: the loss against its recent median, gradient norm and expert outliers against averages.

No report describes its detector; every limit is a setting. Plain numbers, no tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from statistics import median
from typing import Any, Literal

from headrace.core.errors import UserError

Reason = Literal["not finite", "loss", "gradient norm", "outlier"]
_MAD_TO_DEVIATION = 1.4826  # median absolute deviation of a Gaussian times this is its standard deviation


@dataclass(frozen=True, kw_only=True)
class DetectorSettings:
    """Limits of the detector.

    Attributes:
        window: steps whose losses make up median and deviation.
        loss_limit: robust z of the loss above which a step is suspicious.
        loss_repeats: suspicious steps in a row that make an alarm.
        grad_limit: gradient norm above this many times its average makes an alarm.
        outlier_limit: the same for the largest input of an expert's down-projection.
        decay: of both averages, per step.
        min_history: steps before the first alarm, those for values that are not finite apart.
        min_spread: smallest deviation of the loss, in nats, so that a flat loss does not make noise a spike.
    """

    window: int = 200
    loss_limit: float = 6.0
    loss_repeats: int = 2
    grad_limit: float = 5.0
    outlier_limit: float = 10.0
    decay: float = 0.98
    min_history: int = 20
    min_spread: float = 1e-3

    def __post_init__(self) -> None:
        """Refuse limits outside their range.

        Raises:
            UserError: names the limit.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise UserError(f"Detector {field.name} is {value}; a number above 0 is accepted.", param=field.name)
        if self.decay >= 1.0:
            raise UserError(f"Detector decay is {self.decay}; above 0 and below 1 is accepted.", param="decay")


@dataclass(frozen=True)
class Observation:
    """What one step showed; `outlier` None if it was not measured.

    `phase` is a number for how the model was run and what was trained: values of different phases say nothing about
    each other, such as the gradient norm of an indexer alone and that of all parameters.
    """

    loss: float
    grad_norm: float
    outlier: float | None = None
    phase: int = 0


@dataclass(frozen=True)
class Alarm:
    """Why a step counts as a spike: the value and what it was held against."""

    reason: Reason
    value: float
    limit: float

    def __str__(self) -> str:
        """Return e.g. `gradient norm 12.5, above 5.1`."""
        if self.reason == "not finite":
            return f"a value is {self.value}"
        return f"{self.reason} {self.value:.4g}, above {self.limit:.4g}"


class Detector:
    """Remembers enough of the past to judge a step. A value that raises an alarm never becomes part of that past.

    State: the phase, and of its steps recent losses, two averages, suspicious steps in a row.
    """

    def __init__(self, settings: DetectorSettings | None = None) -> None:
        self._settings = settings or DetectorSettings()
        self._forget(0)

    def _forget(self, phase: int) -> None:
        self._phase = phase
        self._losses: list[float] = []
        self._suspicious = 0
        self._averages: dict[str, tuple[float, int]] = {"gradient norm": (0.0, 0), "outlier": (0.0, 0)}

    def observe(self, observation: Observation) -> Alarm | None:
        """Judge a step and remember it; the first step of another phase begins a new past.

        Returns:
            The first alarm of: a value that is not finite, gradient norm, outlier, loss.
        """
        if observation.phase != self._phase:
            self._forget(observation.phase)
        values = (observation.loss, observation.grad_norm, observation.outlier or 0.0)
        unfit = [value for value in values if not isfinite(value)]
        if unfit:
            return Alarm("not finite", unfit[0], 0.0)
        alarms = [self._judge_average("gradient norm", observation.grad_norm, self._settings.grad_limit)]
        if observation.outlier is not None:
            alarms.append(self._judge_average("outlier", observation.outlier, self._settings.outlier_limit))
        alarms.append(self._judge_loss(observation.loss))
        return next((alarm for alarm in alarms if alarm is not None), None)

    def _judge_loss(self, loss: float) -> Alarm | None:
        if len(self._losses) >= self._settings.min_history:
            middle = median(self._losses)
            deviation = _MAD_TO_DEVIATION * median(abs(past - middle) for past in self._losses)
            limit = middle + self._settings.loss_limit * max(deviation, self._settings.min_spread)
            self._suspicious = self._suspicious + 1 if loss > limit else 0
            if self._suspicious >= self._settings.loss_repeats:
                return Alarm("loss", loss, limit)
        self._losses = [*self._losses, loss][-self._settings.window :]
        return None

    def _judge_average(self, reason: Literal["gradient norm", "outlier"], value: float, limit: float) -> Alarm | None:
        average, count = self._averages[reason]
        decay = self._settings.decay
        # an average of few values weighs them equally, as if it had begun earlier
        typical = average / (1.0 - decay**count) if count else 0.0
        if count >= self._settings.min_history and value > limit * typical:
            return Alarm(reason, value, limit * typical)
        self._averages[reason] = (decay * average + (1.0 - decay) * value, count + 1)
        return None

    def state(self) -> dict[str, Any]:
        """Return the past as plain values."""
        return {
            "phase": self._phase,
            "losses": list(self._losses),
            "suspicious": self._suspicious,
            "averages": {reason: list(pair) for reason, pair in self._averages.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a past that `state` described.

        Raises:
            UserError: it is no such description.
        """
        try:
            losses = [float(loss) for loss in state["losses"]]
            suspicious, phase = int(state["suspicious"]), int(state["phase"])
            averages = {
                reason: (float(state["averages"][reason][0]), int(state["averages"][reason][1]))
                for reason in self._averages
            }
        except (KeyError, TypeError, ValueError, IndexError) as problem:
            raise UserError(f"The saved state of the spike detector is damaged: {problem!r}.") from problem
        self._phase, self._losses, self._suspicious, self._averages = phase, losses, suspicious, averages
