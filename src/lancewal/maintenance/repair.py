"""Repair of what can be rebuilt from something else without a guess."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.errors import LanceWalError
from lancewal.format.shard_manifest import ShardManifest
from lancewal.maintenance.tags import mark_pending, remove_tags
from lancewal.maintenance.verify.findings import Finding, Kind
from lancewal.maintenance.verify.run import verify
from lancewal.manifest import ShardManifestStore
from lancewal.objects import ObjectStore
from lancewal.sstable import rebuild_sidecars

logger = logging.getLogger(__name__)


@dataclass
class RepairReport:
    """``failed`` gives what went wrong with each finding that could not be repaired."""

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
    base: BaseTable, store: ObjectStore | None = None, findings: Sequence[Finding] | None = None
) -> RepairReport:
    """Put right what is safe: version hints, SSTables' key indexes and bloom filters, unfinished appends.

    ``findings`` are those of a verification; without them the table is verified first. All other
    findings are left as they are: no row is changed, and nothing is deleted.
    """
    store = store or ObjectStore.from_uri(base.uri, base.storage_options)
    if findings is None:
        findings = verify(base, store).findings
    report = RepairReport()
    done: dict[tuple[Kind, UUID | None, int | None], str | None] = {}
    for finding in findings:
        action = _ACTIONS.get(finding.kind)
        if action is None:
            report.left.append(finding)
            continue
        # Several sidecars of one SSTable are rebuilt at once.
        key = (finding.kind, finding.shard_id, finding.generation)
        if key not in done:
            done[key] = _try(partial(action, base, store, finding))
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


def _repair_hint(base: BaseTable, store: ObjectStore, finding: Finding) -> None:
    assert finding.shard_id is not None
    ShardManifestStore(store, finding.shard_id).repair_hint()


def _rebuild_sidecars(base: BaseTable, store: ObjectStore, finding: Finding) -> None:
    assert finding.shard_id is not None
    manifests = ShardManifestStore(store, finding.shard_id)
    for entry in manifests.require_latest().sstables:
        if entry.generation == finding.generation:
            notes = rebuild_sidecars(store, finding.shard_id, entry, base.schema)
            if entry.notes not in ("", notes):
                manifests.commit_update(None, partial(_without_notes, entry.path))
            return
    raise LookupError(f"generation {finding.generation} of shard {finding.shard_id} is not listed any more")


def _without_notes(path: str, manifest: ShardManifest) -> ShardManifest:
    """Without the copy of notes that are out of date; readers go to the SSTable's own."""
    entries = (replace(entry, notes="") if entry.path == path else entry for entry in manifest.sstables)
    return replace(manifest, sstables=tuple(entries))


def _finish_append(base: BaseTable, store: ObjectStore, finding: Finding) -> None:
    mark_pending(store)
    remove_tags(store)


_ACTIONS: dict[Kind, Callable[[BaseTable, ObjectStore, Finding], None]] = {
    Kind.HINT_WRONG: _repair_hint,
    Kind.SIDECAR_MISSING: _rebuild_sidecars,
    Kind.SIDECAR_WRONG: _rebuild_sidecars,
    Kind.APPEND_UNFINISHED: _finish_append,
}
