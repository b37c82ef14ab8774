"""What actors of all kinds share: the one shard, how they write to it, what may fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

import pyarrow as pa

from lancewal.config import ShardWriterConfig
from lancewal.errors import (
    ConflictError,
    FencedError,
    OutcomeUnknownError,
    PartialWriteError,
    ShardOwnedError,
    StorageError,
)
from lancewal.shard import Shard

SHARD = UUID(int=7)
CONFIG = ShardWriterConfig(fsync=False, durable_write=True, stats_log_interval=None)
#: Every put fills a MemTable.
SMALL = replace(CONFIG, max_memtable_rows=3)
WAL_ONLY = ShardWriterConfig(fsync=False, durable_write=True, stats_log_interval=None, enable_memtable=False)
#: What a call may raise where storage fails or others take over; anything else is a bug.
EXPECTED = (
    FencedError,
    ConflictError,
    StorageError,
    OutcomeUnknownError,
    PartialWriteError,
    ShardOwnedError,
)


class _OneShard:
    """Routes all rows to one shard, as the router of a table does that is not sharded."""

    def route(self, batch: pa.RecordBatch) -> list[tuple[Shard, pa.RecordBatch]]:
        return [(Shard(SHARD, 0, ()), batch)]


ONE_SHARD: Any = _OneShard()


@contextmanager
def replaced(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Attributes of modules have other values within the block."""
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)
