"""SsTable: one flushed MemTable, read as the table's current schema.

Row offsets count from the SSTable's first row in insert order, older versions of keys
included; they are Lance's row addresses, because an SSTable is one fragment.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from uuid import UUID

import crc32c
import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.base import lance_errors
from lancewal.errors import ColumnMismatchError, InvalidInputError, StorageError
from lancewal.format import (
    TOMBSTONE,
    TOMBSTONE_FIELD,
    BloomFilter,
    ColumnSource,
    SsTableEntry,
    TableSchema,
    has_dictionary,
    key_values,
    numbers,
    one_array,
    without_null_words_in,
)
from lancewal.predicate import Predicate
from lancewal.sstable.columns import Alignment
from lancewal.sstable.key_index import ABSENT, KeyIndex, KeyOrder, KeyProbe, Mask, Rows, damaged_index
from lancewal.sstable.notes import SsTableNotes, file_checksum
from lancewal.storage import ObjectStore, layout

logger = logging.getLogger(__name__)

# SSTables that are open in this process: Lance's handles, key indexes and bloom filters.
#
# An SSTable never changes once a manifest names it, so what was opened stays valid. What no reader
# needs any more is closed: a file that garbage collection deletes takes its space until it is.


_INDEXES_DIR = "_indices"
#: Where lancewal noted the version before: some versions of Lance panic over it in a lookup.
_FORMER_BASE_VERSION_KEY = b"lancewal:base_version"
_ROW_ADDRESS = "_rowaddr"
_MAX_OPEN = 256
_INDEX_CACHE_BYTES = 512 << 20
_METADATA_CACHE_BYTES = 128 << 20

_Identity = tuple[str, frozenset[tuple[str, str]]]


class OpenedSsTable:
    """One SSTable's files; each is opened when it is first needed, from any thread."""

    def __init__(self, store: ObjectStore, directory: str, notes: str = "") -> None:
        self._store = store
        self._directory = directory
        self._noted = notes
        self.uri = layout.child_uri(store.uri, directory)
        #: Whether Lance's session may keep files of its indexes open.
        self.may_have_index_files = False

    @cached_property
    def dataset(self) -> lance.LanceDataset:
        self._refuse_links()
        indexes = self._store.local_path(f"{self._directory}/{_INDEXES_DIR}")
        self.may_have_index_files |= indexes is not None and os.path.isdir(indexes)
        with lance_errors(f"open the SSTable at {self.uri}"):
            return lance.dataset(self.uri, storage_options=self._storage_options, session=_session())

    def close(self, *, only_dataset: bool = False) -> None:
        """Close its files; who has it still, and asks for one, opens that again."""
        for name in ("dataset", "_fragments") if only_dataset else ("dataset", "_fragments", "key_index"):
            self.__dict__.pop(name, None)

    @cached_property
    def stored(self) -> TableSchema:
        """The SSTable's own columns and primary key, tombstone column included."""
        with lance_errors(f"read the columns of {self.uri}"):
            fields = self.dataset.lance_schema
            primary_key = [field.name() for field in fields.unenforced_primary_key()]
            return TableSchema.from_lance(self.dataset.schema, fields.fields(), primary_key)

    @cached_property
    def written_for(self) -> int | None:
        """The version of the base table that had these columns; ``None`` where Lance wrote the SSTable."""
        # The notes first: the manifest has a copy of them, so that nothing has to be opened.
        if self.notes.base_version is not None:
            return self.notes.base_version
        stated = (self.dataset.schema.metadata or {}).get(_FORMER_BASE_VERSION_KEY, b"")
        return int(stated) if stated.isdigit() else None

    @cached_property
    def notes(self) -> SsTableNotes:
        """What lancewal noted when it wrote the SSTable; nothing where Lance did."""
        return SsTableNotes.parse(self._noted, self.uri) if self._noted else self._stored_notes()

    def _stored_notes(self) -> SsTableNotes:
        try:
            text = self._store.get(f"{self._directory}/{layout.SSTABLE_NOTES_NAME}")
        except FileNotFoundError:
            return SsTableNotes()
        return SsTableNotes.parse(text.decode(errors="replace"), self.uri)

    @cached_property
    def key_index(self) -> KeyIndex | None:
        """``None`` for an SSTable that never had one, as early versions of Lance wrote them."""
        self._refuse_links()
        try:
            self._check_index_files()
            return KeyIndex(self.uri, self._storage_options, self.notes, self._key_of_rows)
        except StorageError:
            if self._store.head(f"{self._directory}/{layout.PK_PAGE_LOOKUP_NAME}") is None:
                return None
            raise

    def _check_index_files(self) -> None:
        """Compare the key index's files with their checksums, where they are local and have any."""
        if not self._store.is_local:
            return
        files = self._stored_notes().files
        for name in (layout.PK_PAGE_LOOKUP_NAME, layout.PK_PAGE_DATA_NAME):
            noted, path = files.get(name), self._store.local_path(f"{self._directory}/{name}")
            if noted is None or path is None:
                continue
            with lance_errors(f"read the key index of {self.uri}"):
                if file_checksum(path) != noted:
                    raise damaged_index(self.uri, f"{name} does not have its checksum")

    @cached_property
    def bloom(self) -> BloomFilter | None:
        """``None`` when there is none that can be used; a lookup is only slower without it."""
        bloom, problem = self.checked_bloom()
        if problem is not None:
            logger.warning("the bloom filter of %s is not used: %s", self.uri, problem)
        return bloom

    def checked_bloom(self) -> tuple[BloomFilter | None, str | None]:
        """The bloom filter, if it can be used, and what is wrong with it, if something is."""
        try:
            raw = self._store.get(f"{self._directory}/{layout.BLOOM_FILTER_NAME}")
            bloom = BloomFilter.from_bytes(raw)
        except FileNotFoundError:
            return None, None
        except InvalidInputError as error:
            return None, str(error)
        noted = self.notes.files.get(layout.BLOOM_FILTER_NAME)
        if noted is not None and noted != (actual := crc32c.crc32c(raw)):
            return None, f"it is damaged: its checksum is {actual:08x}, not {noted:08x}"
        return bloom, None

    def _key_of_rows(self, offsets: Rows) -> tuple[Rows, pa.Array]:
        """Of the rows at ``offsets`` those that Lance does not hold for deleted, and the key of each."""
        names = list(self.stored.primary_key)
        rows = self.dataset._take_rows(pa.array(offsets, pa.uint64()), columns=[*names, _ROW_ADDRESS])
        kept = numbers(one_array(rows.column(_ROW_ADDRESS))).astype(np.int64)
        return kept, key_values([rows.column(name) for name in names])

    def rows_at(self, offsets: Rows, columns: Sequence[str]) -> pa.Table:
        """Rows by their offset, in the order asked; rows that Lance holds for deleted are left out."""
        rows = self._rows_at(offsets, columns)
        return without_null_words_in(rows) if self.has_dictionaries else rows

    @cached_property
    def has_dictionaries(self) -> bool:
        """Whether rows come with dictionaries that may hold nulls, which Arrow does not join."""
        return any(map(has_dictionary, self.dataset.schema.types))

    def _rows_at(self, offsets: Rows, columns: Sequence[str]) -> pa.Table:
        with lance_errors(f"read rows of {self.uri}"):
            fragments = self._fragments
            if len(fragments) != 1 or fragments[0].num_deletions:
                # The public ways count rows without the deleted ones.
                return self.dataset._take_rows(pa.array(offsets, pa.uint64()), columns=list(columns))
            # The quickest way to a single row, but it wants its rows ascending.
            ascending, places = np.unique(offsets, return_inverse=True)
            rows = fragments[0].take(ascending.tolist(), columns=list(columns))
            return rows if np.array_equal(ascending, offsets) else rows.take(pa.array(places))

    @cached_property
    def physical_rows(self) -> int:
        with lance_errors(f"open the SSTable at {self.uri}"):
            return sum(int(fragment.physical_rows) for fragment in self._fragments)

    @cached_property
    def _fragments(self) -> list[lance.LanceFragment]:
        return list(self.dataset.get_fragments())

    def _refuse_links(self) -> None:
        # Lance follows them, out of the table too.
        self._store.refuse_links(self._directory)

    @property
    def _storage_options(self) -> dict[str, str]:
        return dict(self._store.storage_options)


