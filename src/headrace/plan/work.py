"""Work of one decoded token: floating-point operations in one unit, and bytes read.

Accounting: a multiply-add counts two; operations are weighed by the rate at which hardware does them, in BF16
equivalents. Weights count with the format of their product, whatever they are stored in: FP4 experts are multiplied
with FP8 inputs, so they count as FP8; index products run in the format of the index keys; attention, head, router and
the grouped output projection run in BF16. Source: serving.md section 9 ("Decode FLOPs 4K -> 1M").
"""

from dataclasses import dataclass

from headrace.plan.facts import EXPERTS, TABLES, Facts, Precision

RATES: dict[Precision, float] = {"bf16": 1.0, "fp8": 0.5, "fp4": 0.25}
"""Cost of an operation relative to BF16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Operations of one decoded token in BF16 equivalents: all weights, attention over rows, index scores."""

    weights: float
    attention: float
    index: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.weights + self.attention + self.index


def decode_flops(facts: Facts, context: int) -> Flops:
    """Return the work of the token that makes a sequence `context` tokens long."""
    scans = {False: 0.0, True: 0.0}
    for scan in facts.scans:
        cost = scan.layers * scan.rows(context) * scan.flops * RATES[scan.precision]
        scans[scan.name.startswith("index keys")] += cost
    weights = sum(
        2 * float(part.parameters * part.share) * RATES[part.precision] for part in facts.weights if part.precision
    )
    return Flops(weights=weights, attention=scans[False], index=scans[True])


def expert_share(facts: Facts, sessions: int) -> float:
    """Share of the routed experts that a step with one token of each session reads.

    Assumes that every token takes its experts evenly and independently; real routing repeats itself and reads less.
    """
    experts, chosen = facts.experts
    return 1.0 - (1.0 - chosen / experts) ** sessions if experts else 0.0


def decode_reads(facts: Facts, context: int, sessions: int = 1) -> dict[str, int]:
    """Return the bytes that one step reads, by part: one new token for each of `sessions` sequences.

    Weights are read once a step, whatever the number of sequences; the rows of each sequence are its own. Every layer
    counts the rows it attends to, also where neighbours share a selection (serving.md section 3.4).
    """
    reads: dict[str, int] = {}
    for part in facts.weights:
        share = float(part.share)
        if part.kind == EXPERTS:
            share = expert_share(facts, sessions)
        elif part.precision is None:
            share = min(1.0, share * sessions)
        if share:
            reads[part.kind] = reads.get(part.kind, 0) + round(part.num_bytes * share)
    for scan in facts.scans:
        count = sessions * scan.layers * scan.rows(context) * scan.row_bytes
        reads[scan.name] = reads.get(scan.name, 0) + count
    for fixed in facts.state:
        if fixed.is_read:
            reads[fixed.name] = reads.get(fixed.name, 0) + sessions * fixed.total
    if facts.tables:
        reads[TABLES] = sessions * sum(table.rows_per_token * table.row_bytes for table in facts.tables)
    return reads
