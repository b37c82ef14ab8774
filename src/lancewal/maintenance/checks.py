"""The checks of one shard: history, manifests, WAL, SSTables and their columns."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.base import BaseTable, fragments_of
from lancewal.errors import (
    ColumnMismatchError,
    CorruptManifestError,
    DifferentHistoryError,
    LanceWalError,
    StorageError,
    WalCorruptError,
)
from lancewal.format import (
    TOMBSTONE,
    ShardManifest,
    SsTableEntry,
    TableSchema,
    WalEntry,
    column_sources,
    field_id,
    key_values,
)
from lancewal.maintenance.conserved import LogRange, log_ranges
from lancewal.maintenance.plan import pending_sstables
from lancewal.maintenance.reports import Finding, Kind, Severity
from lancewal.shard import (
    ShardManifestStore,
    WalTailer,
    missing_positions,
    retained_positions,
)
from lancewal.sstable import (
    SsTable,
    SsTableNotes,
    check_rows_in_log,
    copied_marker,
    copy_of,
    held_generation,
)
from lancewal.storage import ObjectStore, Task, beside, both, layout, numbered, ordered_map

logger = logging.getLogger(__name__)

_SIDECARS = (layout.PK_PAGE_DATA_NAME, layout.PK_PAGE_LOOKUP_NAME, layout.BLOOM_FILTER_NAME)
_SHARD_DIRECTORIES = ("manifest", "wal")


@dataclass
class ShardCheck:
    """One check of one shard. ``deep`` reads rows, not only metadata."""

    store: ObjectStore
    base: BaseTable
    shard_id: UUID
    manifest: ShardManifest
    marker: int
    deep: bool
    #: How many WAL entries, SSTables or versions of the manifest are read in parallel.
    readers: int
    #: The SSTables that the versions of the manifest name that were read.
    once_listed: set[str] = field(default_factory=set)
    #: The names of the directories in the shard's directory.
    directories: list[str] = field(default_factory=list)
    #: The retained versions of the manifest that were read, oldest first.
    history: list[ShardManifest] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)

    def found(
        self, kind: Kind, severity: Severity, subject: str, text: str, generation: int | None = None
    ) -> None:
        self.findings.append(Finding(kind, severity, subject, text, self.shard_id, generation))

    def apart(self, check: Callable[[ShardCheck], object]) -> ShardCheck:
        """Run a check and collect its findings apart, for :meth:`add`, so that checks can run in parallel."""
        part = replace(self, once_listed=set(), directories=[], findings=[], checked=Counter())
        if check is _check_versions:
            part.history = []
        check(part)
        return part

    def add(self, part: ShardCheck) -> None:
        self.once_listed |= part.once_listed
        self.directories += part.directories
        if part.history is not self.history:
            self.history += part.history
        self.findings += part.findings
        self.checked.update(part.checked)


def check_shard(shard: ShardCheck) -> None:
    """All checks of one shard; in parallel on remote storage."""
    # The versions come first: the check of the log compares it with the flushes that they show.
    versions, _ = both(
        lambda: shard.apart(_check_versions),
        lambda: _check_lineage(shard),
        at_once=not shard.store.is_local,
    )
    shard.add(versions)
    _check_generations(shard)
    checks = (_check_hint, _check_wal, _check_sstables, _list_directories)
    for part in ordered_map(shard.apart, checks, 1 if shard.store.is_local else len(checks)):
        shard.add(part)
    _check_directories(shard)


def _check_lineage(shard: ShardCheck) -> None:
    """Check that the shard and the base table share one history.

    Sets the shard's marker, the newest generation that the base holds. The other checks use it.
    """
    base, store, manifest = shard.base, shard.store, shard.manifest
    where = layout.manifest_file(shard.shard_id, manifest.version)
    marker = base.compacted_generation(shard.shard_id)
    try:
        shard.marker, entry = both(
            lambda: held_generation(base, store, manifest),
            lambda: _first_unflushed(shard),
            at_once=not store.is_local,
        )
        if entry is not None:
            check_rows_in_log(base, store, entry.shard_id, entry.base_version)
    except DifferentHistoryError as error:
        kind = Kind.MARKER_ABOVE_MANIFEST if marker >= manifest.current_generation else Kind.EARLIER_TABLE
        shard.found(kind, Severity.ERROR, where, str(error), marker or None)
        return
    copy = copy_of(store)
    copied = 0 if copy is None else copy.markers.get(shard.shard_id, 0)
    passed = [
        entry.generation for entry in manifest.sstables if entry.generation <= min(copied, shard.marker)
    ]
    if passed and marker > copied:
        text = (
            f"the table is a copy, whose marker {copied} came along; generations {passed} are not above it "
            "and later ones were compacted: rows of theirs may be missing from the base table"
        )
        shard.found(Kind.GENERATION_GAP, Severity.ERROR, where, text, passed[0])
    if copied_marker(base, store, manifest):
        text = (
            f"the table is a copy, whose marker {marker} came along: the shard's generations have to be "
            "numbered anew before they can be compacted"
        )
        shard.found(Kind.COPIED_MARKER, Severity.WARNING, where, text, marker)


def _first_unflushed(shard: ShardCheck) -> WalEntry | None:
    tailer = WalTailer(shard.store, shard.shard_id)
    position = shard.manifest.first_unsettled
    try:
        while (entry := tailer.read_entry(position)) is not None:
            if not entry.sentinel:
                return entry
            position += 1
    except WalCorruptError as error:
        logger.debug("reported by the check of the WAL: %s", error)
    return None


def _check_versions(shard: ShardCheck) -> None:
    """Check the retained versions of the shard's manifest."""
    manifests = ShardManifestStore(shard.store, shard.shard_id)
    directory = layout.manifest_dir(shard.shard_id)
    versions = list(numbered(shard.store.list(directory), directory, layout.parse_manifest_name))
    newest = shard.manifest.version
    for version, following in pairwise(versions):
        if following != version + 1:
            shard.found(
                Kind.MANIFEST_GAP,
                Severity.ERROR,
                layout.manifest_file(shard.shard_id, version + 1),
                f"manifest versions {version} and {following} exist, those between do not; "
                f"readers may take {version} for the newest",
            )

    def read(version: int) -> ShardManifest | CorruptManifestError | None:
        try:
            return shard.manifest if version == newest else manifests.read_version(version)
        except FileNotFoundError:
            return None
        except CorruptManifestError as error:
            return error

    before: ShardManifest | None = None
    looked_at = versions if shard.deep else versions[-2:]
    for version, manifest in zip(looked_at, ordered_map(read, looked_at, shard.readers), strict=True):
        if manifest is None:
            continue
        if isinstance(manifest, CorruptManifestError):
            severity = Severity.ERROR if version >= newest else Severity.WARNING
            path = layout.manifest_file(shard.shard_id, version)
            shard.found(Kind.MANIFEST_UNREADABLE, severity, path, str(manifest))
            continue
        shard.checked["manifest versions"] += 1
        shard.history.append(manifest)
        shard.once_listed.update(entry.path for entry in manifest.sstables)
        if before is not None and (regressed := _regressed(before, manifest)):
            path = layout.manifest_file(shard.shard_id, version)
            text = f"{regressed} falls from version {before.version} to {version}"
            shard.found(Kind.MANIFEST_REGRESSION, Severity.ERROR, path, text)
        before = manifest


