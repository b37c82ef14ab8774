"""One flushed MemTable on storage: written, read, and its sidecars repaired."""

from lancewal.sstable.notes import SsTableNotes
from lancewal.sstable.null_structs import (
    needs_present_structs,
    present_values,
    refuse_null_structs,
    without_dead_values,
)
from lancewal.sstable.probe import KeyProbe
from lancewal.sstable.reader import ROW_OFFSET, SsTable
from lancewal.sstable.sidecars import rebuild_sidecars
from lancewal.sstable.trial import check_storable
from lancewal.sstable.writer import write_sstable

__all__ = [
    "ROW_OFFSET",
    "KeyProbe",
    "SsTable",
    "SsTableNotes",
    "check_storable",
    "needs_present_structs",
    "present_values",
    "rebuild_sidecars",
    "refuse_null_structs",
    "without_dead_values",
    "write_sstable",
]
