"""Table: the front door to one Lance table and its write path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa

from lancewal.base import locate
from lancewal.config import ShardWriterConfig
from lancewal.errors import InvalidInputError
from lancewal.format import MemWalDetails, check_columns
from lancewal.publish import ChangeFeed
from lancewal.reader import MaxStaleness
from lancewal.service import (
    Owner,
    TakeOver,
    checked_take_over,
    look_at_owners,
    open_owned,
    presence_at,
    seal_through_owner,
)
from lancewal.shard import (
    Shard,
    ShardManifestStore,
    ShardRouter,
    listed_shards,
    require_shard,
)
from lancewal.status import ShardInfo, shard_infos
from lancewal.storage import ObjectStore, both, layout
from lancewal.upkeep import MaintainedTable
from lancewal.writer import (
    Cast,
    ShardWriter,
    TableWriter,
    open_shard_writer,
    unseal_shard,
)


class Table(MaintainedTable):
    """A Lance table with a streaming write path; get one from :func:`lancewal.open`.

    Every call sees the newest state: rows that a writer of this process has put, and rows
    that are durable in any other. What is kept between calls only saves work, unless the table was
    opened with ``max_staleness``. Thread-safe.

    >>> import tempfile, lance, lancewal, pyarrow as pa
    >>> key = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
    >>> uri = tempfile.mkdtemp() + "/table"
    >>> _ = lance.write_dataset(pa.schema([key, pa.field("text", pa.string())]).empty_table(), uri)
    >>> table = lancewal.initialize(uri, unsharded=True)
    >>> with table.writer() as writer:
    ...     _ = writer.put(pa.table({"id": [1, 2, 3], "text": ["a", "b", "c"]}))
    ...     table.count_rows(), table.lookup(2)
    (3, {'id': 2, 'text': 'b'})
    >>> table.scan(columns=["text"], filter="id > 1").to_table().to_pylist()
    [{'text': 'b'}, {'text': 'c'}]
    >>> result = table.lookup([3, 9])
    >>> result.found.tolist(), result.table["text"].to_pylist()
    ([True, False], ['c'])
    """

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str] | lance.LanceDataset,
        storage_options: Mapping[str, str] | None = None,
        *,
        store: ObjectStore | None = None,
        max_staleness: MaxStaleness = None,
    ) -> Table:
        """Open an initialised table; raises :class:`NotInitializedError` for one that is not.

        ``max_staleness`` as in :func:`lancewal.open`. ``store`` is for tests that need a faulty one.
        """
        shared = store is not None
        if store is None:
            store = ObjectStore.from_uri(*locate(uri, storage_options))
        table = cls(store, share_store=shared, max_staleness=max_staleness)
        table._reader.base()
        return table

    @property
    def details(self) -> MemWalDetails:
        """What the table says about its write path, read anew.

        Sharding specs, maintained indexes, writer defaults, the compacted generation of each
        shard, and how far each index has caught up with compaction.
        """
        return self._reader.base().details

    def shards(self) -> list[ShardInfo]:
        """Every shard with its state, sorted by id."""
        return shard_infos(self._store, self._reader.base)

    def router(self) -> ShardRouter:
        """Which shard a row goes to; refuses a table whose shards are chosen by hand."""
        return ShardRouter.of_table(self._reader.base(), self._store)

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

    def seal_shard(self, shard_id: UUID | str) -> None:
        """Let a shard take no more writers, of lancewal or Lance, until :meth:`unseal_shard`.

        Its rows are flushed first, by its owner if one lives, for a sealed shard cannot be claimed any
        more: **a writer that is open on it is fenced**. It goes on being read and compacted. Raises
        :class:`FencedError` where another writer claims it meanwhile; a sealed shard is left as it is.
        """
        seal_through_owner(self._reader.base(), self._store, layout.parse_shard_id(shard_id))

    def unseal_shard(self, shard_id: UUID | str) -> None:
        """Let a sealed shard take writers again; one that is not sealed is left as it is.

        Refused where another shard takes the rows of the same sharding value, as after
        :meth:`repair` of two shards for one value: no row would have a shard of its own any more.
        """
        unseal_shard(self._reader.base(), self._store, layout.parse_shard_id(shard_id))

    def owners(self) -> list[Owner]:
        """The processes that write to the table, as they say themselves, with their shards.

        One that is ``gone`` has left its shards to whoever comes next.
        """
        return look_at_owners(self._store)

    def announce(self, address: str | None) -> None:
        """Say in this process's owner record where it takes requests for the table; ``None``: nowhere."""
        presence_at(self.uri).announce(self._store, address)

    def writer(
        self,
        config: ShardWriterConfig | None = None,
        *,
        cast: Cast = "numbers",
        take_over: TakeOver = "when_gone",
        upkeep: bool = False,
        **overrides: Any,
    ) -> TableWriter:
        """A writer that sends every row to its shard.

        ``config`` replaces the table's stored writer defaults; single settings may be
        overridden by name, as in ``table.writer(durable_write=False)``. ``cast=True`` converts
        columns to the table's types where no value changes, and refuses the rows where one would;
        ``cast="round"`` also rounds floats to the table's precision, as vectors of doubles need it,
        but never to infinity. The writer takes the columns that the table has now; after a column
        was added, open a new one.

        ``take_over`` is for shards that another writer has, in this process or elsewhere. ``"when_gone"``
        claims a shard when its owner has closed it, died, or was not heard of for a lease, waits where that
        is not known yet, and raises :class:`ShardOwnedError` when it lives. ``"now"`` claims the shard
        and fences the other one. ``"never"`` takes no shard that somebody has, gone or not.

        With ``upkeep`` a thread keeps the whole table in shape until the writer is closed, as
        :meth:`upkeeper` does: nobody has to flush, compact or collect.
        """
        take_over = checked_take_over(take_over)
        base, shards = both(
            self._reader.base, lambda: listed_shards(self._store), at_once=not self._store.is_local
        )
        config = ShardWriterConfig.resolved(config, base.details.writer_config_defaults, overrides)
        check_columns(base.schema)
        store = self._writer_store(base, config)

        def open_shard(shard: Shard) -> ShardWriter:
            return open_owned(
                store,
                shard.shard_id,
                lambda look, claimed: open_shard_writer(
                    base,
                    shard.shard_id,
                    config,
                    store=store,
                    spec_id=shard.spec_id,
                    look=look,
                    claimed=claimed,
                    cast=cast,
                ),
                look=partial(shard.create, store),
                take_over=take_over,
                lease=config.owner_lease,
            )

        return TableWriter(
            base.schema,
            ShardRouter.of_table(base, self._store, shards),
            open_shard,
            cast=cast,
            storage_version=base.storage_version,
            newest=lambda: self._reader.base().schema,
            max_bytes_in_hand=config.max_unflushed_memtable_bytes,
            is_remote=not store.is_local,
            come_back_after=config.owner_lease.total_seconds() if take_over == "when_gone" else None,
            companion=self.upkeeper() if upkeep else None,
            find=lambda where, columns: self._reader.scan(columns, where).to_batches(),
        )

    def shard_writer(
        self,
        shard_id: UUID | str,
        config: ShardWriterConfig | None = None,
        *,
        cast: Cast = "numbers",
        take_over: TakeOver = "when_gone",
        **overrides: Any,
    ) -> ShardWriter:
        """The writer of one shard.

        Settings and ``take_over`` as in :meth:`writer`. In a table without a sharding spec a new id makes
        a new shard. In any other the caller answers for the rows: they must belong to this shard.
        """
        shard = layout.parse_shard_id(shard_id)
        base = self._reader.base()
        config = ShardWriterConfig.resolved(config, base.details.writer_config_defaults, overrides)
        check_columns(base.schema)
        store = self._writer_store(base, config)
        if base.details.sharding_specs:
            require_shard(self._store, base.details, base.schema, shard)
        return open_owned(
            store,
            shard,
            lambda look, claimed: open_shard_writer(
                base, shard, config, store=store, look=look, claimed=claimed, cast=cast
            ),
            look=ShardManifestStore.read_to_claim,
            take_over=checked_take_over(take_over),
            lease=config.owner_lease,
        )

    def feed(self) -> ChangeFeed:
        """The table's change feed, for places of one's own; :meth:`changes` is the simple way."""
        return ChangeFeed(self._store, self._reader.base().schema)

    def changes(
        self,
        start: Mapping[UUID, int] | None = None,
        *,
        follow: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[pa.RecordBatch, dict[UUID, int]]]:
        """Every row that reached the table's logs, in their order, with the columns of the change feed.

        From ``start``, or the earliest place that is retained, up to now; with ``follow`` from ``start``, or
        now, until ``stop()`` is true. With each batch comes a place to start from again: batches of one
        look may come once more then, with the same ``_shard_id`` and ``_wal_position``.
        """
        feed = self.feed()
        return feed.follow(start, stop=stop) if follow else feed.up_to_now(start)


def open_table(
    uri: str | os.PathLike[str] | lance.LanceDataset,
    storage_options: Mapping[str, str] | None = None,
    *,
    max_staleness: MaxStaleness = None,
) -> Table:
    """Open a table that :func:`lancewal.initialize` (or Lance itself) has prepared.

    ``storage_options`` are those of Lance. A LanceDataset brings its own; its version does
    not matter, reads always see the newest one.

    With ``max_staleness`` (seconds, or a timedelta) scans, counts, lookups and searches may show a state
    that was read at most so long ago, and ask storage for no other meanwhile. Rows of writers that
    are open in this process are seen at once all the same, and no read goes back behind an earlier one of
    this Table. Keep it well below the ``min_age`` of garbage collection.

    >>> import tempfile, lance, lancewal, pyarrow as pa
    >>> uri = tempfile.mkdtemp() + "/table"
    >>> _ = lance.write_dataset(pa.table({"id": [1, 2]}), uri)
    >>> _ = lancewal.initialize(uri, unsharded=True)
    >>> lancewal.open(uri, max_staleness=5).count_rows()
    2
    """
    return Table.open(uri, storage_options, max_staleness=max_staleness)
