"""The ledger's entries. A report's value is quoted; ours is computed here from the shipped configurations."""

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.plan.facts import EXPERTS, Facts
from headrace.plan.families import released
from headrace.plan.families.earlier import gqa_row_bytes
from headrace.plan.ledger.arithmetic import (
    GQA_HEAD_DIM,
    GQA_KV_HEADS,
    decode_growth,
    entry_bytes_per_token,
    index_saving,
    ngram_bytes_per_token,
    prefill_rows,
    prefill_saving,
    recompute_tokens,
    stream_passes,
    stream_traffic,
    window_bytes_per_token,
    with_fp4_experts,
)
from headrace.plan.ledger.figure import Figure
from headrace.plan.work import decode_flops

K4, K128, M1 = 4096, 131_072, 1_048_576
PROMPT = 10_000
SESSIONS = 32
GIB, MIB, GB = 2**30, 2**20, 10**9

_FLOPS = (
    "multiply-add 2; BF16 equivalents: FP8 products 0.5 (FP4 experts meet FP8 inputs), FP4 index 0.25, attention, "
    "head, router and grouped output projection 1; weights of the backbone with n-gram projections, no draft"
)


@dataclass(frozen=True, kw_only=True)
class Models:
    """The configurations that the ledger is computed from."""

    v41: Facts
    flash: Facts
    pro: Facts
    v32: Facts
    v1: Facts


def shipped_models() -> Models:
    """Read the shipped configurations."""
    return Models(
        v41=released("deepseek-v4.1-flash"),
        flash=released("deepseek-v4-flash"),
        pro=released("deepseek-v4-pro"),
        v32=released("deepseek-v3.2"),
        v1=released("deepseek-v1-67b"),
    )


def ledger(models: Models) -> list[Figure]:
    """Return every figure, computed."""
    return [*_work(models), *_against_v32(models), *_kv(models), *_states(models), *_streams(models), *_sizes(models)]


def _work(models: Models) -> Iterator[Figure]:
    v41 = models.v41
    low, high = decode_flops(v41, K4).total / 1e9, decode_flops(v41, M1).total / 1e9
    yield Figure(
        key="decode-growth", title="decode FLOPs, 1M over 4K tokens of context", reported="1.25",
        ours=decode_growth(v41, K4, M1), formula=f"{high:.2f} G / {low:.2f} G",
        accounting=f"{_FLOPS}; with the experts' products at 0.25 it would be "
        f"{decode_growth(with_fp4_experts(v41), K4, M1):.2f}",
        source="V4.1 report; serving.md section 9", configs=(v41.name,),
        measured_by="index_scored, global_bytes and window_bytes of a decode step",
    )  # fmt: skip
    full, replay = (prefill_rows(v41, PROMPT, is_replay=mode) for mode in (False, True))
    yield Figure(
        key="prefill-saving", title="prefill of 10,000 tokens, full over replay", reported="1.9747",
        ours=prefill_saving(v41, PROMPT), formula=f"{full:,} / {replay:,} layer-rows",
        accounting="complete layers times tokens; the producer stub on the other rows is not counted",
        source="V4.1 report section 3.2.1; serving.md section 9", configs=(v41.name,),
        measured_by="layer_rows of a full and of a replayed prefill",
    )  # fmt: skip
    yield Figure(
        key="index-saving", title="index scores saved by the candidate pool at 1M", reported="61", unit="%",
        ours=index_saving(v41, M1), formula="1 - scores with the pool / scores of all entries in all selecting layers",
        source="serving.md section 3.4", configs=(v41.name,),
        measured_by="index_scored and index_skipped of a decode step",
    )  # fmt: skip
    yield Figure(
        key="active-decode", title="active parameters, decode", reported="16", unit="B",
        ours=v41.active_parameters / 1e9, formula="layers with routed experts, n-gram projections, norms, head",
        source="V4.1 report; deepseek-v41.md section 2.8", configs=(v41.name,),
    )  # fmt: skip
    yield Figure(
        key="active-prefill", title="active parameters, prefill", reported="8", unit="B",
        ours=(v41.prefill_parameters or 0) / 1e9,
        formula="encoder layers and what the cut layer needs to write global KV",
        source="V4.1 report; serving.md section 0", configs=(v41.name,),
    )  # fmt: skip