def _regressed(before: ShardManifest, after: ShardManifest) -> str | None:
    names = ("writer_epoch", "current_generation", "replay_after_wal_entry_position")
    return next((name for name in names if getattr(after, name) < getattr(before, name)), None)


def _check_hint(shard: ShardCheck) -> None:
    hint = ShardManifestStore(shard.store, shard.shard_id).read_hint()
    # A commit writes its hint last, so a hint that is one version behind may be due to a running commit.
    if hint is None or not 0 <= shard.manifest.version - hint <= 1:
        said = "is missing or unreadable" if hint is None else f"says version {hint}"
        shard.found(
            Kind.HINT_WRONG,
            Severity.WARNING,
            layout.version_hint(shard.shard_id),
            f"the version hint {said}, the newest manifest is {shard.manifest.version}",
        )


def _check_generations(shard: ShardCheck) -> None:
    manifest, marker = shard.manifest, shard.marker
    where = layout.manifest_file(shard.shard_id, manifest.version)
    if any(finding.kind in (Kind.MARKER_ABOVE_MANIFEST, Kind.EARLIER_TABLE) for finding in shard.findings):
        return
    try:
        pending_sstables(manifest, marker)
    except CorruptManifestError as error:
        shard.found(Kind.GENERATION_GAP, Severity.ERROR, where, str(error))


