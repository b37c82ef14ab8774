"""One shard on storage: its manifest, its log, and which rows belong to it."""

from lancewal.shard.discovery import (
    discover_manifests,
    discover_shards,
    is_retired,
    listed_shards,
    read_manifests,
    shard_files,
)
from lancewal.shard.log import (
    AppendResult,
    WalAppender,
    WatchedTip,
    established_tip,
    find_tip,
    first_readable,
    first_unsettled,
    is_flushed,
    may_follow,
    missing_positions,
    retained_positions,
)
from lancewal.shard.manifest import DEFAULT_SCAN_BATCH_SIZE, ShardManifestStore
from lancewal.shard.replay import Replay
from lancewal.shard.routing import (
    BUCKET,
    IDENTITY,
    MAX_BUCKETS,
    UNSHARDED,
    Shard,
    ShardRouter,
    check_shard_column,
    decoded_values,
    identity_result_type,
    require_shard,
)
from lancewal.shard.tail import WalTailer, first_unflushed, has_unflushed_rows

__all__ = [
    "BUCKET",
    "DEFAULT_SCAN_BATCH_SIZE",
    "IDENTITY",
    "MAX_BUCKETS",
    "UNSHARDED",
    "AppendResult",
    "Replay",
    "Shard",
    "ShardManifestStore",
    "ShardRouter",
    "WalAppender",
    "WalTailer",
    "WatchedTip",
    "check_shard_column",
    "decoded_values",
    "discover_manifests",
    "discover_shards",
    "established_tip",
    "find_tip",
    "first_readable",
    "first_unflushed",
    "first_unsettled",
    "has_unflushed_rows",
    "identity_result_type",
    "is_flushed",
    "is_retired",
    "listed_shards",
    "may_follow",
    "missing_positions",
    "read_manifests",
    "require_shard",
    "retained_positions",
    "shard_files",
]
