"""The part of :class:`lancewal.Table` that keeps a table in shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from uuid import UUID

from lancewal import activity
from lancewal.maintenance import (
    CompactionPlan,
    CompactionReport,
    Finding,
    GcReport,
    Progress,
    RepairReport,
    Resource,
    Retention,
    VerifyReport,
    collect_garbage,
    compact,
    plan_compaction,
    repair,
    verify,
)
from lancewal.objects import ObjectStore
from lancewal.reader import TableReader


class TableMaintenance:
    """Compaction, garbage collection and verification; none of them needs or disturbs a writer."""

    _store: ObjectStore
    _reader: TableReader

    def plan_compaction(self, shards: Sequence[UUID | str] | None = None) -> CompactionPlan:
        """What :meth:`compact` would do now; can be looked at, stored, and passed to it."""
        return plan_compaction(self._reader.base(), self._store, shards)

    def compact(
        self,
        shards: Sequence[UUID | str] | None = None,
        *,
        plan: CompactionPlan | None = None,
        optimize_indexes: bool = False,
        compact_files: bool = False,
        progress: Callable[[Progress], object] | None = None,
    ) -> CompactionReport:
        """Bring all flushed generations into the base table, where plain Lance reads them.

        Safe beside live writers, readers, other compactors and direct writes to the base; may
        be killed and repeated at any point. Rows in MemTables and WALs stay there: call
        :meth:`flush` first to include them. ``optimize_indexes`` then brings the base's indexes
        up to date, ``compact_files`` joins its small files.
        """
        with activity.compaction(self._store.uri) as record:
            return record(
                compact(
                    self._reader.base(),
                    self._store,
                    shards,
                    plan=plan,
                    optimize_indexes=optimize_indexes,
                    compact_files=compact_files,
                    progress=progress,
                )
            )

    def gc(
        self,
        dry_run: bool = False,
        min_age: timedelta | None = None,
        *,
        retention: Retention | None = None,
        resources: Iterable[Resource | str] | None = None,
        shards: Sequence[UUID | str] | None = None,
    ) -> GcReport:
        """Delete what nobody needs any more: compacted SSTables, covered WAL entries, leftovers.

        ``dry_run`` deletes nothing and reports the same. ``min_age`` is how old garbage must
        be, for all kinds alike (a day by default; WAL entries never less than ten minutes);
        ``retention`` sets it kind by kind.
        """
        with activity.collection(self._store.uri) as record:
            return record(
                collect_garbage(
                    self._reader.base(),
                    self._store,
                    retention=retention,
                    min_age=min_age,
                    resources=resources,
                    shards=shards,
                    dry_run=dry_run,
                )
            )

    def verify(
        self,
        shards: Sequence[UUID | str] | None = None,
        *,
        deep: bool = True,
        progress: Callable[[UUID], object] | None = None,
    ) -> VerifyReport:
        """Check every invariant of the table on storage; ``report.ok`` says whether all hold.

        ``deep`` reads all rows that are not compacted, the retained WAL and the base's keys.
        """
        return verify(self._reader.base(), self._store, shards, deep=deep, progress=progress)

    def repair(
        self, findings: Sequence[Finding] | None = None, *, earlier: str | None = None
    ) -> RepairReport:
        """Rebuild what can be rebuilt without touching a row: hints, key indexes, bloom filters.

        Where the table is a copy, its shards' generations are numbered above the copied markers,
        which fences their writers. ``earlier`` decides on rows that shards have from before the table
        was made anew at its place: "keep" has them count as the newest, "drop" takes them out.
        """
        return repair(self._reader.base(), self._store, findings, earlier=earlier)
