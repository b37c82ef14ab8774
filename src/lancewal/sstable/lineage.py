"""Whether the base table's markers refer to the generations that a shard has.

A marker says that the base table holds a shard up to some generation. That is true only while table
and shard share one history. Their histories diverge in three cases:

- **A copy.** Branches and clones of a table have its markers, but none of its shards. The shards
  of the copy are new. Shards of lancewal start above the copied marker (``ShardManifestStore``). Shards of
  Lance's own writer start at generation 1, and the marker does not refer to them.
- **A table that was created again.** When the MemWAL index is dropped and made again, or the table is
  overwritten, the markers are gone and the shards stay. The earlier table's last version still says
  how far it held them. Generations above that were never compacted. They count if no row
  of the table has changed in between; otherwise it is unknown which rows are newer.
- **A shard's directory that was deleted or restored from a backup.**

The evidence never changes, so it is valid whatever runs at the same time: the first version of a
copy; the version of the base table that rows were written for (a generation that this version
already holds cannot be theirs); and the versions without a MemWAL index.
If the evidence does not suffice, a :class:`~lancewal.errors.DifferentHistoryError` is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from uuid import UUID

import lance

from lancewal.base import (
    MEM_WAL_INDEX,
    BaseTable,
    appended_generations,
    column_log,
    find_manifest,
    lance_errors,
    manifest_info,
    operation_of,
    retained_versions,
)
from lancewal.errors import DifferentHistoryError, InvalidInputError, NotInitializedError, StorageError
from lancewal.format import ShardManifest, SsTableEntry, WalEntry
from lancewal.shard import ShardManifestStore, WalTailer
from lancewal.sstable.opened import open_sstable
from lancewal.storage import ObjectStore, Shelf, layout

logger = logging.getLogger(__name__)

#: One object for each time that a user decided to keep the rows of an earlier table.
_TAKEN_OVER_DIR = f"{layout.OWN_DIR}/taken_over"
#: How many versions between two MemWAL indexes are searched for changes.
_MOST_BETWEEN = 64


@dataclass(frozen=True)
class Copy:
    """The beginning of a branch or clone: its first version, and the markers that were copied."""

    version: int
    markers: Mapping[UUID, int]


@dataclass(frozen=True)
class EarlierTable:
    """The table before its MemWAL index was made again in version ``began``.

    ``markers`` are the markers of its last version. ``unchanged`` is true if no row of the base table has
    changed since. If old versions are gone, neither is known: ``markers`` is empty and ``unchanged`` false.
    """

    began: int
    markers: Mapping[UUID, int]
    unchanged: bool


# Facts about a table that never change, in tuples because they may be None. The key is the store and not the
# URI: another table may be created at the same place.
_stamps_found: Shelf[tuple[object, str], tuple[int | None]] = Shelf()
_copies_found: Shelf[object, tuple[Copy | None]] = Shelf()
_earlier_found: Shelf[tuple[object, int, int | None], tuple[EarlierTable | None]] = Shelf()
#: The approximate memory of a stamp or a marker.
_FOUND_BYTES = 128


def held_generation(base: BaseTable, store: ObjectStore, manifest: ShardManifest) -> int:
    """The newest generation of ``manifest`` whose rows ``base`` holds; 0 for none.

    ``base`` must have been read after ``manifest``. If the shard was flushed and compacted in between,
    the result is not below the manifest's ``current_generation``: read both again.
    """
    marker = base.compacted_generation(manifest.shard_id)
    lowest = min((entry.generation for entry in manifest.sstables), default=manifest.current_generation)
    if 0 < marker < lowest:
        return marker
    if marker == 0:
        return _held_by_earlier_table(base, store, manifest, lowest)
    foreign = _is_foreign(store, manifest, marker)
    if foreign:
        return 0
    if manifest.current_generation > marker:
        return marker
    # A compactor marks only generations that a manifest listed. So the newest manifest tells a race from a
    # directory that was deleted or is an old copy.
    newest = ShardManifestStore(store, manifest.shard_id).require_latest()
    if newest.current_generation > marker:
        return marker
    raise DifferentHistoryError(
        f"the base table holds shard {manifest.shard_id} up to generation {marker}, but the shard is at "
        f"generation {manifest.current_generation}: its directory was deleted or is an old copy. Bring "
        f"{layout.child_uri(store.uri, layout.shard_dir(manifest.shard_id))} back to the newest state"
    )


def copied_marker(base: BaseTable, store: ObjectStore, manifest: ShardManifest) -> int:
    """The marker above which :func:`lift` must move the shard's generations; 0 if that is not needed.

    Raises the same errors as :func:`held_generation`.
    """
    marker = base.compacted_generation(manifest.shard_id)
    lowest = min((entry.generation for entry in manifest.sstables), default=manifest.current_generation)
    if marker < lowest or held_generation(base, store, manifest):
        return 0
    return marker


def lift(manifests: ShardManifestStore, epoch: int, marker: int) -> ShardManifest:
    """Renumber the shard's generations, in their order, above a marker that does not refer to them.

    Afterwards the markers are right for all readers, including Lance. The holder of ``epoch`` may call this
    only when no WAL entry is left to be flushed, because replay would skip an entry of a generation below
    the new ones. SSTables keep their directories.
    """

    def lifted(manifest: ShardManifest) -> ShardManifest:
        lowest = min((entry.generation for entry in manifest.sstables), default=manifest.current_generation)
        if lowest > marker:
            return manifest
        by = marker + 1 - lowest
        return replace(
            manifest,
            sstables=tuple(replace(e, generation=e.generation + by) for e in manifest.sstables),
            current_generation=manifest.current_generation + by,
        )

    return manifests.commit_update(epoch, lifted)


def check_rows_in_log(base: BaseTable, store: ObjectStore, shard_id: UUID, written_for: int | None) -> None:
    """Refuse WAL rows that an earlier table left, unless they count in this table as well.

    ``written_for`` is the version that the oldest row was written for. One version suffices, because the
    rows of one shard are in the order of time.
    """
    if written_for is None or base.initialized_since(written_for):
        return
    earlier = earlier_table(base, store, written_for)
    if earlier is not None:
        _refuse_unknown(store, shard_id, earlier, "rows in its write-ahead log")


def earlier_table(base: BaseTable, store: ObjectStore, stamp: int | None = None) -> EarlierTable | None:
    """The earlier table at the same place, as far as its versions show; ``None`` if there was none.

    ``stamp`` is a version that is known to have had a MemWAL index.
    """
    key = store.identity, base.version, stamp
    return _earlier_found.get_or_make(key, lambda: (_find_earlier(base, store, stamp),), _size)[0]


def unknown_entries(store: ObjectStore, manifest: ShardManifest, earlier: EarlierTable) -> list[SsTableEntry]:
    """The SSTables that an earlier table left uncompacted, ascending."""
    held = earlier.markers.get(manifest.shard_id, 0)
    found = []
    for entry in sorted(manifest.sstables, key=lambda each: each.generation):
        # Generations are in the order of time, so all later ones belong to this table.
        if not _is_of_earlier_table(store, manifest.shard_id, entry, earlier):
            break
        if entry.generation > held:
            found.append(entry)
    return found


def take_over(store: ObjectStore, earlier: EarlierTable) -> None:
    """Record that the rows of an earlier table count in this one, as newer than those of the base table."""
    store.put(f"{_TAKEN_OVER_DIR}/{earlier.began}", b"")


def is_entry_of_earlier_table(store: ObjectStore, entry: WalEntry, earlier: EarlierTable) -> bool:
    """Whether an earlier table left this entry of a WAL."""
    if entry.base_version is not None:
        return entry.base_version < earlier.began
    info = store.head(layout.wal_entry(entry.shard_id, entry.position))
    began = manifest_info(store, earlier.began)
    return info is not None and began is not None and info.modified < began.modified


def copy_of(store: ObjectStore) -> Copy | None:
    """The beginning of a table that is a copy; ``None`` for any other, or if its first version is gone."""
    return _copies_found.get_or_make(store.identity, lambda: (_find_copy(store),), _size)[0]


def _held_by_earlier_table(base: BaseTable, store: ObjectStore, manifest: ShardManifest, lowest: int) -> int:
    """Like :func:`held_generation`, for a shard that this table never compacted."""
    if manifest.current_generation == layout.FIRST_GENERATION:
        return 0
    first = next((entry for entry in manifest.sstables if entry.generation == lowest), None)
    stamp = None if first is None else _stamp(store, manifest.shard_id, first)
    is_of_this_table = stamp is not None and base.initialized_since(stamp)
    if is_of_this_table and lowest == layout.FIRST_GENERATION:
        return 0
    # Nothing proves that the oldest generation belongs to this table, or earlier generations were pruned.
    earlier = earlier_table(base, store, None if is_of_this_table else stamp)
    if earlier is None:
        return 0
    unknown = unknown_entries(store, manifest, earlier)
    if unknown:
        generations = f"{unknown[0].generation} to {unknown[-1].generation}"
        _refuse_unknown(store, manifest.shard_id, earlier, f"generations {generations}")
    held = earlier.markers.get(manifest.shard_id, 0)
    is_older = (
        first is None or lowest > held or _is_of_earlier_table(store, manifest.shard_id, first, earlier)
    )
    return held if is_older and held < manifest.current_generation else 0


def _refuse_unknown(store: ObjectStore, shard_id: UUID, earlier: EarlierTable, what: str) -> None:
    if earlier.unchanged or store.head(f"{_TAKEN_OVER_DIR}/{earlier.began}") is not None:
        return
    raise DifferentHistoryError(
        f"shard {shard_id} has {what} from before version {earlier.began} of the base table, in which its "
        "MemWAL index was made anew, and rows of the base table have changed in between: nothing says which "
        "are newer. table.repair(earlier='keep') has those of the shards count as the newest, "
        "table.repair(earlier='drop') removes them from the shards"
    )


def _is_foreign(store: ObjectStore, manifest: ShardManifest, marker: int) -> bool | None:
    """Whether the marker does not refer to the shard's generations; ``None`` if that is unknown."""
    copy = copy_of(store)
    came_along = copy is not None and copy.markers.get(manifest.shard_id, 0) == marker
    if not came_along and manifest.current_generation > marker:
        return False
    for stamp, generation in _stamps(store, manifest, marker):
        if copy is not None and stamp < copy.version:
            # The shard was copied too, by other means, so the markers refer to it.
            return False
        written_for = find_manifest(store, stamp)
        if written_for is not None and written_for.mem_wal is not None:
            return written_for.mem_wal.compacted.get(manifest.shard_id, 0) >= generation
    return True if came_along else None


