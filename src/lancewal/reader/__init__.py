"""Merged reads: scans, lookups and searches of one consistent state of a table."""

from lancewal.reader.base_source import BaseSource, byte_width
from lancewal.reader.front import Queries
from lancewal.reader.lookup import LookupResult, asked_keys, is_one_key
from lancewal.reader.pruning import ShardPruner
from lancewal.reader.scan import Scan
from lancewal.reader.search import checked_nearest, checked_words, find_words, nearest, words_statistics
from lancewal.reader.snapshot import Level, Snapshot, newest_first
from lancewal.reader.source import Newer, Request, Source
from lancewal.reader.sql import run_sql
from lancewal.reader.sstable_source import SsTableSource
from lancewal.reader.state import ShardPlace, StateReader, TableState, read_state
from lancewal.reader.table_reader import FixedReader, MaxStaleness, TableReader, TableView

__all__ = [
    "BaseSource",
    "FixedReader",
    "Level",
    "LookupResult",
    "MaxStaleness",
    "Newer",
    "Queries",
    "Request",
    "Scan",
    "ShardPlace",
    "ShardPruner",
    "Snapshot",
    "Source",
    "SsTableSource",
    "StateReader",
    "TableReader",
    "TableState",
    "TableView",
    "asked_keys",
    "byte_width",
    "checked_nearest",
    "checked_words",
    "find_words",
    "is_one_key",
    "nearest",
    "newest_first",
    "read_state",
    "run_sql",
    "words_statistics",
]
