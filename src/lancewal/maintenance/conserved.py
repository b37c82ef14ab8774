"""Checks that every row gets from the log to an SSTable, and from there to the base table, exactly once.

A flush notes a checksum of the rows that it writes, their *sum* (:mod:`lancewal.format.row_sum`).
Three comparisons follow a row:

1. The log entries that a flush covered are compared with the sum that the flush noted, while they exist.
2. The rows of an SSTable are compared with the sum that the flush noted.
3. The base table is compared with what was compacted. With a key: the newest rows of the compacted SSTables
   must be in it, while those SSTables exist. Without a key: a compaction notes the sum of the rows that it
   appends in its commit, and the fragments of that version must have this sum.

In a table with a key, the third comparison also reports rows that somebody deleted from the base table
directly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from uuid import UUID

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.base import BaseTable, lance_errors
from lancewal.errors import LanceWalError
from lancewal.format import (
    TOMBSTONE,
    RowSum,
    ShardManifest,
    SsTableEntry,
    TableSchema,
    WalEntry,
    field_id,
    key_values,
    key_words,
    row_hashes,
    row_keys,
)
from lancewal.maintenance.newest import newest_rows
from lancewal.shard import is_flushed
from lancewal.sstable import KeyOrder, SsTable
from lancewal.storage import ObjectStore, layout

logger = logging.getLogger(__name__)

#: Properties of a commit that appended rows: their sum, and the first and last of the new fragments.
SUM_PROPERTY = "lancewal:sum"
_RECENT_COMMITS = 100


@dataclass
class LogRange:
    """The log entries that became one SSTable: those in ``positions`` that ``before`` had not flushed."""

    before: ShardManifest
    sstable: SsTableEntry
    positions: range
    _hashes: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    _keys: list[list[pa.Array]] = field(default_factory=list)
    _seen: int = 0
    _columns: set[tuple[int, ...]] = field(default_factory=set)
    _versions: set[int | None] = field(default_factory=set)

    def add(self, entry: WalEntry, primary_key: Sequence[str]) -> None:
        """Add the rows of one entry of these positions."""
        self._seen += 1
        if entry.sentinel or is_flushed(self.before, entry.position, entry.generation):
            return
        self._versions.add(entry.base_version)
        for batch in entry.batches:
            self._columns.add(_numbers(batch.schema))
            if all(name in batch.schema.names for name in primary_key):
                self._hashes.append(row_hashes(batch, primary_key))
                self._keys.append([batch.column(name) for name in primary_key])

    def sum(self, table: SsTable, schema: TableSchema) -> RowSum | None:
        """The sum of the entries' newest rows; ``None`` if entries are gone or have other columns."""
        try:
            stored = _numbers(table.stored_columns)
        except LanceWalError:
            return None
        replaced = any(schema.replaced_since(version) for version in self._versions)
        if self._seen < len(self.positions) or self._columns != {stored} or replaced or -1 in stored:
            return None
        hashes = np.concatenate(self._hashes)
        if schema.primary_key:
            columns = [pa.concat_arrays(parts) for parts in zip(*self._keys, strict=True)]
            newest = KeyOrder.of(columns).newest
            hashes = hashes if newest is None else hashes[newest]
        return RowSum.of_hashes(hashes)


def _numbers(columns: pa.Schema) -> tuple[int, ...]:
    return tuple(field_id(column) for column in columns if column.name != TOMBSTONE)


def log_ranges(history: Sequence[ShardManifest]) -> dict[int, LogRange]:
    """The flushes that ``history`` shows, by each of the log positions that they covered.

    ``history`` holds versions of a manifest, oldest first. Staged SSTables are left out, because they did not
    come through the log.
    """
    found: dict[int, LogRange] = {}
    for before, after in pairwise(history):
        cursors = before.replay_after_wal_entry_position, after.replay_after_wal_entry_position
        known = {entry.path for entry in before.sstables}
        new = [entry for entry in after.sstables if entry.path not in known]
        if after.version != before.version + 1 or len(new) != 1 or cursors[0] >= cursors[1]:
            continue
        if layout.parse_sstable_name(new[0].path) == new[0].generation:
            positions = range(cursors[0] + 1, cursors[1] + 1)
            found.update(dict.fromkeys(positions, LogRange(before, new[0], positions)))
    return found


