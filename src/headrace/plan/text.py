"""The plan and the ledger as lines for a reader."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from headrace.plan.ledger.figure import Figure, Live
from headrace.plan.sizes import gibibytes, gigabytes, rounded

_NUMERIC = ".,0123456789-"


def plan_lines(plan: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a plan."""
    weights = plan["weights"]
    yield f"{plan['model']} ({plan['model_type']}): {plan['sessions']:,} x {plan['context']:,} tokens"
    yield from ("", "weights")
    yield from _table(_weight_rows(weights))
    active = weights["active_parameters"]
    prefill = "" if active["prefill"] is None else f", prefill in replay {_billions(active['prefill'])}"
    yield f"active parameters: decode {_billions(active['decode'])}{prefill}"
    yield from ("", "sequences")
    yield from _table(_sequence_rows(plan))
    for context in plan["global_kv"]["contexts"]:
        size = context["bytes"]
        mebi, gibi = (rounded(size / 2**power, digits) for power, digits in ((20, 1), (30, 3)))
        yield f"global KV of {context['tokens']:,} tokens: {size:,} bytes = {mebi} MiB = {gibi} GiB"
    yield from _tables(plan["ngram_tables"])
    yield from ("", "where it goes")
    yield from _placement(plan["placement"])
    yield from ("", "read for one decoded token")
    yield from _decode(plan["decode"])
    yield from ("", "global KV per token, by generation")
    yield from _table(
        (one["model"], f"{one['bytes_per_token']:,} B", f"{rounded(one['over_this_model'], 2)} x this model")
        for one in plan["earlier_generations"]
    )
    yield from (f"note: {note}." for note in plan["notes"])


def _billions(count: float) -> str:
    return f"{rounded(count / 1e9, 2)} B" if count >= 1e8 else f"{rounded(count / 1e6, 2)} M"


