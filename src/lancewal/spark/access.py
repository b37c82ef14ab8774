"""Opening a table in a driver or a task, from nothing but options."""

from __future__ import annotations

from dataclasses import dataclass

from lancewal.base import BaseTable
from lancewal.objects import ObjectStore
from lancewal.sharding import ShardRouter
from lancewal.spark.options import Options
from lancewal.writer.config import ShardWriterConfig


@dataclass(frozen=True)
class OpenTable:
    """The newest version of a table, and its storage as its writers are told to use it."""

    base: BaseTable
    store: ObjectStore

    @classmethod
    def open(cls, options: Options) -> OpenTable:
        reading = ObjectStore.from_uri(options.uri, options.storage)
        base = BaseTable.open(reading.uri, options.storage, store=reading)
        fsync = ShardWriterConfig.from_defaults(base.details.writer_config_defaults).fsync
        return cls(base, ObjectStore.from_uri(options.uri, options.storage, fsync=fsync))

    def router(self) -> ShardRouter:
        """The router for writing, of the shards that the table has now."""
        return ShardRouter.of_table(self.base, self.store)
