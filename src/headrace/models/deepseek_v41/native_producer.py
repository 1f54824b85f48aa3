"""Global entries and index keys of one KV source on native kernels."""

import torch
from torch import Tensor

from headrace.kernels.native.compress import Compressor, NewRows, Places
from headrace.kernels.native.library import Library
from headrace.kernels.native.product import Product
from headrace.kernels.native.room import Rooms
from headrace.kernels.rope import rotation
from headrace.models.deepseek_v41.attention import Frequencies, Turn
from headrace.models.deepseek_v41.batch import Rows, Segment
from headrace.models.deepseek_v41.config import Config
from headrace.models.deepseek_v41.parameters import CompressorWeights, LayerWeights
from headrace.models.deepseek_v41.tiled import TiledCompressor

_MOST_TURNS, _FEW = 64, 16


class EntryTurns:
    """Rotations of new entries, made once where several sources store the same ones."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int, int], Turn] = {}

    def of(self, row: int, entries: int, ratio: int, frequencies: Tensor) -> Turn:
        """Return cosines and sines of the positions of entries `row` onwards."""
        wanted = (row, entries, ratio, id(frequencies))
        found = self._made.get(wanted)
        if found is None:
            if len(self._made) >= _MOST_TURNS:
                self._made.clear()
            found = rotation(torch.arange(row, row + entries) * ratio, frequencies)
            if entries <= _FEW:
                self._made[wanted] = found
        return found


class NativeProducer:
    """Appends to the sequences' stores, as `LayerAttention.produce` does."""

    def __init__(
        self,
        library: Library,
        layer: LayerWeights,
        weights: CompressorWeights,
        tiled: TiledCompressor,
        config: Config,
        frequencies: Frequencies,
        rooms: Rooms,
    ) -> None:
        self._plan = layer.plan
        self._frequencies = frequencies.of(layer.plan)
        self._turns: EntryTurns = rooms.shared("turns of entries", EntryTurns)
        is_pair = tiled.gate is not None
        kinds = {"is_quantised": False, "is_float": is_pair}
        parts = [
            rooms.tensor(part, config.head_dim, torch.float32 if is_pair else torch.bfloat16)
            for part in ("entry values", "entry gates")
        ]
        self._kv = Product(library, tiled.kv, room=parts[0], **kinds)
        self._gate = None if tiled.gate is None else Product(library, tiled.gate, room=parts[1], **kinds)
        self._compressor = Compressor(
            library, weights.norm, tiled.index_key, weights.index_key_norm, rotated=config.rope_dim, eps=config.norm_eps
        )

    def produce(self, rows: Rows, u_TD: Tensor) -> None:
        """Append the rows' entries and index keys."""
        values = self._kv(u_TD)
        gates = None if self._gate is None else self._gate(u_TD)
        for segment in rows.segments:
            self._append(segment, values[segment.rows], None if gates is None else gates[segment.rows])

    def _append(self, segment: Segment, values: Tensor, gates: Tensor | None) -> None:
        store = segment.state.stores[self._plan.id]
        row, ratio = store.length, store.ratio
        entries = (segment.first + segment.count) // ratio - row
        skipped = store.admit(entries)
        history = None
        if gates is not None:
            pair = segment.state.pairs[self._plan.id]
            pair.advance(segment.first, segment.count)
            history = pair.rows
        new = NewRows(values, gates, history, segment.first, row, entries, skipped)
        turn = self._turns.of(row, entries, ratio, self._frequencies)
        self._compressor(new, turn, Places(store.planes, *store.block_rows))
