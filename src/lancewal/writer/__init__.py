"""Puts and deletes: one writer per shard, and one per table that routes to them."""

from lancewal.config import ShardWriterConfig
from lancewal.writer.drain import (
    DrainBudget,
    Drained,
    drain_shard,
    flush_shard,
    flush_shards,
    seal_shard,
    unseal_shard,
)
from lancewal.writer.intake import Cast, Intake, is_condition
from lancewal.writer.matching import Find, Matching
from lancewal.writer.modes import InMemoryMemTables, MemTableStats
from lancewal.writer.open import (
    live_writer,
    open_shard_writer,
    open_writers,
    written,
)
from lancewal.writer.put_ids import RETRY_WINDOW
from lancewal.writer.rows import (
    as_batches,
    is_key_sequence,
    is_stream,
    is_tabular,
    new_table_of,
    streamed_batches,
)
from lancewal.writer.shard_writer import Durability, ShardWriter, WalStats, WriteResult
from lancewal.writer.state import WriteStats, WriteStatsSnapshot
from lancewal.writer.table_writer import TableWriter, TableWriteResult

__all__ = [
    "RETRY_WINDOW",
    "Cast",
    "DrainBudget",
    "Drained",
    "Durability",
    "Find",
    "InMemoryMemTables",
    "Intake",
    "Matching",
    "MemTableStats",
    "ShardWriter",
    "ShardWriterConfig",
    "TableWriteResult",
    "TableWriter",
    "WalStats",
    "WriteResult",
    "WriteStats",
    "WriteStatsSnapshot",
    "as_batches",
    "drain_shard",
    "flush_shard",
    "flush_shards",
    "is_condition",
    "is_key_sequence",
    "is_stream",
    "is_tabular",
    "live_writer",
    "new_table_of",
    "open_shard_writer",
    "open_writers",
    "seal_shard",
    "streamed_batches",
    "unseal_shard",
    "written",
]
