"""Turns token ids into the table rows of the n-gram memory: token map, look-back history, hash, row number.

Plain numpy on purpose: addresses are known as soon as the ids are, long before any layer runs, and this module can be
tested thousands of times a second. It knows neither tensors nor files. Read `memory/table.py` next.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from headrace.core.errors import CheckpointError, InternalError, UserError

DEAD = -1
"""Marks a position in a look-back array that no n-gram may cross: before the start, or inside an image span."""

_SEED_STEP = 10007
_INT64_MAX = 2**63 - 1
# the published multipliers of layer 1 for 99,092 compressed ids: a numpy release whose stream differs would address
# other, equally valid rows without any error, so every build compares against this one vector first
_PROBE_LAYER_ID, _PROBE_CLASSES = 1, 99092
_PROBE_MULTIPLIERS = (76632096046245, 4839876093313, 35959672319349, 73987337458391)

Ids = NDArray[np.int64]


class Addressing:
    """Owns the constants of one model's n-gram hash and computes row ids from them.

    Invariant: everything is fixed after construction; the state of a sequence (its last `lookback` compressed ids) is
    passed in and handed back, so row ids cannot depend on how a prompt was cut into chunks or on other sequences.

    Attributes:
        lookback: number of earlier ids a token's n-grams may use.
        columns: rows read per token and layer.
        pad: compressed id that stands for missing history.
        multipliers: [layers, N] odd int64, one per look-back distance.
        primes: [layers, N - 1, Z] bucket sizes in rows, one per n-gram size and hash head.
        offsets: [layers, C] first row of each column's bucket range in the layer's table.
    """

    def __init__(
        self,
        layer_ids: Sequence[int],
        num_embeddings: Sequence[int],
        max_ngram: int,
        first_prime_above: int,
        num_hashes: int,
        pad_token_id: int,
        compressed_vocab_size: int,
        token_map: ArrayLike,
    ) -> None:
        """Build multipliers, primes and offsets and check them against the checkpoint's own numbers.

        Args:
            layer_ids: ids of the layers that own a table, in order.
            num_embeddings: rows of each of those tables.
            max_ngram: longest n-gram N, at least 2.
            first_prime_above: where the search for primes starts (itself included).
            num_hashes: hash heads Z per n-gram size.
            pad_token_id: raw id whose compressed id stands for missing history.
            compressed_vocab_size: number of classes the token map must have.
            token_map: [V] compressed id of every raw id.

        Raises:
            CheckpointError: the token map or the table sizes contradict the configuration.
            InternalError: numpy's random stream is not the one the published multipliers come from.

        Numerics: exact integers. A multiplier times any compressed id stays below 2**63.
        Source: specification 3.9.1 and 3.9.2.
        """
        _check_fields(layer_ids, num_embeddings, max_ngram, first_prime_above, num_hashes, pad_token_id)
        self.layer_ids = tuple(layer_ids)
        self.num_embeddings = tuple(num_embeddings)
        self.compressed_vocab_size = compressed_vocab_size
        self.lookback = max_ngram - 1
        self.columns = self.lookback * num_hashes
        self.token_map = _checked_map(token_map, compressed_vocab_size, pad_token_id + 1)
        self.pad = int(self.token_map[pad_token_id])
        self.multipliers = hash_multipliers(self.layer_ids, max_ngram, compressed_vocab_size)
        self.primes = hash_primes(len(self.layer_ids), max_ngram, num_hashes, first_prime_above)
        flat = self.primes.reshape(len(self.layer_ids), self.columns)
        self.offsets = np.concatenate([np.zeros_like(flat[:, :1]), np.cumsum(flat, axis=1)[:, :-1]], axis=1)
        for layer_id, rows, total in zip(self.layer_ids, self.num_embeddings, flat.sum(axis=1), strict=True):
            if rows != total:
                raise CheckpointError(
                    f"n-gram table of layer {layer_id}: the configuration says {rows} rows "
                    f"(engram_num_embeddings) but its {self.columns} primes sum to {total}",
                    param="engram_num_embeddings",
                )

    def require(self, num_ids: int) -> None:
        """Check that the token map covers raw ids 0 to `num_ids` - 1, e.g. up to the image token.

        Raises:
            CheckpointError: it is shorter.
        """
        _check_map_len(self.token_map, num_ids)

    def compress(self, ids: ArrayLike, is_dead: ArrayLike | None = None) -> Ids:
        """Map raw token ids to compressed ids.

        Args:
            ids: [T] raw token ids.
            is_dead: [T] booleans, true inside an image span; such positions become `DEAD`. None means all are alive.

        Returns:
            [T] compressed ids.

        Raises:
            UserError: an id is negative or not covered by the token map, or the two arguments differ in length.

        State: none.
        """
        raw = _as_ids(ids, "token ids")
        bad = (raw < 0) | (raw >= len(self.token_map))
        if bad.any():
            index = int(bad.argmax())
            raise UserError(
                f"token id {raw[index]} at index {index} is outside the token map of the n-gram memory; "
                f"accepted are 0 to {len(self.token_map) - 1}",
                param="token_ids",
            )
        compressed = self.token_map[raw]
        if is_dead is not None:
            dead = np.asarray(is_dead)
            if dead.dtype != np.bool_ or dead.shape != raw.shape:
                raise UserError(
                    f"the dead-position mask has shape {list(dead.shape)} and type {dead.dtype}; "
                    f"accepted is a boolean array of shape {list(raw.shape)}"
                )
            compressed[dead] = DEAD
        return compressed

    def fresh(self) -> Ids:
        """Return the look-back of a sequence that has no token yet: [lookback], all `DEAD`."""
        return np.full(self.lookback, DEAD, dtype=np.int64)

    def advance(self, compressed: ArrayLike, previous: ArrayLike) -> Ids:
        """Return the look-back array to pass with the chunk that follows `compressed`.

        Args:
            compressed: [T] compressed ids of the chunk, `DEAD` where dead; T may be 0.
            previous: [lookback] what came before the chunk, oldest first.

        Returns:
            [lookback] compressed ids, oldest first.

        Raises:
            UserError: an id is out of range or a shape is wrong.
        """
        return self._joined(compressed, previous)[-self.lookback :].copy()

    def history(self, compressed: ArrayLike, previous: ArrayLike) -> Ids:
        """Return, for every token, its own compressed id and those before it.

        Looking back stops for good at the first dead position or at the start of the sequence: that look-back and all
        longer ones read `pad`. With pad 2, `[50, DEAD, 40, 30]` at the start of a sequence (N = 3) gives rows
        `[50, 2, 2]`, `[2, 2, 2]`, `[40, 2, 2]`, `[30, 40, 2]`.

        Args:
            compressed: [T] compressed ids, `DEAD` where dead.
            previous: [lookback] the ids before them, oldest first, `DEAD` where dead or before the start.

        Returns:
            [T, N] compressed ids, column k the token k steps back.

        Raises:
            UserError: an id is out of range or a shape is wrong.

        State: none; see `advance` for the next chunk's `previous`.
        """
        joined = self._joined(compressed, previous)
        num_tokens = len(joined) - self.lookback
        # column k starts k places earlier, so that row t holds positions t, t - 1, ...
        columns = [joined[self.lookback - k : self.lookback - k + num_tokens] for k in range(self.lookback + 1)]
        steps = np.stack(columns, axis=1)
        blocked = np.logical_or.accumulate(steps == DEAD, axis=1)
        return np.where(blocked, self.pad, steps)

    def row_ids(self, history: ArrayLike) -> Ids:
        """Return the table rows of every n-gram that ends at each token.

        Args:
            history: [T, N] compressed ids, column 0 the token itself, column k the token k steps back.

        Returns:
            [T, layers, C] row ids counted from the start of each layer's table; columns ordered by n-gram size, then
            by hash head.

        Raises:
            UserError: an id is outside the compressed vocabulary or the shape is wrong.

        Numerics: exact; XOR of non-negative 63-bit products, then remainder.
        State: none.
        """
        steps = np.asarray(history)
        if steps.ndim != 2 or steps.shape[1] != self.lookback + 1 or steps.dtype.kind not in "iu":
            raise UserError(
                f"n-gram history has shape {list(steps.shape)} and type {steps.dtype}; "
                f"accepted is an integer array of shape [tokens, {self.lookback + 1}]"
            )
        self._check_compressed(steps, lowest=0)
        products = steps.astype(np.int64)[:, None, :] * self.multipliers  # [T, layers, N]
        hashes = np.bitwise_xor.accumulate(products, axis=2)[:, :, 1:]  # [T, layers, N - 1], one per n-gram size
        buckets: Ids = hashes[..., None] % self.primes
        rows: Ids = buckets.reshape(len(steps), len(self.layer_ids), self.columns) + self.offsets
        return rows

    def _joined(self, compressed: ArrayLike, previous: ArrayLike) -> Ids:
        before = _as_ids(previous, "look-back")
        if len(before) != self.lookback:
            raise UserError(f"the look-back holds {len(before)} ids; accepted are exactly {self.lookback}")
        joined = np.concatenate([before, _as_ids(compressed, "compressed ids")])
        self._check_compressed(joined, lowest=DEAD)
        return joined

    def _check_compressed(self, ids: NDArray[np.integer], lowest: int) -> None:
        bad = (ids < lowest) | (ids >= self.compressed_vocab_size)
        if bad.any():
            raise UserError(
                f"compressed id {ids[bad][0]} is outside the compressed vocabulary; "
                f"accepted are {lowest} to {self.compressed_vocab_size - 1}"
            )


def hash_multipliers(layer_ids: Sequence[int], max_ngram: int, compressed_vocab_size: int) -> Ids:
    """Draw the odd multipliers of every layer from numpy's default generator, seeded by the layer id.

    Args:
        layer_ids: layers that own a table.
        max_ngram: multipliers per layer.
        compressed_vocab_size: largest compressed id + 1; bounds the multipliers so that no product overflows.

    Returns:
        [layers, max_ngram] odd int64.

    Raises:
        CheckpointError: the compressed vocabulary is empty or so large that no multiplier is left.
        InternalError: the generator no longer yields the published values.

    Source: specification 3.9.2.
    """
    if tuple(_draw_multipliers(_PROBE_LAYER_ID, len(_PROBE_MULTIPLIERS), _PROBE_CLASSES)) != _PROBE_MULTIPLIERS:
        raise InternalError(
            f"numpy {np.__version__} does not reproduce the published n-gram hash multipliers of layer "
            f"{_PROBE_LAYER_ID}; results would be silently wrong, so use a numpy whose default_rng stream matches"
        )
    if not 0 < compressed_vocab_size <= _INT64_MAX // 2:
        raise CheckpointError(
            f"engram_compressed_vocab_size is {compressed_vocab_size}; accepted are 1 to {_INT64_MAX // 2}",
            param="engram_compressed_vocab_size",
        )
    return np.stack([_draw_multipliers(layer_id, max_ngram, compressed_vocab_size) for layer_id in layer_ids])


def _draw_multipliers(layer_id: int, count: int, compressed_vocab_size: int) -> Ids:
    bound = _INT64_MAX // compressed_vocab_size // 2
    draws = np.random.default_rng(_SEED_STEP * layer_id).integers(0, bound, size=count, dtype=np.int64)
    return 2 * draws + 1


def hash_primes(num_layers: int, max_ngram: int, num_hashes: int, first_prime_above: int) -> Ids:
    """Hand out the primes from `first_prime_above` upward, none twice, in order of layer, n-gram size, hash head.

    Returns:
        [num_layers, max_ngram - 1, num_hashes] primes.

    Source: specification 3.9.2; the published search restarts for every n-gram size but skips used primes, which is
        the same as taking them in order.
    """
    shape = (num_layers, max_ngram - 1, num_hashes)
    wanted = itertools.islice(_primes_from(first_prime_above), math.prod(shape))
    return np.fromiter(wanted, dtype=np.int64, count=math.prod(shape)).reshape(shape)


def _primes_from(start: int) -> Iterator[int]:
    for candidate in itertools.count(max(start, 2)):
        divisors = np.arange(2, math.isqrt(candidate) + 1, dtype=np.int64)
        if (candidate % divisors).all():
            yield candidate


def _check_fields(
    layer_ids: Sequence[int],
    num_embeddings: Sequence[int],
    max_ngram: int,
    first_prime_above: int,
    num_hashes: int,
    pad_token_id: int,
) -> None:
    if len(layer_ids) != len(num_embeddings):
        raise CheckpointError(
            f"engram_num_embeddings has {len(num_embeddings)} entries for {len(layer_ids)} n-gram layers",
            param="engram_num_embeddings",
        )
    if not layer_ids or len(set(layer_ids)) != len(layer_ids) or min(layer_ids) < 0:
        raise CheckpointError(
            f"engram_layer_ids is {list(layer_ids)}; accepted is a non-empty list of distinct layer ids",
            param="engram_layer_ids",
        )
    limits = (
        ("engram_max_ngram_size", max_ngram, 2),
        ("engram_n_heads", num_hashes, 1),
        ("engram_vocab_size", first_prime_above, 2),
        ("engram_pad_token_id", pad_token_id, 0),
    )
    for name, value, least in limits:
        if value < least:
            raise CheckpointError(f"{name} is {value}; accepted is {least} or more", param=name)


def _checked_map(token_map: ArrayLike, compressed_vocab_size: int, min_len: int) -> Ids:
    ids = np.asarray(token_map)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise CheckpointError(f"the token map has shape {list(ids.shape)} and type {ids.dtype}; it must list integers")
    _check_map_len(ids, min_len)
    classes = np.unique(ids)
    if len(classes) != compressed_vocab_size:
        raise CheckpointError(
            f"the token map has {len(classes)} classes but the configuration says {compressed_vocab_size} "
            "(engram_compressed_vocab_size); is this the model's own tokenizer?",
            param="engram_compressed_vocab_size",
        )
    if classes[0] != 0 or classes[-1] != len(classes) - 1:
        raise CheckpointError(
            f"the token map's {len(classes)} classes run from {classes[0]} to {classes[-1]}; "
            f"they must be numbered 0 to {len(classes) - 1}"
        )
    return ids.astype(np.int64)


def _check_map_len(token_map: NDArray[np.integer], min_len: int) -> None:
    if len(token_map) < min_len:
        raise CheckpointError(
            f"the token map covers {len(token_map)} token ids but the model needs {min_len}; "
            "is this the model's own tokenizer?"
        )


def _as_ids(ids: ArrayLike, name: str) -> Ids:
    array = np.asarray(ids)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{name} have shape {list(array.shape)} and type {array.dtype}; accepted is a list of integers")
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(_INT64_MAX))
    return array.astype(np.int64)
