"""Table: the front door to one Lance table and its write path."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa

from lancewal import layout
from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError, LanceWalError, PartialWriteError
from lancewal.format.index_details import MemWalDetails
from lancewal.format.shard_manifest import ShardManifest, ShardStatus
from lancewal.manifest import ShardManifestStore
from lancewal.objects import ObjectStore
from lancewal.parallel import ordered_map
from lancewal.sharding import UNSHARDED, Shard, ShardRouter, decoded_values, discover_manifests
from lancewal.wal.tailer import WalTailer
from lancewal.wal.tip import find_tip, first_unsettled
from lancewal.writer.config import ShardWriterConfig
from lancewal.writer.open import open_shard_writer
from lancewal.writer.registry import live_writer
from lancewal.writer.shard_writer import ShardWriter
from lancewal.writer.table_writer import TableWriter

#: Shards looked at together on a remote store, and flushed together anywhere.
_REMOTE_LOOKS = 16
_CONCURRENT_FLUSHES = 4


@dataclass(frozen=True)
class ShardInfo:
    """The state of one shard at one moment.

    ``values`` are its sharding values by field ("bucket" for all specs that Lance makes);
    empty for a shard of null values or one made by hand. ``generations`` are the SSTables
    that the manifest lists, ``compacted_generation`` is the newest one whose rows the base
    table holds (0: none). ``wal_tip`` is the position that the next WAL entry takes, and
    ``tail_length`` the number of entries that no SSTable covers, sentinels included.
    """

    shard_id: UUID
    spec_id: int
    values: Mapping[str, bool | int | str]
    status: ShardStatus
    epoch: int
    current_generation: int
    generations: tuple[int, ...]
    compacted_generation: int
    wal_tip: int
    tail_length: int


class Table:
    """A Lance table with a streaming write path. Holds no state: every call sees the newest one.

    Get one from :func:`lancewal.open` or :func:`lancewal.initialize`.
    """

    def __init__(self, store: ObjectStore, *, share_store: bool = False) -> None:
        """``share_store`` has writers use ``store`` as well, whatever their ``fsync`` says."""
        self._store = store
        self._share_store = share_store

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str] | lance.LanceDataset,
        storage_options: Mapping[str, str] | None = None,
        *,
        store: ObjectStore | None = None,
    ) -> Table:
        """Open an initialised table; raises :class:`NotInitializedError` for one that is not.

        ``store`` replaces the way to object storage, for tests that need a faulty one.
        """
        shared = store is not None
        if store is None:
            store = ObjectStore.from_uri(*locate(uri, storage_options))
        table = cls(store, share_store=shared)
        table._newest()
        return table

    def __repr__(self) -> str:
        return f"Table({self.uri!r})"

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def schema(self) -> pa.Schema:
        """The table's columns, read anew."""
        return self._newest().schema.plain

    @property
    def primary_key(self) -> tuple[str, ...]:
        """The key columns in key order; empty for an append-only table. Read anew."""
        return self._newest().schema.primary_key

    @property
    def details(self) -> MemWalDetails:
        """What the table says about its write path, read anew.

        Sharding specs, maintained indexes, writer defaults, the compacted generation of each
        shard, and how far each index has caught up with compaction.
        """
        return self._newest().details

    def shards(self) -> list[ShardInfo]:
        """Every shard with its state, sorted by id."""
        manifests = discover_manifests(self._store)
        tips = ordered_map(
            lambda manifest: find_tip(self._store, manifest.shard_id, manifest),
            manifests,
            1 if self._store.is_local else _REMOTE_LOOKS,
        )
        pairs = list(zip(manifests, tips, strict=True))
        # Last, as readers do: a marker then never points beyond what the manifests said.
        details = self._newest().details
        return [_shard_info(details, manifest, tip) for manifest, tip in pairs]

    def router(self) -> ShardRouter:
        """Which shard a row goes to; refuses a table whose shards are chosen by hand."""
        return self._router(self._newest())

    def shard_for(self, value: Any = None) -> UUID:
        """The shard of the rows with ``value`` in the sharding column; created when it is missing."""
        shard = self.router().shard_for(value)
        shard.create(self._store)
        return shard.shard_id

    def create_shard(self, shard_id: UUID | str | None = None) -> UUID:
        """Make a shard by hand, with a random id unless one is given; one that exists is left as it is.

        Only for tables without a sharding spec: elsewhere a row's own values decide.
        """
        specs = self.details.sharding_specs
        if specs:
            raise InvalidInputError(
                "this table has a sharding spec, which decides on the shards; write with table.writer(), "
                "or get the shard of a value with table.shard_for(value)"
            )
        shard = uuid4() if shard_id is None else layout.parse_shard_id(shard_id)
        ShardManifestStore(self._store, shard).initialize_shard()
        return shard

    def writer(
        self, config: ShardWriterConfig | None = None, *, cast: bool = False, **overrides: Any
    ) -> TableWriter:
        """A writer that sends every row to its shard.

        ``config`` replaces the table's stored writer defaults; single settings may be
        overridden by name, as in ``table.writer(durable_write=False)``. ``cast=True`` converts
        columns to the table's types where no value changes.
        """
        base = self._newest()
        config = _resolve(config, base.details, overrides)
        store = self._writer_store(config)

        def open_shard(shard: Shard) -> ShardWriter:
            shard.create(store)
            return open_shard_writer(
                base, shard.shard_id, config, store=store, spec_id=shard.spec_id, cast=cast
            )

        return TableWriter(base.schema, self._router(base), open_shard, cast=cast)

    def shard_writer(
        self,
        shard_id: UUID | str,
        config: ShardWriterConfig | None = None,
        *,
        cast: bool = False,
        **overrides: Any,
    ) -> ShardWriter:
        """The writer of one shard; its former writer, here or elsewhere, is fenced.

        Settings as in :meth:`writer`. In a table without a sharding spec a new id makes a new
        shard. In any other the caller answers for the rows: they must belong to this shard.
        """
        shard = layout.parse_shard_id(shard_id)
        base = self._newest()
        config = _resolve(config, base.details, overrides)
        store = self._writer_store(config)
        if base.details.sharding_specs:
            self._require_shard(base, shard)
        return open_shard_writer(base, shard, config, store=store, cast=cast)

    def flush(self) -> None:
        """Move all rows from MemTables and WALs to SSTables.

        A shard with a writer in this process flushes through it. Any other shard that has
        rows in its WAL is claimed, replayed, flushed and let go: **a writer that another
        process has on it is fenced**. Shards without such rows are left alone.
        """
        failed: dict[UUID, Exception] = {}

        def flush(manifest: ShardManifest) -> None:
            try:
                self._flush_shard(manifest)
            except LanceWalError as error:
                failed[manifest.shard_id] = error

        list(ordered_map(flush, discover_manifests(self._store), _CONCURRENT_FLUSHES))
        if failed:
            raise PartialWriteError("flush", failed, {}) from next(iter(failed.values()))

    def _flush_shard(self, manifest: ShardManifest) -> None:
        writer = live_writer(self.uri, manifest.shard_id)
        if writer is not None:
            writer.force_seal_active()
            writer.wait_for_flush_drain()
        elif self._has_rows_in_wal(manifest):
            base = self._newest()
            config = ShardWriterConfig.from_defaults(base.details.writer_config_defaults)
            # Writers of this table may be WAL-only; whoever flushes for them needs MemTables.
            config = dataclasses.replace(
                config,
                enable_memtable=True,
                max_memtable_size=min(config.max_memtable_size, config.max_unflushed_memtable_bytes),
            )
            open_shard_writer(base, manifest.shard_id, config, store=self._writer_store(config)).close()

    def _has_rows_in_wal(self, manifest: ShardManifest) -> bool:
        tailer = WalTailer(self._store, manifest.shard_id, update_cursor=False)
        position = first_unsettled(manifest)
        while (header := tailer.read_header(position)) is not None:
            flushed = header.generation is not None and header.generation < manifest.current_generation
            if not header.sentinel and not flushed:
                return True
            position += 1
        return False

    def _require_shard(self, base: BaseTable, shard_id: UUID) -> None:
        if ShardManifestStore(self._store, shard_id).read_latest() is not None:
            return
        for shard in self._router(base).known_shards():
            if shard.shard_id == shard_id:
                shard.create(self._store)
                return
        raise InvalidInputError(
            f"{shard_id} is no shard of this table, whose sharding spec decides on the shards; write with "
            "table.writer(), or get the shard of a value with table.shard_for(value)"
        )

    def _router(self, base: BaseTable) -> ShardRouter:
        router = ShardRouter.for_table(base.details, base.schema)
        if router.transform != UNSHARDED:
            return router
        return router.adopting(discover_manifests(self._store))

    def _newest(self) -> BaseTable:
        return BaseTable.open(self.uri, self._store.storage_options, store=self._store)

    def _writer_store(self, config: ShardWriterConfig) -> ObjectStore:
        if self._share_store:
            return self._store
        return ObjectStore.from_uri(self.uri, self._store.storage_options, fsync=config.fsync)


