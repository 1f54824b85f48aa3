"""What a run says of itself before its first step: parameters, memory of the update rules, texts, what nothing teaches.

Values for the metrics file and lines for a reader; nothing here prints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from headrace.kernels.native.library import best_library
from headrace.train.data.corpus import SourceRecord
from headrace.train.index_loss import first_eligible
from headrace.train.loop import Trainer
from headrace.train.optim.optimizer import Optimizer
from headrace.train.recipe import Recipe


def summarise(trainer: Trainer) -> dict[str, Any]:
    """Return plain values about a run that begins or goes on.

    Returns:
        `parameters`, all of them; `optimizer_state`: per update rule `parameters`, `bytes`, `bytes_per_parameter` and
        `adam_bytes`, what Adam's two moments would take; `untaught`: index sources whose choice is never one, see
        `untaught_sources`; `texts`: source, version, licence, documents and bytes of each.
    """
    return {
        "parameters": sum(parameter.numel() for parameter in trainer.masters.parameters.values()),
        "optimizer_state": state_of(trainer.state.optimizer),
        "untaught": untaught_sources(trainer.recipe),
        "texts": texts_of(trainer.material.records),
    }


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the memory of every update rule's state."""
    return {
        one.update: {
            "parameters": one.num_parameters,
            "bytes": one.num_bytes,
            "bytes_per_parameter": one.per_parameter,
            "adam_bytes": one.adam_bytes,
        }
        for one in optimizer.state_bytes()
    }


def texts_of(records: Sequence[SourceRecord]) -> list[dict[str, Any]]:
    """Return where the text of a run came from."""
    return [asdict(record) | {"licence": record.licence.name} for record in records]


def kernels_in_use() -> str:
    """Return whose order of sums the gradients have: "compiled, avx512" (or another instruction set), or "PyTorch"."""
    library = best_library()
    return "PyTorch" if library is None else f"compiled, {library.instruction_set}"


def untaught_sources(recipe: Recipe) -> list[int]:
    """Return the index sources that see no more entries behind their window than they pick, in the longest rows.

    Nothing teaches their indexer; all entries are attended to, as in dense attention. Empty where no loss teaches one.
    """
    model = recipe.model
    if model is None or not recipe.losses.index:
        return []
    longest = int(max(recipe.sequence_length.values))
    return [
        source
        for source in model.index_sources
        if source < model.num_layers and longest <= first_eligible(model, model.compress_ratios[source])
    ]


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return e.g. `1,290,240 parameters; update rules keep 5.4 MB, Adam would keep 10.3 MB`, and a line per rule."""
    rules = summary["optimizer_state"]
    held, adam = (sum(one[name] for one in rules.values()) for name in ("bytes", "adam_bytes"))
    lines = [
        f"{summary['parameters']:,} parameters; update rules keep {_megabytes(held)}, Adam would keep "
        f"{_megabytes(adam)}"
    ]
    lines += [
        f"  {update}: {one['parameters']:,} parameters, {one['bytes_per_parameter']:.2f} bytes each"
        for update, one in rules.items()
    ]
    if summary.get("untaught"):
        lines.append(
            f"  no row is long enough to teach index sources {', '.join(map(str, summary['untaught']))}: "
            "they see no more entries than they pick"
        )
    now, before = summary.get("kernels"), summary.get("kernels_before")
    if before is not None and before != now:
        lines.append(
            f"  gradients were computed by: {before}; now by: {now}. What follows is not what an uninterrupted run "
            "would give, bit for bit"
        )
    return lines


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
