"""Reports of compaction, garbage collection and verification, as data."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias
from uuid import UUID


@dataclass(frozen=True)
class Progress:
    """One step of a compaction. ``rows`` is how many rows of this shard it has written so far."""

    shard_id: UUID
    step: str
    through: int
    rows: int


ProgressCallback: TypeAlias = Callable[[Progress], object]


@dataclass
class ShardReport:
    """What a compaction did for one shard.

    ``skipped`` are generations that another compactor compacted in the meantime. ``rows_in`` counts every
    row of the generations, ``rows_upserted`` the rows that reached the base. ``rows_replaced`` are
    tombstones, and rows whose key has a newer version in a later generation. ``commits`` and ``retries``
    count those that included the shard.

    Lance counts inserted, updated and deleted rows per commit. If a shard shared a commit with others, these
    numbers are ``None``; :class:`CompactionReport` has the sums.
    """

    shard_id: UUID
    generations: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    rows_in: int = 0
    rows_upserted: int = 0
    rows_inserted: int | None = 0
    rows_updated: int | None = 0
    rows_deleted: int | None = 0
    num_bytes: int = 0
    commits: int = 0
    retries: int = 0
    seconds: float = 0.0

    @property
    def through(self) -> int:
        """The newest generation of the plan that the base holds."""
        return max([*self.generations, *self.skipped], default=0)

    @property
    def rows_replaced(self) -> int:
        return self.rows_in - self.rows_upserted

    def add(self, later: ShardReport) -> None:
        """Add a later report of the same shard."""
        for each in fields(self):
            if each.name != "shard_id":
                one, other = getattr(self, each.name), getattr(later, each.name)
                setattr(self, each.name, None if one is None or other is None else one + other)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shard_id": str(self.shard_id)}


@dataclass
class PackReport:
    """What a compaction did for shards that share commits, and which shards failed.

    ``commits`` counts each commit once, however many shards it included. So do the other sums.
    """

    shards: dict[UUID, ShardReport] = field(default_factory=dict)
    failed: dict[UUID, Exception] = field(default_factory=dict)
    rows_inserted: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    commits: int = 0
    retries: int = 0

    def add(self, other: PackReport) -> None:
        for shard_id, report in other.shards.items():
            if shard_id in self.shards:
                self.shards[shard_id].add(report)
            else:
                self.shards[shard_id] = report
        self.failed.update(other.failed)
        for name in PACK_SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


PACK_SUMS = ("rows_inserted", "rows_updated", "rows_deleted", "commits", "retries")
_SHARD_SUMS = ("generations", "rows_in", "rows_upserted", "num_bytes")


@dataclass
class CompactionReport:
    """What a compaction did for all shards and for the base table itself."""

    uri: str
    shards: list[ShardReport] = field(default_factory=list)
    base_version: int = 0
    seconds: float = 0.0
    rows_inserted: int = 0
    rows_updated: int = 0
    rows_deleted: int = 0
    commits: int = 0
    retries: int = 0
    indexes_optimized: bool = False
    files_removed: int = 0
    files_added: int = 0

    @property
    def generations(self) -> int:
        """How many generations were compacted."""
        return sum(len(shard.generations) for shard in self.shards)

    @property
    def rows_in(self) -> int:
        return sum(shard.rows_in for shard in self.shards)

    @property
    def rows_upserted(self) -> int:
        return sum(shard.rows_upserted for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    def totals(self) -> dict[str, float]:
        """What this compaction adds to the totals of the process."""
        return {
            "compactions": 1,
            "compaction_seconds": self.seconds,
            "compaction_generations": self.generations,
            "compaction_rows_upserted": self.rows_upserted,
            "compaction_rows_deleted": self.rows_deleted,
            "compaction_bytes": self.num_bytes,
            "compaction_conflicts": self.retries,
        }

    def to_dict(self) -> dict[str, Any]:
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "shards"}
        sums = {name: getattr(self, name) for name in _SHARD_SUMS}
        return {**own, **sums, "shards": [shard.to_dict() for shard in self.shards]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)


class Resource(enum.StrEnum):
    """What garbage collection deletes, in this order."""

    MANIFEST_ENTRIES = "manifest_entries"
    WAL_ENTRIES = "wal_entries"
    SSTABLES = "sstables"
    ORPHANS = "orphans"
    MANIFEST_VERSIONS = "manifest_versions"
    STAGING_FILES = "staging_files"


@dataclass(frozen=True)
class Collected:
    """Something that was deleted. ``name`` is relative to the shard's directory."""

    resource: Resource
    shard_id: UUID | None
    name: str
    num_bytes: int = 0


@dataclass(frozen=True)
class Kept:
    """Garbage that something still needs."""

    resource: Resource
    shard_id: UUID | None
    name: str
    reason: str


