"""Rows in memory: MemTables and fixed views of them."""

from lancewal.memtable.memtable import MemTable
from lancewal.memtable.view import MemTableView

__all__ = ["MemTable", "MemTableView"]
