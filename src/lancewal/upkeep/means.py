"""By what means a round of upkeep does its work on shards: here in this process, or elsewhere.

What is due, in which order, what is paused and what is noted is the business of the round
(:class:`lancewal.upkeep.Upkeep`). Only flush, compaction and collection depend on where they run, because
these have a part for each shard; what is about the base table alone is done by whoever runs the round.
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
from lancewal.maintenance import collect_garbage, compact, plan_compaction, process_totals
from lancewal.service import flush_through_owners
from lancewal.shard import ShardManifestStore
from lancewal.storage import ObjectStore, ordered_map

_MANIFESTS_AT_ONCE = 16

#: Rows of one commit. A merge takes two to three times that.
COMMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Done:
    """What became of some work; ``failed`` has the error of each shard, ``None`` for the table as a whole."""

    what: str = ""
    failed: Mapping[UUID | None, Exception] = field(default_factory=dict)
    #: Shards whose owner has nothing to flush with, in WAL-only mode. That is its own business.
    left: frozenset[UUID] = frozenset()


class Means(Protocol):
    """The work on shards. A shard that fails is told of, and does not stop the others."""

    def flush(self, shards: Sequence[UUID]) -> Done:
        """Move the rows of these logs to SSTables, by their owners where they have one."""

    def compact(self, shards: Sequence[UUID], stop: Callable[[], bool]) -> Done:
        """Bring their SSTables into the base table.

        Raises a :class:`~lancewal.errors.LanceWalError`, with nothing done, where there is no plan for all.
        """

    def collect(self, min_age: timedelta) -> Done:
        """Delete garbage of all shards that is so old."""


class Here(Means):
    """All in this process, one commit at a time.

    ``writer_store`` gives the store that shards are flushed with, by default the very same.
    ``most_commits`` of a shard are made in one compaction; without it all that are due.
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
        work = partial(compact, self._store, plan=plan, max_workers=1, stop=stop)
        try:
            report = process_totals.counted(self._store.uri, "compaction", work)
        except PartialWriteError as error:
            return Done(f"{len(error.written)} shards compacted", dict(error.failed.items()))
        return Done(f"{report.generations} SSTables with {report.rows_in} rows compacted")

    def collect(self, min_age: timedelta) -> Done:
        work = partial(collect_garbage, self._store, min_age=min_age)
        report = process_totals.counted(self._store.uri, "collection", work)
        return Done(f"{len(report.collected)} files ({report.num_bytes} bytes) deleted")
