"""What a verification can find."""

from __future__ import annotations

import enum
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID


class Severity(enum.StrEnum):
    """ERROR: rows are lost, doubled or unreadable, or will be. WARNING: something that should not be,
    but harms no row. INFO: leftovers that garbage collection or the next compaction removes."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Kind(enum.StrEnum):
    """Every invariant that is checked, named after its breach."""

    UNKNOWN_DIRECTORY = "unknown_directory"
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


#: What :func:`~lancewal.maintenance.repair.repair` can put right.
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
    """One breach. ``subject`` is a path below the table, or a WAL position or generation in words."""

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
    """All findings, and how much was looked at."""

    uri: str
    base_version: int = 0
    findings: list[Finding] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """No errors and no warnings."""
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