_opened: OrderedDict[_Identity, OpenedSsTable] = OrderedDict()
#: Also those that the limit pushed out of the opened ones, as long as a reader has them.
_living: weakref.WeakSet[OpenedSsTable] = weakref.WeakSet()
#: By shard, which of its SSTables are among the opened ones.
_of_shard: dict[_Identity, set[_Identity]] = {}
_lock = threading.Lock()


def open_sstable(store: ObjectStore, directory: str, notes: str = "") -> OpenedSsTable:
    """The SSTable at ``directory``; the one that is open already, if it still is. No I/O.

    ``notes`` are those that the manifest has a copy of, which need not be read then.
    """
    identity = _identity(store, directory)
    with _lock:
        opened = _opened.get(identity)
        if opened is None:
            opened = _opened[identity] = OpenedSsTable(store, directory, notes)
            _living.add(opened)
            _of_shard.setdefault(_shard_of(identity), set()).add(identity)
        _opened.move_to_end(identity)
        if len(_opened) > _MAX_OPEN:
            _forget(next(iter(_opened)))
        return opened


def forget_sstable(store: ObjectStore, directory: str) -> None:
    """Close it, and open it anew next time: its sidecars were rewritten, or it was deleted."""
    with _lock:
        _close([_identity(store, directory)])


