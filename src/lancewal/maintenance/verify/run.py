"""Verification: walk a table and report every invariant that is broken."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from uuid import UUID

from lancewal import layout
from lancewal.base import BaseTable
from lancewal.errors import CorruptManifestError, InvalidInputError
from lancewal.format.shard_manifest import ShardManifest
from lancewal.lineage import copy_of
from lancewal.maintenance.tags import unmarked_tags
from lancewal.maintenance.verify import base_keys, lineage, manifests, sstables, wal
from lancewal.maintenance.verify.context import ShardCheck
from lancewal.maintenance.verify.findings import Finding, Kind, Severity, VerifyReport
from lancewal.manifest import ShardManifestStore
from lancewal.markers import is_fence
from lancewal.objects import ObjectStore

logger = logging.getLogger(__name__)

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
        lineage.check(shard)
        manifests.check(shard)
        wal.check(shard)
        sstables.check(shard)
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
        rows, doubled = base_keys.doubled_keys(base)
        report.checked["base rows"] += rows
        if doubled:
            text = f"{doubled} of {rows} rows of the base table have a key that another row has too"
            report.findings.append(Finding(Kind.DUPLICATE_KEYS, Severity.ERROR, base.uri, text))
