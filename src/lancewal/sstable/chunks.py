"""MemTable batches as a stream that Lance's file writer takes well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from lancewal.sstable.key_order import Mask
from lancewal.sstable.null_structs import with_present_dead_structs

#: Small batches are joined to chunks of about this size: Lance's cost per batch is far above
#: its cost per row.
CHUNK_ROWS = 8192
CHUNK_BYTES = 4 << 20


def coalesced(
    batches: Sequence[pa.RecordBatch],
    schema: pa.Schema,
    newest: Mask | None,
    *,
    fill_dead_for: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of ``batches`` that ``newest`` marks, in order, as ``schema``.

    ``schema`` differs from the batches' own in field metadata at most. Large batches
    without a row to leave out are passed on uncopied. ``fill_dead_for`` names the file version
    where it cannot hold some nulls that tombstones have.
    """
    for chunk in _chunks(batches, newest):
        # Lance takes an empty batch for a page.
        if chunk.num_rows:
            rows = chunk if fill_dead_for is None else with_present_dead_structs(chunk, fill_dead_for)
            yield pa.RecordBatch.from_arrays(rows.columns, schema=schema)


def _chunks(batches: Sequence[pa.RecordBatch], newest: Mask | None) -> Iterator[pa.RecordBatch]:
    limit = _chunk_rows(batches)
    group: list[pa.RecordBatch] = []
    rows = first_row = 0
    for batch in batches:
        if group and rows + batch.num_rows > limit:
            yield _joined(group, newest, first_row)
            first_row += rows
            group, rows = [], 0
        group.append(batch)
        rows += batch.num_rows
    if group:
        yield _joined(group, newest, first_row)


def _chunk_rows(batches: Sequence[pa.RecordBatch]) -> int:
    """Rows per chunk, judged by the largest batch: sizing each would cost more than joining it."""
    sample = max(batches, key=lambda batch: batch.num_rows)
    row_bytes = max(sample.nbytes // max(sample.num_rows, 1), 1)
    return int(min(CHUNK_ROWS, max(CHUNK_BYTES // row_bytes, 1)))


def _joined(group: Sequence[pa.RecordBatch], newest: Mask | None, first_row: int) -> pa.RecordBatch:
    chunk = group[0] if len(group) == 1 else pa.concat_batches(group)
    if newest is None:
        return chunk
    kept = newest[first_row : first_row + chunk.num_rows]
    return chunk if kept.all() else chunk.filter(pa.array(kept))
