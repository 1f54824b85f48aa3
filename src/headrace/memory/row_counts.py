"""What reading n-gram rows took, layer by layer: counts that add up."""

from dataclasses import dataclass, field


@dataclass
class RowReads:
    """Rows of one layer's table.

    Attributes:
        requested: rows asked for: columns times tokens.
        unique: of those, what is left when each batch counts a row once.
        hits: requested rows for which nothing was read: kept in the row cache, or asked for twice in a batch.
        read: rows that came from the source; always `requested - hits`.
        read_bytes: their bytes.
        unused: requested rows of tokens that were announced and then never ran.
        wait_s: seconds that the layer stood still for rows.
    """

    requested: int = 0
    unique: int = 0
    hits: int = 0
    read: int = 0
    read_bytes: int = 0
    unused: int = 0
    wait_s: float = 0.0

    def add(self, other: "RowReads", sign: int = 1) -> None:
        """Add another's counts, or take them away with `sign` -1."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + sign * value)


@dataclass
class NgramReads:
    """Counts of all layers with tables, by layer id."""

    layers: dict[int, RowReads] = field(default_factory=dict)

    def of(self, layer_id: int) -> RowReads:
        """Return the counts of one layer, to be added to."""
        return self.layers.setdefault(layer_id, RowReads())

    def add(self, other: "NgramReads", sign: int = 1) -> None:
        """Add another's counts, or take them away with `sign` -1."""
        for layer_id, reads in other.layers.items():
            self.of(layer_id).add(reads, sign)

    def since(self, before: "NgramReads") -> "NgramReads":
        """Return what was added after `before`."""
        grown = NgramReads()
        grown.add(self)
        grown.add(before, -1)
        return grown

    @property
    def total(self) -> RowReads:
        """All layers together."""
        found = RowReads()
        for reads in self.layers.values():
            found.add(reads)
        return found
