"""SSTables that are open in this process: Lance's handles, key indexes and bloom filters.

An SSTable never changes once a manifest names it, so an open SSTable stays valid. SSTables that no reader
needs are closed, because a deleted file takes up space as long as it is open.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from uuid import UUID

import crc32c
import lance
import numpy as np
import pyarrow as pa

from lancewal.base import lance_errors
from lancewal.errors import InvalidInputError, StorageError
from lancewal.format import (
    BloomFilter,
    TableSchema,
    numbers,
    one_array,
    row_keys,
    without_null_words_in,
)
from lancewal.sstable.key_index import KeyIndex, Rows, damaged_index
from lancewal.sstable.notes import SsTableNotes, file_checksum
from lancewal.storage import (
    ObjectStore,
    in_forked_child,
    lance_cache_bytes,
    layout,
    lazy_property,
    ordered_map,
)

logger = logging.getLogger(__name__)

ROW_ADDRESS = "_rowaddr"

_INDEXES_DIR = "_indices"
#: The metadata key of earlier releases for the base version; it makes some versions of Lance panic.
_FORMER_BASE_VERSION_KEY = b"lancewal:base_version"
#: Bounds the number of open files; the bytes of Lance's caches and of key pages are bounded elsewhere.
_MAX_OPEN = 256
#: The share of Lance's cache for file metadata; the rest is for indexes.
_METADATA_SHARE = 0.2

_Identity = tuple[str, frozenset[tuple[str, str]]]


class OpenedSsTable:
    """The files of one SSTable, each opened on first use; thread-safe."""

    def __init__(self, store: ObjectStore, directory: str, notes: str = "") -> None:
        self._store = store
        self._directory = directory
        self._noted = notes
        self.uri = layout.child_uri(store.uri, directory)
        #: Whether Lance's session may keep files of its indexes open.
        self.may_have_index_files = False

    @lazy_property
    def dataset(self) -> lance.LanceDataset:
        self._refuse_links()
        indexes = self._store.local_path(f"{self._directory}/{_INDEXES_DIR}")
        self.may_have_index_files |= indexes is not None and os.path.isdir(indexes)
        with lance_errors(f"open the SSTable at {self.uri}"):
            return lance.dataset(self.uri, storage_options=self._storage_options, session=_handles.session())

    def close(self, *, only_dataset: bool = False) -> None:
        """Close its files; a later use opens them again."""
        for name in ("dataset", "_fragments") if only_dataset else ("dataset", "_fragments", "key_index"):
            self.__dict__.pop(name, None)

    @lazy_property
    def stored(self) -> TableSchema:
        """The SSTable's own columns and primary key, tombstone column included."""
        with lance_errors(f"read the columns of {self.uri}"):
            fields = self.dataset.lance_schema
            primary_key = [field.name() for field in fields.unenforced_primary_key()]
            return TableSchema.from_lance(self.dataset.schema, fields.fields(), primary_key)

    @lazy_property
    def written_for(self) -> int | None:
        """The version of the base table that had these columns; ``None`` if Lance wrote the SSTable."""
        # Try the notes first: the manifest has a copy of them, so nothing needs to be opened.
        if self.notes.base_version is not None:
            return self.notes.base_version
        stated = (self.dataset.schema.metadata or {}).get(_FORMER_BASE_VERSION_KEY, b"")
        return int(stated) if stated.isdigit() else None

    @lazy_property
    def notes(self) -> SsTableNotes:
        """The notes of lancewal about the SSTable; empty if Lance wrote it."""
        return SsTableNotes.parse(self._noted, self.uri) if self._noted else self._stored_notes()

    def _stored_notes(self) -> SsTableNotes:
        try:
            text = self._store.get(f"{self._directory}/{layout.SSTABLE_NOTES_NAME}")
        except FileNotFoundError:
            return SsTableNotes()
        return SsTableNotes.parse(text.decode(errors="replace"), self.uri)

    @lazy_property
    def key_index(self) -> KeyIndex | None:
        """The key index; ``None`` for an SSTable that never had one (early versions of Lance wrote none)."""
        self._refuse_links()
        try:
            self._check_index_files()
            remote = not self._store.is_local
            return KeyIndex(self.uri, self._storage_options, self.notes, self._key_of_rows, is_remote=remote)
        except StorageError:
            if self._store.head(f"{self._directory}/{layout.PK_PAGE_LOOKUP_NAME}") is None:
                return None
            raise

    def _check_index_files(self) -> None:
        """Compare the key index's files with their checksums, if they are local and have some."""
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

    @lazy_property
    def bloom(self) -> BloomFilter | None:
        """The bloom filter; ``None`` if there is no usable one, which only makes lookups slower."""
        bloom, problem = self.checked_bloom()
        if problem is not None:
            logger.warning("the bloom filter of %s is not used: %s", self.uri, problem)
        return bloom

    def checked_bloom(self) -> tuple[BloomFilter | None, str | None]:
        """The bloom filter, if it is usable, and the problem with it, if there is one."""
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

    def has(self, *names: str) -> bool:
        """Whether these attributes are loaded already, so that they cost nothing now."""
        return all(name in self.__dict__ for name in names)

    def open_for_lookups(self) -> None:
        """Open the bloom filter, the key index and the rows."""
        files = ("bloom", "key_index", "_fragments")
        list(ordered_map(partial(getattr, self), files, 1 if self._store.is_local else len(files)))

    def _key_of_rows(self, offsets: Rows) -> tuple[Rows, pa.Array]:
        """The rows at ``offsets`` that are not deleted in Lance, and their keys."""
        names = list(self.stored.primary_key)
        rows = self.dataset._take_rows(pa.array(offsets, pa.uint64()), columns=[*names, ROW_ADDRESS])
        kept = numbers(one_array(rows.column(ROW_ADDRESS))).astype(np.int64)
        return kept, row_keys(rows, names)

    def rows_at(self, offsets: Rows, columns: Sequence[str]) -> pa.Table:
        """The rows at ``offsets``, in this order, without those that are deleted in Lance."""
        rows = self._rows_at(offsets, columns)
        return without_null_words_in(rows) if self.stored.has_dictionaries else rows

    def _rows_at(self, offsets: Rows, columns: Sequence[str]) -> pa.Table:
        with lance_errors(f"read rows of {self.uri}"):
            fragments = self._fragments
            if len(fragments) != 1 or fragments[0].num_deletions:
                # The offsets of the public methods skip deleted rows.
                return self.dataset._take_rows(pa.array(offsets, pa.uint64()), columns=list(columns))
            # The fastest method for single rows, but it needs ascending offsets.
            ascending, places = np.unique(offsets, return_inverse=True)
            rows = fragments[0].take(ascending.tolist(), columns=list(columns))
            return rows if np.array_equal(ascending, offsets) else rows.take(pa.array(places))

    @lazy_property
    def physical_rows(self) -> int:
        with lance_errors(f"open the SSTable at {self.uri}"):
            return sum(int(fragment.physical_rows) for fragment in self._fragments)

    @lazy_property
    def _fragments(self) -> list[lance.LanceFragment]:
        return list(self.dataset.get_fragments())

    def _refuse_links(self) -> None:
        # Lance follows symbolic links, even out of the table.
        self._store.refuse_links(self._directory)

    @property
    def _storage_options(self) -> dict[str, str]:
        return dict(self._store.storage_options)