def _weight_rows(weights: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    yield "kind", "parameters", "stored", "active"
    for row in weights["by_kind"]:
        active = _billions(row["active_parameters"]) if row["active_parameters"] else "-"
        yield row["kind"], _billions(row["parameters"]), gigabytes(row["bytes"]), active
    yield "all", _billions(weights["parameters"]), gigabytes(weights["bytes"]), ""


def _sequence_rows(plan: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    kv, window, state = plan["global_kv"], plan["window"], plan["state"]
    yield "", "per token", "one sequence", f"all {plan['sessions']:,}"
    both = gibibytes(kv["bytes_per_session"]), gibibytes(kv["bytes"])
    yield "global KV", f"{kv['bytes_per_token']:,} B", *both
    for part in kv["parts"]:
        what = f"  {part['name']}: {part['layers']} layers x {part['entry_bytes']} B"
        every = f" every {part['tokens_per_entry']} tokens" if part["tokens_per_entry"] > 1 else ""
        yield what + every, f"{rounded(part['bytes_per_token'], 2)} B", "", ""
    if window:
        name = f"windows: {window['layers']} layers x {window['tokens']} rows x {window['row_bytes']} B"
        yield name, "", gibibytes(window["bytes_per_session"]), gibibytes(window["bytes"])
    for part in state["parts"]:
        yield part["name"], "", gibibytes(part["bytes"]), gibibytes(plan["sessions"] * part["bytes"])
    if state["snapshot_bytes"]:
        each = state["snapshot_bytes"]
        yield "snapshot for an exact resume", "", gibibytes(each), gibibytes(plan["sessions"] * each)


def _tables(tables: dict[str, Any] | None) -> Iterator[str]:
    if tables is None:
        return
    yield f"n-gram tables: {gigabytes(tables['bytes'])}, {tables['bytes_read_per_token']:,} B read per token"
    for table in tables["tables"]:
        yield (
            f"  layer {table['layer_id']}: {table['num_rows']:,} rows x {table['row_bytes']} B, "
            f"{table['rows_per_token']} rows per token"
        )


def _placement(placement: dict[str, Any]) -> Iterator[str]:
    rows = [("", "bytes", "in memory", "not in memory")]
    for part in placement["parts"]:
        outside = part["bytes"] - part["in_memory"]
        rows.append(
            (
                part["name"],
                gigabytes(part["bytes"]),
                gigabytes(part["in_memory"]),
                gigabytes(outside) if outside else "-",
            )
        )
    yield from _table(rows)
    for name, used in (("memory", placement["memory_used"]), ("disk", placement["disk_needed"])):
        budget = placement[name]
        yield f"{name}: {gigabytes(used)} of {gigabytes(budget) if budget is not None else 'no given limit'}"
    if placement["memory"] is not None:
        yield f"everything in memory at once would take {gigabytes(placement['memory_needed'])}"
    yield from (f"remark: {remark}" for remark in placement["remarks"])
    yield from (f"DOES NOT FIT: {problem}" for problem in placement["problems"])


def _decode(decode: dict[str, Any]) -> Iterator[str]:
    steps = decode["steps"]
    rows = [("", *(f"{step['sessions']:,} at once" if step["sessions"] > 1 else "alone" for step in steps))]
    for name in steps[0]["by_part"]:
        rows.append((name, *(gigabytes(step["by_part"][name] / step["sessions"]) for step in steps)))
    rows.append(("all", *(gigabytes(step["bytes_per_token"]) for step in steps)))
    if any(step["disk_bytes"] for step in steps):
        rows.append(("read from disk", *(gigabytes(step["disk_bytes"] / step["sessions"]) for step in steps)))
    yield from _table(rows)
    for step in steps:
        yield _bound(decode, step)


def _bound(decode: dict[str, Any], step: dict[str, Any]) -> str:
    who = "one sequence alone" if step["sessions"] == 1 else f"{step['sessions']:,} sequences in one step"
    if step["tokens_per_second"] is not None:
        each = f", {rounded(step['tokens_per_second_per_session'], 2)} each" if step["sessions"] > 1 else ""
        return f"at most {rounded(step['tokens_per_second'], 2)} tokens/s{each}: {who}, bound by {step['bound_by']}"
    if decode["bandwidth"] is None:
        return f"no bound for {who}: --bandwidth was not given"
    if not decode["fits_one"]:
        return f"no bound for {who}: it does not fit into memory"
    return f"no bound for {who}: bytes come from disk, and --disk-bandwidth was not given"


def ledger_lines(figures: Iterable[Figure], live: Mapping[str, Live]) -> Iterator[str]:
    """Yield the lines of the ledger."""
    figures = list(figures)
    rows: list[tuple[str, ...]] = [("figure", "report", "computed", "difference", "")]
    for figure in figures:
        rows.append(
            (
                figure.title,
                f"{figure.reported} {figure.unit}".rstrip(),
                f"{rounded(figure.ours, 4)} {figure.unit}".rstrip(),
                rounded(figure.ours - figure.reported_value, 4),
                "" if figure.agrees else "DIFFERS",
            )
        )
    yield from _table(rows)
    yield ""
    for figure in figures:
        yield f"{figure.title}: {figure.formula}"
        yield f"    from {', '.join(figure.configs)}; report's value: {figure.source}"
        if figure.accounting:
            yield f"    counted: {figure.accounting}"
        if figure.measured_by:
            yield f"    measured by: {figure.measured_by}"
    if live:
        yield from ("", "measured on headrace-nano, beside the same arithmetic on its configuration")
        measured: list[tuple[str, ...]] = [("figure", "arithmetic", "measured", "from")]
        for figure in figures:
            if figure.key in live:
                one = live[figure.key]
                measured.append((one.what, rounded(one.arithmetic, 4), rounded(one.measured, 4), one.how))
        yield from _table(measured)


def _table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Align columns: the first to the left, numbers to the right."""
    lines = list(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    last = len(widths) - 1
    for line in lines:
        cells = [
            f"{cell:<{width}}" if place == 0 or (place == last and not _is_number(cell)) else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _is_number(cell: str) -> bool:
    return cell == "-" or cell[:1] in _NUMERIC
