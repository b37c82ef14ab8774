"""Rows in memory, readable while they grow."""

from lancewal.memtable.memtable import MemTable, MemTableView
from lancewal.memtable.scan import FEW_ROWS, checked_columns, deleted_rows, rows_at, scan_views, selected

__all__ = [
    "FEW_ROWS",
    "MemTable",
    "MemTableView",
    "checked_columns",
    "deleted_rows",
    "rows_at",
    "scan_views",
    "selected",
]
