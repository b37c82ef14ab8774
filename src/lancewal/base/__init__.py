"""The underlying Lance table: its newest version, columns and markers; conversion of Lance's errors."""

from lancewal.base.columns import MEM_WAL_INDEX
from lancewal.base.keys import check_key_columns, check_unique, declare_key
from lancewal.base.lance import (
    fragments_of,
    key_marks,
    lance_errors,
    locate,
    next_fragment_id,
    operation_of,
    projection,
    row_count,
    tagged_versions,
    with_column_metadata,
)
from lancewal.base.markers import (
    TAGGED_COLUMNS,
    fence_id,
    is_fence,
    parts_id,
    stored_markers,
    tag,
    tags,
)
from lancewal.base.table import (
    BaseTable,
    appended_generations,
    column_log,
    find_manifest,
    forget_columns,
    manifest_info,
    open_base,
    store_column_history,
    table_schema,
)

__all__ = [
    "MEM_WAL_INDEX",
    "TAGGED_COLUMNS",
    "BaseTable",
    "appended_generations",
    "check_key_columns",
    "check_unique",
    "column_log",
    "declare_key",
    "fence_id",
    "find_manifest",
    "forget_columns",
    "fragments_of",
    "is_fence",
    "key_marks",
    "lance_errors",
    "locate",
    "manifest_info",
    "next_fragment_id",
    "open_base",
    "operation_of",
    "parts_id",
    "projection",
    "row_count",
    "store_column_history",
    "stored_markers",
    "table_schema",
    "tag",
    "tagged_versions",
    "tags",
    "with_column_metadata",
]
