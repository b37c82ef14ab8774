"""Tables get a write path: new ones, those that exist, and those from a backup; and lose it again."""

from lancewal.initialization.create import create, create_table, restore, with_key
from lancewal.initialization.initialize import initialize
from lancewal.initialization.sharding import DEFAULT_BUCKETS
from lancewal.initialization.undo import uninitialize

__all__ = [
    "DEFAULT_BUCKETS",
    "create",
    "create_table",
    "initialize",
    "restore",
    "uninitialize",
    "with_key",
]
