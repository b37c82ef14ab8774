"""Which rows of the base are superseded, asked of its BTree on the key.

Without it every key of the base has to be compared with those of newer levels. With it the
cost is that of the newer keys, and for SSTables it is paid once for each base version.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.dialect import among
from lancewal.format.spans import numbers, one_array
from lancewal.lance_errors import lance_errors, row_count
from lancewal.reader.key_set import KeySet

Addresses = npt.NDArray[np.uint64]

_NOWHERE: Addresses = np.empty(0, np.uint64)
#: Keys in one ``IN``: Lance's planner slows down beyond.
KEYS_AT_A_TIME = 5_000
#: An index search for a key costs as much as comparing so many keys of the base. It is
#: several times as much, but a level is read again and again before it is compacted.
_ROWS_PER_SEARCH = 50


class BaseOverlap:
    """Row addresses, in one version of the base, of the keys that newer levels hold."""

    def __init__(self, base: BaseTable) -> None:
        self._base = base
        self._known: weakref.WeakKeyDictionary[KeySet, Addresses] = weakref.WeakKeyDictionary()
        self._usable = len(base.schema.primary_key) == 1 and _has_btree(base)

    def addresses(self, levels: Sequence[KeySet]) -> Addresses | None:
        """Ascending addresses of the superseded rows; ``None`` when comparing keys is cheaper."""
        unknown = sum(len(keys) for keys in levels if keys not in self._known)
        if not self._usable or unknown * _ROWS_PER_SEARCH > row_count(self._base.dataset):
            return None
        parts = [self._of(keys) for keys in levels]
        return np.unique(np.concatenate(parts)) if parts else _NOWHERE

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


def positions_of(dead: Addresses, addresses: Addresses) -> npt.NDArray[np.int64]:
    """Where in ``addresses`` those that are ``dead`` stand, ascending.

    Costs little more than the dead among them where ``addresses`` ascend, as in a scan in order.
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


def _has_btree(base: BaseTable) -> bool:
    """Whether a BTree on the key covers all fragments; one that does not would be a slow search."""
    key = base.schema.field_ids[base.schema.primary_key[0]]
    return any(
        "BTree" in index.details_type
        and index.field_ids == (key,)
        and base.manifest.covered_fragments(index.name) == base.manifest.fragment_ids
        for index in base.manifest.indexes
    )
