"""How a round of upkeep does its work on shards: in this process, or elsewhere.

The round (:class:`lancewal.upkeep.Upkeep`) decides what is due, in which order, and what is paused, and
records the results. Only flush, compaction and collection have a part for each shard and can run elsewhere.
The process that runs the round does the work on the base table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Protocol
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.errors import PartialWriteError, ShardOwnedError
from lancewal.maintenance import collect_garbage, compact, plan_compaction
from lancewal.service import flush_through_owners
from lancewal.shard import ShardManifestStore
from lancewal.storage import ObjectStore, ordered_map, process_totals

_MANIFESTS_AT_ONCE = 16

#: Bytes of rows in one commit. A merge needs two to three times as much memory.
COMMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Done:
    """The result of some work; ``failed`` has errors by shard, under ``None`` that of the whole table."""

    what: str = ""
    failed: Mapping[UUID | None, Exception] = field(default_factory=dict)
    #: Shards whose owner cannot flush, because it is in WAL-only mode. They are left alone.
    left: frozenset[UUID] = frozenset()


class Means(Protocol):
    """Does the work on shards. A failed shard is reported, and does not stop the others."""

    def flush(self, shards: Sequence[UUID]) -> Done:
        """Flush the logs of these shards to SSTables, through their owners if they have one."""

    def compact(self, shards: Sequence[UUID], stop: Callable[[], bool]) -> Done:
        """Merge the shards' SSTables into the base table.

        Raises a :class:`~lancewal.errors.LanceWalError` if they cannot be planned; then nothing was done.
        """

    def collect(self, min_age: timedelta) -> Done:
        """Delete garbage of all shards that is at least ``min_age`` old."""


class Here(Means):
    """Does all work in this process, one commit at a time.

    ``writer_store`` returns the store that shards are flushed with, by default ``store``. A compaction makes
    at most ``most_commits`` per shard; by default all that are due.
    """

    def __init__(
        self,
        store: ObjectStore,
        read_base: Callable[[], BaseTable],
        *,
        writer_store: Callable[[BaseTable, ShardWriterConfig], ObjectStore] | None = None,
        most_commits: int | None = None,
    ) -> None:
        self._store = store
        self._read_base = read_base
        self._writer_store = writer_store or (lambda base, config: store)
        self._most_commits = most_commits

    def flush(self, shards: Sequence[UUID]) -> Done:
        base = self._read_base()
        config = ShardWriterConfig.from_defaults(
            base.details.writer_config_defaults,
            max_memtable_size=COMMIT_BYTES,
            max_unflushed_memtable_bytes=2 * COMMIT_BYTES,
            stats_log_interval=None,
        )
        store = self._writer_store(base, config)
        manifests = list(
            ordered_map(
                lambda shard: ShardManifestStore(store, shard).require_latest(),
                shards,
                1 if store.is_local else _MANIFESTS_AT_ONCE,
            )
        )
        errors: Mapping[UUID, Exception] = {}
        try:
            flush_through_owners(base, manifests, store, config)
        except PartialWriteError as error:
            errors = error.failed
        left = frozenset(shard for shard, each in errors.items() if isinstance(each, ShardOwnedError))
        failed: dict[UUID | None, Exception] = {s: e for s, e in errors.items() if s not in left}
        return Done(f"{len(manifests) - len(errors)} logs flushed", failed, left)

    def compact(self, shards: Sequence[UUID], stop: Callable[[], bool]) -> Done:
        plan = plan_compaction(self._store, shards, max_commit_bytes=COMMIT_BYTES)
        if self._most_commits is not None:
            plan = plan.first(self._most_commits)
        work = partial(compact, self._store, plan=plan, stop=stop)
        try:
            report = process_totals.counted(self._store.uri, "compaction", work)
        except PartialWriteError as error:
            return Done(f"{len(error.written)} shards compacted", dict(error.failed.items()))
        return Done(f"{report.generations} SSTables with {report.rows_in} rows compacted")

    def collect(self, min_age: timedelta) -> Done:
        work = partial(collect_garbage, self._store, min_age=min_age)
        report = process_totals.counted(self._store.uri, "collection", work)
        return Done(f"{len(report.collected)} files ({report.num_bytes} bytes) deleted")
