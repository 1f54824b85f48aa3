"""The plan of one model as JSON values: what it holds, where it goes, what a token reads, how fast it can be."""

from dataclasses import asdict, dataclass
from typing import Any

from headrace.core.errors import UserError
from headrace.plan.facts import EXPERTS, TABLES, Facts
from headrace.plan.families import released
from headrace.plan.placement import Placement, place
from headrace.plan.work import decode_flops, decode_reads

CONTEXTS = (131_072, 1_048_576)
GENERATIONS = ("deepseek-v1-67b", "deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4.1-flash")
DISK_BLOCK = 4096
_MAX_CONTEXT, _MAX_SESSIONS = 2**40, 10**9


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is planned for: tokens of every sequence, sequences, and budgets in bytes and bytes per second.

    None is no limit for a size, and no bound for a rate.
    """

    context: int
    sessions: int
    memory: int | None = None
    disk: int | None = None
    bandwidth: int | None = None
    disk_bandwidth: int | None = None

    def __post_init__(self) -> None:
        """Check the counts.

        Raises:
            UserError: one is out of range.
        """
        for name, value, high in (("context", self.context, _MAX_CONTEXT), ("sessions", self.sessions, _MAX_SESSIONS)):
            if not 1 <= value <= high:
                raise UserError(f"--{name} is {value}; a whole number from 1 to {high} is accepted.", param=name)


def make_plan(facts: Facts, wanted: Wanted) -> dict[str, Any]:
    """Return the plan as JSON values; bytes per token are rounded only where they are no whole number."""
    placement = place(facts, wanted.context, wanted.sessions, wanted.memory, wanted.disk)
    notes = list(facts.notes)
    if wanted.context > facts.max_positions:
        notes.append(
            f"the configuration ends at {facts.max_positions:,} tokens; {wanted.context:,} are arithmetic only"
        )
    return {
        "model": facts.name,
        "model_type": facts.model_type,
        "context": wanted.context,
        "sessions": wanted.sessions,
        "weights": _weights(facts),
        "global_kv": _global_kv(facts, wanted),
        "window": _window(facts, wanted.sessions),
        "state": _state(facts, wanted.sessions),
        "ngram_tables": _tables(facts),
        "placement": _placement(placement),
        "decode": _decode(facts, wanted, placement),
        "earlier_generations": _earlier(facts),
        "notes": notes,
    }


def _number(value: Any) -> int | float:
    return int(value) if float(value).is_integer() else float(value)


def _weights(facts: Facts) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {}
    for part in facts.weights:
        row = kinds.setdefault(part.kind, {"kind": part.kind, "parameters": 0, "bytes": 0, "active_parameters": 0})
        row["parameters"] += part.parameters
        row["bytes"] += part.num_bytes
        row["active_parameters"] += int(part.parameters * part.share) if part.precision else 0
    return {
        "parameters": facts.parameters,
        "bytes": facts.weight_bytes,
        "active_parameters": {"decode": facts.active_parameters, "prefill": facts.prefill_parameters},
        "by_kind": list(kinds.values()),
    }


def _global_kv(facts: Facts, wanted: Wanted) -> dict[str, Any]:
    one = facts.kv_bytes(wanted.context)
    return {
        "bytes_per_token": _number(facts.kv_bytes_per_token),
        "parts": [
            {
                "name": part.name,
                "layers": part.layers,
                "entry_bytes": part.entry_bytes,
                "tokens_per_entry": part.ratio,
                "bytes_per_token": _number(part.bytes_per_token),
            }
            for part in facts.growing
        ],
        "bytes_per_session": one,
        "bytes": wanted.sessions * one,
        "contexts": [{"tokens": tokens, "bytes": facts.kv_bytes(tokens)} for tokens in CONTEXTS],
    }


def _window(facts: Facts, sessions: int) -> dict[str, Any] | None:
    if facts.window is None:
        return None
    return {
        "tokens": facts.window_tokens,
        "layers": facts.window.layers,
        "row_bytes": facts.window.num_bytes // facts.window_tokens,
        "bytes_per_session": facts.window_bytes,
        "bytes": sessions * facts.window_bytes,
    }


def _state(facts: Facts, sessions: int) -> dict[str, Any]:
    return {
        "parts": [{"name": part.name, "layers": part.layers, "bytes": part.total} for part in facts.state],
        "bytes_per_session": facts.state_bytes,
        "bytes": sessions * facts.state_bytes,
        "snapshot_bytes": facts.snapshot_bytes,
    }


def _tables(facts: Facts) -> dict[str, Any] | None:
    if not facts.tables:
        return None
    return {
        "bytes": sum(table.num_bytes for table in facts.tables),
        "bytes_read_per_token": sum(table.rows_per_token * table.row_bytes for table in facts.tables),
        "tables": [asdict(table) | {"bytes": table.num_bytes} for table in facts.tables],
    }


def _placement(placement: Placement) -> dict[str, Any]:
    return asdict(placement) | {
        "parts": [
            {"name": part.name, "bytes": part.num_bytes, "in_memory": part.in_memory, "on_disk": part.on_disk}
            for part in placement.parts
        ],
        "problems": list(placement.problems),
        "remarks": list(placement.remarks),
        "fits": placement.fits,
    }


def _decode(facts: Facts, wanted: Wanted, placement: Placement) -> dict[str, Any]:
    flops = decode_flops(facts, wanted.context)
    steps = [_step(facts, wanted, placement, 1)]
    if placement.running > 1:
        steps.append(_step(facts, wanted, placement, placement.running))
    return {
        "flops": {**asdict(flops), "total": flops.total, "unit": "BF16 equivalents"},
        "bandwidth": wanted.bandwidth,
        "disk_bandwidth": wanted.disk_bandwidth,
        "fits_one": placement.running > 0,
        "steps": steps,
    }


def _step(facts: Facts, wanted: Wanted, placement: Placement, sessions: int) -> dict[str, Any]:
    """One step with one new token for each of `sessions` sequences: bytes, and the rate that the budgets bound."""
    reads = decode_reads(facts, wanted.context, sessions)
    outside = {part.name: part.on_disk / part.num_bytes for part in placement.parts if part.name in reads}
    missing = sum(round(reads[name] * share) for name, share in outside.items())
    disk, num_reads = _from_disk(facts, reads, outside, sessions)
    total = sum(reads.values())
    bounds = {
        "memory": wanted.bandwidth * sessions / (total - missing) if wanted.bandwidth else None,
        "disk": wanted.disk_bandwidth * sessions / disk if wanted.disk_bandwidth and disk else None,
    }
    known = {name: rate for name, rate in bounds.items() if rate is not None}
    is_complete = bounds["memory"] is not None and (not disk or bounds["disk"] is not None) and placement.running > 0
    rate = min(known.values()) if is_complete else None
    return {
        "sessions": sessions,
        "bytes": total,
        "bytes_per_token": _number(total / sessions),
        "by_part": reads,
        "disk_bytes": disk,
        "disk_row_reads": num_reads,
        "bounds_tokens_per_second": bounds,
        "tokens_per_second": rate,
        "tokens_per_second_per_session": None if rate is None else rate / sessions,
        "bound_by": min(known, key=lambda name: known[name]) if is_complete else None,
    }


def _from_disk(facts: Facts, reads: dict[str, int], outside: dict[str, float], sessions: int) -> tuple[int, int]:
    """Return the bytes that a step reads from disk, and the n-gram rows among them.

    Experts and rows in memory are taken to be as likely as the others; a cache that keeps what is asked for most reads
    less. A row costs the disk whole blocks of 4,096 bytes.
    """
    num_rows = sum(table.rows_per_token for table in facts.tables) * sessions * outside.get(TABLES, 0.0)
    blocks = max((-(-table.row_bytes // DISK_BLOCK) for table in facts.tables), default=0)
    experts = reads.get(EXPERTS, 0) * outside.get(EXPERTS, 0.0)
    return round(experts + num_rows * blocks * DISK_BLOCK), round(num_rows)


def _earlier(facts: Facts) -> list[dict[str, Any]]:
    own = facts.kv_bytes_per_token
    rows = []
    for name in GENERATIONS:
        theirs = released(name).kv_bytes_per_token
        rows.append({"model": name, "bytes_per_token": _number(theirs), "over_this_model": float(theirs / own)})
    return rows