def _stamps(store: ObjectStore, manifest: ShardManifest, marker: int) -> Iterator[tuple[int, int]]:
    """The versions that the shard's rows were written for, with their generations, oldest first."""
    for entry in sorted(manifest.sstables, key=lambda each: each.generation):
        stamp = _stamp(store, manifest.shard_id, entry) if entry.generation <= marker else None
        if stamp is not None:
            yield stamp, entry.generation
    tailer = WalTailer(store, manifest.shard_id)
    position = manifest.first_unsettled
    while (wal_entry := tailer.read_entry(position)) is not None:
        if not wal_entry.sentinel and wal_entry.base_version is not None and wal_entry.generation is not None:
            yield wal_entry.base_version, wal_entry.generation
            return
        position += 1


def _stamp(store: ObjectStore, shard_id: UUID, entry: SsTableEntry) -> int | None:
    """The version of the base table that an SSTable was written for, if it can be read."""
    directory = layout.sstable_dir(shard_id, entry.path)

    def find() -> tuple[int | None]:
        return (open_sstable(store, directory, entry.notes).written_for,)

    try:
        return _stamps_found.get_or_make((store.identity, directory), find, lambda _: _FOUND_BYTES)[0]
    except StorageError as error:
        logger.debug("an SSTable says nothing: %s", error)
        return None


