"""What readers and followers of a world got, in the words of the oracle."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from lancewal.reader.state import StateReader
from tests.simulation.oracle import BrokenError


class CountedReader(StateReader):
    """Counts how often a snapshot starts again."""

    met: Counter[str]

    def _retried(self, read):  # type: ignore[no-untyped-def]
        def counted(attempt: int):  # type: ignore[no-untyped-def]
            if attempt > 1:
                self.met["a snapshot starts again"] += 1
            return read(attempt)

        return super()._retried(counted)


def changes_of(batch: pa.RecordBatch) -> list[tuple[int, int | None]]:
    columns = (batch[name].to_pylist() for name in ("id", "value", "_change_type"))
    return [(key, None if kind == "delete" else value) for key, value, kind in zip(*columns, strict=True)]


def values_of(rows: pa.Table) -> dict[int, int]:
    found: dict[int, int] = {}
    for key, value in zip(rows["id"].to_pylist(), rows["value"].to_pylist(), strict=True):
        if key in found:
            raise BrokenError(f"a row is there twice: {key}")
        found[key] = value
    return found
