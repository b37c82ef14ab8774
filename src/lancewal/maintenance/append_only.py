"""Compaction of a table without a primary key: appends each row once, even if compactors are killed.

Lance cannot append and mark in one commit. It can replace the list of fragments and the columns' metadata
in one commit (a ``Merge``), and it refuses that commit if anything has changed the rows or the columns since
the version that the commit was made for. So the steps are:

1. Open the newest version and see how far it holds each shard, by marker or tag.
2. Write the rows of all later generations, of all shards together, as new data files. No reader sees them
   yet.
3. Commit a version that has the old fragments, the new ones, and for each shard the tag "this shard is held
   up to generation g" (see :mod:`lancewal.base.markers`).
4. Commit the markers, with a merge that has no rows.
5. Remove the tags, once for all shards (:func:`remove_tags`).

If another compactor has compacted a shard after step 1, or a shard cannot be read, the files are written
again without it.

**No row is doubled.** Two compactors that both found g missing in version v both try to replace
v. Lance lets one pass; the other is refused, looks at the new version and finds the tag. This
holds however long either of them was stopped, because what counts is the version, not time.
**No row is lost**, because the marker comes after the rows. **Every reader sees each row once**:
rows and tag come in one version, and with the tag the SSTables are left out. **A compactor that is killed**
before step 3 leaves files that no version names, and Lance's own cleanup removes them. After step 3 it
leaves a tag, and the next compaction turns the tag into a marker.

Other work on the table that began before step 3 and commits after it succeeds (appends, merges, updates,
deletes), unless it replaces fragments or columns. Lance refuses such work (file compaction, schema
changes), and it has to be repeated.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

import lance
import pyarrow as pa
from lance.dataset import LANCE_COMMIT_MESSAGE_KEY
from lance.fragment import FragmentMetadata, write_fragments

from lancewal.base import (
    TAGGED_COLUMNS,
    BaseTable,
    lance_errors,
    next_fragment_id,
    open_base,
    tag,
    tags,
    unmarked_tags,
    with_column_metadata,
)
from lancewal.format import RowSum, SsTableEntry, TableSchema, field_id
from lancewal.maintenance.commits import (
    AlreadyCompactedError,
    LostRaceError,
    commit_errors,
    commit_markers,
    crash_point,
    until_won,
)
from lancewal.maintenance.conserved import sum_property
from lancewal.maintenance.newest import Generations, rows_per_batch
from lancewal.maintenance.plan import ShardPlan
from lancewal.maintenance.reports import PackReport, Progress, ProgressCallback, ShardReport
from lancewal.sstable import SsTable
from lancewal.storage import ObjectStore

logger = logging.getLogger(__name__)

#: A commit that takes longer than this is given up: the versions that Lance would have to compare it
#: with may have been cleaned up.
_COMMIT_TIMEOUT = timedelta(seconds=30)

_MESSAGE = "lancewal: append compacted generations"


class AppendOnlyCompaction:
    """Appends generations of shards to a base table without a key; ``base`` is for the first attempt."""

    def __init__(
        self,
        parts: Sequence[ShardPlan],
        store: ObjectStore,
        progress: ProgressCallback | None,
        base: BaseTable | None = None,
    ) -> None:
        self._parts = {part.shard_id: part for part in parts}
        self._store = store
        self._progress = progress
        self._base = base
        self._report = PackReport({shard_id: ShardReport(shard_id) for shard_id in self._parts})
        # Data files for one schema. They are written once, even if the commit has to be retried.
        self._written: _Written | None = None

    def run(self) -> PackReport:
        report = self._report
        name = f"compaction of {len(self._parts)} shards"
        try:
            for step in (self._append_rest, self._mark):
                _, lost = until_won(name, step)
                report.retries += lost
                for shard in report.shards.values():
                    shard.retries += lost
        except Exception as error:
            report.failed.update({each: error for each in self._parts if each not in report.failed})
        return report

    def _append_rest(self) -> None:
        """Steps 1 to 3, once."""
        while True:
            base, self._base = self._base or open_base(self._store), None
            entries: dict[UUID, list[SsTableEntry]] = {}
            for shard_id, part in self._parts.items():
                held = base.compacted_generation(shard_id)
                self._report.shards[shard_id].skipped = [g for g in part.generations if g <= held]
                missing = [entry for entry in part.sstables if entry.generation > held]
                if missing and shard_id not in self._report.failed:
                    entries[shard_id] = missing
            if not entries:
                return
            written = self._written
            if written is not None and written.fits(entries, base):
                break
            # Writing takes a while, so look at the newest version again before the commit. Lance compares
            # the commit with all versions since the one that it is made for, and others may clean those up.
            self._written = self._write(base, entries)
        crash_point("append: files are written")
        self._commit(base, written)
        crash_point("append: rows and tag are committed")
        self._report.commits += 1
        self._report.rows_inserted += sum(written.rows.values())
        for shard_id, generations in written.generations.items():
            report, rows = self._report.shards[shard_id], written.rows[shard_id]
            report.generations = generations
            report.rows_in = report.rows_upserted = report.rows_inserted = rows
            report.num_bytes = self._parts[shard_id].num_bytes
            report.commits += 1
        self._tell("appended", written.generations)

    def _write(self, base: BaseTable, entries: Generations) -> _Written | None:
        """Step 2; ``None`` if a shard has failed, so that the others have to be written without it."""
        rows: Counter[UUID] = Counter()
        failed: dict[UUID, Exception] = {}
        sums: list[RowSum] = []
        batches = self._rows(entries, base.schema, rows, failed, sums)
        try:
            with commit_errors("write the rows of a compaction", commits=False):
                fragments = write_fragments(
                    pa.RecordBatchReader.from_batches(base.schema.plain, batches),
                    base.dataset,
                    mode="append",
                    data_storage_version=base.storage_version,
                    storage_options=dict(self._store.storage_options) or None,
                )
        except Exception:
            # Missing SSTables may have been compacted and collected by others: look again.
            newest = open_base(self._store)
            if any(newest.compacted_generation(each) > base.compacted_generation(each) for each in entries):
                raise LostRaceError("generations were compacted meanwhile") from None
            if not failed:
                raise
            self._report.failed.update(failed)
            return None
        generations = {each: [entry.generation for entry in some] for each, some in entries.items()}
        return _Written(generations, base.schema, list(fragments), rows, sum(sums, RowSum()))

    def _rows(
        self,
        entries: Generations,
        schema: TableSchema,
        rows: Counter[UUID],
        failed: dict[UUID, Exception],
        sums: list[RowSum],
    ) -> Iterator[pa.RecordBatch]:
        """All rows of all shards.

        Counts the rows of each shard in ``rows``, appends the sum of each batch to ``sums``, and notes a
        shard that cannot be read in ``failed``.
        """
        for shard_id, some in entries.items():
            try:
                for entry in some:
                    table = SsTable.open(self._store, shard_id, entry)
                    before = rows[shard_id]
                    for batch in table.scan(schema, schema.names, batch_size=rows_per_batch(entry)):
                        rows[shard_id] += batch.num_rows
                        sums.append(RowSum.of([batch], ()))
                        yield batch
                    table.check_count(rows[shard_id] - before)
            except Exception as error:
                failed[shard_id] = error
                raise

    def _commit(self, base: BaseTable, written: _Written) -> None:
        """Step 3."""
        dataset = base.dataset
        with lance_errors(f"read the manifest of {base.uri}"):
            first = next_fragment_id(dataset)
            present = [fragment.metadata for fragment in dataset.get_fragments()]
        for number, fragment in enumerate(written.fragments, first):
            fragment.id = number
        outdated = _stale_tags(base)
        new_tags = {tag(each, generations[-1]): b"" for each, generations in written.generations.items()}

        def tagged(place: int, metadata: Mapping[str, bytes]) -> Mapping[str, bytes]:
            kept = {key: value for key, value in metadata.items() if key not in outdated}
            return {**kept, **new_tags} if place < TAGGED_COLUMNS else kept

        added = range(first, first + len(written.fragments))
        said = {LANCE_COMMIT_MESSAGE_KEY: _MESSAGE, **sum_property(written.sum, added)}
        operation = lance.LanceOperation.Merge(
            [*present, *written.fragments],
            with_column_metadata(dataset.lance_schema, tagged),
            # No column is new, so others may keep appending.
            preserves_nullability=True,
        )
        with commit_errors("append the rows of a compaction"):
            lance.LanceDataset.commit(
                dataset,
                lance.Transaction(dataset.version, operation, transaction_properties=said),
                storage_options=dict(self._store.storage_options) or None,
                # Lance's own retry would be made for the same, outdated version.
                max_retries=0,
                commit_timeout=_COMMIT_TIMEOUT,
            )

    def _mark(self) -> None:
        """Step 4, also for tags that another compactor left."""
        base = open_base(self._store)
        stored = base.details.compacted
        held = {each: base.compacted_generation(each) for each in self._parts}
        unmarked = {each: generation for each, generation in held.items() if stored.get(each, 0) < generation}
        if unmarked:
            _mark_all(base, unmarked)
            self._report.commits += 1
            for shard_id in unmarked:
                self._report.shards[shard_id].commits += 1
        crash_point("append: the marker is committed")
        self._tell("marked", [each for each in self._parts if each not in self._report.failed])

    def _tell(self, step: str, shards: Iterable[UUID]) -> None:
        if self._progress is not None:
            for shard_id in shards:
                rows = self._report.shards[shard_id].rows_upserted
                self._progress(Progress(shard_id, step, self._parts[shard_id].through, rows))


@dataclass(frozen=True)
class _Written:
    """Data files of some generations, the schema they were written for, and their rows per shard."""

    generations: Mapping[UUID, list[int]]
    schema: TableSchema
    fragments: list[FragmentMetadata]
    rows: Mapping[UUID, int]
    sum: RowSum

    def fits(self, entries: Generations, base: BaseTable) -> bool:
        """Whether they can be committed as the rows of ``entries``."""
        same_rows = self.generations == {
            each: [entry.generation for entry in some] for each, some in entries.items()
        }
        same_columns = _numbered(self.schema.columns) == _numbered(base.schema.columns)
        return same_rows and same_columns and not base.schema.replaced_since(self.schema.version)


def _numbered(fields: Iterable[pa.Field]) -> list[object]:
    """Names, types and field ids, nested ones too; other metadata, such as tags, does not count."""
    return [
        (
            field.name,
            field.type,
            field_id(field),
            _numbered(field.type.field(i) for i in range(field.type.num_fields)),
        )
        for field in fields
    ]


def _stale_tags(base: BaseTable) -> set[str]:
    """Tags whose generation a marker covers."""
    stored = base.details.compacted
    return {
        key
        for key, (shard_id, generation) in tags(base.schema.columns).items()
        if generation <= stored.get(shard_id, 0)
    }


def mark_pending(store: ObjectStore) -> list[UUID]:
    """Commit the markers of appends that were interrupted before step 4; returns their shards."""

    def attempt() -> list[UUID]:
        base = open_base(store)
        pending = unmarked_tags(base.details.compacted, base.schema.columns)
        if pending:
            _mark_all(base, pending)
        return list(pending)

    return until_won("marking finished appends", attempt)[0]


def _mark_all(base: BaseTable, markers: Mapping[UUID, int]) -> None:
    try:
        commit_markers(base.dataset, markers)
    except AlreadyCompactedError as error:
        raise LostRaceError(f"another compactor marked one of them: {error}") from error


def remove_tags(store: ObjectStore) -> bool:
    """Step 5: remove the tags that markers cover; returns whether there were any.

    This only tidies up: a tag at or below its marker has no effect.
    """

    def attempt() -> bool:
        base = open_base(store)
        outdated = _stale_tags(base)
        if not outdated:
            return False
        changes = {
            field.name: {key: None for key in outdated if key.encode() in (field.metadata or {})}
            for field in base.schema.columns
        }
        with commit_errors("remove the tags of finished appends"):
            base.dataset.update_field_metadata({name: keys for name, keys in changes.items() if keys})
        return True

    removed, _ = until_won("removing tags", attempt)
    crash_point("append: the tag is removed")
    return removed
