"""Find the rows of keys in the base table, through the BTree on the key and through cached keys.

To find one row in fragments that the BTree does not cover, Lance reads all requested columns of these
fragments. So the BTree is used only for the fragments that it covers. The keys of the other fragments are
read once for each fragment, without other columns, and kept in the process's cache. They are few, because
indexes are brought up to date, or because the table is small and has no BTree. A large table without a BTree
is scanned: there Lance reads the key column, and the other columns only of the rows that it found.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.base import BaseTable, fragments_of, lance_errors, row_count
from lancewal.format import KeySet, key_words, numbers, one_array, row_keys
from lancewal.predicate import among
from lancewal.storage import Shelf, process_cache

Addresses = npt.NDArray[np.uint64]

_NOWHERE: Addresses = np.empty(0, np.uint64)
#: Keys in one ``IN``: Lance's planner slows down beyond this number.
KEYS_AT_A_TIME = 5_000
#: The assumed cost of an index search for one key, in key comparisons of a scan. A single search costs
#: several times as much, but its result is reused: a level is read many times before it is compacted.
_ROWS_PER_SEARCH = 50
#: The most keys that are cached of a table. Sorting that many takes as long as about ten scans of them.
MOST_KEPT = 1 << 20
#: The size of a word, a row id and a fragment number.
_KEPT_KEY_BYTES = 20


class BaseOverlap:
    """Row addresses, in one version of the base, of the keys that newer levels hold.

    They come from the BTree on the key. Without a BTree every key of the base must be compared with the keys
    of newer levels. With a BTree the cost depends on the number of newer keys only, and for SSTables it is
    paid once for each base version.
    """

    def __init__(self, base: BaseTable) -> None:
        self._base = base
        self._known: weakref.WeakKeyDictionary[KeySet, Addresses] = weakref.WeakKeyDictionary()
        # The levels of the last call, and the addresses of all of them together.
        self._joined: tuple[list[weakref.ref[KeySet]], Addresses] = [], _NOWHERE
        #: Whether a BTree covers all fragments; a search with an incomplete one would be slow.
        self.usable = bool(base.indexed_fragments) and _covers_all(base)

    def addresses(self, levels: Sequence[KeySet]) -> Addresses | None:
        """Ascending addresses of the superseded rows; ``None`` when comparing keys is cheaper."""
        unknown = sum(len(keys) for keys in levels if keys not in self._known)
        if unknown * _ROWS_PER_SEARCH > row_count(self._base.dataset):
            return None
        which = [weakref.ref(keys) for keys in levels]
        joined = self._joined
        if joined[0] != which:
            joined = self._joined = which, np.unique(np.concatenate([self._of(keys) for keys in levels]))
        return joined[1]

    def _of(self, keys: KeySet) -> Addresses:
        known = self._known.get(keys)
        if known is None:
            known = self._known[keys] = self._searched(keys.to_array())
        return known

    def _searched(self, keys: pa.Array) -> Addresses:
        (name,) = self._base.schema.primary_key
        parts = [_NOWHERE]
        for start in range(0, len(keys), KEYS_AT_A_TIME):
            asked = among(name, keys.slice(start, KEYS_AT_A_TIME))
            with lance_errors("search the base table's key index"):
                found = self._base.dataset.scanner(columns=[], filter=asked, with_row_address=True).to_table()
            parts.append(numbers(one_array(found.column("_rowaddr"))))
        return np.concatenate(parts)


def _covers_all(base: BaseTable) -> bool:
    return base.indexed_fragments == base.manifest.fragment_ids


def positions_of(dead: Addresses, addresses: Addresses) -> npt.NDArray[np.int64]:
    """The ascending positions in ``addresses`` of those that are ``dead``.

    If ``addresses`` ascend, as in a scan in order, the cost depends mostly on the number of dead ones.
    """
    if not len(addresses) or not len(dead):
        return np.empty(0, np.int64)
    if (addresses[1:] <= addresses[:-1]).any():
        return np.flatnonzero(np.isin(addresses, dead))
    low, high = np.searchsorted(dead, [addresses[0], addresses[-1] + np.uint64(1)])
    near = dead[low:high]
    places = np.searchsorted(addresses, near)
    here: npt.NDArray[np.int64] = places[addresses[places] == near]
    return here


@dataclass(frozen=True)
class KeptKeys:
    """The keys of some fragments as ascending ``words`` (see ``key_words``), and the row id of each.

    ``version`` is the version of the base that they are for. ``fragments`` maps the metadata of each
    fragment, which determines its rows, to its id. ``owners`` has the fragment id of each row. Several keys
    may share a word.
    """

    version: tuple[int, int]
    fragments: Mapping[str, int]
    words: Addresses
    rows: Addresses
    owners: npt.NDArray[np.uint32]

    def find(self, words: Addresses) -> Addresses:
        """The row ids of all keys that have one of these words."""
        low = np.searchsorted(self.words, words, "left")
        counts = np.searchsorted(self.words, words, "right") - low
        if not counts.any():
            return _NOWHERE
        ends = np.cumsum(counts)
        found: Addresses = self.rows[np.repeat(low - ends + counts, counts) + np.arange(ends[-1])]
        return found


#: By the table's address and the field ids of its key. One entry for each table is enough: a new version
#: shares most of its fragments with the version before.
_kept: Shelf[tuple[str, tuple[int, ...]], KeptKeys] = Shelf()
_NONE_KEPT = KeptKeys((0, 0), {}, _NOWHERE, _NOWHERE, np.empty(0, np.uint32))


class KeyPlaces:
    """Decides, for one version of the base, which fragments are searched for keys through which means."""

    def __init__(self, base: BaseTable) -> None:
        self._base = base

    @cached_property
    def scans(self) -> list[dict[str, Any]]:
        """Arguments for the scans that find the keys that are not cached; the caller adds the filter."""
        if _covers_all(self._base):
            return [{}] if self._base.manifest.fragment_ids else []
        covered = self._base.indexed_fragments
        indexed = [each for each in self._fragments if each.fragment_id in covered]
        if self.are_kept:
            return [{"fragments": indexed}] if indexed else []
        if not indexed:
            return [{}]
        return [{"fragments": indexed}, {"fragments": self._others, "use_scalar_index": False}]

    @cached_property
    def are_kept(self) -> bool:
        """Whether there are fragments that the BTree does not cover, with few enough keys to be cached."""
        rows = sum(each.metadata.num_rows for each in self._others)
        most = min(MOST_KEPT, process_cache.max_bytes // (8 * _KEPT_KEY_BYTES))
        return bool(self._others) and rows <= most

    @cached_property
    def are_fast(self) -> bool:
        """Whether the keys of every fragment are in the BTree or in the cache."""
        return not self._others or self.are_kept

    def kept(self) -> KeptKeys:
        """The keys of the fragments that the BTree does not cover; reads those that are not cached yet."""
        base = self._base
        place = base.uri, tuple(base.schema.field_ids[name] for name in base.schema.primary_key)
        version = base.version, base.committed_at
        known = _kept.get(place) or _NONE_KEPT
        if known.version == version:
            return known
        kept = known.fragments.keys() & self._identities.keys()
        new = [each for name, each in self._identities.items() if name not in kept]
        still = np.isin(known.owners, [known.fragments[name] for name in kept])
        words, rows, owners = self._read(new)
        words = np.concatenate([known.words[still], words])
        order = np.argsort(words, kind="stable")
        known = KeptKeys(
            version,
            {name: each.fragment_id for name, each in self._identities.items()},
            words[order],
            np.concatenate([known.rows[still], rows])[order],
            np.concatenate([known.owners[still], owners])[order],
        )
        _kept.put(place, known, _KEPT_KEY_BYTES * len(order) + sum(map(len, self._identities)))
        return known

    @cached_property
    def _fragments(self) -> list[lance.LanceFragment]:
        return fragments_of(self._base.dataset)

    @cached_property
    def _others(self) -> list[lance.LanceFragment]:
        """The fragments that no BTree on the key covers."""
        if _covers_all(self._base):
            return []
        covered = self._base.indexed_fragments
        return [each for each in self._fragments if each.fragment_id not in covered]

    @cached_property
    def _identities(self) -> Mapping[str, lance.LanceFragment]:
        """These fragments by their metadata, deletions included; unique, as file names are never reused."""
        return {str(each.metadata.to_json()): each for each in self._others}

    def _read(
        self, fragments: list[lance.LanceFragment]
    ) -> tuple[Addresses, Addresses, npt.NDArray[np.uint32]]:
        if not fragments:
            return _NOWHERE, _NOWHERE, _NONE_KEPT.owners
        names = list(self._base.schema.primary_key)
        with lance_errors("read the keys of the base table"):
            scanner = self._base.dataset.scanner(
                columns=names, fragments=fragments, with_row_id=True, with_row_address=True
            )
            # Lance does not enforce that keys are not null, and a row with a null key cannot be looked up.
            found = scanner.to_table().drop_null()
        words = key_words(row_keys(found, names))
        owners = numbers(one_array(found.column("_rowaddr"))) >> np.uint64(32)
        return words, numbers(one_array(found.column("_rowid"))), owners.astype(np.uint32)
