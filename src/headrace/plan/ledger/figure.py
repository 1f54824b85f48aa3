"""One figure of a report: what the report says, what the configurations give, and how a run measures it."""

from dataclasses import dataclass
from typing import Any

from headrace.plan.sizes import rounded


@dataclass(frozen=True, kw_only=True)
class Live:
    """A figure measured on a running model beside the same arithmetic on that model's configuration.

    `what` says what was measured at which lengths, `how` names the counters; both values are in the figure's unit.
    """

    what: str
    arithmetic: float
    measured: float
    how: str

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        return {
            "what": self.what,
            "arithmetic": self.arithmetic,
            "measured": self.measured,
            "difference": self.measured - self.arithmetic,
            "how": self.how,
        }


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One entry of the ledger.

    Attributes:
        key: short name, stable.
        title: what it is about.
        reported: the report's value, with as many decimals as the report gives.
        unit: "" for a plain ratio.
        ours: the value computed from configurations.
        formula: how, with the numbers that went in.
        accounting: what is counted and what is not, where the source leaves a choice; "" where it leaves none.
        source: where the figure stands.
        configs: names of the configurations it is computed from.
        measured_by: the counters of a run that give it, None where there are none.
    """

    key: str
    title: str
    reported: str
    ours: float
    formula: str
    source: str
    configs: tuple[str, ...]
    unit: str = ""
    accounting: str = ""
    measured_by: str | None = None

    @property
    def reported_value(self) -> float:
        """The report's value as a number."""
        return float(self.reported.replace(",", ""))

    @property
    def shown(self) -> str:
        """Our value with the report's decimals, halves rounded up."""
        return rounded(self.ours, _decimals(self.reported))

    @property
    def agrees(self) -> bool:
        """Whether both are the same at the report's number of decimals."""
        return self.shown == rounded(self.reported_value, _decimals(self.reported))

    def to_json(self, live: Live | None) -> dict[str, Any]:
        """Return it as JSON holds it, with what a run measured if there was one."""
        return {
            "key": self.key,
            "title": self.title,
            "unit": self.unit,
            "reported": self.reported_value,
            "ours": self.ours,
            "difference": self.ours - self.reported_value,
            "agrees": self.agrees,
            "formula": self.formula,
            "accounting": self.accounting,
            "source": self.source,
            "configs": list(self.configs),
            "measured_by": self.measured_by,
            "live": live.to_json() if live else None,
        }


def _decimals(number: str) -> int:
    return len(number.partition(".")[2])
