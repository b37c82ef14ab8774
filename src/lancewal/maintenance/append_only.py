"""Compaction of a table without a primary key: append once, whoever dies when.

Lance cannot append and mark in one commit. What it can do in one commit is replace the list of
fragments and the columns' metadata (a ``Merge``), and it refuses that when anything has
changed the rows or the columns since the version it was made for. That gives:

1. Open the newest version and see how far it holds the shard, by marker or tag.
2. Write the rows above that as new data files. Nobody sees them yet.
3. Commit a version that has the old fragments, the new ones, and the tag "this shard is held up
   to generation g" (see :mod:`lancewal.base.markers`).
4. Commit the marker for g, by a merge of nothing.
5. Remove the tag, once for all shards (:func:`remove_tags`).

**No row is doubled.** Two compactors that both found g missing in version v both try to replace
v. Lance lets one pass; the other is refused, looks at the new version and finds the tag. This
holds however long either of them was stopped, because what counts is the version, not time.
**No row is lost**, because the marker comes after the rows. **Every reader sees each row once**:
rows and tag come in one version, and with the tag the SSTables are left out. **Who is killed**
before 3 leaves files that no version names (Lance's own cleanup removes them), after 3 a tag that
the next compaction turns into a marker.

Work of others on the table that began before step 3 and commits after it goes through (appends,
merges, updates, deletes), except what replaces fragments or columns: file compaction and schema
changes are refused by Lance then, and have to be repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

import lance
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments

from lancewal.base import (
    TAGGED_COLUMNS,
    BaseTable,
    lance_errors,
    next_fragment_id,
    tag,
    tags,
    with_column_metadata,
)
from lancewal.format import SsTableEntry, TableSchema, field_id
from lancewal.maintenance.commits import (
    AlreadyCompactedError,
    LostRaceError,
    commit_errors,
    commit_marker,
    crash_point,
    mark,
    open_base,
    until_won,
)
from lancewal.maintenance.keyed import rows_per_batch
from lancewal.maintenance.plan import ShardPlan
from lancewal.maintenance.reports import Progress, ProgressCallback, ShardReport
from lancewal.sstable import SsTable
from lancewal.storage import ObjectStore

logger = logging.getLogger(__name__)

#: A commit that stood still for longer is given up: the versions that it would have to be compared
#: with may be cleaned up by then.
_COMMIT_TIMEOUT = timedelta(seconds=30)


class AppendOnlyCompaction:
    """Brings one shard's generations into a base table that has no key."""

    def __init__(self, plan: ShardPlan, store: ObjectStore, progress: ProgressCallback | None) -> None:
        self._plan = plan
        self._store = store
        self._progress = progress
        self._report = ShardReport(plan.shard_id)
        # Data files for one schema; written once, however often the commit has to be repeated.
        self._written: _Written | None = None

    def run(self) -> ShardReport:
        name = f"compaction of shard {self._plan.shard_id}"
        _, lost = until_won(name, self._append_rest)
        _, lost_by_marker = until_won(name, self._mark)
        self._report.retries += lost + lost_by_marker
        return self._report

    def _append_rest(self) -> None:
        """Steps 1 to 3, once."""
        base = open_base(self._store)
        held = base.compacted_generation(self._plan.shard_id)
        entries = [entry for entry in self._plan.sstables if entry.generation > held]
        self._report.skipped = [e.generation for e in self._plan.sstables if e.generation <= held]
        if not entries:
            return
        written = self._written
        if written is None or not written.fits(entries, base):
            try:
                self._written = self._write(base, entries)
            except Exception:
                # SSTables that are gone were compacted and collected by others: look again.
                if open_base(self._store).compacted_generation(self._plan.shard_id) > held:
                    raise LostRaceError("the generations were compacted meanwhile") from None
                raise
            # That took its time. What is committed is made for a version that was just looked at:
            # Lance compares with the versions since, and somebody may clean those up.
            self._append_rest()
            return
        crash_point("append: files are written")
        self._commit(base, written)
        crash_point("append: rows and tag are committed")
        report = self._report
        report.generations = [entry.generation for entry in entries]
        report.rows_in = report.rows_inserted = written.rows
        report.num_bytes = self._plan.num_bytes
        report.commits += 1
        self._tell("appended")

    def _write(self, base: BaseTable, entries: Sequence[SsTableEntry]) -> _Written:
        """Step 2."""
        reader = pa.RecordBatchReader.from_batches(base.schema.plain, self._rows(entries, base.schema))
        with commit_errors(f"write the rows of shard {self._plan.shard_id}", commits=False):
            fragments = write_fragments(
                reader,
                base.dataset,
                mode="append",
                data_storage_version=base.storage_version,
                storage_options=dict(self._store.storage_options) or None,
            )
        return _Written([entry.generation for entry in entries], base.schema, list(fragments))

    def _rows(self, entries: Sequence[SsTableEntry], schema: TableSchema) -> Iterator[pa.RecordBatch]:
        for entry in entries:
            table = SsTable.open(self._store, self._plan.shard_id, entry)
            yield from table.scan(schema, schema.names, batch_size=rows_per_batch(entry))

    def _commit(self, base: BaseTable, written: _Written) -> None:
        """Step 3."""
        dataset = base.dataset
        with lance_errors(f"read the manifest of {base.uri}"):
            first = next_fragment_id(dataset)
            present = [fragment.metadata for fragment in dataset.get_fragments()]
        for number, fragment in enumerate(written.fragments, first):
            fragment.id = number
        outdated = _stale_tags(base)
        new_tag = tag(self._plan.shard_id, written.generations[-1])

        def tagged(place: int, metadata: Mapping[str, bytes]) -> Mapping[str, bytes]:
            kept = {key: value for key, value in metadata.items() if key not in outdated}
            return {**kept, new_tag: b""} if place < TAGGED_COLUMNS else kept

        operation = lance.LanceOperation.Merge(
            [*present, *written.fragments],
            with_column_metadata(dataset.lance_schema, tagged),
            # No column is new: others may go on appending.
            preserves_nullability=True,
        )
        with commit_errors(f"append the rows of shard {self._plan.shard_id}"):
            lance.LanceDataset.commit(
                dataset,
                operation,
                read_version=dataset.version,
                storage_options=dict(self._store.storage_options) or None,
                # A second try of Lance's own would be made for the same, outdated version.
                max_retries=0,
                commit_timeout=_COMMIT_TIMEOUT,
                commit_message="lancewal: append compacted generations",
            )

    def _mark(self) -> None:
        """Step 4, also for a tag that somebody else left."""
        base = open_base(self._store)
        held = base.compacted_generation(self._plan.shard_id)
        if base.details.compacted.get(self._plan.shard_id, 0) < held:
            try:
                commit_marker(base.dataset, self._plan.shard_id, held)
            except AlreadyCompactedError as error:
                logger.debug("marked by another compactor: %s", error)
            else:
                self._report.commits += 1
        crash_point("append: the marker is committed")
        self._tell("marked")

    def _tell(self, step: str) -> None:
        if self._progress is not None:
            self._progress(
                Progress(self._plan.shard_id, step, self._plan.through, self._report.rows_inserted)
            )