def _check_sstables(shard: ShardCheck) -> None:
    """Check the SSTables that the shard's manifest names."""

    def check(entry: SsTableEntry) -> ShardCheck:
        return shard.apart(lambda part: _check_sstable(part, entry))

    for part in ordered_map(check, shard.manifest.sstables, shard.readers):
        shard.add(part)


def _check_sstable(shard: ShardCheck, entry: SsTableEntry) -> None:
    directory = layout.sstable_dir(shard.shard_id, entry.path)
    # Once the base holds a generation, nobody needs its SSTable; a collector may be deleting it.
    lost = Severity.ERROR if entry.generation > shard.marker else Severity.INFO
    try:
        shard.store.refuse_links(directory)
    except LanceWalError as error:
        shard.found(Kind.SSTABLE_UNREADABLE, lost, directory, str(error), entry.generation)
        return
    table = SsTable.open(shard.store, shard.shard_id, entry)
    at_once = not shard.store.is_local
    bloom = beside(table.bloom_problem, at_once=at_once)
    opening = beside(partial(_open_ahead, shard, table), at_once=at_once)
    try:
        names = {info.path.removeprefix(f"{directory}/") for info in shard.store.list(directory)}
        if not names:
            text = f"the manifest names {entry.path}, which does not exist"
            shard.found(Kind.DANGLING_PATH, lost, directory, text, entry.generation)
            return
        if shard.base.schema.primary_key:
            for name in _SIDECARS:
                if name not in names:
                    text = f"{entry.path} has no {name}; Lance's own readers need it"
                    shard.found(Kind.SIDECAR_MISSING, lost, f"{directory}/{name}", text, entry.generation)
        _check_notes(shard, entry, names, lost)
        opening.wait()
        _check_content(shard, entry, table, bloom, lost)
    except (LanceWalError, pa.ArrowException) as error:
        text = f"{entry.path} cannot be read: {error}"
        shard.found(Kind.SSTABLE_UNREADABLE, lost, directory, text, entry.generation)
    finally:
        opening.wait()
        bloom.wait()
    shard.checked["SSTables"] += 1


def _open_ahead(shard: ShardCheck, table: SsTable) -> None:
    """Open the files that the check needs. Ignores errors: the check itself raises them again."""
    with suppress(LanceWalError):
        if shard.deep and shard.base.schema.primary_key:
            table.open_for()
        else:
            _ = table.dataset


def _check_notes(shard: ShardCheck, entry: SsTableEntry, names: set[str], lost: Severity) -> None:
    path = f"{layout.sstable_dir(shard.shard_id, entry.path)}/{layout.SSTABLE_NOTES_NAME}"
    if layout.SSTABLE_NOTES_NAME not in names:
        if entry.notes:
            text = f"{entry.path} has lost its {layout.SSTABLE_NOTES_NAME}; the manifest has a copy"
            shard.found(Kind.SIDECAR_MISSING, lost, path, text, entry.generation)
        return
    try:
        SsTableNotes.parse(shard.store.get(path).decode(errors="replace"), entry.path)
    except StorageError as error:
        shard.found(Kind.SIDECAR_WRONG, lost, path, str(error), entry.generation)


def _check_content(
    shard: ShardCheck, entry: SsTableEntry, table: SsTable, bloom: Task[str | None], lost: Severity
) -> None:
    directory = layout.sstable_dir(shard.shard_id, entry.path)
    dataset = table.dataset
    unreadable = False
    for severity, text in _mismatches(table.stored_columns, shard.base.schema, table.written_for):
        unreadable |= severity is Severity.ERROR
        worst = lost if severity is Severity.ERROR else severity
        shard.found(Kind.FIELD_ID_MISMATCH, worst, directory, f"{entry.path}: {text}", entry.generation)
    rows = sum(fragment.physical_rows for fragment in fragments_of(dataset))
    if entry.physical_rows is not None and rows != entry.physical_rows:
        text = f"{entry.path} has {rows} rows, the manifest says {entry.physical_rows}"
        shard.found(Kind.ROW_COUNT_WRONG, lost, directory, text, entry.generation)
    if problem := bloom.result():
        text = f"{entry.path}: the bloom filter: {problem}"
        shard.found(Kind.SIDECAR_WRONG, lost, directory, text, entry.generation)
    if not shard.deep or unreadable:
        return
    check_rows = partial(shard.apart, partial(_check_rows, entry=entry, table=table, lost=lost))
    reading = beside(check_rows, at_once=not shard.store.is_local)
    try:
        if shard.base.schema.primary_key:
            _check_keys(shard, entry, table, lost)
    finally:
        reading.wait()
    shard.add(reading.result())


