"""One flushed MemTable on storage: written, read, and its sidecars repaired."""

from lancewal.sstable.notes import SsTableNotes
from lancewal.sstable.null_structs import needs_present_structs, refuse_null_structs
from lancewal.sstable.probe import KeyProbe
from lancewal.sstable.reader import ROW_OFFSET, SsTable
from lancewal.sstable.sidecars import rebuild_sidecars
from lancewal.sstable.writer import write_sstable

__all__ = [
    "ROW_OFFSET",
    "KeyProbe",
    "SsTable",
    "SsTableNotes",
    "needs_present_structs",
    "rebuild_sidecars",
    "refuse_null_structs",
    "write_sstable",
]
