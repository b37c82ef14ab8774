"""Rows in memory, readable while they grow."""

from lancewal.memtable.memtable import (
    FEW_ROWS,
    MemTable,
    MemTableView,
    RowsSoFar,
    checked_columns,
    deleted_rows,
    scan_views,
    selected,
)

__all__ = [
    "FEW_ROWS",
    "MemTable",
    "MemTableView",
    "RowsSoFar",
    "checked_columns",
    "deleted_rows",
    "scan_views",
    "selected",
]
