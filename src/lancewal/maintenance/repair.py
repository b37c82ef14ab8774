"""Repairs damage that can be rebuilt without guessing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias
from uuid import UUID

from lancewal.base import BaseTable, open_base
from lancewal.errors import InvalidInputError, LanceWalError
from lancewal.format import ShardManifest, encode_sentinel
from lancewal.maintenance.append_only import mark_pending, remove_tags
from lancewal.maintenance.commits import mark
from lancewal.maintenance.compact import compact
from lancewal.maintenance.reports import Finding, Kind
from lancewal.maintenance.verify import verify
from lancewal.shard import (
    ShardManifestStore,
    WalAppender,
    WalTailer,
    find_tip,
    missing_positions,
    retained_positions,
)
from lancewal.sstable import (
    EarlierTable,
    earlier_table,
    is_entry_of_earlier_table,
    rebuild_sidecars,
    take_over,
    unknown_entries,
)
from lancewal.storage import ObjectStore, layout
from lancewal.writer import drain_shard

logger = logging.getLogger(__name__)

#: A longer gap is not a loss: it means that a file of another position or shard was put there.
_MAX_LOST_ENTRIES = 10_000


@dataclass
class RepairReport:
    """What was repaired, and what was not.

    ``left`` are findings that repair does not handle. ``failed`` gives the reason for each failed repair.
    """

    repaired: list[Finding] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)
    failed: list[tuple[Finding, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "repaired": [finding.to_dict() for finding in self.repaired],
            "left": [finding.to_dict() for finding in self.left],
            "failed": [{**finding.to_dict(), "error": text} for finding, text in self.failed],
        }


def repair(
    store: ObjectStore,
    findings: Sequence[Finding] | None = None,
    *,
    accept_lost_entries: bool = False,
    earlier: str | None = None,
) -> RepairReport:
    """Repair what is safe: version hints, SSTables' key indexes and bloom filters, unfinished appends.

    If several shards have the same sharding value, one is kept and the others are retired: **taken over
    from their writers**, flushed, compacted into the base table and sealed. A key that is in two of them
    keeps the version that reads return after a flush.

    ``findings`` are those of a verification; without them the table is verified first. All other
    findings are left as they are: no row is changed, and nothing is deleted.

    The generations of a copied table are renumbered above the copied marker. This takes over the
    shard: **a writer that is open on it is fenced**.

    ``accept_lost_entries`` gives up the rows of missing WAL entries. An empty entry takes the place of
    each, so that the log can be read and written again. First try to get the objects back, from a
    backup or from the versions that a bucket keeps.

    ``earlier`` is for a table that was created again at the same place, with shards that still hold rows of
    the earlier table. It decides about these rows if it is unknown whether they are newer than the base
    table's rows: "keep" treats them as the newest, "drop" removes them from their shards, which fences their
    writers.
    """
    if earlier not in (None, *_EARLIER):
        raise InvalidInputError(f"earlier is {earlier!r}; pass 'keep' or 'drop'")
    if findings is None:
        findings = verify(store).findings
    report = RepairReport()
    actions = {**_ACTIONS, Kind.WAL_GAP: _fill_gaps} if accept_lost_entries else _ACTIONS
    done: dict[tuple[Kind, UUID | None, int | None], str | None] = {}
    for finding in findings:
        action = actions.get(finding.kind)
        if finding.kind is Kind.EARLIER_TABLE and earlier is not None:
            action = _EARLIER[earlier]
        if action is None:
            report.left.append(finding)
            continue
        # All sidecars of one SSTable are rebuilt together.
        key = (finding.kind, finding.shard_id, finding.generation)
        if key not in done:
            done[key] = _try(partial(action, store, finding))
        error = done[key]
        if error is None:
            report.repaired.append(finding)
        else:
            report.failed.append((finding, error))
    return report


def _try(action: Callable[[], None]) -> str | None:
    try:
        action()
    except (LanceWalError, LookupError) as error:
        logger.warning("repair failed: %s", error)
        return str(error)
    return None


def _repair_hint(store: ObjectStore, finding: Finding) -> None:
    assert finding.shard_id is not None
    ShardManifestStore(store, finding.shard_id).repair_hint()


def _rebuild_sidecars(store: ObjectStore, finding: Finding) -> None:
    assert finding.shard_id is not None
    manifests = ShardManifestStore(store, finding.shard_id)
    for entry in manifests.require_latest().sstables:
        if entry.generation == finding.generation:
            notes = rebuild_sidecars(store, finding.shard_id, entry, open_base(store).schema)
            if entry.notes not in ("", notes):
                manifests.commit_update(None, partial(_without_notes, entry.path))
            return
    raise LookupError(f"generation {finding.generation} of shard {finding.shard_id} is not listed any more")


def _without_notes(path: str, manifest: ShardManifest) -> ShardManifest:
    """The manifest without an outdated copy of notes; readers then use the SSTable's own."""
    entries = (replace(entry, notes="") if entry.path == path else entry for entry in manifest.sstables)
    return replace(manifest, sstables=tuple(entries))