def keep_sstables(store: ObjectStore, shard_id: UUID, names: Collection[str]) -> None:
    """Close all SSTables of a shard but these; reads that are under way keep what they have."""
    shard = _identity(store, layout.shard_dir(shard_id))
    with _lock:
        opened = _of_shard.get(shard, ())
        _close([each for each in opened if each[0].rpartition("/")[2] not in names])


def _close(identities: Sequence[_Identity]) -> None:
    closing = [opened for identity in identities if (opened := _forget(identity)) is not None]
    if any(opened.may_have_index_files for opened in closing):
        # Lance cannot close those of one SSTable: it gets a new session, and loads the others again.
        # Every dataset of the old session must go, or the session and its files stay.
        _session.cache_clear()
        for opened in list(_living):
            opened.close(only_dataset=True)
    for opened in closing:
        opened.close()


def _forget(identity: _Identity) -> OpenedSsTable | None:
    opened = _opened.pop(identity, None)
    if opened is not None:
        others = _of_shard[_shard_of(identity)]
        others.discard(identity)
        if not others:
            del _of_shard[_shard_of(identity)]
    return opened


def _shard_of(identity: _Identity) -> _Identity:
    return identity[0].rpartition("/")[0], identity[1]


def _identity(store: ObjectStore, directory: str) -> _Identity:
    return layout.child_uri(store.uri, directory), frozenset(store.storage_options.items())


@lru_cache(maxsize=1)
def _session() -> lance.Session:
    """One for all SSTables: it bounds their caches together and shares their connections."""
    return lance.Session(_INDEX_CACHE_BYTES, _METADATA_CACHE_BYTES)


#: The name of the offset column in scans that ask for it.
#: A name that Lance refuses for columns, so that no table has one of its own.
ROW_OFFSET = "_rowoffset"
_ROW_OFFSET_FIELD = pa.field(ROW_OFFSET, pa.int64(), nullable=False)
_KEY_BATCH_ROWS = 1 << 16


