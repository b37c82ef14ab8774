"""Whether a shard and the base table have one history."""

from __future__ import annotations

import logging

from lancewal import layout
from lancewal.errors import DifferentHistoryError, WalCorruptError
from lancewal.format.wal_entry import WalEntry
from lancewal.lineage import check_entries, copied_marker, copy_of, held_generation
from lancewal.maintenance.verify.context import ShardCheck
from lancewal.maintenance.verify.findings import Kind, Severity
from lancewal.wal.tailer import WalTailer
from lancewal.wal.tip import first_unsettled

logger = logging.getLogger(__name__)


def check(shard: ShardCheck) -> None:
    """Also sets the shard's marker: the newest generation that the base table holds."""
    base, store, manifest = shard.base, shard.store, shard.manifest
    where = layout.manifest_file(shard.shard_id, manifest.version)
    marker = base.compacted_generation(shard.shard_id)
    try:
        shard.marker = held_generation(base, store, manifest)
        entry = _first_unflushed(shard)
        if entry is not None:
            check_entries(base, store, [entry])
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
    tailer = WalTailer(shard.store, shard.shard_id, update_cursor=False)
    position = first_unsettled(shard.manifest)
    try:
        while (entry := tailer.read_entry(position)) is not None:
            if not entry.sentinel:
                return entry
            position += 1
    except WalCorruptError as error:
        logger.debug("reported by the check of the WAL: %s", error)
    return None
