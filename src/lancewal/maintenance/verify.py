"""Verification: walk a table and report every invariant that is broken."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from uuid import UUID

from lancewal.base import BaseTable, appended_generations, is_fence
from lancewal.errors import (
    CorruptManifestError,
    DifferentHistoryError,
    InvalidInputError,
    LanceWalError,
    WalCorruptError,
)
from lancewal.format import KeySet, ShardManifest, WalEntry
from lancewal.maintenance.checks import ShardCheck, check_manifests, check_sstables, check_wal, doubled_keys
from lancewal.maintenance.commits import unmarked_tags
from lancewal.maintenance.findings import Finding, Kind, Severity, VerifyReport
from lancewal.maintenance.plan import shared_keys
from lancewal.reader import TableReader
from lancewal.shard import (
    ShardManifestStore,
    ShardRouter,
    WalTailer,
    discover_manifests,
    first_unsettled,
    is_retired,
)
from lancewal.sstable import check_rows_in_log, copied_marker, copy_of, held_generation
from lancewal.storage import ObjectStore, layout

logger = logging.getLogger(__name__)

# Whether a shard and the base table have one history.


def check_lineage(shard: ShardCheck) -> None:
    """Also sets the shard's marker: the newest generation that the base table holds."""
    base, store, manifest = shard.base, shard.store, shard.manifest
    where = layout.manifest_file(shard.shard_id, manifest.version)
    marker = base.compacted_generation(shard.shard_id)
    try:
        shard.marker = held_generation(base, store, manifest)
        entry = _first_unflushed(shard)
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
    position = first_unsettled(shard.manifest)
    try:
        while (entry := tailer.read_entry(position)) is not None:
            if not entry.sentinel:
                return entry
            position += 1
    except WalCorruptError as error:
        logger.debug("reported by the check of the WAL: %s", error)
    return None


# Whether rows that belong together are in several shards.


def check_split_shards(base: BaseTable, store: ObjectStore, deep: bool, report: VerifyReport) -> None:
    """Shards that are for one value; with ``deep``, keys that are in two shards, whatever these say."""
    try:
        _check_shards(base, store, report)
        if deep and base.schema.primary_key:
            _check_keys(store, report)
    except LanceWalError as error:
        # What cannot be read is a finding of its own already.
        logger.debug("shards were not compared: %s", error)


def _check_shards(base: BaseTable, store: ObjectStore, report: VerifyReport) -> None:
    try:
        router = ShardRouter.for_table(base.details, base.schema)
    except InvalidInputError:
        return  # Shards are chosen by hand.
    markers = appended_generations(base)
    in_use = [m for m in discover_manifests(store) if not is_retired(store, m, markers.get(m.shard_id, 0))]
    for kept, *others in router.groups(in_use):
        for manifest in others:
            text = (
                f"shard {manifest.shard_id} is for the same value of the sharding column as {kept.shard_id}; "
                "nothing can be written for it until one is drained and sealed"
            )
            report.findings.append(
                Finding(Kind.SPLIT_SHARD, Severity.WARNING, str(manifest.shard_id), text, manifest.shard_id)
            )


def _check_keys(store: ObjectStore, report: VerifyReport) -> None:
    shards = TableReader(store, live_writers=False).snapshot().shards
    keys = [KeySet.union(source.keys() for source in shard.sources) for shard in shards]
    for pair in shared_keys(keys):
        one, other = shards[pair.first].shard_id, shards[pair.second].shard_id
        text = (
            f"{pair.count} keys, such as {pair.example!r}, are in shard {one} and in shard {other}; nothing "
            "says which version is newer"
        )
        report.findings.append(Finding(Kind.KEYS_IN_TWO_SHARDS, Severity.ERROR, str(other), text, other))


#: Looks at a shard that changes while it is looked at; what is still wrong then is reported.
_ATTEMPTS = 3


