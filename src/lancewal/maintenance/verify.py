"""Verification: walk a table and report every broken invariant."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from uuid import UUID

import numpy as np
import numpy.typing as npt

from lancewal.base import BaseTable, is_fence, lance_errors, open_base, unmarked_tags
from lancewal.errors import CorruptManifestError, InvalidInputError, LanceWalError
from lancewal.format import KeySet, ShardManifest, key_values, key_words
from lancewal.maintenance.checkpoints import list_checkpoints, read_checkpoints
from lancewal.maintenance.checks import ShardCheck, check_shard
from lancewal.maintenance.conserved import Compacted, missing_keys, wrong_appends
from lancewal.maintenance.plan import shared_keys
from lancewal.maintenance.reports import Finding, Kind, Severity, VerifyReport
from lancewal.reader import ShardPlace, TableReader
from lancewal.shard import ShardManifestStore, ShardRouter, is_retired, shard_files
from lancewal.sstable import copy_of
from lancewal.storage import ObjectStore, both, layout, ordered_map

logger = logging.getLogger(__name__)

#: How often a shard that changes during its check is checked before its findings are reported.
_ATTEMPTS = 3
#: On remote storage: the number of shards, or of SSTables across all shards, that are checked in parallel.
#: A deep check holds the keys of an SSTable in memory.
_AT_ONCE = 64
_MOST_READERS = 16


def verify(
    store: ObjectStore,
    shards: Sequence[UUID | str] | None = None,
    *,
    deep: bool = True,
    between_shards: bool = False,
    progress: Callable[[UUID], object] | None = None,
) -> VerifyReport:
    """Check a table, or some of its shards. Changes nothing, and may run beside everything else.

    ``between_shards`` skips the checks of single shards, for jobs that check shards one by one. What remains
    are the checks of the base table, and of what two shards must not both have.

    ``deep`` reads all rows of SSTables, the whole retained WAL and the keys of the base table. Without it,
    only metadata and the unflushed WAL are read.
    """
    started = time.perf_counter()
    report = VerifyReport(store.uri)
    wanted = None if shards is None else {layout.parse_shard_id(shard) for shard in shards}
    present = _shard_directories(store, report, wanted)
    if wanted is not None and (absent := wanted - set(present)):
        raise InvalidInputError(f"there are no shards {', '.join(map(str, sorted(absent)))} in {store.uri}")
    check_keys = partial(_check_keys, store) if deep and wanted is None else partial(VerifyReport, store.uri)
    # On remote storage, the keys of all shards are read in parallel with all other checks.
    checked = [] if between_shards else present
    (base, compacted), keys = both(
        lambda: _verify(store, present, checked, wanted is None, deep, progress, report),
        check_keys,
        at_once=not store.is_local,
    )
    _add(report, keys)
    if deep and all(finding.kind is not Kind.BASE_DAMAGED for finding in report.findings):
        _check_conserved(base, store, compacted, report)
    report.seconds = time.perf_counter() - started
    return report


def _verify(
    store: ObjectStore,
    present: Sequence[UUID],
    checked: Sequence[UUID],
    whole: bool,
    deep: bool,
    progress: Callable[[UUID], object] | None,
    report: VerifyReport,
) -> tuple[BaseTable, list[Compacted]]:
    """Check shards, and with ``whole`` the base table too.

    Returns the base table, and the compacted SSTables of each shard. ``checked`` is a subset of ``present``.
    """
    workers = 1 if store.is_local else max(1, min(len(present), _AT_ONCE))
    readers = 1 if store.is_local else min(_MOST_READERS, _AT_ONCE // workers)
    manifests = list(ordered_map(partial(_manifest, store), present, workers))
    # Opened after all manifests were read, as readers do. Every shard asks whether the table is a copy, so
    # that is read ahead.
    base, _ = both(partial(open_base, store), partial(copy_of, store), at_once=not store.is_local)
    report.base_version = base.version

    compacted: list[Compacted] = []

    def check(shard: tuple[UUID, ShardManifest | Finding]) -> tuple[VerifyReport, Compacted | None]:
        return _verify_shard(store, *shard, base, deep, readers)

    def check_shards() -> None:
        read = dict(zip(present, manifests, strict=True))
        found = [(shard_id, read[shard_id]) for shard_id in checked]
        for shard_id, (part, held) in zip(checked, ordered_map(check, found, workers), strict=True):
            _add(report, part)
            compacted.extend(() if held is None else (held,))
            if progress is not None:
                progress(shard_id)

    def check_base() -> list[VerifyReport]:
        known = [each for each in manifests if isinstance(each, ShardManifest)]
        checks = (
            partial(_verify_base, base, store, set(present), deep),
            partial(_check_shards, base, store, known),
        )
        return [check() for check in checks] if whole else []

    at_once = not store.is_local
    (_, parts), kept = both(
        lambda: both(check_shards, check_base, at_once=at_once),
        lambda: _check_checkpoints(base, store) if whole else VerifyReport(store.uri),
        at_once=at_once,
    )
    for part in (*parts, kept):
        _add(report, part)
    return base, compacted


def _add(report: VerifyReport, part: VerifyReport) -> None:
    report.checked.update(part.checked)
    report.findings += part.findings


def _shard_directories(store: ObjectStore, report: VerifyReport, wanted: set[UUID] | None) -> list[UUID]:
    found = []
    for name in store.list_directories(layout.MEM_WAL_DIR):
        path = f"{layout.MEM_WAL_DIR}/{name}"
        shard_id = layout.parse_shard_dir(name)
        if shard_id is not None:
            if wanted is None or shard_id in wanted:
                found.append(shard_id)
        elif path != layout.OWN_DIR and wanted is None:
            text = f"{path} is neither a shard nor lancewal's own"
            report.found(Kind.UNKNOWN_DIRECTORY, Severity.WARNING, path, text)
    return found


def _verify_shard(
    store: ObjectStore,
    shard_id: UUID,
    manifest: ShardManifest | Finding,
    base: BaseTable,
    deep: bool,
    readers: int,
) -> tuple[VerifyReport, Compacted | None]:
    """The findings of one shard, and its compacted SSTables. ``base`` was read after ``manifest``."""
    report = VerifyReport(store.uri)
    for attempt in range(1, _ATTEMPTS + 1):
        if isinstance(manifest, Finding):
            report.findings.append(manifest)
            return report, None
        shard = ShardCheck(store, base, shard_id, manifest, 0, deep, readers)
        check_shard(shard)
        if not shard.findings or attempt == _ATTEMPTS:
            break
        before, manifest = manifest.version, _manifest(store, shard_id)
        if not isinstance(manifest, Finding) and manifest.version == before:
            break
        logger.debug("shard %s changed while it was verified; once more", shard_id)
        base = open_base(store)
    report.checked["shards"] += 1
    report.checked.update(shard.checked)
    report.findings += shard.findings
    return report, Compacted.of(shard_id, shard.marker, shard.history)


def _check_conserved(
    base: BaseTable, store: ObjectStore, compacted: Sequence[Compacted], report: VerifyReport
) -> None:
    """Check that the base table holds every compacted row exactly once."""
    if not base.schema.primary_key:
        for version, noted, found in wrong_appends(base):
            text = f"version {version} has {found} of a compaction that appended {noted}"
            report.found(Kind.ROWS_CHANGED, Severity.ERROR, base.uri, text)
        return
    for shard_id, count in missing_keys(base, store, compacted):
        text = (
            f"{count} keys that were compacted last from shard {shard_id} are not in the base table: rows "
            "were lost, unless they were deleted from the base table directly"
        )
        report.found(Kind.ROWS_CHANGED, Severity.WARNING, str(shard_id), text, shard_id)


def _manifest(store: ObjectStore, shard_id: UUID) -> ShardManifest | Finding:
    where = layout.manifest_dir(shard_id)
    try:
        manifest = ShardManifestStore(store, shard_id).read_latest()
    except CorruptManifestError as error:
        return Finding(Kind.MANIFEST_UNREADABLE, Severity.ERROR, where, str(error), shard_id)
    if manifest is not None:
        return manifest
    # A writer creates the first manifest before anything else.
    has_rows = bool(store.list(layout.shard_dir(shard_id)))
    severity = Severity.ERROR if has_rows else Severity.INFO
    text = f"shard {shard_id} has no manifest" + (" but files" if has_rows else "")
    return Finding(Kind.MANIFEST_MISSING, severity, where, text, shard_id)


def _verify_base(base: BaseTable, store: ObjectStore, present: set[UUID], deep: bool) -> VerifyReport:
    report = VerifyReport(store.uri)
    absent = {s: g for s, g in base.details.compacted.items() if s not in present and not is_fence(s)}
    copy = copy_of(store) if absent else None
    for shard_id, generation in sorted(absent.items()):
        # A copied table has the markers of its source. Its own shards exist once they have a writer.
        if copy is None or copy.markers.get(shard_id, 0) < generation:
            text = f"the base table holds generation {generation} of shard {shard_id}, which does not exist"
            kind = Kind.MARKER_WITHOUT_SHARD
            report.found(kind, Severity.WARNING, str(shard_id), text, shard_id, generation)
    for shard_id, generation in sorted(unmarked_tags(base.details.compacted, base.schema.columns).items()):
        text = f"the rows of shard {shard_id} up to generation {generation} are in the base without a marker"
        report.found(Kind.APPEND_UNFINISHED, Severity.INFO, str(shard_id), text, shard_id, generation)
    _check_base_files(base, store, deep, report)
    return report


def _check_base_files(base: BaseTable, store: ObjectStore, deep: bool, report: VerifyReport) -> None:
    """Check that the files of the base table are whole; with ``deep`` and a key, read the keys."""
    doubled = 0
    for attempt in range(1, _ATTEMPTS + 1):
        damage = {**_damaged_files(base, store), **_lost_indexes(base, store)}
        if deep and base.schema.primary_key:
            try:
                report.checked["base rows"], doubled = _doubled_keys(base)
            except LanceWalError as error:
                damage = damage or {base.uri: str(error)}
        if not damage or attempt == _ATTEMPTS:
            break
        # The version may have been cleaned up since it was opened.
        newest = open_base(store)
        if newest.version == base.version:
            break
        base = newest
    for path, text in damage.items():
        report.found(Kind.BASE_DAMAGED, Severity.ERROR, path, text)
    if doubled:
        rows = report.checked["base rows"]
        text = f"{doubled} of {rows} rows of the base table have a key that another row has too"
        report.found(Kind.DUPLICATE_KEYS, Severity.ERROR, base.uri, text)


def _damaged_files(base: BaseTable, store: ObjectStore) -> dict[str, str]:
    """What is wrong with files of the base table, by path: they are missing, or have another size.

    Files that a copied table shares with another table are left out.
    """
    wanted: dict[str, int | None] = {}
    for fragment in base.dataset.get_fragments():
        for file in fragment.data_files():
            if file.base_id is None:
                wanted[f"data/{file.path}"] = file.file_size_bytes
        deletions = fragment.deletion_file()
        if deletions is not None and fragment.metadata.deletion_file.base_id is None:
            wanted[deletions] = None
    there = {info.path: info.size for directory in ("data", "_deletions") for info in store.list(directory)}
    found = {}
    for path, size in sorted(wanted.items()):
        if path not in there:
            found[path] = f"{path} of the base table is missing: rows of it cannot be read"
        elif size and there[path] != size:
            found[path] = f"{path} of the base table has {there[path]} bytes, and was written with {size}"
    return found


def _lost_indexes(base: BaseTable, store: ObjectStore) -> dict[str, str]:
    """Indexes of the base table without any file, by path. A copied table may have those of its source."""
    built = {
        f"_indices/{index.uuid}": index.name
        for index in base.manifest.indexes
        if index.fragments and not index.name.startswith("__")
    }
    there = {"/".join(info.path.split("/")[:2]) for info in store.list("_indices")} if built else set()
    lost = {
        path: f"the files of the index {name!r} are missing: searches that use it fail; create it anew"
        for path, name in built.items()
        if path not in there
    }
    return lost if lost and copy_of(store) is None else {}


def _check_checkpoints(base: BaseTable, store: ObjectStore) -> VerifyReport:
    """Check that every checkpoint can be read, and that all files that it needs exist."""
    report = VerifyReport(store.uri)
    for checkpoint, state in read_checkpoints(store):
        report.checked["checkpoints"] += 1
        name = checkpoint.name
        if state is None:
            text = (
                f"the checkpoint {name!r} cannot be read, and nothing is collected until it is dropped: "
                f"{checkpoint.problem}"
            )
            report.found(Kind.CHECKPOINT_UNREADABLE, Severity.ERROR, name, text)
            continue
        missing = [] if _has_version(base, state.version) else [f"version {state.version} of the base table"]
        for place in state.shards:
            missing += _missing_files(store, place)
        # The checkpoint may have been dropped and its files collected since it was listed.
        if missing and checkpoint in list_checkpoints(store):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            text = f"the checkpoint {name!r} cannot show its rows any more: {missing[0]}{more} is gone"
            report.found(Kind.CHECKPOINT_INCOMPLETE, Severity.ERROR, name, text)
    return report


def _has_version(base: BaseTable, version: int) -> bool:
    try:
        with lance_errors(f"open version {version} of {base.uri}"):
            base.dataset.checkout_version(version)
    except LanceWalError as error:
        logger.debug("a version that a checkpoint names: %s", error)
        return False
    return True


def _missing_files(store: ObjectStore, place: ShardPlace) -> list[str]:
    """The SSTables and WAL entries of a checkpoint that are missing."""
    paths = {info.path for info in shard_files(store, place.shard_id)}
    sstables = [layout.sstable_dir(place.shard_id, entry.path) for entry in place.manifest.sstables]
    entries = [layout.wal_entry(place.shard_id, position) for position in place.wal_range]
    lost = [each for each in sstables if not any(path.startswith(f"{each}/") for path in paths)]
    return lost + [each for each in entries if each not in paths]


def _check_shards(base: BaseTable, store: ObjectStore, manifests: Sequence[ShardManifest]) -> VerifyReport:
    """Report shards that have the same sharding value."""
    report = VerifyReport(store.uri)
    try:
        router = ShardRouter.for_table(base.details, base.schema)
        in_use = [m for m in manifests if not is_retired(store, m, base.compacted_generation(m.shard_id))]
        groups = router.groups(in_use)
    except InvalidInputError:
        return report  # The sharding cannot route rows: callers choose the shard.
    except LanceWalError as error:
        # The checks of single shards report an unreadable shard.
        logger.debug("shards were not compared: %s", error)
        return report
    for kept, *others in groups:
        for manifest in others:
            text = (
                f"shard {manifest.shard_id} is for the same value of the sharding column as {kept.shard_id}; "
                "nothing can be written for it until one is drained and sealed"
            )
            shard_id = manifest.shard_id
            report.found(Kind.SPLIT_SHARD, Severity.WARNING, str(shard_id), text, shard_id)
    return report


def _check_keys(store: ObjectStore) -> VerifyReport:
    """Report keys that are in two shards, whatever their sharding values are."""
    report = VerifyReport(store.uri)
    try:
        snapshot = TableReader(store, live_writers=False).snapshot()
        shards = snapshot.shards if snapshot.schema.primary_key else ()
        sources = [(number, source) for number, shard in enumerate(shards) for source in shard.sources]
        keys: list[list[KeySet]] = [[] for _ in shards]
        workers = 1 if store.is_local else _AT_ONCE
        found = ordered_map(lambda each: each[1].keys(), sources, workers)
        for (number, _), some in zip(sources, found, strict=True):
            keys[number].append(some)
    except LanceWalError as error:
        logger.debug("shards were not compared: %s", error)
        return report
    for pair in shared_keys([KeySet.union(some) for some in keys]):
        one, other = shards[pair.first].shard_id, shards[pair.second].shard_id
        text = (
            f"{pair.count} keys, such as {pair.example!r}, are in shard {one} and in shard {other}; nothing "
            "says which version is newer"
        )
        report.found(Kind.KEYS_IN_TWO_SHARDS, Severity.ERROR, str(other), text, other)
    return report


def _doubled_keys(base: BaseTable) -> tuple[int, int]:
    """How many rows the base table has, and how many of them share a key with an earlier row.

    Takes eight bytes per row. Text and composite keys are compared by a 64-bit hash. Of tables with a billion
    rows, about one in forty has two keys with the same hash, which are then reported wrongly.
    """
    words: list[npt.NDArray[np.uint64]] = []
    with lance_errors("read the keys of the base table"):
        for batch in base.dataset.scanner(columns=list(base.schema.primary_key)).to_batches():
            words.append(key_words(key_values(batch.columns)))
    if not words:
        return 0, 0
    every = np.sort(np.concatenate(words))
    return len(every), int(np.count_nonzero(every[1:] == every[:-1]))