@dataclass
class GcReport:
    """What a garbage collection deleted and kept.

    In a dry run nothing was deleted, and ``collected`` is what would have been.
    """

    uri: str
    dry_run: bool = False
    collected: list[Collected] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for each in self.collected)

    def of(self, resource: Resource) -> list[Collected]:
        return [each for each in self.collected if each.resource is resource]

    def names(self, resource: Resource) -> list[str]:
        return [each.name for each in self.of(resource)]

    def counts(self) -> dict[str, int]:
        return {str(resource): len(self.of(resource)) for resource in Resource}

    def totals(self) -> dict[str, float]:
        """What this collection adds to the totals of the process; the resource is named after a dot."""
        if self.dry_run:
            return {}
        return {
            "collections": 1,
            "collection_seconds": self.seconds,
            "collection_bytes": self.num_bytes,
            **{f"collected.{name}": number for name, number in self.counts().items()},
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "dry_run": self.dry_run,
            "seconds": self.seconds,
            "num_bytes": self.num_bytes,
            "counts": self.counts(),
            "collected": [_as_dict(each) for each in self.collected],
            "kept": [_as_dict(each) for each in self.kept],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        verb = "would delete" if self.dry_run else "deleted"
        counts = ", ".join(f"{count} {name}" for name, count in self.counts().items() if count)
        lines = [f"{verb} {counts or 'nothing'}, {self.num_bytes / 1e6:.1f} MB"]
        lines += [f"kept {each.resource} {each.name} of {each.shard_id}: {each.reason}" for each in self.kept]
        return "\n".join(lines)


def _as_dict(each: Collected | Kept) -> dict[str, Any]:
    shard_id = str(each.shard_id) if each.shard_id else None
    return {**asdict(each), "resource": str(each.resource), "shard_id": shard_id}


class Severity(enum.StrEnum):
    """How serious a finding is.

    ERROR: rows are lost, doubled or unreadable, or will be. WARNING: a fault that harms no row.
    INFO: leftovers that garbage collection or the next compaction removes.
    """

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Kind(enum.StrEnum):
    """The invariants that are checked, each named after its violation."""

    UNKNOWN_DIRECTORY = "unknown_directory"
    BASE_DAMAGED = "base_damaged"
    MANIFEST_MISSING = "manifest_missing"
    MANIFEST_UNREADABLE = "manifest_unreadable"
    MANIFEST_GAP = "manifest_gap"
    MANIFEST_REGRESSION = "manifest_regression"
    HINT_WRONG = "hint_wrong"
    MARKER_ABOVE_MANIFEST = "marker_above_manifest"
    COPIED_MARKER = "copied_marker"
    EARLIER_TABLE = "earlier_table"
    MARKER_WITHOUT_SHARD = "marker_without_shard"
    APPEND_UNFINISHED = "append_unfinished"
    GENERATION_GAP = "generation_gap"
    DANGLING_PATH = "dangling_path"
    SSTABLE_UNREADABLE = "sstable_unreadable"
    SIDECAR_MISSING = "sidecar_missing"
    SIDECAR_WRONG = "sidecar_wrong"
    ROW_COUNT_WRONG = "row_count_wrong"
    ROWS_CHANGED = "rows_changed"
    FIELD_ID_MISMATCH = "field_id_mismatch"
    DUPLICATE_KEYS = "duplicate_keys"
    SPLIT_SHARD = "split_shard"
    KEYS_IN_TWO_SHARDS = "keys_in_two_shards"
    ORPHANED_SSTABLE = "orphaned_sstable"
    WAL_GAP = "wal_gap"
    WAL_UNREADABLE = "wal_unreadable"
    WAL_EPOCH_AHEAD = "wal_epoch_ahead"
    WAL_EPOCH_BEHIND = "wal_epoch_behind"
    WAL_STRAY = "wal_stray"
    CHECKPOINT_UNREADABLE = "checkpoint_unreadable"
    CHECKPOINT_INCOMPLETE = "checkpoint_incomplete"


#: What :func:`~lancewal.maintenance.repair.repair` can repair.
REPAIRABLE = frozenset(
    {
        Kind.HINT_WRONG,
        Kind.SIDECAR_MISSING,
        Kind.SIDECAR_WRONG,
        Kind.APPEND_UNFINISHED,
        Kind.SPLIT_SHARD,
        Kind.COPIED_MARKER,
    }
)


@dataclass(frozen=True)
class Finding:
    """One violated invariant. ``subject`` says where: a path, a URI, a shard id or a checkpoint's name."""

    kind: Kind
    severity: Severity
    subject: str
    text: str
    shard_id: UUID | None = None
    generation: int | None = None

    @property
    def repairable(self) -> bool:
        return self.kind in REPAIRABLE

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": str(self.kind),
            "severity": str(self.severity),
            "shard_id": str(self.shard_id) if self.shard_id else None,
            "generation": self.generation,
            "subject": self.subject,
            "text": self.text,
            "repairable": self.repairable,
        }

    def __str__(self) -> str:
        return f"{self.severity} {self.kind}: {self.text}"


@dataclass
class VerifyReport:
    """All findings, and how much was checked."""

    uri: str
    base_version: int = 0
    findings: list[Finding] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def found(
        self,
        kind: Kind,
        severity: Severity,
        subject: str,
        text: str,
        shard_id: UUID | None = None,
        generation: int | None = None,
    ) -> None:
        self.findings.append(Finding(kind, severity, subject, text, shard_id, generation))

    @property
    def ok(self) -> bool:
        """Whether there are no errors and no warnings."""
        return all(finding.severity is Severity.INFO for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """For scripts: 0 when all is well, 1 with warnings, 2 with errors."""
        severities = {finding.severity for finding in self.findings}
        if Severity.ERROR in severities:
            return 2
        return 1 if Severity.WARNING in severities else 0

    def of(self, kind: Kind) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind is kind]

    def to_dict(self) -> dict[str, Any]:
        return {
            "uri": self.uri,
            "base_version": self.base_version,
            "ok": self.ok,
            "exit_code": self.exit_code,
            "seconds": self.seconds,
            "checked": dict(self.checked),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        checked = ", ".join(f"{count} {what}" for what, count in self.checked.items())
        verdict = "no errors" if self.ok else f"{len(self.findings)} findings"
        return "\n".join([f"checked {checked}: {verdict}", *map(str, self.findings)])
