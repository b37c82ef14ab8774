"""Flushed MemTables: small Lance datasets, written once and read by key, filter and search."""

from lancewal.sstable.key_index import KeyOrder, KeyProbe
from lancewal.sstable.lineage import (
    EarlierTable,
    check_rows_in_log,
    copied_marker,
    copy_of,
    earlier_table,
    held_generation,
    is_entry_of_earlier_table,
    lift,
    take_over,
    unknown_entries,
)
from lancewal.sstable.notes import SsTableNotes
from lancewal.sstable.opened import forget_sstable, keep_sstables
from lancewal.sstable.reader import ROW_OFFSET, SsTable
from lancewal.sstable.storable import (
    check_storable,
    needs_present_structs,
    present_values,
    refuse_null_structs,
    without_dead_values,
)
from lancewal.sstable.writer import rebuild_sidecars, write_sstable

__all__ = [
    "ROW_OFFSET",
    "EarlierTable",
    "KeyOrder",
    "KeyProbe",
    "SsTable",
    "SsTableNotes",
    "check_rows_in_log",
    "check_storable",
    "copied_marker",
    "copy_of",
    "earlier_table",
    "forget_sstable",
    "held_generation",
    "is_entry_of_earlier_table",
    "keep_sstables",
    "lift",
    "needs_present_structs",
    "present_values",
    "rebuild_sidecars",
    "refuse_null_structs",
    "take_over",
    "unknown_entries",
    "without_dead_values",
    "write_sstable",
]
