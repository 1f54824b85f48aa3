"""Decode and prefill with n-gram tables far larger than memory, against the same model with small tables in memory.

The model is `configs/bench-ngram.json` (released plan of 40 layers at width 512, released n-gram columns: 24 rows of
264 bytes for each of two layers), its tables written for real, `--gigabytes` of them. Rows come from the file through
the row store, 256 MiB of them cached; before every round the system's page cache of the file is dropped, so that no
row is in memory but those in the row cache. Text is Python's own sources, read token by token as if sampled: a token is
known when the pass before it is over, and its rows are asked for then. Both variants are measured in turn, in decode
token by token. Time is what the computing thread computes and waits for rows, so that other users of the machine are
left out; wall time stands beside it. `--folder` keeps what was written and takes it again.
"""

import json
import os
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from headrace.cache.sequence_state import SequenceState
from headrace.core.chunk_plan import plan_chunks
from headrace.memory.read_source import ReadSource
from headrace.memory.row_counts import RowReads
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.config import load_config, table_rows
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics
from headrace.models.deepseek_v41.ngram_rows import NgramMemory
from headrace.models.deepseek_v41.synth import write_checkpoint
from headrace.text.tokenizer import Tokenizer

from ._measure import ROOT, Figure, checkpoint, memory, parser, progress, report

CONFIG = ROOT / "configs" / "bench-ngram.json"
NANO = ROOT / "src" / "headrace" / "nano"
LAYERS, COLUMNS, ROW_BYTES = 2, 24, 264
CACHE_BYTES = 256 * 2**20
DECODE_BOUND, PREFILL_BOUND, PREFILL_LIMIT = 0.85, 0.9, 800.0
CHUNK = 256


@dataclass
class Run:
    """One variant in one round: seconds by `Clock`, and by the clock on the wall."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    decode_wall_s: float = 0.0
    prefill_wall_s: float = 0.0


class Clock:
    """Seconds that a model computed or waited for rows: CPU time of this thread, and what the store counts as waiting.

    It is wall time on a machine without other users; theirs it leaves out, but for what they add to the waiting.
    """

    def __init__(self, model: DeepseekV41) -> None:
        self._model = model
        self._began = self._now()

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds since the clock was made: computed or waited, and on the wall."""
        now = self._now()
        return now[0] - self._began[0], now[1] - self._began[1]

    def _now(self) -> tuple[float, float]:
        return time.thread_time() + reads_of(self._model).wait_s, time.perf_counter()


@contextmanager
def written(gigabytes: float, kept: Path | None) -> Iterator[Path]:
    """Give the model with tables of a size; under `kept` it stays, and is taken if it was written there before."""
    first = max(100, int(gigabytes * 1e9 / ROW_BYTES / LAYERS / COLUMNS))
    changes = {"engram_vocab_size": first, "engram_num_embeddings": list(table_rows(first, LAYERS, 4, 8))}
    if kept is None:
        with checkpoint(CONFIG, changes) as folder:
            yield folder
        return
    folder = kept / f"{gigabytes:g}GB"
    if not (folder / "config.json").exists():  # it is written last
        document = json.loads(CONFIG.read_text(encoding="utf-8"))
        document["text_config"].update(changes)
        folder.mkdir(parents=True, exist_ok=True)
        changed = kept / f"{gigabytes:g}GB.json"
        changed.write_text(json.dumps(document), encoding="utf-8")
        progress(f"random weights of {CONFIG.name}, {gigabytes:g} GB of tables")
        write_checkpoint(load_config(changed), folder, seed=1)
    yield folder


@contextmanager
def model_of(gigabytes: float, options: LoadOptions, kept: Path | None) -> Iterator[tuple[DeepseekV41, list[Path]]]:
    """Write the model with tables of a size, with nano's tokenizer, and load it; give also its files."""
    with written(gigabytes, kept) as folder:
        (folder / "tokenizer.json").write_bytes((NANO / "tokenizer.json").read_bytes())
        model = load_model(folder, options).model
        yield model, sorted(folder.glob("*.safetensors"))
        if model.memory is not None and model.memory.store is not None:
            model.memory.store.close()


def text_ids(count: int) -> np.ndarray:
    """Return token ids of Python's own sources, [count] int64."""
    tokenizer, found = Tokenizer.from_file(NANO / "tokenizer.json"), []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += list(tokenizer.encode(file.read_text(encoding="utf-8")))
        if len(found) >= count:
            return np.array(found[:count], dtype=np.int64)
    raise SystemExit(f"Python's sources have {len(found)} tokens; {count} are needed")