def _is_of_earlier_table(
    store: ObjectStore, shard_id: UUID, entry: SsTableEntry, earlier: EarlierTable
) -> bool:
    stamp = _stamp(store, shard_id, entry)
    if stamp is not None:
        return stamp < earlier.began
    # Lance's own writer does not record the version: compare the storage's time stamps.
    files = store.list(layout.sstable_dir(shard_id, entry.path))
    began = manifest_info(store, earlier.began)
    return began is not None and bool(files) and min(info.modified for info in files) < began.modified


def _find_copy(store: ObjectStore) -> Copy | None:
    first = min(retained_versions(store), default=1)
    if first == 1:
        # Nothing can have been compacted yet.
        return None
    try:
        base = BaseTable.open(store.uri, store.storage_options, store=store, version=first)
        operation = operation_of(base.dataset, first)
    except (NotInitializedError, InvalidInputError):
        # Not a table with shards, or the version was cleaned up meanwhile.
        return None
    if not isinstance(operation, lance.LanceOperation.Clone):
        return None
    return Copy(first, appended_generations(base))


def _find_earlier(base: BaseTable, store: ObjectStore, stamp: int | None) -> EarlierTable | None:
    log = column_log(store)
    began, is_known = log.run_start(MEM_WAL_INDEX, base.version)
    if not is_known:
        return None
    last = log.newest_with(MEM_WAL_INDEX, began - 1)
    if last is None:
        # Without a stamp there need not be an earlier table.
        return None if stamp is None or stamp >= began else EarlierTable(began, {}, False)
    try:
        before = BaseTable.open(base.uri, base.storage_options, store=store, version=last)
        unchanged = _is_unchanged(base, last, began)
    except InvalidInputError:
        # The version was cleaned up meanwhile.
        return EarlierTable(began, {}, False)
    return EarlierTable(began, appended_generations(before), unchanged)


def _is_unchanged(base: BaseTable, last: int, began: int) -> bool:
    """Whether no row was added, removed or changed between two versions; any overwrite counts as a change."""
    if began - last > _MOST_BETWEEN:
        return False

    def opened(version: int) -> lance.LanceDataset:
        return lance.dataset(base.uri, version=version, storage_options=dict(base.storage_options) or None)

    with lance_errors(f"read versions {last} to {began} of {base.uri}"):
        fragments = [[f.metadata.to_json() for f in opened(v).get_fragments()] for v in (last, began)]
        operations = [operation_of(opened(began), version) for version in range(last + 1, began + 1)]
    overwritten = any(each is None or isinstance(each, lance.LanceOperation.Overwrite) for each in operations)
    return fragments[0] == fragments[1] and not overwritten


def _size(found: tuple[Copy | None] | tuple[EarlierTable | None]) -> int:
    return _FOUND_BYTES * (1 if found[0] is None else 1 + len(found[0].markers))
