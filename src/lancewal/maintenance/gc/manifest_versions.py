"""Old versions of a shard's manifest.

In ascending order: whoever knows an older version and probes for the next one takes a version
whose successor is missing for the newest, so there must never be a gap.
"""

from __future__ import annotations

from lancewal import layout
from lancewal.maintenance import points
from lancewal.maintenance.gc.context import ShardContext, numbered
from lancewal.maintenance.gc.looks import unseen
from lancewal.maintenance.gc.retention import Resource

_RESOURCE = Resource.MANIFEST_VERSIONS


def collect(shard: ShardContext) -> None:
    listing = shard.store.list(layout.manifest_dir(shard.shard_id))
    infos = numbered(listing, layout.parse_manifest_name)
    # Pruning writes a version of its own; a dry run tells of what that would leave.
    superseded = list(infos) if shard.dry_run and shard.pruned else list(infos)[:-1]
    age = shard.retention.least_age(_RESOURCE)
    seen = shard.looks.reach("version", age)
    for version in superseded:
        info = infos[version]
        if not shard.is_old(info.modified, _RESOURCE):
            break
        if version > seen:
            shard.kept(_RESOURCE, f"manifest/{version}", unseen(shard.looks.age_of("version", version), age))
            break
        if not shard.dry_run:
            shard.store.delete(info.path)
            points.reached("collect: an old manifest is deleted")
        shard.collected(_RESOURCE, f"manifest/{version}", info.size)
