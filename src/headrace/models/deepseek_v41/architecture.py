"""What one DeepSeek-V4.1-Flash model is: the numbers of its configuration, under headrace's own names.

Values only. `config.py` reads and writes the two published spellings, `config_rules.py` says which values fit
together, `plan.py` derives what each layer does.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """How rotary frequencies of layers with a compression ratio above 0 are stretched; no attention temperature."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_positions: int


@dataclass(frozen=True, kw_only=True)
class Engram:
    """Hashed n-gram tables.

    `num_embeddings` holds the rows of each layer's table: the sum of that layer's primes, which are searched above
    `first_prime_above`, `num_hashes` of them for every n-gram size from 2 to `max_ngram`.
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram: int
    first_prime_above: int
    num_hashes: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def num_columns(self) -> int:
        """Table rows looked up per token and layer."""
        return (self.max_ngram - 1) * self.num_hashes


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The DSpark draft module: `num_layers` blocks that propose `block_size` tokens from taps of the backbone."""

    num_layers: int
    block_size: int
    noise_token_id: int
    tap_layers: tuple[int, ...]
    markov_rank: int
    num_experts: int
    experts_per_token: int


@dataclass(frozen=True, kw_only=True)
class Vision:
    """The image tower and what an image may cost; `max_wh_ratio` None means any shape of image is taken as it is."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class Config:
    """One DeepSeek-V4.1-Flash model.

    `compress_ratios` has one entry per layer, draft layers last: 0 window only, r = also attend to entries that stand
    for r tokens. `candidate_source` None means that no layer builds a candidate pool; `engram`, `draft` and `vision`
    None mean that the model has no such part.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    window: int
    norm_eps: float
    max_positions: int

    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn

    compress_ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source: int | None
    candidate_blocks: int
    candidate_block_size: int

    num_experts: int
    experts_per_token: int
    expert_dim: int
    route_scale: float
    swiglu_limit: float

    num_streams: int
    sinkhorn_iterations: int
    hc_eps: float

    engram: Engram | None
    draft: Draft | None
    vision: Vision | None

    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None

    expert_dtype: str = "fp4"
    block: int = 32

    @property
    def cut(self) -> int:
        """First decoder layer: the last layer that writes global KV."""
        return self.kv_sources[-1]

    @property
    def mix_width(self) -> int:
        """Mixing coefficients per half layer: one pre and one post per stream, and a square of streams."""
        return (2 + self.num_streams) * self.num_streams

    @property
    def num_draft_layers(self) -> int:
        """Draft layers, counted after the backbone's."""
        return self.draft.num_layers if self.draft else 0