def open_table(
    uri: str | os.PathLike[str] | lance.LanceDataset, storage_options: Mapping[str, str] | None = None
) -> Table:
    """Open a table that :func:`lancewal.initialize` (or Lance itself) has prepared.

    ``storage_options`` are those of Lance. A LanceDataset brings its own; its version does
    not matter, reads always see the newest one.
    """
    return Table.open(uri, storage_options)


def locate(
    uri: str | os.PathLike[str] | lance.LanceDataset, storage_options: Mapping[str, str] | None
) -> tuple[str, dict[str, str]]:
    """Address and options of a table, from what a caller passed."""
    if isinstance(uri, lance.LanceDataset):
        options = uri._storage_options if storage_options is None else storage_options
        return uri.uri, dict(options or {})
    return os.fspath(uri), dict(storage_options or {})


def _resolve(
    config: ShardWriterConfig | None, details: MemWalDetails, overrides: Mapping[str, Any]
) -> ShardWriterConfig:
    """Arguments, then the table's stored defaults, then the built-in ones."""
    if config is None:
        return ShardWriterConfig.from_defaults(details.writer_config_defaults, **overrides)
    unknown = sorted(set(overrides) - {field.name for field in dataclasses.fields(config)})
    if unknown:
        raise InvalidInputError(f"unknown writer setting {', '.join(unknown)}")
    return dataclasses.replace(config, **overrides)


def _shard_info(details: MemWalDetails, manifest: ShardManifest, tip: int) -> ShardInfo:
    return ShardInfo(
        shard_id=manifest.shard_id,
        spec_id=manifest.shard_spec_id,
        values=decoded_values(details, manifest),
        status=manifest.status,
        epoch=manifest.writer_epoch,
        current_generation=manifest.current_generation,
        generations=tuple(entry.generation for entry in manifest.sstables),
        compacted_generation=details.compacted.get(manifest.shard_id, 0),
        wal_tip=tip,
        tail_length=tip - first_unsettled(manifest),
    )
