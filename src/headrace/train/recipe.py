"""A whole training run as one frozen value: model, data, schedules, rules, losses, phases, and when to look and save.

Recipes are made by the functions in `recipes/`; derive one with `dataclasses.replace`. `recipe_json.py` writes one down
and reads it back, `loop.py` carries it out. Nothing here computes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.core.errors import UserError
from headrace.models.deepseek_v41.architecture import Config
from headrace.train.anticipatory import DetectorSettings, RollbackSettings
from headrace.train.optim.optimizer import OptimizerSettings
from headrace.train.optim.ownership import family_rules
from headrace.train.quantise import QuantPlan
from headrace.train.schedule import BatchRamp, LearningRate, Staircase, Unit

SourceKind = Literal["stdlib", "packages", "folder"]
Family = Literal["v4", "v4.1"]
Replay = Literal["off", "last-turn", "every-turn"]
Pool = Literal["visible", "picked"]
Trains = Literal["all", "backbone", "indexer"]


def _refuse(name: str, value: object, rule: str) -> UserError:
    return UserError(f"the recipe has {name} {value}; {rule} accepted.", param=name)


def at_least(low: float, **values: float) -> None:
    """Refuse fields below a bound.

    Raises:
        UserError: names the field.
    """
    for name, value in values.items():
        if not value >= low:
            raise _refuse(name, value, f"{low:g} or more is")


def share(**values: float) -> None:
    """Refuse fields that are no shares.

    Raises:
        UserError: names the field.
    """
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise _refuse(name, value, "a number from 0 to 1 is")


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """Files with a common origin, see `data/corpus.py`.

    `names` are the packages of kind "packages" (empty: every installed one under an accepted licence); `path` and
    `licence` belong to kind "folder".
    """

    kind: SourceKind = "stdlib"
    names: tuple[str, ...] = ()
    path: str | None = None
    licence: str | None = None

    def __post_init__(self) -> None:
        """Refuse a folder without path or licence."""
        if self.kind == "folder" and (self.path is None or self.licence is None):
            raise UserError("a folder of the recipe needs a path and the licence its text is under.", param="path")


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """Text of a run.

    Attributes:
        sources: where it comes from.
        weight: share of text rows, relative to those of the tasks.
        max_bytes: documents are taken, in an order of their own, until they hold so many bytes; None takes all.
        held_out_share, held_out_groups, salt: what is judged and never trained on, see `Corpus.split`.
        fim_rate: share of documents in fill-in-the-middle form.
        max_characters: longer documents are cut at line ends; None leaves them whole.
    """

    sources: tuple[SourceSettings, ...] = (SourceSettings(),)
    weight: float = 1.0
    max_bytes: int | None = None
    held_out_share: float = 0.05
    held_out_groups: tuple[str, ...] = ()
    salt: str = ""
    fim_rate: float = 0.0
    max_characters: int | None = None

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        share(held_out_share=self.held_out_share, fim_rate=self.fim_rate)
        at_least(0, weight=self.weight)
        if not self.sources:
            raise UserError("the text of the recipe has no source; at least one is accepted.", param="sources")


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The vocabulary: trained on the text, or read from a `tokenizer.json`.

    `num_reserved` ids follow the special tokens; the pair probe lives in them. `max_bytes` bounds the text that merges
    are learned from.
    """

    size: int
    num_reserved: int = 64
    max_bytes: int = 16 * 2**20
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """One generated task: a kind of `mixture.TASKS`, its share of the rows, and fields of that kind.

    `label_weight` is what its labels count in the loss, those of text counting 1: a row of a task asks few of its
    tokens, so text alone would say where the parameters go.
    """

    kind: str
    weight: float = 1.0
    label_weight: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a share or a weight below 0."""
        at_least(0, weight=self.weight, label_weight=self.label_weight)


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Weights of the losses and how the indexer is taught.

    Attributes:
        index: of the index loss; 0 leaves it out, and the indexer's parameters where they are.
        index_rows: query rows per index source and pass that it looks at; None takes all.
        index_pool: the entries it compares, all that the source may pick from or the picked ones. No report says.
        balance: of the sequence-wise balance loss.
    """

    index: float = 1.0
    index_rows: int | None = 128
    index_pool: Pool = "visible"
    balance: float = 1e-4

    def __post_init__(self) -> None:
        """Refuse weights below 0 and an empty sample."""
        at_least(0, index=self.index, balance=self.balance)
        at_least(1, index_rows=1 if self.index_rows is None else self.index_rows)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """How the model is run from a place on.

    Attributes:
        start: first step (or token, see `Recipe.unit`) of the phase.
        attention: "sparse" attends to picked entries, "dense" to all visible ones (V4 begins so).
        has_candidates: whether later index sources pick from the candidate pool only.
        replay: "last-turn" runs the decoder behind one cut of a document as serving does after a prefill (variant A of
            training.md 5.2), "every-turn" behind each (variant B).
        exact_share: share of documents that the decoder sees whole although `replay` is on.
        quant: quantisers that act.
        trains: "backbone" moves all but the indexer, and computes no index loss: V4's dense stage. "indexer" moves the
            indexer's parameters alone and leaves the routing biases too: V4 does so between dense and sparse
            attention. What does not move in a phase loses its optimizer state.
        frozen: further parameters, names or patterns, that nothing moves.
        shares: kind of row, "text" or the name of a task -> its share in this phase instead of its weight.
        window: positions that a query sees in this phase, fewer than the model's: what lies behind them can only be
            found through global entries, in short rows too. None for the model's own.
    """

    start: int = 0
    attention: Literal["sparse", "dense"] = "sparse"
    has_candidates: bool = False
    replay: Replay = "off"
    exact_share: float = 0.2
    quant: QuantPlan = field(default_factory=QuantPlan)
    trains: Trains = "all"
    frozen: tuple[str, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse a share or a start out of range."""
        share(exact_share=self.exact_share)
        at_least(0, start=self.start, **self.shares)
        at_least(1, window=1 if self.window is None else self.window)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """When to judge and on how much; `every` 0 judges at the end only."""

    every: int = 100
    text_rows: int = 16
    task_rows: int = 16

    def __post_init__(self) -> None:
        """Refuse counts below 0."""
        at_least(0, every=self.every, text_rows=self.text_rows, task_rows=self.task_rows)


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """When to save and how many complete checkpoints to keep; `every` 0 saves at the end only."""

    every: int = 200
    keep: int = 1

    def __post_init__(self) -> None:
        """Refuse to keep none."""
        at_least(0, every=self.every)
        at_least(1, keep=self.keep)


@dataclass(frozen=True, kw_only=True)
class StabilitySettings:
    """Spikes are detected, the run goes back to a snapshot, and experts are chosen `delta` steps early for a while.

    V4 does so; V4.1 was trained without. No report gives a number. The states that the run may go back to are part of
    every checkpoint's resume state, which is larger by their number.
    """

    delta: int = 1
    detector: DetectorSettings = field(default_factory=DetectorSettings)
    rollback: RollbackSettings = field(default_factory=RollbackSettings)

    def __post_init__(self) -> None:
        """Refuse to look nowhere."""
        at_least(1, delta=self.delta)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A run.

    Attributes:
        name: what it is called.
        family: table of update rules.
        model: configuration; the n-gram class count is set from the vocabulary. None for a model headrace has not.
        obstacle: why nobody can run this recipe here; None for one that runs.
        tokenizer: None where rows are made of the pair probe's own ids alone.
        text: None for none.
        tasks: generated rows.
        duration: length of the run in `unit`.
        unit: what `duration` and the starts of phases count.
        learning_rate, sequence_length, batch: schedules; a batch counts tokens.
        micro_batch: tokens run at once at most, rounded to whole rows, at least one.
        group_changes: parameter group -> field -> value, see `family_rules`.
        stability: answers to spikes; None for none.
        held_at_zero: parameters that are 0 and stay so, names or patterns: for ablations.
        embedding_deviation: of the embedding's first values; small ones move faster against the rate.
        bias_speed: u of the loss-free balance.
        numerics: dtype of activations; parameters and their updates are float32 in both.
        has_recomputation: recompute the expert half of each layer in the backward pass instead of keeping it.
    """

    name: str
    family: Family = "v4.1"
    model: Config | None
    obstacle: str | None = None
    tokenizer: TokenizerSettings | None = None
    text: TextSettings | None = None
    tasks: tuple[TaskSettings, ...] = ()
    duration: int
    unit: Unit = "steps"
    learning_rate: LearningRate
    sequence_length: Staircase
    batch: BatchRamp
    micro_batch: int
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    group_changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    losses: LossSettings = field(default_factory=LossSettings)
    bias_speed: Staircase = field(default_factory=lambda: Staircase(starts=(0,), values=(1e-3,)))
    phases: tuple[Phase, ...] = (Phase(),)
    stability: StabilitySettings | None = None
    held_at_zero: tuple[str, ...] = ()
    embedding_deviation: float = 0.5
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    saving: SaveSettings = field(default_factory=SaveSettings)
    seed: int = 0
    numerics: Literal["float32", "bfloat16"] = "float32"
    threads: int = 1
    has_recomputation: bool = False

    def __post_init__(self) -> None:
        """Refuse what does not fit together.

        Raises:
            UserError: names the field, the value and what would be accepted.
        """
        at_least(1, duration=self.duration, micro_batch=self.micro_batch, threads=self.threads)
        at_least(0, seed=self.seed)
        starts = [phase.start for phase in self.phases]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise _refuse("phases that start at", starts, "rising starts from 0 on are")
        if not self.embedding_deviation > 0:
            raise _refuse("embedding_deviation", self.embedding_deviation, "a number above 0 is")
        if (self.model is None) != (self.obstacle is not None):
            raise UserError("a recipe without a model says why in obstacle, and one with a model has none.", "obstacle")
        if self.obstacle is None and self.text is None and not self.tasks:
            raise UserError("the recipe has neither text nor tasks; at least one of them is accepted.", param="text")
        if self.text is not None and self.tokenizer is None and self.obstacle is None:
            raise UserError("the recipe has text and no tokenizer; settings of one are accepted.", param="tokenizer")
        family_rules(self.family, self.group_changes)
        self._check_model()

    def _check_model(self) -> None:
        model = self.model
        if model is None:
            return
        if model.vision is not None or model.draft is not None:
            raise UserError(
                "the model of the recipe has a vision tower or draft layers; a text backbone is accepted (drafts are "
                "trained afterwards, on the frozen backbone).",
                param="model",
            )
        if self.tokenizer is not None and self.tokenizer.size != model.vocab_size:
            raise _refuse("tokenizer.size", self.tokenizer.size, f"the model's vocab_size, {model.vocab_size}, is")
        longest = int(max(self.sequence_length.values))
        if not 1 <= min(self.sequence_length.values) <= longest <= model.max_positions:
            raise _refuse(
                "sequence_length", list(self.sequence_length.values), f"1 to {model.max_positions} tokens are"
            )
        windows = [phase.window for phase in self.phases if phase.window is not None]
        if windows and max(windows) > model.window:
            raise _refuse("window", max(windows), f"1 to the model's {model.window} are")
        if any(phase.has_candidates for phase in self.phases) and model.candidate_source is None:
            raise _refuse("has_candidates", True, "a model with a candidate source is")

    def phase_at(self, steps: int, tokens: int) -> Phase:
        """Return the phase of the step taken after so many steps and tokens."""
        place = steps if self.unit == "steps" else tokens
        return next(phase for phase in reversed(self.phases) if phase.start <= place)
