"""Verification: walk a table and report every broken invariant."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from uuid import UUID

import numpy as np
import numpy.typing as npt

from lancewal.base import BaseTable, is_fence, lance_errors
from lancewal.errors import CorruptManifestError, InvalidInputError, LanceWalError
from lancewal.format import KeySet, ShardManifest, key_values, key_words
from lancewal.maintenance.append_only import unmarked_tags
from lancewal.maintenance.checks import (
    ShardCheck,
    check_lineage,
    check_manifests,
    check_sstables,
    check_wal,
)
from lancewal.maintenance.commits import open_base
from lancewal.maintenance.plan import shared_keys
from lancewal.maintenance.reports import Finding, Kind, Severity, VerifyReport
from lancewal.reader import TableReader
from lancewal.shard import ShardManifestStore, ShardRouter, discover_manifests, is_retired
from lancewal.sstable import copy_of
from lancewal.storage import ObjectStore, in_thread, layout, ordered_map

logger = logging.getLogger(__name__)

#: How often a shard that changes during its check is checked again; then its findings are reported.
_ATTEMPTS = 3
#: Shards that are checked side by side where each request is a network round trip. A deep check holds the
#: keys of its shard in memory.
_SHARDS_AT_ONCE = 32
_DEEP_SHARDS_AT_ONCE = 4
#: WAL entries that all of them together read at a time.
_READERS = 64


def verify(
    store: ObjectStore,
    shards: Sequence[UUID | str] | None = None,
    *,
    deep: bool = True,
    progress: Callable[[UUID], object] | None = None,
) -> VerifyReport:
    """Check a table, or some of its shards; changes nothing, and may run beside everything else.

    ``deep`` reads all rows of SSTables, the whole retained WAL and the keys of the base table;
    otherwise only metadata and the unflushed WAL are read.
    """
    started = time.perf_counter()
    report = VerifyReport(store.uri)
    wanted = None if shards is None else {layout.parse_shard_id(shard) for shard in shards}
    present = _shard_directories(store, report, wanted)
    if wanted is not None and (absent := wanted - set(present)):
        raise InvalidInputError(f"there are no shards {', '.join(map(str, sorted(absent)))} in {store.uri}")
    at_once = _DEEP_SHARDS_AT_ONCE if deep else _SHARDS_AT_ONCE
    workers = 1 if store.is_local else max(1, min(len(present), at_once))
    readers = 1 if store.is_local else min(16, _READERS // workers)

    def check(shard_id: UUID) -> VerifyReport:
        part = VerifyReport(store.uri)
        _verify_shard(store, shard_id, deep, readers, part)
        return part

    def check_table() -> VerifyReport:
        part = VerifyReport(store.uri)
        if wanted is None:
            base = open_base(store)
            part.base_version = base.version
            _verify_base(base, store, set(present), deep, part)
            _check_split_shards(base, store, deep, part)
        return part

    # The table as a whole is checked beside its shards where each request is a network round trip.
    whole = None if store.is_local else in_thread(check_table, "lancewal-io")
    try:
        for shard_id, part in zip(present, ordered_map(check, present, workers), strict=True):
            _add(report, part)
            if progress is not None:
                progress(shard_id)
    finally:
        if whole is not None:
            whole.wait()
    _add(report, check_table() if whole is None else whole.result())
    report.seconds = time.perf_counter() - started
    return report


def _add(report: VerifyReport, part: VerifyReport) -> None:
    report.base_version = max(report.base_version, part.base_version)
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


def _verify_shard(store: ObjectStore, shard_id: UUID, deep: bool, readers: int, report: VerifyReport) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        before = _manifest(store, shard_id)
        if isinstance(before, Finding):
            report.findings.append(before)
            return
        # After the manifest, as readers do.
        shard = ShardCheck(store, open_base(store), shard_id, before, 0, deep, readers)
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
    # A writer creates the first manifest before anything else.
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
        # A copy has the markers of its source; its shards exist once they have a writer.
        if copy is None or copy.markers.get(shard_id, 0) < generation:
            text = f"the base table holds generation {generation} of shard {shard_id}, which does not exist"
            kind = Kind.MARKER_WITHOUT_SHARD
            report.found(kind, Severity.WARNING, str(shard_id), text, shard_id, generation)
    for shard_id, generation in sorted(unmarked_tags(base).items()):
        text = f"the rows of shard {shard_id} up to generation {generation} are in the base without a marker"
        report.found(Kind.APPEND_UNFINISHED, Severity.INFO, str(shard_id), text, shard_id, generation)
    if deep and base.schema.primary_key:
        rows, doubled = _doubled_keys(base)
        report.checked["base rows"] += rows
        if doubled:
            text = f"{doubled} of {rows} rows of the base table have a key that another row has too"
            report.found(Kind.DUPLICATE_KEYS, Severity.ERROR, base.uri, text)


def _check_split_shards(base: BaseTable, store: ObjectStore, deep: bool, report: VerifyReport) -> None:
    """Shards with the same sharding value; with ``deep``, keys that are in two shards of any value."""
    try:
        _check_shards(base, store, report)
        if deep and base.schema.primary_key:
            _check_keys(store, report)
    except LanceWalError as error:
        # An unreadable shard is a finding already.
        logger.debug("shards were not compared: %s", error)


def _check_shards(base: BaseTable, store: ObjectStore, report: VerifyReport) -> None:
    try:
        router = ShardRouter.for_table(base.details, base.schema)
    except InvalidInputError:
        return  # Shards are chosen by hand.
    manifests = discover_manifests(store)
    in_use = [m for m in manifests if not is_retired(store, m, base.compacted_generation(m.shard_id))]
    for kept, *others in router.groups(in_use):
        for manifest in others:
            text = (
                f"shard {manifest.shard_id} is for the same value of the sharding column as {kept.shard_id}; "
                "nothing can be written for it until one is drained and sealed"
            )
            shard_id = manifest.shard_id
            report.found(Kind.SPLIT_SHARD, Severity.WARNING, str(shard_id), text, shard_id)


def _check_keys(store: ObjectStore, report: VerifyReport) -> None:
    shards = TableReader(store, live_writers=False).snapshot().shards
    workers = 1 if store.is_local else _SHARDS_AT_ONCE
    keys = list(
        ordered_map(lambda shard: KeySet.union(source.keys() for source in shard.sources), shards, workers)
    )
    for pair in shared_keys(keys):
        one, other = shards[pair.first].shard_id, shards[pair.second].shard_id
        text = (
            f"{pair.count} keys, such as {pair.example!r}, are in shard {one} and in shard {other}; nothing "
            "says which version is newer"
        )
        report.found(Kind.KEYS_IN_TWO_SHARDS, Severity.ERROR, str(other), text, other)


def _doubled_keys(base: BaseTable) -> tuple[int, int]:
    """How many rows there are, and how many share a key with an earlier one.

    Takes eight bytes per row. Text and composite keys are compared by a 64-bit hash, which confuses
    two of them about once in ten thousand tables of a billion rows.
    """
    words: list[npt.NDArray[np.uint64]] = []
    with lance_errors("read the keys of the base table"):
        for batch in base.dataset.scanner(columns=list(base.schema.primary_key)).to_batches():
            words.append(key_words(key_values(batch.columns)))
    if not words:
        return 0, 0
    every = np.sort(np.concatenate(words))
    return len(every), int(np.count_nonzero(every[1:] == every[:-1]))
