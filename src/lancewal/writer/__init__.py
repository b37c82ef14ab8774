"""Writers: one per shard, and one that routes a table's rows to them."""

from lancewal.writer.config import ShardWriterConfig
from lancewal.writer.open import open_shard_writer
from lancewal.writer.results import (
    Durability,
    InMemoryMemTables,
    MemTableStats,
    WalStats,
    WriteResult,
)
from lancewal.writer.shard_writer import ShardWriter
from lancewal.writer.stats import WriteStats, WriteStatsSnapshot

__all__ = [
    "Durability",
    "InMemoryMemTables",
    "MemTableStats",
    "ShardWriter",
    "ShardWriterConfig",
    "WalStats",
    "WriteResult",
    "WriteStats",
    "WriteStatsSnapshot",
    "open_shard_writer",
]