def _check_rows(shard: ShardCheck, entry: SsTableEntry, table: SsTable, lost: Severity) -> None:
    """Check that all rows can be read and are those that the flush wrote."""
    schema = shard.base.schema
    if (noted := table.noted_rows) is None:
        batches = table.scan(schema, schema.names, with_tombstone=True)
        shard.checked["rows"] += sum(batch.num_rows for batch in batches)
        return
    found = table.sum_rows()
    shard.checked["rows"] += found.rows
    shard.checked["sums"] += 1
    if found != noted:
        directory = layout.sstable_dir(shard.shard_id, entry.path)
        text = f"{entry.path} has {found}, the flush wrote {noted}: rows were lost, doubled or changed"
        shard.found(Kind.ROWS_CHANGED, lost, directory, text, entry.generation)


def _check_keys(shard: ShardCheck, entry: SsTableEntry, table: SsTable, lost: Severity) -> None:
    directory = layout.sstable_dir(shard.shard_id, entry.path)
    columns, offsets, _ = table.keys(shard.base.schema)
    values = key_values(columns)
    doubled = len(values) - len(pc.unique(values))
    if doubled:
        text = f"{entry.path} has {doubled} keys more than once; older versions of them are not deleted"
        shard.found(Kind.DUPLICATE_KEYS, lost, directory, text, entry.generation)
        return
    try:
        wrong = int(np.count_nonzero(table.lookup(columns) != offsets))
        text = f"the key index or the bloom filter is wrong for {wrong} of {len(values)} keys"
    except StorageError as error:
        wrong, text = len(values), str(error)
    if wrong:
        shard.found(Kind.SIDECAR_WRONG, lost, directory, f"{entry.path}: {text}", entry.generation)


def _list_directories(shard: ShardCheck) -> None:
    shard.directories += shard.store.list_directories(layout.shard_dir(shard.shard_id))


def _check_directories(shard: ShardCheck) -> None:
    """Check the directories that the manifest does not name."""
    listed = {entry.path for entry in shard.manifest.sstables}
    for name in shard.directories:
        path = layout.sstable_dir(shard.shard_id, name)
        if name in listed or name in _SHARD_DIRECTORIES:
            continue
        generation = layout.parse_sstable_name(name)
        if generation is None:
            text = f"{name} in the shard's directory is neither an SSTable nor anything else known"
            shard.found(Kind.UNKNOWN_DIRECTORY, Severity.WARNING, path, text)
        # SSTables that compaction pruned stay for reads that began before.
        elif name not in shard.once_listed:
            text = f"the manifest does not name {name}; garbage collection removes it"
            shard.found(Kind.ORPHANED_SSTABLE, Severity.INFO, path, text, generation)


def _check_wal(shard: ShardCheck) -> None:
    positions = retained_positions(shard.store, shard.shard_id)
    covered = shard.manifest.replay_after_wal_entry_position
    _check_gaps(shard, positions, covered)
    # Only followers need flushed entries, so only a deep check reads them.
    wanted = [p for p in positions if shard.deep or p > covered]
    tailer = WalTailer(shard.store, shard.shard_id)

    def read(position: int) -> WalEntry | WalCorruptError | None:
        try:
            return tailer.read_entry(position)
        except WalCorruptError as error:
            return error

    before: WalEntry | None = None
    flushes = log_ranges(shard.history) if shard.deep else {}
    for position, entry in zip(wanted, ordered_map(read, wanted, shard.readers), strict=True):
        _check_wal_entry(shard, position, entry, covered)
        if isinstance(entry, WalEntry) and position > covered:
            if before is not None:
                _check_order(shard, before, entry)
            before = entry
        if isinstance(entry, WalEntry) and (flush := flushes.get(position)) is not None:
            flush.add(entry, shard.base.schema.primary_key)
            if position == flush.positions[-1]:
                _check_flush(shard, flush)


def _check_flush(shard: ShardCheck, flush: LogRange) -> None:
    """Compare the log with the sum that the flush of these entries noted."""
    entry = flush.sstable
    table = SsTable.open(shard.store, shard.shard_id, entry)
    try:
        noted = table.noted_rows
        found = None if noted is None else flush.sum(table, shard.base.schema)
    except StorageError as error:
        logger.debug("reported by the check of the SSTable: %s", error)
        return
    if found is None:
        return
    shard.checked["flushes"] += 1
    if found != noted:
        text = (
            f"the log has {found} in positions {flush.positions[0]} to {flush.positions[-1]}, "
            f"{entry.path}, which was flushed from them, {noted}: rows were lost or doubled"
        )
        directory = layout.sstable_dir(shard.shard_id, entry.path)
        shard.found(Kind.ROWS_CHANGED, Severity.ERROR, directory, text, entry.generation)


