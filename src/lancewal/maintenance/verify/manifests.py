"""A shard's manifest versions and their hint."""

from __future__ import annotations

from itertools import pairwise

from lancewal import layout
from lancewal.errors import CorruptManifestError
from lancewal.format.shard_manifest import ShardManifest
from lancewal.maintenance.plan import pending_sstables
from lancewal.maintenance.verify.context import ShardCheck
from lancewal.maintenance.verify.findings import Kind, Severity
from lancewal.manifest import ShardManifestStore


def check(shard: ShardCheck) -> None:
    _check_versions(shard)
    _check_hint(shard)
    _check_generations(shard)


def _check_versions(shard: ShardCheck) -> None:
    manifests = ShardManifestStore(shard.store, shard.shard_id)
    directory = layout.manifest_dir(shard.shard_id)
    names = (info.path.rsplit("/", 1)[-1] for info in shard.store.list(directory))
    versions = sorted(v for v in map(layout.parse_manifest_name, names) if v is not None)
    newest = shard.manifest.version
    for version, following in pairwise(versions):
        if following != version + 1:
            shard.found(
                Kind.MANIFEST_GAP,
                Severity.ERROR,
                layout.manifest_file(shard.shard_id, version + 1),
                f"manifest versions {version} and {following} exist, those between do not; "
                f"readers may take {version} for the newest",
            )
    before: ShardManifest | None = None
    for version in versions if shard.deep else versions[-2:]:
        try:
            manifest = shard.manifest if version == newest else manifests.read_version(version)
        except FileNotFoundError:
            continue
        except CorruptManifestError as error:
            severity = Severity.ERROR if version >= newest else Severity.WARNING
            path = layout.manifest_file(shard.shard_id, version)
            shard.found(Kind.MANIFEST_UNREADABLE, severity, path, str(error))
            continue
        shard.checked["manifest versions"] += 1
        shard.once_listed.update(entry.path for entry in manifest.sstables)
        if before is not None and (regressed := _regressed(before, manifest)):
            path = layout.manifest_file(shard.shard_id, version)
            text = f"{regressed} falls from version {before.version} to {version}"
            shard.found(Kind.MANIFEST_REGRESSION, Severity.ERROR, path, text)
        before = manifest


def _regressed(before: ShardManifest, after: ShardManifest) -> str | None:
    names = ("writer_epoch", "current_generation", "replay_after_wal_entry_position")
    return next((name for name in names if getattr(after, name) < getattr(before, name)), None)


def _check_hint(shard: ShardCheck) -> None:
    hint = ShardManifestStore(shard.store, shard.shard_id).read_hint()
    # A commit writes its hint last, so that one version behind may be a commit under way.
    if hint is None or not 0 <= shard.manifest.version - hint <= 1:
        said = "is missing or unreadable" if hint is None else f"says version {hint}"
        shard.found(
            Kind.HINT_WRONG,
            Severity.WARNING,
            layout.version_hint(shard.shard_id),
            f"the version hint {said}, the newest manifest is {shard.manifest.version}",
        )


def _check_generations(shard: ShardCheck) -> None:
    manifest, marker = shard.manifest, shard.marker
    where = layout.manifest_file(shard.shard_id, manifest.version)
    if any(finding.kind in (Kind.MARKER_ABOVE_MANIFEST, Kind.EARLIER_TABLE) for finding in shard.findings):
        return
    try:
        pending_sstables(manifest, marker)
    except CorruptManifestError as error:
        shard.found(Kind.GENERATION_GAP, Severity.ERROR, where, str(error))