def drop_pages(files: list[Path]) -> None:
    """Take the files out of the system's page cache."""
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read_from_disk() -> int:
    """Return the bytes that this process caused to be read from storage so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def prefill(model: DeepseekV41, ids: np.ndarray) -> SequenceState:
    """Read a prompt in chunks, the rows of the next chunk asked for before each, as the engine does."""
    state, window, low = model.new_state(), model.config.window, 0
    state.reserve(len(ids))
    sizes = plan_chunks(len(ids), CHUNK, window)
    for place, size in enumerate(sizes):
        is_last = place == len(sizes) - 1
        span = Span(state, ids[low : low + size], min(window, len(ids)) if is_last else 0, is_replay=is_last)
        low += size
        if model.memory is not None:
            model.memory.announce([span])
            first = max(0, low - model.memory.addressing.lookback)
            if not is_last:
                model.memory.announce_part(ids[first : low + sizes[place + 1]], low - first, None)
        model.forward([span], is_tolerant=True)
    return state


def decode(model: DeepseekV41, state: SequenceState, token: np.ndarray) -> None:
    """Run one token, whose rows are asked for now, as if it had just been sampled."""
    span = Span(state, token, 1)
    if model.memory is not None:
        model.memory.announce([span])
    model.forward([span], is_tolerant=True)


def measure(models: dict[str, DeepseekV41], ids: np.ndarray, num_prompt: int) -> dict[str, Run]:
    """Read the first `num_prompt` tokens as a prompt, with one model after the other; then the others in step.

    In decode the models take turns token by token, so that both meet the same other users of the machine. In prefill
    they do not: the pause would be time for the disk.
    """
    runs, states = {}, {}
    for name, model in models.items():
        clock = Clock(model)
        states[name] = prefill(model, ids[:num_prompt])
        seconds, wall = clock.seconds
        runs[name] = Run(prefill_s=seconds, prefill_wall_s=wall)
    for place in range(num_prompt, len(ids)):
        for name, model in models.items():
            clock = Clock(model)
            decode(model, states[name], ids[place : place + 1])
            seconds, wall = clock.seconds
            runs[name].decode_s += seconds
            runs[name].decode_wall_s += wall
    return runs


def check_bits(model: DeepseekV41, ids: np.ndarray) -> None:
    """Hold the store's rows against plain look-ups in the mapped tables, bit for bit."""
    kept, logits = model.memory, []
    if kept is None:
        raise SystemExit("the model has no n-gram memory")
    for store in (kept.store, None):
        model.memory = NgramMemory(kept.addressing, kept.tables, store)
        logits.append(model.forward([Span(model.new_state(), ids, len(ids))], wants_all_logits=True).logits)
    model.memory = kept
    if not torch.equal(*logits):
        raise SystemExit("rows from the store are not those of the tables")


def reads_of(model: DeepseekV41) -> RowReads:
    """Return the counts of all layers so far."""
    if model.memory is None or model.memory.store is None:
        raise SystemExit("the model has no row store")
    return model.memory.store.counts.total


def figures_of(runs: dict[str, list[Run]], num_prompt: int, num_decoded: int, disk_rate: float) -> list[Figure]:
    """Return speeds, ratios and bounds."""
    found = []
    for name, several in runs.items():
        walls = [one.decode_wall_s for one in several]
        speeds = [num_decoded / one.decode_s for one in several]
        found.append(Figure(f"decode, {name}", "tokens/s", speeds, "-", wall_s=walls))
        walls = [one.prefill_wall_s for one in several]
        speeds = [num_prompt / one.prefill_s for one in several]
        found.append(Figure(f"prefill, {name}", "tokens/s", speeds, "-", wall_s=walls))
    pairs = list(zip(runs["memory"], runs["file"], strict=True))
    is_bound = next(one for one in found if one.name == "prefill, memory").median <= PREFILL_LIMIT
    against = "tables in memory, same round"
    for part, bound in (("decode", DECODE_BOUND), ("prefill", PREFILL_BOUND if is_bound else None)):
        ratios = [vars(small)[f"{part}_s"] / vars(large)[f"{part}_s"] for small, large in pairs]
        found.append(Figure(f"{part}, file / memory", "ratio", ratios, against, bound=bound, is_floor=True))
        ratios = [vars(small)[f"{part}_wall_s"] / vars(large)[f"{part}_wall_s"] for small, large in pairs]
        found.append(Figure(f"{part} on the wall, file / memory", "ratio", ratios, against))
    limit = disk_rate / (LAYERS * COLUMNS)
    found.append(Figure("prefill the disk allows without a hit", "tokens/s", [limit], "cold rows, this run"))
    return found


