"""Rows from Spark in the form in which the table stores them, deletes among them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from lancewal.base import BaseTable
from lancewal.errors import InvalidInputError
from lancewal.feed import FEED_COLUMNS
from lancewal.format.columns import check_columns
from lancewal.spark.columns import for_table
from lancewal.spark.options import Options
from lancewal.writer.intake import Intake

#: What a row's change is called: by our own feed, by Delta's, by Debezium's.
_UPSERTS = ("upsert", "insert", "update", "update_postimage", "c", "u", "r")
_DELETES = ("delete", "d")
#: The old version of a row that another row of the feed replaces.
_NOTHING = ("update_preimage",)

_Mask = npt.NDArray[np.bool_]


class SparkRows:
    """Checks rows against the table; refusals name the column, and the key where it helps.

    ``change_column`` holds what is to be done with each row; null is an upsert. With it
    the columns that our change feed adds may be among the rows and are left out.
    """

    def __init__(
        self, base: BaseTable, change_column: str | None = None, *, round_floats: bool = False
    ) -> None:
        self._schema = base.schema
        self._round_floats = round_floats
        self._change_column = change_column
        check_columns(base.schema)
        self._intake = Intake(base.schema, storage_version=base.storage_version)
        if change_column is not None and change_column in base.schema.names:
            raise InvalidInputError(
                f"{change_column} is a column of the table and cannot say what becomes of a row; rename one"
            )

    @classmethod
    def of(cls, base: BaseTable, options: Options) -> SparkRows:
        """As the options of a write ask for."""
        return cls(base, options.text("changeTypeColumn"), round_floats=options.flag("roundFloats"))

    def check(self, given: pa.Schema) -> None:
        """Refuse rows of a schema that does not fit, whatever their values are."""
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, type_) for type_ in given.types], schema=given)
        if self._change_column is not None:
            _, empty = self._take_changes(empty)
        unknown = [name for name in empty.schema.names if name not in self._schema.names]
        if unknown:
            raise InvalidInputError(
                f"the table has no column {', '.join(unknown)}; "
                f"its columns are {', '.join(self._schema.names)}"
            )
        required = [field.name for field in self._schema.plain if not field.nullable]
        if self._change_column is None:
            required += self._schema.primary_key
        missing = sorted(set(required) - set(empty.schema.names))
        if missing:
            raise InvalidInputError(f"the rows lack {', '.join(missing)}, which cannot be null; add it")
        self._for_table(empty)

    def stored(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """The rows in ``schema.stored``, in their order; ``None`` when nothing is left to do."""
        if batch.num_rows == 0:
            return None
        if self._change_column is None:
            return self._upserts(batch)
        changes, batch = self._take_changes(batch)
        deleted = _is_one_of(changes, _DELETES)
        ignored = _is_one_of(changes, _NOTHING)
        self._refuse_unknown(changes, deleted | ignored)
        upserted = ~(deleted | ignored)
        parts, places = [], []
        for wanted, convert in ((upserted, self._upserts), (deleted, self._deletes)):
            if wanted.any():
                part = batch if wanted.all() else batch.filter(pa.array(wanted))
                parts.append(convert(part))
                places.append(np.flatnonzero(wanted))
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0]
        # Each kind was converted by itself; a key's last change must stay the last.
        order = np.argsort(np.concatenate(places), kind="stable")
        return pa.concat_batches(parts).take(pa.array(order))

    def _upserts(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return self._intake.upserts(self._for_table(batch)).batches[0]

    def _deletes(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = [name for name in self._schema.primary_key if name in batch.schema.names]
        return self._intake.deletes(self._for_table(batch.select(names))).batches[0]

    def _for_table(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        key = self._schema.primary_key
        return for_table(batch, self._schema.plain, key, round_floats=self._round_floats)

    def _take_changes(self, batch: pa.RecordBatch) -> tuple[pa.Array, pa.RecordBatch]:
        assert self._change_column is not None
        place = batch.schema.get_field_index(self._change_column)
        if place < 0:
            raise InvalidInputError(
                f"option changeTypeColumn names {self._change_column}, which the rows do not have; "
                f"their columns are {', '.join(batch.schema.names)}"
            )
        changes = batch.column(place)
        if not pa.types.is_string(changes.type) and not pa.types.is_large_string(changes.type):
            raise InvalidInputError(f"column {self._change_column} must hold text, not {changes.type}")
        left_out = {self._change_column, *(c for c in FEED_COLUMNS if c not in self._schema.names)}
        return changes, batch.select([name for name in batch.schema.names if name not in left_out])

    def _refuse_unknown(self, changes: pa.Array, known: _Mask) -> None:
        unknown = ~(known | _is_one_of(changes, _UPSERTS) | changes.is_null().to_numpy(zero_copy_only=False))
        if unknown.any():
            found = changes.filter(pa.array(unknown)).unique().slice(0, 3).to_pylist()
            raise InvalidInputError(
                f"column {self._change_column} says {found}; known are {', '.join((*_UPSERTS, *_DELETES))}"
            )


def _is_one_of(changes: pa.Array, words: tuple[str, ...]) -> _Mask:
    found = pc.is_in(pc.utf8_lower(changes), value_set=pa.array(words, changes.type))
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)
