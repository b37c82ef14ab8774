"""Keys on their way through several SSTables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from lancewal.format.bloom import BloomFilter, can_rule_out, key_hashes
from lancewal.format.keys import key_columns, key_values
from lancewal.sstable.key_order import Mask, Rows


class KeyProbe:
    """Keys to look up, encoded and hashed once however many SSTables are asked."""

    def __init__(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> None:
        """``columns`` are the key columns, in the order of the primary key."""
        self.columns = key_columns(columns)

    def __len__(self) -> int:
        return len(self.columns[0])

    @cached_property
    def values(self) -> pa.Array:
        return key_values(self.columns)

    def values_at(self, rows: Rows) -> pa.Array:
        return self.values if len(rows) == len(self) else self.values.take(pa.array(rows))

    @cached_property
    def _complete(self) -> Mask:
        """Which keys have no null: no row has such a key, and as a number a null looks like 0."""
        complete = np.ones(len(self), np.bool_)
        for column in self.columns:
            if column.null_count:
                complete &= column.is_valid().to_numpy(zero_copy_only=False)
        return complete

    @cached_property
    def _hashes(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]] | None:
        types = [column.type for column in self.columns]
        return key_hashes(self.columns) if can_rule_out(types) else None

    def candidates(self, bloom: BloomFilter | None) -> Rows:
        """The keys (by number) that an SSTable with this filter may hold."""
        possible = self._complete
        if bloom is not None and self._hashes is not None:
            possible = possible & bloom.might_contain_hashes(self._hashes)
        return np.flatnonzero(possible)