def resident_scales(model: DeepseekV41) -> int:
    """Return the bytes of scales that the row store keeps in memory."""
    if model.memory is None or model.memory.store is None:
        raise SystemExit("the model has no row store")
    return sum(source.resident_bytes for source in model.memory.store.sources if isinstance(source, ReadSource))


def cold_reads(model: DeepseekV41, files: list[Path], seed: int) -> float:
    """Return the cold random rows a second that come from the disk, 6,144 asked for at once."""
    if model.memory is None or model.memory.store is None:
        raise SystemExit("the model has no row store")
    drop_pages(files)
    source, rng = model.memory.store.sources[0], np.random.default_rng(seed)
    rows = np.unique(rng.integers(0, source.rows, COLUMNS * CHUNK))
    codes = np.empty((len(rows), source.head_dim), np.uint8)
    scales = np.empty((len(rows), source.head_dim // 32), np.uint8)
    began = time.perf_counter()
    source.start(rows, codes, scales, is_urgent=True).wait()
    return len(rows) / (time.perf_counter() - began)


def main() -> int:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument("--gigabytes", type=float, default=4.0, metavar="G", help="tables on disk, both layers (4)")
    made.add_argument("--memory-gigabytes", type=float, default=1.0, metavar="G", help="tables in memory (1)")
    made.add_argument("--prompt", type=int, default=1024, metavar="N", help="tokens of each prompt (1024)")
    made.add_argument("--decode", type=int, default=96, metavar="N", help="tokens decoded behind each (96)")
    made.add_argument("--folder", type=Path, metavar="DIR", help="keep both models there, or take them from there")
    made.add_argument("--scales", choices=("memory", "file"), help="where scales of the tables on disk lie (chosen)")
    made.add_argument("--kernels", default="auto", metavar="K", help="torch, native or auto (auto)")
    args = made.parse_args()
    options = LoadOptions(numerics=Numerics(kernels=args.kernels))
    torch.set_num_threads(args.threads)
    size = args.prompt + args.decode
    ids = text_ids(size * (args.repetitions + 1))
    runs: dict[str, list[Run]] = {"memory": [], "file": []}
    reading = replace(options, ngram_source="read", ngram_cache_bytes=CACHE_BYTES, ngram_scales=args.scales)
    with (
        model_of(args.memory_gigabytes, replace(options, ngram_source="memory"), args.folder) as (small, _),
        model_of(args.gigabytes, reading, args.folder) as (large, files),
    ):
        disk_rate = cold_reads(large, files, seed=1)
        before, done = RowReads(), read_from_disk()
        before.add(reads_of(large))
        for repetition in range(args.repetitions):
            part = ids[size * (repetition + 1) : size * (repetition + 2)]
            drop_pages(files)
            for name, run in measure({"memory": small, "file": large}, part, args.prompt).items():
                runs[name].append(run)
                progress(f"round {repetition}, {name}: {run}")
        reads = RowReads()
        reads.add(reads_of(large))
        reads.add(before, -1)
        on_disk, from_disk = sum(file.stat().st_size for file in files), read_from_disk() - done
        figures = figures_of(runs, args.prompt, args.decode, disk_rate)
        figures.append(Figure("cold rows", "rows/s", [disk_rate], "6,144 rows at once, page cache dropped"))
        figures.append(Figure("rows not read", "share", [reads.hits / reads.requested], "requested rows"))
        figures.append(Figure("waited for rows", "s", [reads.wait_s], "all rounds together"))
        expected = COLUMNS * LAYERS * size * args.repetitions
        if (reads.requested, reads.unused) != (expected, 0) or reads.read != reads.requested - reads.hits:
            raise SystemExit(f"reads do not add up: {reads}, {expected} rows requested")
        check_bits(large, ids[:CHUNK])  # last: pages that were touched through a mapping are not dropped any more
    notes = {
        "numerics": large.numerics.name,
        "files": f"{on_disk / 1e9:.1f} GB of the model with tables read from disk",
        "machine memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB",
        "scales in memory": f"{resident_scales(large) / 1e6:,.0f} MB",
        "page cache": "dropped before every round (posix_fadvise DONTNEED)",
        "reads": f"{reads.read:,} = {COLUMNS} x {LAYERS} x {size * args.repetitions:,} - {reads.hits:,}",
        "read from storage": f"{from_disk / 1e6:,.0f} MB for {reads.read_bytes / 1e6:,.0f} MB of rows",
        "peak": f"{memory('VmHWM') / 1e9:.1f} GB",
    }
    return report("N-gram tables larger than memory", args, figures, notes)


if __name__ == "__main__":
    raise SystemExit(main())
