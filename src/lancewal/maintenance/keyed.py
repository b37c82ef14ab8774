"""Compaction of a table with a primary key: one merge per group of generations.

Each commit brings whole generations, and its marker with them. Lance refuses a marker that
is not above the stored one when it commits, not when the merge begins. So of two compactors that
work on the same generations one succeeds, and a late one, however long it was stopped, changes
nothing: there is no commit without a marker, whose rows could land under somebody else's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.format.shard_manifest import SsTableEntry
from lancewal.maintenance import points
from lancewal.maintenance.commits import (
    AlreadyCompactedError,
    JoinTooLargeError,
    LostRaceError,
    commit_errors,
    merge_builder,
    until_won,
)
from lancewal.maintenance.dead_keys import is_dead
from lancewal.maintenance.newest_rows import NewestRows, newest_rows
from lancewal.maintenance.plan import CommitPlan, ShardPlan
from lancewal.maintenance.report import Progress, ProgressCallback, ShardReport
from lancewal.markers import appended_generations
from lancewal.objects import ObjectStore

logger = logging.getLogger(__name__)

#: Where the base has so many times the rows of the source, an index on the key is faster than
#: reading the key column once.
_INDEX_PAYS_FROM = 500
#: Lance joins through an index within a fixed pool of memory, 300 MB by default.
_INDEXED_BYTES = 64 << 20
#: Above this the source is streamed, and Lance holds the keys of the base in memory instead.
_MATERIALIZED_BYTES = 2 << 30


class KeyedCompaction:
    """Brings one shard's generations into a base table that has a key."""

    def __init__(self, plan: ShardPlan, store: ObjectStore, progress: ProgressCallback | None) -> None:
        self._plan = plan
        self._store = store
        self._progress = progress
        self._report = ShardReport(plan.shard_id)

    def run(self) -> ShardReport:
        for commit in self._plan.commits:
            _, lost = until_won(
                f"compaction of shard {self._plan.shard_id}", lambda commit=commit: self._merge_rest(commit)
            )
            self._report.retries += lost
        return self._report

    def _merge_rest(self, commit: CommitPlan) -> None:
        """Merge what the base does not hold of one commit's generations."""
        base = BaseTable.open(self._store.uri, self._store.storage_options, store=self._store)
        held = appended_generations(base).get(self._plan.shard_id, 0)
        rest = [entry for entry in commit.sstables if entry.generation > held]
        self._skip([entry for entry in commit.sstables if entry.generation <= held])
        if not rest:
            return
        try:
            self._merge(base, rest, commit.num_bytes)
        except AlreadyCompactedError as error:
            raise LostRaceError(str(error)) from error
        except Exception:
            # SSTables that are gone were compacted and collected by others: look again.
            if self._held() > held:
                raise LostRaceError("the generations were compacted meanwhile") from None
            raise

    def _merge(self, base: BaseTable, entries: Sequence[SsTableEntry], num_bytes: int) -> None:
        schema, through = base.schema, entries[-1].generation
        rows = newest_rows(self._store, self._plan.shard_id, entries, schema)
        count = rows.num_rows
        materialized = num_bytes <= _MATERIALIZED_BYTES
        source: pa.Table | pa.RecordBatchReader
        if materialized:
            source = pa.Table.from_batches(rows.batches(), schema.plain)
        else:
            source = pa.RecordBatchReader.from_batches(schema.plain, rows.batches())
        points.reached("merge: rows are read")
        use_index = materialized and self._index_pays(base, rows, source)
        try:
            stats = self._execute(base, rows, source, through, use_index)
        except JoinTooLargeError:
            if not use_index:
                raise
            stats = self._execute(base, rows, source, through, False)
        points.reached("merge: rows and marker are committed")
        report = self._report
        report.generations += [entry.generation for entry in entries]
        report.rows_in += rows.rows_in
        report.rows_inserted += stats["num_inserted_rows"]
        report.rows_updated += stats["num_updated_rows"]
        report.rows_deleted += stats["num_deleted_rows"]
        report.num_bytes += source.nbytes if materialized else num_bytes
        report.commits += 1
        logger.info(
            "compacted generations %d to %d: %d rows, %d keys deleted",
            entries[0].generation,
            through,
            count,
            rows.num_dead,
            extra={"shard": str(self._plan.shard_id), "generation": through},
        )
        if self._progress is not None:
            self._progress(Progress(self._plan.shard_id, "merged", through, report.rows_upserted))

    def _execute(
        self,
        base: BaseTable,
        rows: NewestRows,
        source: pa.Table | pa.RecordBatchReader,
        through: int,
        use_index: bool,
    ) -> dict[str, int]:
        key = list(base.schema.primary_key)
        builder = merge_builder(base.dataset, key, self._plan.shard_id, through)
        builder = builder.when_matched_update_all().when_not_matched_insert_all().use_index(use_index)
        if rows.num_dead:
            # Any such clause makes Lance read the whole key column, so only where it is needed.
            builder = builder.when_not_matched_by_source_delete(is_dead(key, rows.dead))
        if use_index:
            # Lance counts the memory of a slice as that of the array it was cut from.
            source = source.combine_chunks()
        with commit_errors(f"compact shard {self._plan.shard_id} up to generation {through}"):
            stats: dict[str, int] = builder.execute(source)
        return stats

    def _index_pays(self, base: BaseTable, rows: NewestRows, source: pa.Table) -> bool:
        if rows.num_dead or len(base.schema.primary_key) != 1 or source.nbytes > _INDEXED_BYTES:
            return False
        key_id = base.schema.field_ids[base.schema.primary_key[0]]
        indexed = any(index.field_ids == (key_id,) for index in base.manifest.indexes)
        return indexed and base.dataset.count_rows() > _INDEX_PAYS_FROM * source.num_rows

    def _held(self) -> int:
        base = BaseTable.open(self._store.uri, self._store.storage_options, store=self._store)
        return appended_generations(base).get(self._plan.shard_id, 0)

    def _skip(self, entries: Sequence[SsTableEntry]) -> None:
        known = {*self._report.skipped, *self._report.generations}
        self._report.skipped += [entry.generation for entry in entries if entry.generation not in known]
