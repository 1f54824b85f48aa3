"""The whole-sequence reference of DeepSeek-V4.1-Flash: every equation once, as it is written down.

No cache, no chunks, no fast paths: each function sees all rows of one sequence, builds dense score matrices and may
loop. It is slow on purpose and never deleted, because it is what the cached path is compared with.

Reading order: arithmetic (formats, quantisers, linears), rope, streams (the parallel residual streams), attention,
selection (which compressed entries a row may use), layer (one block), moe, engram, vision, draft, and last model, the
layer loop.

Shape letters in names: T tokens (rows), D model width, M residual streams, Q query heads, H head width, P rotary
width, R low-rank width, C compressed entries, J index heads, I index width, K picks, E experts, F expert width,
N n-gram depth, Z hash heads, U hash columns, W table-row width, V vocabulary, X drafted tokens.
"""
