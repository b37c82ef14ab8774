"""What the collectors of one shard share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from uuid import UUID

from lancewal import layout
from lancewal.errors import DifferentHistoryError
from lancewal.format.shard_manifest import ShardManifest
from lancewal.lineage import held_generation
from lancewal.maintenance.gc.needs import Needs
from lancewal.maintenance.gc.report import Collected, GcReport, Kept
from lancewal.maintenance.gc.retention import Resource, Retention
from lancewal.manifest import ShardManifestStore
from lancewal.objects import ObjectInfo, ObjectStore

logger = logging.getLogger(__name__)

_CLOCK_DIR = f"{layout.OWN_DIR}/clock"


def storage_time(store: ObjectStore, *, dry_run: bool) -> datetime:
    """The time by the clock that stamps objects: this machine's may be wrong by more than is safe.

    A dry run writes nothing, and goes by this machine's.
    """
    if store.is_local or dry_run:
        return datetime.now(UTC)
    store.put(f"{_CLOCK_DIR}/now", b"", durable=False)
    # By a listing, like all other times: those of single objects may be rounded differently.
    stamps = [info.modified for info in store.list(_CLOCK_DIR)]
    return max(stamps, default=datetime.now(UTC))


@dataclass
class ShardContext:
    """One shard during one collection."""

    store: ObjectStore
    shard_id: UUID
    manifest: ShardManifest
    needs: Needs
    retention: Retention
    now: datetime
    report: GcReport
    #: SSTables whose manifest entries this collection pruned, or would prune: path, generation.
    pruned: dict[str, int] = field(default_factory=dict)
    #: WAL positions that this collection deleted, or would delete.
    deleted_positions: set[int] = field(default_factory=set)

    @property
    def dry_run(self) -> bool:
        return self.report.dry_run

    @cached_property
    def marker(self) -> int:
        """The newest generation of this shard that the base table holds; 0 while that is in doubt.

        A copy's markers are not about the copy's generations: those stay.
        """
        marker = self.needs.marker(self.shard_id)
        if not marker:
            return 0
        try:
            return min(marker, held_generation(self.needs.base, self.store, self.manifest))
        except DifferentHistoryError as error:
            logger.warning("nothing of the shard counts as compacted: %s", error)
            return 0

    @cached_property
    def manifests(self) -> ShardManifestStore:
        return ShardManifestStore(self.store, self.shard_id)

    @cached_property
    def wal_infos(self) -> dict[int, ObjectInfo]:
        """The WAL's entries by position, ascending, as listed once."""
        return numbered(self.store.list(layout.wal_dir(self.shard_id)), layout.parse_wal_name)

    def is_old(self, modified: datetime, resource: Resource) -> bool:
        return self.now - modified >= self.retention.least_age(resource)

    def collected(self, resource: Resource, name: str, num_bytes: int = 0) -> None:
        self.report.collected.append(Collected(resource, self.shard_id, name, num_bytes))

    def kept(self, resource: Resource, name: str, reason: str) -> None:
        self.report.kept.append(Kept(resource, self.shard_id, name, reason))


def numbered(infos: Sequence[ObjectInfo], parse: Callable[[str], int | None]) -> dict[int, ObjectInfo]:
    """Objects by the number in their names, ascending; others are left out."""
    found = {}
    for info in infos:
        number = parse(info.path.rsplit("/", 1)[-1])
        if number is not None:
            found[number] = info
    return dict(sorted(found.items()))
