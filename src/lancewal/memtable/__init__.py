"""Rows in memory, readable while they grow."""

from lancewal.memtable.memtable import (
    BATCH_OVERHEAD_BYTES,
    FEW_ROWS,
    MemTable,
    MemTableView,
    RowsSoFar,
    deleted_rows,
    scan_views,
)

__all__ = [
    "BATCH_OVERHEAD_BYTES",
    "FEW_ROWS",
    "MemTable",
    "MemTableView",
    "RowsSoFar",
    "deleted_rows",
    "scan_views",
]
