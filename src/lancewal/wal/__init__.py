"""The write-ahead log of a shard: append, tail, replay."""

from lancewal.format.wal_entry import WalEntry
from lancewal.wal.appender import AppendResult, WalAppender
from lancewal.wal.tailer import WalTailer

__all__ = ["AppendResult", "WalAppender", "WalEntry", "WalTailer"]