class _Handles:
    """The open SSTables, least recently used first, and the Lance session that they share."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start empty, with a new lock: another thread may have held it when the process was forked."""
        self._lock = threading.Lock()
        self._opened: OrderedDict[_Identity, OpenedSsTable] = OrderedDict()
        # Includes SSTables that the limit removed from ``_opened`` while a reader still uses them.
        self._living: weakref.WeakSet[OpenedSsTable] = weakref.WeakSet()
        # The opened SSTables of each shard.
        self._of_shard: dict[_Identity, set[_Identity]] = {}
        self._session: lance.Session | None = None

    def open(self, store: ObjectStore, directory: str, notes: str) -> OpenedSsTable:
        identity = _identity(store, directory)
        with self._lock:
            opened = self._opened.get(identity)
            if opened is None:
                opened = self._opened[identity] = OpenedSsTable(store, directory, notes)
                self._living.add(opened)
                self._of_shard.setdefault(_shard_of(identity), set()).add(identity)
            self._opened.move_to_end(identity)
            if len(self._opened) > _MAX_OPEN:
                self._forget(next(iter(self._opened)))
            return opened

    def session(self) -> lance.Session:
        """One session for all SSTables: it bounds their caches together and shares connections."""
        session = self._session
        if session is None:
            metadata = int(lance_cache_bytes() * _METADATA_SHARE)
            session = self._session = lance.Session(lance_cache_bytes() - metadata, metadata)
        return session

    def close(self, store: ObjectStore, directory: str) -> None:
        with self._lock:
            self._close([_identity(store, directory)])

    def close_others(self, store: ObjectStore, shard_id: UUID, names: Collection[str]) -> None:
        shard = _identity(store, layout.shard_dir(shard_id))
        with self._lock:
            opened = self._of_shard.get(shard, ())
            self._close([each for each in opened if each[0].rpartition("/")[2] not in names])

    def _close(self, identities: Iterable[_Identity]) -> None:
        closing = [opened for identity in identities if (opened := self._forget(identity)) is not None]
        if any(opened.may_have_index_files for opened in closing):
            # Lance cannot close the index files of one SSTable. So take a new session, which loads the other
            # SSTables again. All datasets of the old session must be closed, or it keeps its files open.
            self._session = None
            for opened in list(self._living):
                opened.close(only_dataset=True)
        for opened in closing:
            opened.close()

    def _forget(self, identity: _Identity) -> OpenedSsTable | None:
        opened = self._opened.pop(identity, None)
        if opened is not None:
            others = self._of_shard[_shard_of(identity)]
            others.discard(identity)
            if not others:
                del self._of_shard[_shard_of(identity)]
        return opened


_handles = _Handles()
in_forked_child(_handles.clear)


def open_sstable(store: ObjectStore, directory: str, notes: str = "") -> OpenedSsTable:
    """The SSTable at ``directory``, shared if it is open already. No I/O.

    ``notes`` is the manifest's copy of the notes, which saves reading them.
    """
    return _handles.open(store, directory, notes)


def forget_sstable(store: ObjectStore, directory: str) -> None:
    """Close an SSTable whose sidecars were rewritten or that was deleted; the next use opens it again."""
    _handles.close(store, directory)


def keep_sstables(store: ObjectStore, shard_id: UUID, names: Collection[str]) -> None:
    """Close all SSTables of a shard except these; current reads keep theirs."""
    _handles.close_others(store, shard_id, names)


def _shard_of(identity: _Identity) -> _Identity:
    return identity[0].rpartition("/")[0], identity[1]


def _identity(store: ObjectStore, directory: str) -> _Identity:
    return layout.child_uri(store.uri, directory), frozenset(store.storage_options.items())