def _against_v32(models: Models) -> Iterator[Figure]:
    base = models.v32
    base_flops = decode_flops(base, M1).total
    accounting = f"{_FLOPS}; V3.2: latent attention absorbed, index FP8"
    for facts, title, flops, kv in ((models.pro, "V4-Pro", "27", "10"), (models.flash, "V4-Flash", "10", "7")):
        mine = decode_flops(facts, M1).total
        yield Figure(
            key=f"{facts.name}-flops-over-v3.2", title=f"{title} over V3.2 at 1M: FLOPs of a decoded token",
            reported=flops, unit="%", ours=100 * mine / base_flops,
            formula=f"{mine / 1e9:.1f} G / {base_flops / 1e9:.1f} G", accounting=accounting,
            source="V4 report", configs=(facts.name, base.name),
        )  # fmt: skip
        yield Figure(
            key=f"{facts.name}-kv-over-v3.2", title=f"{title} over V3.2 at 1M: global KV", reported=kv, unit="%",
            ours=100 * facts.kv_bytes(M1) / base.kv_bytes(M1),
            formula=f"{facts.kv_bytes(M1):,} / {base.kv_bytes(M1):,} bytes",
            accounting="entries and FP4 index keys; V3.2: FP8 latents with FP32 scales, FP8 index keys; no windows",
            source="V4 report; deepseek-v4.md section 12.3", configs=(facts.name, base.name),
        )  # fmt: skip
    for facts, title in ((models.flash, "V4-Flash"), (models.pro, "V4-Pro")):
        row = gqa_row_bytes(GQA_KV_HEADS, GQA_HEAD_DIM)
        own = float(facts.kv_bytes_per_token)
        yield Figure(
            key=f"{facts.name}-over-gqa8", title=f"{title} over a BF16 GQA8 cache", reported="2", unit="%",
            ours=100 * own / (facts.num_layers * row),
            formula=f"{own:,.2f} / ({facts.num_layers} layers x {row:,}) bytes",
            accounting=f"baseline: as many layers, {GQA_KV_HEADS} KV heads of {GQA_HEAD_DIM}, keys and values",
            source="V4 report", configs=(facts.name,),
        )  # fmt: skip


def _kv(models: Models) -> Iterator[Figure]:
    own = float(models.v41.kv_bytes_per_token)
    for facts, reported in (
        (models.v1, "389,120"),
        (models.v32, "48,068"),
        (models.flash, "3,514"),
        (models.v41, "890"),
    ):
        yield Figure(
            key=f"{facts.name}-kv-per-token", title=f"{facts.name}: global KV per token", reported=reported,
            unit="bytes", ours=float(facts.kv_bytes_per_token), formula=_growing(facts),
            source="V4.1 report; serving.md section 9", configs=(facts.name,),
            measured_by="global_bytes_written of a prefill" if facts is models.v41 else None,
        )  # fmt: skip
    for facts, name, reported in (
        (models.v1, "V1", "437"),
        (models.v32, "V3.2", "54"),
        (models.flash, "V4-Flash", "3.95"),
    ):
        theirs = float(facts.kv_bytes_per_token)
        yield Figure(
            key=f"{facts.name}-over-v4.1", title=f"{name} over V4.1: global KV per token", reported=reported,
            ours=theirs / own, formula=f"{theirs:,.2f} / {own:,.0f} bytes", source="V4.1 report; serving.md section 9",
            configs=(facts.name, models.v41.name),
        )  # fmt: skip


def _growing(facts: Facts) -> str:
    """The sum over what grows, written out."""
    terms = (
        f"{part.layers} x {part.entry_bytes}" + (f" / {part.ratio}" if part.ratio > 1 else "") for part in facts.growing
    )
    return " + ".join(terms)


