"""Staged SSTables: no manifest lists them yet, and the tasks that write them claim no shard.

A task writes rows of any shards into directories of its own and reports them to the process that
commits. Directories that are not committed are garbage: no reader ever looks at them.

The name of a staged directory has a random number above every generation, so that two tasks never
collide; publishing gives it its generation. Garbage collection must leave staged directories
alone for ``STAGED_DELETION_AGE``, because the job that wrote them may still be running.
Publishing refuses directories that are older than half of that.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.errors import InvalidInputError
from lancewal.format import SsTableEntry
from lancewal.index import maintained_specs
from lancewal.shard import Shard, ShardRouter
from lancewal.sstable import write_sstable
from lancewal.storage import ObjectStore, boot_time, layout

#: How long a staged directory is safe from garbage collection.
STAGED_DELETION_AGE = timedelta(hours=24)
#: The least number in the name of a staged directory; no shard is ever flushed so often.
FIRST_STAGED_NUMBER = 1 << 62

#: A task writes its rows out when it holds this many bytes.
DEFAULT_STAGING_BYTES = 256 << 20
#: About how large one SSTable may get. A compaction needs several commits for a larger one.
MAX_SSTABLE_BYTES = 256 << 20


@dataclass(frozen=True)
class Staged:
    """One SSTable that waits to be published. SSTables of a shard are published by ``order``."""

    shard: Shard
    entry: SsTableEntry
    order: tuple[int, ...]
    staged_at: float


class StagedAge:
    """How old staged SSTables are: until now by the clocks of their tasks, from now on by our own clock."""

    def __init__(self, seconds: float) -> None:
        self._before = seconds
        self._since = boot_time()

    @classmethod
    def of(cls, staged: Sequence[Staged]) -> StagedAge:
        now = time.time()
        return cls(now - min((each.staged_at for each in staged), default=now))

    @property
    def seconds(self) -> float:
        return self._before + boot_time() - self._since

    def refuse_old(self) -> None:
        """Refuse SSTables that garbage collection might take for abandoned before they are published."""
        limit = STAGED_DELETION_AGE.total_seconds() / 2
        age = self.seconds
        if age > limit:
            raise InvalidInputError(
                f"rows were staged {age / 3600:.1f} hours ago, and what is older than {limit / 3600:.0f} "
                "hours is not published, because garbage collection may remove it; write the data again in "
                "smaller jobs"
            )


def is_staged(directory_name: str) -> bool:
    """Whether a directory of a shard was made by a task, published or not.

    >>> is_staged("0123abcd_gen_4611686018427387999"), is_staged("0123abcd_gen_7")
    (True, False)
    """
    number = layout.parse_sstable_name(directory_name)
    return number is not None and number >= FIRST_STAGED_NUMBER


@dataclass
class _Buffer:
    shard: Shard
    batches: list[pa.RecordBatch] = field(default_factory=list)
    num_bytes: int = 0


class Stager:
    """Splits rows by shard and writes them as staged SSTables; memory is bounded by ``max_bytes``."""

    def __init__(
        self,
        base: BaseTable,
        store: ObjectStore,
        router: ShardRouter,
        *,
        order: Sequence[int] = (),
        max_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        """``order`` is the prefix of the order of this task's SSTables; the task adds its own count."""
        self._base = base
        self._store = store
        self._router = router
        self._order = tuple(order)
        self._max_bytes = max_bytes
        self._indexes = maintained_specs(
            base.dataset,
            base.details.maintained_indexes,
            base.details.maintain_all_indexes,
            base.details.writer_config_defaults,
            strict=False,
        )
        self._row_sums = ShardWriterConfig.from_defaults(base.details.writer_config_defaults).row_sums
        self._buffers: dict[UUID, _Buffer] = {}
        self._held = 0
        self._staged: list[Staged] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows in ``base.schema.stored``; later rows of a key replace earlier ones."""
        for shard, rows in self._router.route(batch):
            buffer = self._buffers.setdefault(shard.shard_id, _Buffer(shard))
            buffer.batches.append(rows)
            buffer.num_bytes += rows.nbytes
            self._held += rows.nbytes
            if buffer.num_bytes >= MAX_SSTABLE_BYTES:
                self._write(buffer)
        while self._held > self._max_bytes:
            self._write(max(self._buffers.values(), key=lambda each: each.num_bytes))

    def finish(self) -> list[Staged]:
        """Write the remaining rows; returns all SSTables of this task in the order of their rows."""
        while self._buffers:
            self._write(next(iter(self._buffers.values())))
        return self._staged

    def _write(self, buffer: _Buffer) -> None:
        entry = write_sstable(
            store=self._store,
            shard_id=buffer.shard.shard_id,
            generation=FIRST_STAGED_NUMBER | secrets.randbits(61),
            schema=self._base.schema,
            batches=buffer.batches,
            storage_version=self._base.storage_version,
            indexes=self._indexes,
            row_sums=self._row_sums,
        )
        order = (*self._order, len(self._staged))
        self._staged.append(Staged(buffer.shard, entry, order, time.time()))
        self._held -= buffer.num_bytes
        del self._buffers[buffer.shard.shard_id]
