"""Training step: headrace against an equal-sized Hugging Face `DeepseekV4ForCausalLM`, forward, backward and AdamW.

Both run in this process, in turn, on the same token ids, in float32 with every quantiser off, and both move their
parameters with the same fused `torch.optim.AdamW`. Hidden size, layers, heads, head, query and output ranks, rotary
dimensions, window, streams and their 20 normalisations, experts, experts per token, expert width, shared expert, index
heads, index picks and vocabulary are equal; the parameter counts are printed and differ by a few per cent.

What cannot be equal, because headrace runs V4.1 and the library V4:

* V4.1 has an encoder and a decoder half: one layer of windows only, two layers over entries of two tokens, three over
  entries of one token; three of them choose with an index, two reuse a choice. V4 has here one layer of windows only
  and, alternating as it is released, three layers with an index over entries of 4 tokens (CSA) and two that read every
  entry of 128 tokens (HCA). So headrace reads at least as many entries per token as the library has to.
* V4 compresses anew, and projects its index keys anew, in every layer with entries; V4.1 does it in two layers.
* The index learns on neither side: without an index loss no gradient reaches it.
* The library attends to all pairs of positions behind a mask and offers no other way for this model ("eager" only);
  its experts run in its default way, grouped products. headrace reads a window and the picked entries.
* n-gram memory, draft layers and candidate pools are left out.

headrace multiplies float32 through oneDNN and has compiled gradients for streams, attention, SwiGLU and weights
(docs/training.md); the library multiplies as PyTorch does by default, where no setting was found that is faster. Both
compute in float32 throughout. Without compiled kernels short rows miss the bound.

Model FLOP are what the mathematics asks for, whoever computes it: 6 per token and matrix parameter that the token uses,
12 per head dimension and pair of query and entry that it may look at; the index is not counted. The product beside them
is PyTorch's own. Bound: at least twice the tokens per CPU-second at every length, short rows first: there the library's
quadratic attention costs it least.
"""

import argparse
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from headrace.kernels.native.library import available, why_absent
from headrace.models.deepseek_v41.architecture import Config, Yarn
from headrace.train.allocator import keep_freed_memory
from headrace.train.data.packing import IGNORE
from headrace.train.graph import Document, GraphOptions, TrainGraph
from headrace.train.losses import cross_entropy
from headrace.train.masters import init_masters

from ._measure import Figure, interleaved, parser, report, time_figure, timed

TOKENS = 4096  # of a step, whatever the length
LENGTHS = (256, 512, 1024, 2048)
MIN_RATIO = 2.0
RATE = 1e-4
CSA, HCA = 4, 128  # tokens per entry of the library's layers, as released
_UNUSED = ("embed", "index")  # parts of names: looked up, or not taught


@dataclass(frozen=True)
class Side:
    """One of the two: a training step over token ids [B, T], its parameters, and the model FLOP of a token by length.

    `flop` maps a length to FLOP per token.
    """

    step: Callable[[np.ndarray], None]
    num_parameters: int
    flop: Callable[[int], float]


def model(hidden_size: int) -> Config:
    """Return headrace's configuration; everything else is a share of the hidden size or fixed."""
    return Config(
        vocab_size=4096,
        hidden_size=hidden_size,
        num_layers=6,
        num_heads=4,
        head_dim=64,
        rope_dim=16,
        q_lora_rank=hidden_size // 2,
        o_lora_rank=64,
        o_groups=2,
        window=64,
        norm_eps=1e-6,
        max_positions=4096,
        rope_theta=1e4,
        compress_rope_theta=1.6e5,
        yarn=Yarn(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_positions=1024),
        compress_ratios=(0, 2, 2, 1, 1, 1),
        kv_sources=(1, 3),
        index_sources=(1, 3, 5),
        index_heads=4,
        index_head_dim=32,
        index_topk=128,
        candidate_source=None,
        candidate_blocks=0,
        candidate_block_size=1,
        num_experts=8,
        experts_per_token=2,
        expert_dim=hidden_size * 3 // 4,
        route_scale=1.5,
        swiglu_limit=10.0,
        num_streams=4,
        sinkhorn_iterations=20,
        hc_eps=1e-6,
        engram=None,
        draft=None,
        vision=None,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        image_token_id=None,
    )


def headrace_side(config: Config) -> Side:
    """Build this package's model."""
    masters = init_masters(config, seed=1, embedding_deviation=0.1)
    graph = TrainGraph(masters, None)
    optimizer = torch.optim.AdamW(masters.parameters.values(), lr=RATE, fused=True)

    def step(ids: np.ndarray) -> None:
        labels = np.concatenate([ids[:, 1:], np.full((len(ids), 1), IGNORE)], 1)
        output = graph.forward([Document(row) for row in ids], GraphOptions())
        judged = cross_entropy(output.hidden_TD, output.head, torch.from_numpy(labels.reshape(-1)))
        (judged.numerator / judged.count).backward()
        optimizer.step()
        optimizer.zero_grad()

    sizes = {name: parameter.numel() for name, parameter in masters.parameters.items() if parameter.dim() > 1}
    entries = [partial(_picked, config=config, ratio=ratio) if ratio else None for ratio in config.compress_ratios]
    return Side(step, _count(masters.parameters), partial(_flop, sizes, config, entries))