def _states(models: Models) -> Iterator[Figure]:
    flash, v41 = models.flash, models.v41
    own, theirs = float(v41.kv_bytes_per_token), float(flash.kv_bytes_per_token)
    yield Figure(
        key="persistent-kv", title="persistent KV, V4-Flash over V4.1", reported="7.9", ours=2 * theirs / own,
        formula=f"2 x {theirs:,.2f} / {own:,.0f} bytes",
        accounting="V4 also keeps windows on disk, which the report says were about half of its capacity: twice its "
        "global KV; V4.1 keeps global KV alone",
        source="V4.1 report section 3.2.1; serving.md section 9", configs=(flash.name, v41.name),
    )  # fmt: skip
    window, entries = float(window_bytes_per_token(flash)), float(entry_bytes_per_token(flash))
    yield Figure(
        key="window-over-entries", title="V4-Flash: windows of every token over compressed rows", reported="7.95",
        ours=window / entries, formula=f"{window:,.0f} / {entries:,.2f} bytes per token",
        accounting="entries of ratio 4 and 128 without index keys; the next-token module's window is not counted",
        source="V4 report; deepseek-v4.md section 12.3", configs=(flash.name,),
        measured_by="window_bytes_written and global_bytes_written of a full prefill",
    )  # fmt: skip
    for facts, reported in ((flash, "5,504"), (models.pro, "7,808"), (v41, "5,120")):
        yield Figure(
            key=f"{facts.name}-recompute", title=f"{facts.name}: tokens to recompute without stored windows",
            reported=reported, unit="tokens", ours=recompute_tokens(facts),
            formula=f"{facts.window_tokens} x {facts.num_layers} layers",
            accounting=f"exact windows in every layer; bounded replay runs {recompute_tokens(facts, is_bounded=True)}",
            source="V4 report; deepseek-v4.md section 12.5; serving.md section 1.1", configs=(facts.name,),
            measured_by="reencoded_rows of a bounded replay" if facts is v41 else None,
        )  # fmt: skip


def _streams(models: Models) -> Iterator[Figure]:
    for facts, is_single, reported in ((models.flash, False, "20"), (models.v41, True, "10")):
        passes = stream_passes(facts.streams, is_single_pass=is_single)
        yield Figure(
            key=f"{facts.name}-stream-traffic", title=f"{facts.name}: mHC traffic per half layer and token",
            reported=reported, unit="d", ours=stream_traffic(facts.streams, is_single_pass=is_single),
            formula=" + ".join(f"{name} {read}+{written}" for name, read, written in passes),
            accounting=f"vectors of d values read + written, {facts.streams} streams, each pass through memory once",
            source="V4.1 report; serving.md section 9", configs=(facts.name,),
        )  # fmt: skip


def _sizes(models: Models) -> Iterator[Figure]:
    v41 = models.v41
    per_token = f"{float(v41.kv_bytes_per_token):g}"
    tables, rows = sum(table.num_bytes for table in v41.tables), ngram_bytes_per_token(v41)
    for key, title, reported, unit, ours, formula in (
        ("kv-128k", "V4.1: global KV of 128K tokens", "111.3", "MiB", v41.kv_bytes(K128) / MIB,
         f"{K128:,} x {per_token} bytes"),
        ("kv-1m", "V4.1: global KV of 1M tokens", "0.869", "GiB", v41.kv_bytes(M1) / GIB,
         f"{M1:,} x {per_token} bytes"),
        ("kv-32x1m", "V4.1: 32 unshared contexts of 1M", "27.8", "GiB", SESSIONS * v41.kv_bytes(M1) / GIB,
         f"{SESSIONS} x {v41.kv_bytes(M1):,} bytes"),
        ("ngram-tables", "V4.1: both n-gram tables", "203", "GB", tables / GB,
         " + ".join(f"{table.num_rows:,} x {table.row_bytes}" for table in v41.tables)),
        ("routed-experts", "V4.1: routed experts", "289", "GB", v41.num_bytes(EXPERTS) / GB,
         "all layers, FP4 codes and scales, draft layers not counted"),
        ("ngram-rows", "V4.1: n-gram rows read per token", "12.7", "kB", rows / 1e3,
         " + ".join(f"{table.rows_per_token} x {table.row_bytes}" for table in v41.tables)),
    ):  # fmt: skip
        yield Figure(
            key=key, title=title, reported=reported, unit=unit, ours=ours, formula=formula,
            source="serving.md sections 0 and 4.1; deepseek-v41.md section 2", configs=(v41.name,),
            measured_by="ngram_bytes of a prefill" if key == "ngram-rows" else None,
        )  # fmt: skip
