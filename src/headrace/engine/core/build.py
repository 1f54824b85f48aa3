"""Opens a checkpoint and sets an engine up on it: load, measure, plan, allocate."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from headrace.checkpoint.weights_digest import weights_digest
from headrace.core.errors import UserError
from headrace.engine.core.core import EngineCore
from headrace.engine.core.draft_costs import cost_table
from headrace.engine.core.draft_policy import DraftPolicy
from headrace.engine.core.drafts import Drafting
from headrace.engine.core.dspark import DSpark
from headrace.engine.core.limits import scheduler_config
from headrace.engine.core.memory_plan import Measured, measure_scratch, plan_memory, resident_bytes
from headrace.engine.core.options import EngineOptions
from headrace.engine.drafting.lookup import LookupDrafter
from headrace.engine.drafting.temperatures import TEMPERATURES_NAME, read_temperatures
from headrace.engine.threads import Threads, choose_threads
from headrace.kernels.native.choice import wanted_kernels
from headrace.memory.read_source import ReadSource
from headrace.models.deepseek_v41.batch import Span
from headrace.models.deepseek_v41.config import load_config
from headrace.models.deepseek_v41.load import LoadOptions, load_model
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics

_FORMAT = "1"  # of what the prefix cache holds
_VISION = "1"  # of how images become patches
_TRIAL_ROWS = 256


def build_core(
    path: Path, options: EngineOptions, load: LoadOptions | None, progress: Callable[[int], object] | None
) -> EngineCore:
    """Load a checkpoint folder and return an engine that can take requests.

    Raises:
        UserError: the checkpoint or an option is refused.
        CapacityError: the memory limit leaves no room for one sequence.
    """
    before = resident_bytes()
    load = _with_ngrams(load or _load_options(path, options), options)
    loaded = load_model(path, load, progress)
    model, config = loaded.model, loaded.model.config
    threads = choose_threads(config.hidden_size, options.threads)
    files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    max_context = min(options.max_context or config.max_positions, config.max_positions)
    cached = _row_cache_bytes(model)  # already resident
    weights = max(files - _bytes_outside(model), resident_bytes() - before - cached) + cached
    measured = Measured(process=before, weights=weights, scratch=_scratch(model, options, threads, max_context))
    plan = plan_memory(model.state_shape, options, max_context, measured)
    size = config.vocab_size if loaded.tokenizer is None else min(config.vocab_size, loaded.tokenizer.size)
    drafting = build_drafting(path, model, options, threads, vocab_size=size)
    return EngineCore(
        model, loaded.tokenizer, options, plan, threads=threads, namespace=fingerprint(path), drafting=drafting
    )


def _load_options(path: Path, options: EngineOptions) -> LoadOptions:
    config = load_config(path)
    wants_draft = options.drafting != "off" and options.drafter != "lookup"
    numerics = Numerics(kernels=wanted_kernels(options.kernels))
    has_draft, has_vision = wants_draft and config.draft is not None, config.vision is not None
    return LoadOptions(numerics=numerics, has_draft=has_draft, has_vision=has_vision)


def _with_ngrams(load: LoadOptions, options: EngineOptions) -> LoadOptions:
    return replace(
        load,
        ngram_source=options.ngram_source or load.ngram_source,
        ngram_scales=options.ngram_scales or load.ngram_scales,
        ngram_cache_bytes=load.ngram_cache_bytes if options.ngram_cache_bytes is None else options.ngram_cache_bytes,
        ngram_workers=options.ngram_workers or load.ngram_workers,
    )


def _bytes_outside(model: DeepseekV41) -> int:
    """Return the bytes of tables whose rows are read one by one, resident scales left out.

    Mapped ones come to count as memory when touched.
    """
    if model.memory is None or model.memory.store is None:
        return 0
    read = [source for source in model.memory.store.sources if isinstance(source, ReadSource)]
    return sum(source.rows * (source.head_dim + source.head_dim // 32) - source.resident_bytes for source in read)


def _row_cache_bytes(model: DeepseekV41) -> int:
    return 0 if model.memory is None or model.memory.store is None else model.memory.store.cache_bytes


def build_drafting(
    path: Path, model: DeepseekV41, options: EngineOptions, threads: Threads, *, vocab_size: int
) -> Drafting | None:
    """Return what drafts for an engine; None where nothing does.

    Raises:
        UserError: the draft module was asked for and the checkpoint has none, or its temperatures are damaged or of
            other weights.
    """
    if options.drafting == "off":
        return None
    is_guarded = options.drafting == "auto"
    if options.drafter == "lookup":
        lookup = LookupDrafter()
        return Drafting(lookup, model.config.window, DraftPolicy(lookup.max_guesses, is_guarded=is_guarded))
    if model.config.draft is None or model.parameters.draft is None:
        if options.drafter is None:
            return None
        raise UserError("the checkpoint has no draft module; accepted is drafter 'lookup' or None", param="drafter")
    drafter = DSpark(model, vocab_size)
    torch.set_num_threads(threads.decode)
    file = path / TEMPERATURES_NAME
    scale = read_temperatures(file, drafter.max_guesses, weights_digest(path)) if file.exists() else None
    table = cost_table(model, drafter, fingerprint(path), options.num_slots) if is_guarded else None
    policy = DraftPolicy(drafter.max_guesses, table=table, scale=scale, is_guarded=is_guarded)
    return Drafting(drafter, model.config.window, policy)


def fingerprint(path: Path) -> Mapping[str, str]:
    """Return what tells checkpoints apart, by content: copies of one have the same, whatever their files are called."""
    tokenizer = path / "tokenizer.json"
    return {
        "weights": weights_digest(path, spread=True),
        "config": hashlib.blake2b((path / "config.json").read_bytes(), digest_size=16).hexdigest(),
        "tokenizer": hashlib.blake2b(tokenizer.read_bytes(), digest_size=16).hexdigest() if tokenizer.exists() else "",
        "vision": _VISION,
        "format": _FORMAT,
    }


def _scratch(model: DeepseekV41, options: EngineOptions, threads: Threads, max_context: int) -> int:
    """Measure what a step's rows need, on a few of them."""
    config = model.config
    blocks = plan_memory(model.state_shape, _unlimited(options), max_context, Measured(process=0, weights=0, scratch=0))
    rows = scheduler_config(options, blocks, config, max_context).max_rows
    trial = min(_TRIAL_ROWS, rows, max_context)
    ids = np.full(trial, config.bos_token_id, dtype=np.int64)
    torch.set_num_threads(threads.prefill)
    needed = measure_scratch(lambda: model.forward([Span(model.new_state(), ids, trial)], wants_all_logits=True))
    return needed * -(-rows // trial)


def _unlimited(options: EngineOptions) -> EngineOptions:
    return EngineOptions(
        chunk=options.chunk, max_rows=options.max_rows, num_slots=options.num_slots, cache_tokens=1, host_bytes=0
    )