class SsTable:
    """One SSTable of a shard; every method may be called from any thread.

    Opening reads nothing. Lance's handles are shared by all instances of the process.
    """

    def __init__(
        self, store: ObjectStore, shard_id: UUID, entry: SsTableEntry, opened: OpenedSsTable
    ) -> None:
        self._store = store
        self._opened = opened
        self._aligned_to: tuple[TableSchema, Alignment] | None = None
        self._keys: tuple[tuple[str | None, ...], tuple[list[pa.Array], Rows, Mask]] | None = None
        self.shard_id = shard_id
        self.entry = entry

    @classmethod
    def open(cls, store: ObjectStore, shard_id: UUID, entry: SsTableEntry) -> SsTable:
        directory = layout.sstable_dir(shard_id, entry.path)
        return cls(store, shard_id, entry, open_sstable(store, directory, entry.notes))

    def __repr__(self) -> str:
        return f"SsTable({self.uri!r})"

    @property
    def uri(self) -> str:
        return self._opened.uri

    @property
    def generation(self) -> int:
        return self.entry.generation

    @property
    def dataset(self) -> lance.LanceDataset:
        """The rows as an ordinary Lance dataset, with the SSTable's own column names."""
        return self._opened.dataset

    @property
    def stored_columns(self) -> pa.Schema:
        """The columns of :attr:`dataset`, annotated with their field ids."""
        return self._opened.stored.columns

    @property
    def written_for(self) -> int | None:
        """The version of the base table that had these columns; ``None`` where nothing says it."""
        return self._opened.written_for

    def forget(self) -> None:
        """Close the process's handles on this SSTable; call after its sidecars were rewritten."""
        forget_sstable(self._store, layout.sstable_dir(self.shard_id, self.entry.path))

    def bloom_problem(self) -> str | None:
        """What is wrong with the bloom filter, as far as it can be told without the rows."""
        return self._opened.checked_bloom()[1]

    def columns_for(self, schema: TableSchema) -> Mapping[str, str | None]:
        """For every column of ``schema``, its name in :attr:`dataset`; ``None`` when it is not there."""
        return {name: source.stored_name for name, source in self._alignment(schema).sources.items()}

    def count_live(self) -> int:
        """How many rows a reader sees: newest of their key, and no tombstone."""
        with lance_errors(f"count the rows of {self.uri}"):
            if not self._has_tombstones:
                return int(self.dataset.count_rows())
            return int(self.dataset.count_rows(filter=f"NOT {TOMBSTONE}"))

    def scan(
        self,
        schema: TableSchema,
        columns: Sequence[str],
        *,
        filter: Predicate | None = None,
        with_offsets: bool = False,
        with_tombstone: bool = False,
        batch_size: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The newest rows of their keys, in insert order, as ``columns`` of ``schema``.

        ``filter`` is over the columns of ``schema``. ``with_offsets`` adds ``_rowoffset``.
        ``with_tombstone`` adds ``_tombstone``, and with it the deleted keys, which are left out otherwise;
        a deleted key's other columns are null, and the filter sees them so.
        """
        alignment = self._alignment(schema)
        chosen = alignment.select(columns)
        later = _not_pushed(alignment, filter)
        read = _sources([*chosen, *later]) + ([TOMBSTONE] if self._has_tombstones else [])
        sql = None if filter is None or later else filter.sql
        with lance_errors(f"read {self.uri}"), refusing(sql):
            scanner = self.dataset.scanner(
                columns=read,
                filter=sql,
                with_row_address=with_offsets or not read,
                batch_size=batch_size,
                scan_in_order=True,
            )
        return self._scan(scanner, chosen, sql, filter, later, with_offsets, with_tombstone)

    def _scan(
        self,
        scanner: lance.LanceScanner,
        chosen: Sequence[ColumnSource],
        sql: str | None,
        predicate: Predicate | None,
        later: Sequence[ColumnSource],
        with_offsets: bool,
        with_tombstone: bool,
    ) -> Iterator[pa.RecordBatch]:
        """``later`` are the predicate's columns when Lance could not evaluate it itself, as ``sql``."""
        for stored in self._batches(scanner, sql):
            tombstones = self._tombstones(stored)
            kept = np.ones(stored.num_rows, np.bool_) if with_tombstone else ~tombstones
            if predicate is not None and later:
                kept &= predicate.mask(_aligned(stored, later))
            rows = _aligned(stored, chosen)
            if with_offsets:
                offsets = numbers(stored.column(_ROW_ADDRESS)).astype(np.int64)
                rows = rows.append_column(_ROW_OFFSET_FIELD, pa.array(offsets))
            if with_tombstone:
                rows = rows.append_column(TOMBSTONE_FIELD, pa.array(tombstones))
            if not kept.all():
                rows = rows.filter(pa.array(kept))
            if rows.num_rows:
                yield rows

    def keys(self, schema: TableSchema) -> tuple[list[pa.Array], Rows, Mask]:
        """Key columns, row offset and tombstone mark of every key's newest row, in insert order.

        Reads only the key columns, once per instance.
        """
        chosen = self._alignment(schema).select(schema.primary_key)
        sources = tuple(source.stored_name for source in chosen)
        known = self._keys
        if known is None or known[0] != sources:
            known = self._keys = sources, self._read_keys(schema)
        return known[1]

    def lookup(self, keys: Sequence[pa.Array] | KeyProbe) -> Rows:
        """The row offset of each key's newest version, -1 for keys that are not here.

        A tombstone is found like any other row. ``keys`` are the key columns, in the
        order of the primary key and of its exact types; whoever asks several SSTables
        passes a :class:`~lancewal.sstable.KeyProbe`, so that keys are hashed once.
        """
        probe = keys if isinstance(keys, KeyProbe) else KeyProbe(keys)
        found = np.full(len(probe), ABSENT, np.int64)
        asked = probe.candidates(self._opened.bloom)
        if len(asked) == 0:
            return found
        index = self._opened.key_index
        values = probe.values_at(asked)
        found[asked] = self._find_by_scan(values) if index is None else index.find(values)
        return found

    def take(
        self,
        offsets: Rows,
        schema: TableSchema,
        columns: Sequence[str],
        with_tombstone: bool = False,
    ) -> pa.RecordBatch:
        """Rows by offset, in the order asked, as ``columns`` of ``schema``.

        Raises InvalidInputError for an offset that is no newest row of its key.
        """
        chosen = self._alignment(schema).select(columns)
        read = _sources(chosen)
        if not read or (with_tombstone and self._has_tombstones):
            read.append(TOMBSTONE if self._has_tombstones else self.dataset.schema.names[0])
        outside = np.count_nonzero((offsets < 0) | (offsets >= self._opened.physical_rows))
        table = None if outside else self._opened.rows_at(offsets, read)
        if table is None or table.num_rows != len(offsets):
            missing = outside if table is None else len(offsets) - table.num_rows
            raise InvalidInputError(f"{missing} of {len(offsets)} row offsets are no rows of {self.uri}")
        stored = pa.RecordBatch.from_arrays([one_array(c) for c in table.columns], schema=table.schema)
        rows = _aligned(stored, chosen)
        if with_tombstone:
            rows = rows.append_column(TOMBSTONE_FIELD, pa.array(self._tombstones(stored)))
        return rows

    @cached_property
    def _has_tombstones(self) -> bool:
        """Whether there is a tombstone column; without one every row is live."""
        return TOMBSTONE in self._opened.stored.columns.names

    def _alignment(self, schema: TableSchema) -> Alignment:
        known = self._aligned_to
        if known is None or known[0] is not schema:
            known = self._aligned_to = (schema, self._align(schema))
        return known[1]

    def _align(self, schema: TableSchema) -> Alignment:
        try:
            return Alignment.of(schema, self._opened.stored.columns, self._opened.written_for)
        except ColumnMismatchError as error:
            raise ColumnMismatchError(f"{self.uri} does not fit the table: {error}") from error

    def _batches(self, scanner: lance.LanceScanner, sql: str | None) -> Iterator[pa.RecordBatch]:
        with lance_errors(f"read {self.uri}"), refusing(sql):
            batches = scanner.to_batches()
            yield from map(without_null_words_in, batches) if self._opened.has_dictionaries else batches

    def _tombstones(self, stored: pa.RecordBatch) -> Mask:
        if not self._has_tombstones:
            return np.zeros(stored.num_rows, np.bool_)
        return np.asarray(stored.column(TOMBSTONE).to_numpy(zero_copy_only=False), np.bool_)

    def _read_keys(self, schema: TableSchema) -> tuple[list[pa.Array], Rows, Mask]:
        batches = self.scan(
            schema, schema.primary_key, with_offsets=True, with_tombstone=True, batch_size=_KEY_BATCH_ROWS
        )
        fields = [
            *(schema.plain.field(name) for name in schema.primary_key),
            _ROW_OFFSET_FIELD,
            TOMBSTONE_FIELD,
        ]
        rows = pa.Table.from_batches(batches, pa.schema(fields))
        *columns, offsets, tombstones = (one_array(column) for column in rows.columns)
        return columns, numbers(offsets), np.asarray(tombstones.to_numpy(zero_copy_only=False), np.bool_)

    @cached_property
    def _scanned_keys(self) -> tuple[pa.Array, Rows]:
        """All keys and their newest rows, for an SSTable without a key index."""
        stored = self._opened.stored
        if not stored.primary_key:
            raise InvalidInputError(f"{self.uri} has no primary key, so that no row can be looked up by it")
        own = TableSchema(pa.schema([f for f in stored.columns if f.name != TOMBSTONE]), stored.primary_key)
        columns, offsets, _ = self.keys(own)
        # Lance wrote such SSTables newest row first: the order of replacement is the reverse.
        order = KeyOrder.of([column[::-1] for column in columns])
        return order.values, offsets[::-1][order.rows]

    def _find_by_scan(self, values: pa.Array) -> Rows:
        known, offsets = self._scanned_keys
        if values.type != known.type:
            raise InvalidInputError(f"the keys of {self.uri} are {known.type}, not {values.type}")
        places = pc.index_in(values, value_set=known).fill_null(ABSENT).to_numpy().astype(np.int64)
        return np.where(places != ABSENT, offsets[places], ABSENT)


@contextmanager
def refusing(sql: str | None) -> Iterator[None]:
    """Turns Lance's refusal of a filter, at planning or on some row's value, into ours."""
    try:
        yield
    except ValueError as error:
        about_rows = isinstance(error, pa.ArrowException)
        if sql is None or (about_rows and "filter expression" not in str(error)):
            raise
        raise InvalidInputError(f"the filter {sql!r} is refused: {error}") from error


def _not_pushed(alignment: Alignment, predicate: Predicate | None) -> list[ColumnSource]:
    """The columns of a predicate that Lance would not find here under their names; else none."""
    if predicate is None or alignment.is_exact:
        return []
    used = alignment.select(sorted(predicate.columns))
    return [] if all(source.is_same for source in used) else used


def _sources(chosen: Sequence[ColumnSource]) -> list[str]:
    return list(dict.fromkeys(source.stored_name for source in chosen if source.stored_name is not None))


def _aligned(stored: pa.RecordBatch, chosen: Sequence[ColumnSource]) -> pa.RecordBatch:
    if not chosen:
        return stored.select([])
    return pa.RecordBatch.from_arrays(
        [source.array(stored) for source in chosen], schema=pa.schema([source.field for source in chosen])
    )