@dataclass(frozen=True)
class Compacted:
    """The run of SSTables of a shard that ends at its marker and is still listed, without a gap."""

    shard_id: UUID
    marker: int
    sstables: Sequence[SsTableEntry]

    @classmethod
    def of(cls, shard_id: UUID, marker: int, history: Iterable[ShardManifest]) -> Compacted:
        listed = {entry.generation: entry for manifest in history for entry in manifest.sstables}
        kept: list[SsTableEntry] = []
        while (entry := listed.get(marker - len(kept))) is not None:
            kept.append(entry)
        return cls(shard_id, marker, kept[::-1])


def missing_keys(
    base: BaseTable, store: ObjectStore, shards: Iterable[Compacted]
) -> Iterator[tuple[UUID, int]]:
    """The shards with compacted live keys that the base table does not have, and how many keys.

    Reads the keys of the base table once. Holds nine bytes in memory for each compacted key.
    """
    expected = {}
    for shard in shards:
        if shard.marker == base.compacted_generation(shard.shard_id) and shard.sstables:
            words = _live_keys(base, store, shard)
            if len(words):
                expected[shard.shard_id] = words, np.zeros(len(words), np.bool_)
    if not expected:
        return
    names = list(base.schema.primary_key)
    with lance_errors("compare the base table with what was compacted"):
        for rows in base.dataset.scanner(columns=names).to_batches():
            present = key_words(row_keys(rows, names))
            for words, seen in expected.values():
                places = np.minimum(np.searchsorted(words, present), len(words) - 1)
                seen[places[words[places] == present]] = True
    for shard_id, (_, seen) in expected.items():
        if not seen.all():
            yield shard_id, int(np.count_nonzero(~seen))


def _live_keys(base: BaseTable, store: ObjectStore, shard: Compacted) -> npt.NDArray[np.uint64]:
    """The keys whose newest compacted version is not a delete, sorted; empty if SSTables are gone."""
    try:
        newest = newest_rows(store, shard.shard_id, shard.sstables, base.schema)
    except LanceWalError as error:
        logger.debug("the base table is not compared with shard %s: %s", shard.shard_id, error)
        return np.empty(0, np.uint64)
    words = key_words(newest.keys)
    dead = key_words(key_values(newest.dead)) if newest.dead else words[:0]
    return np.asarray(np.setdiff1d(words, dead), np.uint64)


def sum_property(rows: RowSum, fragments: range) -> Mapping[str, str]:
    """The commit property that notes the sum of the appended rows and their fragments."""
    return {SUM_PROPERTY: f"{rows.rows} {rows.value:016x} {fragments.start} {fragments.stop}"}


def wrong_appends(base: BaseTable) -> Iterator[tuple[int, RowSum, RowSum]]:
    """Versions whose appended rows do not have the sum that their commit states, with both sums.

    Looks at the newest commits that still exist. Reads each in its own version, so later changes to the rows
    do not matter.
    """
    for version in range(max(1, base.version - _RECENT_COMMITS + 1), base.version + 1):
        try:
            with lance_errors(f"read version {version} of {base.uri}"):
                transaction = base.dataset.read_transaction(version)
                text = (getattr(transaction, "transaction_properties", None) or {}).get(SUM_PROPERTY)
                if text is None:
                    continue
                rows, value, first, end = text.split()
                noted = RowSum(int(rows), int(value, 16))
                found = _sum_of_fragments(base.dataset.checkout_version(version), range(int(first), int(end)))
        except LanceWalError as error:
            logger.debug("not compared with its commit: %s", error)
            continue
        if found != noted:
            yield version, noted, found


def _sum_of_fragments(dataset: lance.LanceDataset, numbers: range) -> RowSum:
    fragments = [each for each in dataset.get_fragments() if each.fragment_id in numbers]
    return RowSum.of(dataset.scanner(fragments=fragments).to_batches(), ()) if fragments else RowSum()