def verify(
    base: BaseTable,
    store: ObjectStore | None = None,
    shards: Sequence[UUID | str] | None = None,
    *,
    deep: bool = True,
    progress: Callable[[UUID], object] | None = None,
) -> VerifyReport:
    """Check a table, or some of its shards; changes nothing, and may run beside everything else.

    ``deep`` reads all rows of SSTables, the whole retained WAL and the keys of the base table;
    without it only what describes them, and the WAL that is not flushed yet.
    """
    started = time.perf_counter()
    store = store or ObjectStore.from_uri(base.uri, base.storage_options)
    report = VerifyReport(base.uri)
    wanted = None if shards is None else {layout.parse_shard_id(shard) for shard in shards}
    present = _shard_directories(store, report, wanted)
    if wanted is not None and (absent := wanted - set(present)):
        raise InvalidInputError(f"there are no shards {', '.join(map(str, sorted(absent)))} in {store.uri}")
    for shard_id in present:
        _verify_shard(store, base, shard_id, deep, report)
        if progress is not None:
            progress(shard_id)
    if wanted is None:
        base = _newest(base, store)
        report.base_version = base.version
        _verify_base(base, store, set(present), deep, report)
        check_split_shards(base, store, deep, report)
    report.seconds = time.perf_counter() - started
    return report


def _newest(base: BaseTable, store: ObjectStore) -> BaseTable:
    return BaseTable.open(base.uri, base.storage_options, store=store)


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
            report.findings.append(Finding(Kind.UNKNOWN_DIRECTORY, Severity.WARNING, path, text))
    return found


def _verify_shard(
    store: ObjectStore, base: BaseTable, shard_id: UUID, deep: bool, report: VerifyReport
) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        before = _manifest(store, shard_id)
        if isinstance(before, Finding):
            report.findings.append(before)
            return
        # After the manifest, as readers do.
        base = _newest(base, store)
        shard = ShardCheck(store, base, shard_id, before, 0, deep)
        check_lineage(shard)
        check_manifests(shard)
        check_wal(shard)
        check_sstables(shard)
        after = _manifest(store, shard_id)
        moved = isinstance(after, Finding) or after.version != before.version
        if not shard.findings or not moved or attempt == _ATTEMPTS:
            break
        logger.debug("shard %s changed while it was verified; once more", shard_id)
    report.checked["shards"] += 1
    report.checked.update(shard.checked)
    report.findings += shard.findings


def _manifest(store: ObjectStore, shard_id: UUID) -> ShardManifest | Finding:
    where = layout.manifest_dir(shard_id)
    try:
        manifest = ShardManifestStore(store, shard_id).read_latest()
    except CorruptManifestError as error:
        return Finding(Kind.MANIFEST_UNREADABLE, Severity.ERROR, where, str(error), shard_id)
    if manifest is not None:
        return manifest
    # A writer makes the first manifest before anything else.
    has_rows = bool(store.list(layout.shard_dir(shard_id)))
    severity = Severity.ERROR if has_rows else Severity.INFO
    text = f"shard {shard_id} has no manifest" + (" but files" if has_rows else "")
    return Finding(Kind.MANIFEST_MISSING, severity, where, text, shard_id)


def _verify_base(
    base: BaseTable, store: ObjectStore, present: set[UUID], deep: bool, report: VerifyReport
) -> None:
    absent = {s: g for s, g in base.details.compacted.items() if s not in present and not is_fence(s)}
    copy = copy_of(store) if absent else None
    for shard_id, generation in sorted(absent.items()):
        # A copy has the markers of its source, and shards from their first writer on.
        if copy is None or copy.markers.get(shard_id, 0) < generation:
            text = f"the base table holds generation {generation} of shard {shard_id}, which does not exist"
            report.findings.append(
                Finding(
                    Kind.MARKER_WITHOUT_SHARD, Severity.WARNING, str(shard_id), text, shard_id, generation
                )
            )
    for shard_id, generation in sorted(unmarked_tags(base).items()):
        text = f"the rows of shard {shard_id} up to generation {generation} are in the base without a marker"
        report.findings.append(
            Finding(Kind.APPEND_UNFINISHED, Severity.INFO, str(shard_id), text, shard_id, generation)
        )
    if deep and base.schema.primary_key:
        rows, doubled = doubled_keys(base)
        report.checked["base rows"] += rows
        if doubled:
            text = f"{doubled} of {rows} rows of the base table have a key that another row has too"
            report.findings.append(Finding(Kind.DUPLICATE_KEYS, Severity.ERROR, base.uri, text))
