"""Opens a checkpoint folder: configuration, weights, tokenizer, n-gram addressing, model."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from headrace.core.errors import CheckpointError
from headrace.kernels.native.choice import choose
from headrace.memory.addressing import Addressing
from headrace.memory.source_name import ScalesName, SourceName
from headrace.models.deepseek_v41.config import Config, load_config
from headrace.models.deepseek_v41.model import DeepseekV41, Numerics
from headrace.models.deepseek_v41.ngram_sources import (
    DEFAULT_WORKERS,
    StoreSettings,
    check_settings,
    default_source,
    open_store,
)
from headrace.models.deepseek_v41.parameters import build_parameters
from headrace.models.deepseek_v41.tiled import unsupported
from headrace.models.deepseek_v41.weights import load_weights
from headrace.text.token_map import build_token_map
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadOptions:
    """What to load and where.

    Attributes:
        device: where tensors go.
        numerics: of the cached path.
        has_draft, has_vision: False leaves those tensors on disk.
        ngram_source: where rows of n-gram tables come from: "memory" loads the tables, "mmap" maps their files, "read"
            reads rows with threads; the values are the same. None is "mmap", or "read" where the tables are larger than
            half of the machine's memory.
        ngram_scales: of the source "read": all scales in "memory", or read from the "file" with the codes; None takes
            memory for scales up to an eighth of the machine's.
        ngram_cache_bytes: budget of the row cache; None is, for "read", 256 MiB or, if that is less, the tables' size,
            and none for the others.
        ngram_workers: threads of the source "read".
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    numerics: Numerics = field(default_factory=Numerics)
    has_draft: bool = False
    has_vision: bool = False
    ngram_source: SourceName | None = None
    ngram_scales: ScalesName | None = None
    ngram_cache_bytes: int | None = None
    ngram_workers: int = DEFAULT_WORKERS

    def __post_init__(self) -> None:
        """Check the n-gram settings.

        Raises:
            UserError: a value is out of range.
        """
        check_settings(self.ngram_source, self.ngram_scales, self.ngram_cache_bytes, self.ngram_workers)


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, and its tokenizer (None where the folder has none and the model needs none)."""

    model: DeepseekV41
    tokenizer: Tokenizer | None


def load_model(
    path: Path | str, options: LoadOptions | None = None, progress: Callable[[int], object] | None = None
) -> Loaded:
    """Load a checkpoint folder in the official format.

    Args:
        path: the folder.
        options: what to load; text only on the CPU by default.
        progress: called with bytes read since its last call.

    Raises:
        UserError: the configuration is refused.
        CheckpointError: a tensor or file is missing or wrong, or the n-gram map does not fit the tokenizer.
    """
    options = options or LoadOptions()
    folder = Path(path)
    config = load_config(folder)
    tokenizer = _tokenizer(folder, config)
    addressing = _addressing(tokenizer, config)
    weights = load_weights(
        folder,
        config,
        device=options.device,
        skip_draft=not options.has_draft,
        skip_vision=not options.has_vision,
        engram="memory" if options.ngram_source == "memory" else "mmap",
        progress=progress,
    )
    numerics = options.numerics
    choice = choose(numerics.kernels)
    if choice.native:
        choice = choice.without(unsupported(config, options.device, numerics.dtype))
        numerics = replace(numerics, kernels=choice.id)
    parameters = build_parameters(weights, config, options.device, numerics.dtype, choice)
    store = None
    if addressing is not None:
        source = options.ngram_source or default_source(weights)
        settings = (options.ngram_scales, options.ngram_cache_bytes, options.ngram_workers)
        store = open_store(weights, StoreSettings(source, *settings))
    model = DeepseekV41(config, parameters, addressing, device=options.device, numerics=numerics, row_store=store)
    return Loaded(model, tokenizer)


def _tokenizer(folder: Path, config: Config) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(path)
    if config.engram is not None:
        raise CheckpointError(
            f"{path} is missing; a model with n-gram tables needs its tokenizer to build the map of "
            f"{config.engram.compressed_vocab_size} token classes",
            param="tokenizer",
        )
    return None


def _addressing(tokenizer: Tokenizer | None, config: Config) -> Addressing | None:
    engram = config.engram
    if engram is None or tokenizer is None:
        return None
    token_map, _ = build_token_map(tokenizer)
    addressing = Addressing(
        engram.layer_ids,
        engram.num_embeddings,
        engram.max_ngram,
        engram.first_prime_above,
        engram.num_hashes,
        engram.pad_token_id,
        engram.compressed_vocab_size,
        token_map,
    )
    if config.image_token_id is not None and config.vision is not None:
        addressing.require(config.image_token_id + 1)
    return addressing