@dataclass(frozen=True)
class _Written:
    """Data files of some generations, written for some columns."""

    generations: list[int]
    schema: TableSchema
    fragments: list[FragmentMetadata]

    def fits(self, entries: Sequence[SsTableEntry], base: BaseTable) -> bool:
        """Whether they can be committed as the rows of ``entries``."""
        same_rows = self.generations == [entry.generation for entry in entries]
        same_columns = _numbered(self.schema.columns) == _numbered(base.schema.columns)
        return same_rows and same_columns and not base.schema.replaced_since(self.schema.version)

    @property
    def rows(self) -> int:
        return sum(fragment.physical_rows for fragment in self.fragments)


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


def unmarked_tags(base: BaseTable) -> dict[UUID, int]:
    """The shards with a tag above their marker: an append whose marker is still to come."""
    stored = base.details.compacted
    pending: dict[UUID, int] = {}
    for shard_id, generation in tags(base.schema.columns).values():
        if generation > stored.get(shard_id, 0):
            pending[shard_id] = max(pending.get(shard_id, 0), generation)
    return pending


def mark_pending(store: ObjectStore) -> list[UUID]:
    """Finish appends that were interrupted before their marker; the shards it was done for."""
    done = []
    for shard_id, generation in unmarked_tags(open_base(store)).items():
        try:
            mark(store, shard_id, generation)
        except AlreadyCompactedError:
            continue
        done.append(shard_id)
    return done


def remove_tags(store: ObjectStore) -> bool:
    """Step 5: remove the tags that markers cover; whether there were any.

    Needed for nothing but tidiness: a tag at or below its marker means nothing.
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
