"""The training of a draft module on a frozen backbone as one frozen value.

The backbone itself is named on the command line; what its recipe says about text and tasks holds here too, unless this
recipe says otherwise. `recipes/micro_draft.py` has one, `draft_loop.py` carries it out. Nothing here computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.core.errors import UserError
from headrace.train.optim.optimizer import OptimizerSettings
from headrace.train.optim.ownership import family_rules
from headrace.train.optim.rules import FAMILIES
from headrace.train.quantise import QuantPlan
from headrace.train.recipe import EvaluationSettings, SaveSettings, TaskSettings, TextSettings, at_least, share
from headrace.train.schedule import LearningRate, Staircase, Unit


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """The draft module; widths, window, heads and experts' sizes are the backbone's.

    Attributes:
        num_layers: draft blocks.
        block_size: tokens drafted at once.
        tap_layers: backbone layers whose inputs the draft sees; None takes the last three, or all of fewer.
        noise_token_id: what stands for the tokens to draft; None takes the padding token, which no text holds.
        markov_rank: of the bias that a draft gives the next one.
        num_experts, experts_per_token: None takes the backbone's.
    """

    num_layers: int = 1
    block_size: int = 5
    tap_layers: tuple[int, ...] | None = None
    noise_token_id: int | None = None
    markov_rank: int = 64
    num_experts: int | None = None
    experts_per_token: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below 1; what depends on the backbone is checked when it is known."""
        at_least(1, num_layers=self.num_layers, block_size=self.block_size, markov_rank=self.markov_rank)
        for name in ("num_experts", "experts_per_token"):
            value = getattr(self, name)
            at_least(1, **{name: 1 if value is None else value})


@dataclass(frozen=True, kw_only=True)
class DraftLossWeights:
    """Weights of the draft losses (training.md section 7.2); `decay` is the constant of exp(-k / decay)."""

    cross_entropy: float = 0.1
    variation: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0

    def __post_init__(self) -> None:
        """Refuse weights below 0 and a decay that is none."""
        at_least(0, cross_entropy=self.cross_entropy, variation=self.variation, confidence=self.confidence)
        if not self.decay > 0:
            raise UserError(f"the recipe has decay {self.decay}; a number above 0 is accepted.", param="decay")


@dataclass(frozen=True, kw_only=True)
class ContinuationSettings:
    """The backbone's own continuations of documents.

    Attributes:
        tokens: of a continuation at most. Held-out documents are continued greedily, to count accepted drafts.
        regenerated_share: share of training documents whose ends the backbone writes anew (training.md 7.2).
        regenerated_from: steps after which that begins; before, drafts learn from the corpus alone, which costs less.
        temperature: of those; 0 is greedy.
    """

    tokens: int = 64
    regenerated_share: float = 0.0
    regenerated_from: int = 0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Refuse no tokens, no share and a temperature below 0."""
        at_least(1, tokens=self.tokens)
        at_least(0, temperature=self.temperature, regenerated_from=self.regenerated_from)
        share(regenerated_share=self.regenerated_share)


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """Held-out rows behind the calibration data; they are not those of the evaluation."""

    text_rows: int = 16
    task_rows: int = 0

    def __post_init__(self) -> None:
        """Refuse counts below 0."""
        at_least(0, text_rows=self.text_rows, task_rows=self.task_rows)


@dataclass(frozen=True, kw_only=True)
class DraftRecipe:
    """A run.

    Attributes:
        name: what it is called.
        draft: the module.
        text, tasks: None for those of the backbone's recipe.
        duration: steps.
        learning_rate: schedule.
        row_tokens, batch_rows: size of a batch.
        micro_rows: rows run at once at most.
        anchors_per_row: anchors of a row, on average over the rows that are run at once.
        losses: weights, and how they fall along the block.
        continuations: what the backbone writes itself.
        update: "family" for the rules of V4.1, Muon for matrices; "adamw" without decay for every parameter, as the
            published draft trainer.
        group_changes: see `Recipe`; applied last.
        bias_speed: of the balance of the draft's experts.
        numerics, quant: of the draft; the backbone runs as it is served, in the same numerics.
    """

    name: str
    draft: DraftSettings
    text: TextSettings | None = None
    tasks: tuple[TaskSettings, ...] | None = None
    duration: int
    learning_rate: LearningRate
    row_tokens: int
    batch_rows: int
    micro_rows: int
    anchors_per_row: int
    losses: DraftLossWeights = field(default_factory=DraftLossWeights)
    continuations: ContinuationSettings = field(default_factory=ContinuationSettings)
    update: Literal["family", "adamw"] = "family"
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    group_changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    bias_speed: Staircase = field(default_factory=lambda: Staircase(starts=(0,), values=(1e-3,)))
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)
    saving: SaveSettings = field(default_factory=SaveSettings)
    seed: int = 0
    numerics: Literal["float32", "bfloat16"] = "bfloat16"
    quant: QuantPlan = field(default_factory=QuantPlan.everything)
    threads: int = 1

    def __post_init__(self) -> None:
        """Refuse what does not fit together.

        Raises:
            UserError: names the field, the value and what would be accepted.
        """
        at_least(1, duration=self.duration, row_tokens=self.row_tokens, batch_rows=self.batch_rows)
        at_least(1, micro_rows=self.micro_rows, anchors_per_row=self.anchors_per_row, threads=self.threads)
        at_least(0, seed=self.seed)
        if self.row_tokens < self.draft.block_size + 2:
            raise UserError(
                f"the recipe has row_tokens {self.row_tokens}; at least {self.draft.block_size + 2} are accepted, an "
                "anchor, the known token and the drafted ones.",
                param="row_tokens",
            )
        self.rule_changes()

    @property
    def unit(self) -> Unit:
        """What `duration` counts."""
        return "steps"

    def rule_changes(self) -> dict[str, dict[str, Any]]:
        """Return the changes to the family's rules that `update` and `group_changes` ask for.

        Raises:
            UserError: a group or a field is unknown.
        """
        changes: dict[str, dict[str, Any]] = {}
        if self.update == "adamw":
            groups = (rule.group for rule in FAMILIES["v4.1"] if rule.update != "balance")
            changes = {group: {"update": "adamw", "decay": 0.0} for group in groups}
        for group, values in self.group_changes.items():
            changes[group] = {**changes.get(group, {}), **values}
        family_rules("v4.1", changes)
        return changes
