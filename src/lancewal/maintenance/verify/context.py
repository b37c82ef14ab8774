"""What the checks of one shard share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.format.shard_manifest import ShardManifest
from lancewal.maintenance.verify.findings import Finding, Kind, Severity
from lancewal.objects import ObjectStore


@dataclass
class ShardCheck:
    """One look at one shard. ``deep`` reads rows, not only what describes them."""

    store: ObjectStore
    base: BaseTable
    shard_id: UUID
    manifest: ShardManifest
    marker: int
    deep: bool
    #: SSTables that retained versions of the manifest name, as far as they were read.
    once_listed: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)

    def found(
        self, kind: Kind, severity: Severity, subject: str, text: str, generation: int | None = None
    ) -> None:
        self.findings.append(Finding(kind, severity, subject, text, self.shard_id, generation))
