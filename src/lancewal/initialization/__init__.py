"""Give a table a write path (a new table, an existing one, or one from a backup), and take it away again."""

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
