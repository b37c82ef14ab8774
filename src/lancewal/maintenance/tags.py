"""Tags of appends (see :mod:`lancewal.markers`): turned into markers, and removed."""

from __future__ import annotations

from functools import partial
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.maintenance import points
from lancewal.maintenance.commits import AlreadyCompactedError, commit_errors, commit_marker, until_won
from lancewal.markers import tags
from lancewal.objects import ObjectStore


def open_base(store: ObjectStore) -> BaseTable:
    """The newest version of the table."""
    return BaseTable.open(store.uri, store.storage_options, store=store)


def stale_tags(base: BaseTable) -> set[str]:
    """Tags whose generation a marker covers."""
    stored = base.details.compacted
    return {
        key
        for key, (shard_id, generation) in tags(base.schema.columns).items()
        if generation <= stored.get(shard_id, 0)
    }


def unmarked_tags(base: BaseTable) -> dict[UUID, int]:
    """The shards with a tag above their marker: an append whose marker is still to come."""
    stored = base.details.compacted
    pending: dict[UUID, int] = {}
    for shard_id, generation in tags(base.schema.columns).values():
        if generation > stored.get(shard_id, 0):
            pending[shard_id] = max(pending.get(shard_id, 0), generation)
    return pending


def mark_pending(store: ObjectStore) -> list[UUID]:
    """Finish appends that were interrupted before their marker; the shards it was done for."""
    done = []
    for shard_id, generation in unmarked_tags(open_base(store)).items():
        try:
            until_won(f"marking shard {shard_id}", partial(_mark_one, store, shard_id, generation))
        except AlreadyCompactedError:
            continue
        done.append(shard_id)
    return done


def _mark_one(store: ObjectStore, shard_id: UUID, generation: int) -> None:
    commit_marker(open_base(store).dataset, shard_id, generation)


def remove_tags(store: ObjectStore) -> bool:
    """Step 5: remove the tags that markers cover; whether there were any.

    Needed for nothing but tidiness: a tag at or below its marker means nothing.
    """

    def attempt() -> bool:
        base = open_base(store)
        outdated = stale_tags(base)
        if not outdated:
            return False
        changes = {
            field.name: {key: None for key in outdated if key.encode() in (field.metadata or {})}
            for field in base.schema.columns
        }
        with commit_errors("remove the tags of finished appends"):
            base.dataset.update_field_metadata({name: keys for name, keys in changes.items() if keys})
        return True

    removed, _ = until_won("removing tags", attempt)
    points.reached("append: the tag is removed")
    return removed
