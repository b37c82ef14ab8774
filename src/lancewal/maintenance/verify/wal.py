"""A shard's WAL: no gap above the cursor, every entry readable, none from the future."""

from __future__ import annotations

from itertools import pairwise

from lancewal import layout
from lancewal.errors import WalCorruptError
from lancewal.format.wal_entry import WalEntry
from lancewal.maintenance.verify.columns import mismatches
from lancewal.maintenance.verify.context import ShardCheck
from lancewal.maintenance.verify.findings import Kind, Severity
from lancewal.parallel import ordered_map
from lancewal.wal.tailer import WalTailer
from lancewal.wal.tip import missing_positions, retained_positions

_REMOTE_READERS = 16


def check(shard: ShardCheck) -> None:
    positions = retained_positions(shard.store, shard.shard_id)
    covered = shard.manifest.replay_after_wal_entry_position
    _check_gaps(shard, positions, covered)
    # What SSTables hold is needed by followers only: read where everything is.
    wanted = [p for p in positions if shard.deep or p > covered]
    tailer = WalTailer(shard.store, shard.shard_id, update_cursor=False)

    def read(position: int) -> WalEntry | WalCorruptError | None:
        try:
            return tailer.read_entry(position)
        except WalCorruptError as error:
            return error

    workers = 1 if shard.store.is_local else _REMOTE_READERS
    before: WalEntry | None = None
    for position, entry in zip(wanted, ordered_map(read, wanted, workers), strict=True):
        _check_entry(shard, position, entry, covered)
        if isinstance(entry, WalEntry) and position > covered:
            if before is not None:
                _check_order(shard, before, entry)
            before = entry


def _check_gaps(shard: ShardCheck, positions: list[int], covered: int) -> None:
    for missing in missing_positions(positions, covered + 1):
        # A listing is no snapshot: what came while it ran may be missing in it.
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
    """Who claims a shard writes behind all that is there, so epochs rise along the log."""
    if entry.writer_epoch < before.writer_epoch:
        shard.found(
            Kind.WAL_EPOCH_BEHIND,
            Severity.WARNING,
            layout.wal_entry(shard.shard_id, entry.position),
            f"WAL entry {entry.position} has epoch {entry.writer_epoch}, entry {before.position} before it "
            f"has {before.writer_epoch}: a writer took the place of a lost entry {before.position}, or wrote "
            "on after it was superseded",
        )


def _check_entry(
    shard: ShardCheck, position: int, entry: WalEntry | WalCorruptError | None, covered: int
) -> None:
    path = layout.wal_entry(shard.shard_id, position)
    if entry is None:
        # Collected since the listing, or the gap that the caller looks at again.
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
        for worst, text in mismatches(entry.batches[0].schema, shard.base.schema, entry.base_version):
            limited = worst if position > covered else Severity.INFO
            shard.found(Kind.FIELD_ID_MISMATCH, limited, path, f"WAL entry {position}: {text}")
