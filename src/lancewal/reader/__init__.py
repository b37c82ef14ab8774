"""Merged reads: one consistent state of a table, scanned, looked up and searched."""

from lancewal.reader.lookup import LookupResult, lookup
from lancewal.reader.pruning import ShardIdentity, ShardPruner
from lancewal.reader.scan import Scan
from lancewal.reader.source import SHARD_ID, SOURCE, Request, newest_first
from lancewal.reader.sstable_source import KeyedSsTable, SsTableSource
from lancewal.reader.state import (
    ShardPlace,
    ShardReader,
    ShardSnapshot,
    Snapshot,
    TableState,
    ordered,
    read_state,
)
from lancewal.reader.table_reader import TableReader, full_text_search, vector_search

__all__ = [
    "SHARD_ID",
    "SOURCE",
    "KeyedSsTable",
    "LookupResult",
    "Request",
    "Scan",
    "ShardIdentity",
    "ShardPlace",
    "ShardPruner",
    "ShardReader",
    "ShardSnapshot",
    "Snapshot",
    "SsTableSource",
    "TableReader",
    "TableState",
    "full_text_search",
    "lookup",
    "newest_first",
    "ordered",
    "read_state",
    "vector_search",
]