def _check_gaps(shard: ShardCheck, positions: list[int], covered: int) -> None:
    for missing in missing_positions(positions, covered + 1):
        # A listing is not a snapshot: entries that were written while it ran may be missing from it.
        lost = next(
            (p for p in missing if shard.store.head(layout.wal_entry(shard.shard_id, p)) is None), None
        )
        if lost is not None:
            others = f", and others up to {missing.stop - 1}" if lost < missing.stop - 1 else ""
            shard.found(
                Kind.WAL_GAP,
                Severity.ERROR,
                layout.wal_entry(shard.shard_id, lost),
                f"WAL entry {lost} is missing{others}; the log cannot be read beyond, nor the shard written",
            )
    below = [p for p in positions if p <= covered]
    for position, following in pairwise(below):
        if following != position + 1:
            shard.found(
                Kind.WAL_STRAY,
                Severity.INFO,
                layout.wal_entry(shard.shard_id, position),
                f"WAL entry {position} lies below collected ones; a stalled writer may have left it",
            )


def _check_order(shard: ShardCheck, before: WalEntry, entry: WalEntry) -> None:
    """Check that epochs never fall along the log: a claim appends after all entries of earlier epochs."""
    if entry.writer_epoch < before.writer_epoch:
        shard.found(
            Kind.WAL_EPOCH_BEHIND,
            Severity.WARNING,
            layout.wal_entry(shard.shard_id, entry.position),
            f"WAL entry {entry.position} has epoch {entry.writer_epoch}, entry {before.position} before it "
            f"has {before.writer_epoch}: a writer took the place of a lost entry {before.position}, or wrote "
            "on after it was superseded",
        )


def _check_wal_entry(
    shard: ShardCheck, position: int, entry: WalEntry | WalCorruptError | None, covered: int
) -> None:
    path = layout.wal_entry(shard.shard_id, position)
    if entry is None:
        # The entry was collected since the listing, or it is a gap, which the caller checks.
        return
    shard.checked["WAL entries"] += 1
    severity = Severity.ERROR if position > covered else Severity.WARNING
    if isinstance(entry, WalCorruptError):
        shard.found(Kind.WAL_UNREADABLE, severity, path, str(entry))
        return
    if entry.writer_epoch > shard.manifest.writer_epoch:
        text = f"WAL entry {position} has epoch {entry.writer_epoch}, above the shard's"
        shard.found(Kind.WAL_EPOCH_AHEAD, severity, path, text)
    if entry.batches:
        for worst, text in _mismatches(entry.batches[0].schema, shard.base.schema, entry.base_version):
            limited = worst if position > covered else Severity.INFO
            shard.found(Kind.FIELD_ID_MISMATCH, limited, path, f"WAL entry {position}: {text}")


def _mismatches(
    stored: pa.Schema, schema: TableSchema, written_for: int | None
) -> Iterator[tuple[Severity, str]]:
    """Columns in ``stored`` that a reader would refuse, read as nulls, or may confuse.

    Renamed and dropped columns are not mismatches. ``written_for`` is the version of the table that had
    these columns, ``None`` if it is not known. The columns are matched by the readers' own code.
    """
    try:
        column_sources(stored, schema, written_for)
    except ColumnMismatchError as error:
        yield Severity.ERROR, str(error)
        return
    columns = [column for column in stored if column.name != TOMBSTONE]
    if all(field_id(column) < 0 for column in columns):
        # The rows were written before columns had ids, so columns are matched by name.
        return
    by_id = {field_id(column): column for column in schema.columns}
    for column in columns:
        number, known = field_id(column), by_id.get(field_id(column))
        if known is not None and known.name != column.name and column.name in schema.names:
            # Two columns may have swapped their names, or a writer numbered its columns wrongly.
            yield Severity.INFO, f"column {column.name!r} has column id {number}, which is now {known.name!r}"
        elif known is None and column.name in schema.names:
            now = field_id(schema.columns.field(column.name))
            yield (
                Severity.WARNING,
                f"column {column.name!r} has column id {number}, in the table {now}; it reads as nulls",
            )
