"""A writer that was opened before the table's columns changed, and rows that were written after.

Such a writer may come to a shard in whose log another one has put rows with columns that it
does not know. Were they loaded as its own columns, their values would be gone. So it keeps
all rows with the newest columns, those that it takes itself included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lancewal.base import BaseTable
from lancewal.format.align import align
from lancewal.format.schema import TableSchema
from lancewal.index.specs import IndexSpec
from lancewal.objects import ObjectStore
from lancewal.writer.intake import Rows


@dataclass(frozen=True)
class Adapter:
    """Rows that were accepted with the columns of an older ``version``, as those of ``schema``."""

    schema: TableSchema
    version: int

    def adapted(self, rows: Rows) -> Rows:
        return Rows.of([align(batch, self.schema, self.version) for batch in rows.batches])

    def indexes(self, specs: Sequence[IndexSpec]) -> list[IndexSpec]:
        """Those of ``specs`` whose columns are still there, under their present names."""
        gone = self.schema.replaced_since(self.version)
        names = {number: name for name, number in self.schema.field_ids.items() if number not in gone}
        return [replace(spec, column=names[spec.field_id]) for spec in specs if spec.field_id in names]


def columns_to_keep(base: BaseTable, store: ObjectStore) -> BaseTable:
    """``base`` or, where the table has got other columns since, its newest version.

    Call it once the shard is claimed: whoever wrote to it before then knew no newer columns.
    """
    if base.dataset.latest_version == base.version:
        return base
    newest = BaseTable.open(base.uri, base.storage_options, store=store)
    newest = replace(newest, schema=newest.schema.without_blobs)
    same = newest.schema.columns.equals(base.schema.columns, check_metadata=True)
    return base if same and not newest.schema.replaced_since(base.version) else newest