def _finish_append(store: ObjectStore, finding: Finding) -> None:
    mark_pending(store)
    remove_tags(store)


def _retire(store: ObjectStore, finding: Finding) -> None:
    """Move all rows of a shard into the base table, and seal the shard."""
    assert finding.shard_id is not None
    epoch = drain_shard(open_base(store), store, finding.shard_id).epoch
    # This also compacts all shards that share its keys, in order.
    compact(store, [finding.shard_id])
    # Refused if another writer has claimed the shard since it was drained.
    ShardManifestStore(store, finding.shard_id).seal(epoch)


def _fill_gaps(store: ObjectStore, finding: Finding) -> None:
    """Write sentinels, which every reader skips, at the positions of lost entries."""
    shard_id = finding.shard_id
    assert shard_id is not None
    manifest = ShardManifestStore(store, shard_id).require_latest()
    tailer = WalTailer(store, shard_id)
    for gap in missing_positions(retained_positions(store, shard_id), manifest.first_unsettled):
        if len(gap) > _MAX_LOST_ENTRIES:
            raise LookupError(
                f"the {len(gap)} entries before {layout.wal_entry(shard_id, gap.stop)} are missing: "
                "that file does not belong there; move it away"
            )
        # Epochs never fall along the log, so the epoch after the gap is valid in it.
        following = tailer.read_header(gap.stop)
        epoch = manifest.writer_epoch if following is None else following.writer_epoch
        for position in gap:
            store.put_if_absent(layout.wal_entry(shard_id, position), encode_sentinel(epoch))
            logger.warning("gave up a lost WAL entry", extra={"shard": str(shard_id), "position": position})


def _lift(store: ObjectStore, finding: Finding) -> None:
    """Open a writer, which flushes the log and renumbers all generations."""
    assert finding.shard_id is not None
    drain_shard(open_base(store), store, finding.shard_id)


def _keep_earlier(store: ObjectStore, finding: Finding) -> None:
    take_over(store, _earlier(open_base(store), store))


def _drop_earlier(store: ObjectStore, finding: Finding) -> None:
    """Move the marker and the replay cursor past the earlier table's SSTables and WAL entries.

    The marker is first. Once it is committed, everybody ignores the SSTables, listed or not. If this is
    killed in between, it can be repeated.
    """
    assert finding.shard_id is not None
    newest = open_base(store)
    earlier = _earlier(newest, store)
    manifests = ShardManifestStore(store, finding.shard_id)
    appender = WalAppender.open(store, finding.shard_id, manifests.require_latest().shard_spec_id)
    claimed = appender.claimed
    assert claimed is not None, "a claim leaves a manifest"
    unknown = unknown_entries(store, claimed, earlier)
    covered = claimed.replay_after_wal_entry_position
    end = appender.sentinel_position or find_tip(store, finding.shard_id, claimed)
    tailer = WalTailer(store, finding.shard_id)
    for entry in tailer.entries(claimed.first_unsettled, end):
        if not entry.sentinel and not is_entry_of_earlier_table(store, entry, earlier):
            break
        covered = entry.position
    logger.warning(
        "dropped %d SSTables and the WAL up to position %d of an earlier table",
        len(unknown),
        covered,
        extra={"shard": str(finding.shard_id)},
    )

    if unknown and unknown[-1].generation > newest.compacted_generation(finding.shard_id):
        mark(store, claimed.shard_id, unknown[-1].generation)

    def rest(manifest: ShardManifest) -> ShardManifest:
        cursor = max(covered, manifest.replay_after_wal_entry_position)
        return replace(manifest.without(unknown), replay_after_wal_entry_position=cursor)

    manifests.commit_update(appender.epoch, rest)


def _earlier(base: BaseTable, store: ObjectStore) -> EarlierTable:
    # The first version is older than any index, so it proves that there was an earlier table.
    found = earlier_table(base, store, layout.FIRST_MANIFEST_VERSION)
    if found is None:
        raise LookupError("the versions of the table do not tell when it was made anew")
    return found


_Action: TypeAlias = Callable[[ObjectStore, Finding], None]

#: The caller's choices for the rows of an earlier table.
_EARLIER: dict[str, _Action] = {
    "keep": _keep_earlier,
    "drop": _drop_earlier,
}

_ACTIONS: dict[Kind, _Action] = {
    Kind.HINT_WRONG: _repair_hint,
    Kind.SIDECAR_MISSING: _rebuild_sidecars,
    Kind.SIDECAR_WRONG: _rebuild_sidecars,
    Kind.APPEND_UNFINISHED: _finish_append,
    Kind.SPLIT_SHARD: _retire,
    Kind.COPIED_MARKER: _lift,
}
