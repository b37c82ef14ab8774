"""Merged reads: one consistent state of base table, SSTables, WAL tails and live MemTables."""

from lancewal.reader.lookup import LookupResult, lookup
from lancewal.reader.row_source import SHARD_ID, SOURCE
from lancewal.reader.scan import Scan
from lancewal.reader.snapshot import ShardSnapshot, Snapshot
from lancewal.reader.table_reader import TableReader

__all__ = ["SHARD_ID", "SOURCE", "LookupResult", "Scan", "ShardSnapshot", "Snapshot", "TableReader", "lookup"]
