"""Whether rows that belong together are in several shards."""

from __future__ import annotations

import logging

from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError, LanceWalError
from lancewal.maintenance.shared_keys import shared_keys
from lancewal.maintenance.verify.findings import Finding, Kind, Severity, VerifyReport
from lancewal.markers import appended_generations
from lancewal.objects import ObjectStore
from lancewal.reader.key_set import KeySet
from lancewal.reader.table_reader import TableReader
from lancewal.sharding import ShardRouter, discover_manifests, is_retired

logger = logging.getLogger(__name__)


def check(base: BaseTable, store: ObjectStore, deep: bool, report: VerifyReport) -> None:
    """Shards that are for one value; with ``deep``, keys that are in two shards, whatever these say."""
    try:
        _check_shards(base, store, report)
        if deep and base.schema.primary_key:
            _check_keys(store, report)
    except LanceWalError as error:
        # What cannot be read is a finding of its own already.
        logger.debug("shards were not compared: %s", error)


def _check_shards(base: BaseTable, store: ObjectStore, report: VerifyReport) -> None:
    try:
        router = ShardRouter.for_table(base.details, base.schema)
    except InvalidInputError:
        return  # Shards are chosen by hand.
    markers = appended_generations(base)
    in_use = [m for m in discover_manifests(store) if not is_retired(store, m, markers.get(m.shard_id, 0))]
    for kept, *others in router.groups(in_use):
        for manifest in others:
            text = (
                f"shard {manifest.shard_id} is for the same value of the sharding column as {kept.shard_id}; "
                "nothing can be written for it until one is drained and sealed"
            )
            report.findings.append(
                Finding(Kind.SPLIT_SHARD, Severity.WARNING, str(manifest.shard_id), text, manifest.shard_id)
            )


def _check_keys(store: ObjectStore, report: VerifyReport) -> None:
    shards = TableReader(store, live_writers=False).snapshot().shards
    keys = [KeySet.union(source.keys() for source in shard.sources) for shard in shards]
    for pair in shared_keys(keys):
        one, other = shards[pair.first].shard_id, shards[pair.second].shard_id
        text = (
            f"{pair.count} keys, such as {pair.example!r}, are in shard {one} and in shard {other}; nothing "
            "says which version is newer"
        )
        report.findings.append(Finding(Kind.KEYS_IN_TWO_SHARDS, Severity.ERROR, str(other), text, other))
