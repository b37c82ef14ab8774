"""Searches right after a compaction brought 20 % new rows, beside the same searches right before it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa

import lancewal
from bench.comparison import Comparison
from bench.context import Context
from bench.registry import workload
from bench.tables import KEY, expect

DIMENSION = 64
SSTABLES = 4
K = 10
_WORDS = 5_000
#: How much longer a search may take.
_TARGET = 1.5

_SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("text", pa.string()),
        pa.field("v", pa.list_(pa.float32(), DIMENSION)),
    ]
)


@workload(
    "index_lag", "vector and text search after a compaction of 20 % new rows, and before it (50,000 rows)"
)
def index_lag(context: Context) -> list[Comparison]:
    """Half of the new rows are updates. The peer is the same table before its compaction."""
    rows = context.size(full=50_000, quick=11_000)
    before = context.directory("tables") / "before"
    _flushed(before, rows)
    indexed, lagging = (shutil.copytree(before, before.with_name(name)) for name in ("indexed", "lagging"))
    lancewal.open(indexed).compact()
    lancewal.open(lagging).compact(optimize_indexes=False)
    # Within it no read asks for a newer state: the search itself is measured.
    tables = {path: lancewal.open(path, max_staleness=3600) for path in (before, indexed, lagging)}
    random = np.random.default_rng(7)
    searches = context.size(full=60, quick=3)
    vectors = random.random((searches, DIMENSION), dtype=np.float32)
    words = [f"w{first} w{second}" for first, second in random.integers(1, 300, (searches, 2))]

    def near(path: Path) -> Callable[[int], object]:
        return lambda i: expect(tables[path].vector_search("v", vectors[i], K, columns=["id"]).num_rows, K)

    def text(path: Path) -> Callable[[int], object]:
        return lambda i: tables[path].full_text_search("text", words[i], K, columns=["id"])

    found = []
    for kind, search in (("vector search", near), ("text search", text)):
        for path in tables:
            search(path)(0)
        for name, after in (("indexes up to date", indexed), ("indexes left as they were", lagging)):
            laps = context.alternate(searches, ours=search(after), peer=search(before))
            ours, peer = (1e3 * laps[side].percentile(50) for side in ("ours", "peer"))
            found.append(
                Comparison(
                    f"{kind} after compaction, {name}", ours, peer, "ms", False, "before it", target=_TARGET
                )
            )
    return found


def _flushed(where: Path, rows: int) -> None:
    """A base with all kinds of indexes, and a fifth of its rows again in SSTables."""
    random = np.random.default_rng(1)
    dataset = lance.write_dataset(_rows(random, 0, rows), str(where), schema=_SCHEMA)
    dataset.create_index("v", "IVF_PQ", num_partitions=16, num_sub_vectors=16)
    dataset.create_scalar_index("text", "INVERTED", with_position=False)
    dataset.create_scalar_index("id", "BTREE")
    table = lancewal.initialize(where, unsharded=True)
    new = rows // 5
    for number in range(SSTABLES):
        with table.writer() as writer:
            writer.put(_rows(random, rows - new // 2 + number * new // SSTABLES, new // SSTABLES))


def _rows(random: np.random.Generator, first: int, count: int) -> pa.Table:
    vectors = pa.array(random.random(count * DIMENSION, dtype=np.float32))
    picked = random.zipf(1.3, (count, 12)) % _WORDS
    return pa.table(
        {
            "id": pa.array(range(first, first + count), pa.int64()),
            "text": [" ".join(f"w{word}" for word in line) for line in picked],
            "v": pa.FixedSizeListArray.from_arrays(vectors, DIMENSION),
        },
        schema=_SCHEMA,
    )