def library_side(config: Config) -> Side:
    """Build the library's model with the same sizes.

    Raises:
        ImportError: the library is not installed.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM  # noqa: PLC0415 - an optional package

    types = ["sliding_attention", *(["compressed_sparse_attention", "heavily_compressed_attention"] * 3)]
    torch.manual_seed(1)
    made = DeepseekV4ForCausalLM(
        DeepseekV4Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            moe_intermediate_size=config.expert_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            partial_rotary_factor=config.rope_dim / config.head_dim,
            q_lora_rank=config.q_lora_rank,
            o_lora_rank=config.o_lora_rank,
            o_groups=config.o_groups,
            num_experts_per_tok=config.experts_per_token,
            n_routed_experts=config.num_experts,
            routed_scaling_factor=config.route_scale,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_eps,
            layer_types=types[: config.num_layers],
            compress_rates={"compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA},
            mlp_layer_types=["moe"] * config.num_layers,
            hc_mult=config.num_streams,
            hc_sinkhorn_iters=config.sinkhorn_iterations,
            sliding_window=config.window,
            index_n_heads=config.index_heads,
            index_head_dim=config.index_head_dim,
            index_topk=config.index_topk,
        )
    )
    made.train()
    optimizer = torch.optim.AdamW(made.parameters(), lr=RATE, fused=True)

    def step(ids: np.ndarray) -> None:
        tokens = torch.from_numpy(ids)
        made(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    sizes = {name: parameter.numel() for name, parameter in made.named_parameters() if parameter.dim() > 1}
    read = {"compressed_sparse_attention": partial(_picked, config=config, ratio=CSA)}
    read["heavily_compressed_attention"] = _every_long_entry
    entries = [read.get(kind) for kind in types[: config.num_layers]]
    return Side(step, _count(dict(made.named_parameters())), partial(_flop, sizes, config, entries))


def _count(parameters: Mapping[str, torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters.values())


def _picked(positions: np.ndarray, config: Config, ratio: int) -> np.ndarray:
    return np.minimum((positions + 1) // ratio, config.index_topk)


def _every_long_entry(positions: np.ndarray) -> np.ndarray:
    return (positions + 1) // HCA


def _flop(sizes: Mapping[str, int], config: Config, entries: list[Any], length: int) -> float:
    """Return the model FLOP of a token in rows of a length."""
    used = 0.0
    for name, size in sizes.items():
        if any(part in name for part in _UNUSED):
            continue
        is_routed = ".experts." in name
        used += size * config.experts_per_token / config.num_experts if is_routed else size
    positions = np.arange(length)
    pairs = sum(
        np.minimum(positions + 1, config.window).mean() + (0.0 if read is None else read(positions).mean())
        for read in entries
    )
    return 6.0 * used + 12.0 * config.num_heads * config.head_dim * pairs


def float_product_gflops(size: int = 1536, products: int = 4) -> float:
    """Return GFLOP per CPU-second of a float32 product."""
    a, b = (torch.randn(size, size, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    torch.mm(a, b)
    took = timed(lambda: [torch.mm(a, b) for _ in range(products)])
    return 2.0 * products * size**3 / took.cpu_s / 1e9


def measure(sides: Mapping[str, Side], vocab_size: int, length: int, repetitions: int) -> list[Figure]:
    """Compare both sides at one length."""
    ids = np.random.default_rng(length).integers(3, vocab_size - 16, (TOKENS // length, length))
    products: list[float] = []
    steps: dict[str, Callable[[], object]] = {name: partial(side.step, ids) for name, side in sides.items()}
    for step in steps.values():
        step()
    samples = interleaved({**steps, "product": lambda: products.append(float_product_gflops())}, repetitions)
    took = {name: [one.cpu_s for one in samples[name]] for name in sides}
    figures = [
        time_figure(f"{length}: {name}", samples[name], f"step of {TOKENS} tokens; the other side, same run")
        for name in sides
    ]
    ratios = [theirs / ours for ours, theirs in zip(took["headrace"], took["library"], strict=True)]
    figures.append(Figure(f"{length}: tokens/s, headrace / library", "x", ratios, "same run", bound=MIN_RATIO))
    figures[-1].is_floor = True
    for name, side in sides.items():
        done = side.flop(length) * TOKENS / 1e9
        shares = [done / seconds / peak for seconds, peak in zip(took[name], products, strict=True)]
        figures.append(Figure(f"{length}: {name}, model FLOP/s", "of the product", shares, "float32 product, same run"))
    figures.append(Figure(f"{length}: float32 product", "GFLOP/CPU-s", products, "one size, 1,536"))
    return figures


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    config = model(args.hidden)
    try:
        library = library_side(config)
    except ImportError:
        print("train_step was not measured: it needs the package transformers; pip install 'headrace[bench]'.")
        return 0
    sides = {"headrace": headrace_side(config), "library": library}
    keep_freed_memory()  # as a training run does; for both sides, as they share the process
    gc.collect()
    gc.freeze()  # no step walks over the modules of both packages
    figures = [
        figure for length in args.lengths for figure in measure(sides, config.vocab_size, length, args.repetitions)
    ]
    import transformers  # noqa: PLC0415 - an optional package

    notes = {"compiled kernels": why_absent() or available()[-1]}
    notes |= {"hidden size": args.hidden, "tokens per step": TOKENS, "transformers": transformers.__version__}
    notes |= {f"parameters, {name}": f"{side.num_parameters:,}" for name, side in sides.items()}
    return report("Training step", args, figures, notes)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--hidden", type=int, default=256, metavar="D", help="hidden size, a multiple of 64 (256)")
    options.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, metavar="T", help="tokens of a row (256 512 1024 2048)"
    )
    raise SystemExit(main(options.parse_args()))
