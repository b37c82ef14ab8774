"""Whether a column once had another name, or only has the field id of one that was dropped.

Lance numbers a new column above all that the table's schema and data files have. Rows in WALs
and SSTables are no data files of the table: a column that was added, written to, and
dropped before anything was compacted leaves no trace there, and the next column gets its
id. By id and type alone, its values would be taken for those of the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

#: Versions looked at. Beyond, as where versions were cleaned up, a name is taken for a former one.
MAX_LOOKBACK = 1_000


class ColumnHistory:
    """The columns of one version of a table, and what they were called in those before it.

    >>> versions = {1: {0: "id"}, 2: {0: "id", 1: "draft"}, 3: {0: "id"}, 4: {0: "key", 1: "note"}}
    >>> history = ColumnHistory(4, versions.get)
    >>> history.was_called(0, "id"), history.was_called(1, "draft")
    (True, False)
    """

    def __init__(self, version: int, columns_of: Callable[[int], Mapping[int, str] | None]) -> None:
        """``columns_of`` gives a version's column names by field id; ``None`` where it is gone."""
        self._version = version
        self._columns_of = columns_of
        self._known: dict[tuple[int, str], bool] = {}

    def was_called(self, field_id: int, name: str) -> bool:
        """Whether the column had ``name`` in any version since it was added."""
        known = self._known.get((field_id, name))
        if known is None:
            known = self._known[field_id, name] = self._find(field_id, name)
        return known

    def _find(self, field_id: int, name: str) -> bool:
        oldest = max(self._version - MAX_LOOKBACK, 1)
        for version in range(self._version, oldest - 1, -1):
            columns = self._columns_of(version)
            if columns is None:
                return True
            present = columns.get(field_id)
            if present is None or present == name:
                return present is not None
        return oldest > 1
