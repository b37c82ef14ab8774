"""What a reader walks through who follows one operation from its call to its end.

``python tests/architecture/walks.py`` runs each operation once with a tracer and prints, for each: how many
functions of the package run, how many lines they have, in how many files they stand, and how often the walk
comes back to a file that it had left. A function is read once, when it is first called. It works on any
checkout whose ``src`` is on ``PYTHONPATH``, so that two can be compared.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lance
import numpy as np
import pyarrow as pa

import lancewal

ROOT = Path(lancewal.__file__).parent
DIMENSION = 8


@dataclass
class Walk:
    """The functions of one operation, in the order of their first calls."""

    functions: list[CodeType] = field(default_factory=list)

    @property
    def path(self) -> list[str]:
        """The files in the order of the walk; a file appears again where the walk comes back to it."""
        files: list[str] = []
        for code in self.functions:
            name = str(Path(code.co_filename).relative_to(ROOT))
            if not files or files[-1] != name:
                files.append(name)
        return files

    @property
    def files(self) -> int:
        return len(set(self.path))

    @property
    def returns(self) -> int:
        return len(self.path) - self.files

    @property
    def lines(self) -> int:
        return sum(_length(code) for code in self.functions)


def _length(code: CodeType) -> int:
    numbers = [line for *_, line in code.co_lines() if line is not None]
    return max(numbers) - code.co_firstlineno + 1


@contextmanager
def traced() -> Iterator[Walk]:
    """Follows all threads; lambdas, comprehensions and generated methods belong to who made them."""
    walk, seen, lock = Walk(), set[CodeType](), threading.Lock()
    root = str(ROOT) + "/"

    def follow(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            with lock:
                if code not in seen:
                    seen.add(code)
                    walk.functions.append(code)

    threading.setprofile_all_threads(follow) if sys.version_info >= (3, 12) else threading.setprofile(follow)
    sys.setprofile(follow)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def rows(first: int, count: int) -> pa.Table:
    ids = np.arange(first, first + count)
    vectors = np.repeat(ids, DIMENSION).astype(np.float32)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "n": pa.array(ids % 10, pa.int64()),
            "vector": pa.FixedSizeListArray.from_arrays(vectors, DIMENSION),
        }
    )


def new_table(directory: Path, name: str) -> lancewal.Table:
    key = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
    vector = pa.field("vector", pa.list_(pa.float32(), DIMENSION))
    schema = pa.schema([key, pa.field("n", pa.int64()), vector])
    uri = str(directory / name)
    lance.write_dataset(rows(0, 100).cast(schema), uri, schema=schema)
    return lancewal.initialize(uri, bucket=("id", 1))


def walk_put(directory: Path) -> Walk:
    table = new_table(directory, "put")
    with table.writer() as writer:
        writer.put(rows(100, 10))
        with traced() as walk:
            writer.put(rows(110, 10))
    return walk


def walk_flush(directory: Path) -> Walk:
    table = new_table(directory, "flush")
    with table.writer() as writer:
        writer.put(rows(100, 10))
        with traced() as walk:
            table.flush()
    return walk


def walk_compaction(directory: Path) -> Walk:
    table = new_table(directory, "compaction")
    with table.writer() as writer:
        writer.put(rows(90, 20))
        writer.delete([5, 6])
    table.flush()
    with traced() as walk:
        table.compact()
    return walk


def _all_levels(directory: Path, name: str) -> tuple[lancewal.Table, Any]:
    table = new_table(directory, name)
    with table.writer() as writer:
        writer.put(rows(90, 20))
    table.flush()
    writer = table.writer()
    writer.put(rows(95, 20))
    return table, writer


def walk_filtered_scan(directory: Path) -> Walk:
    table, writer = _all_levels(directory, "scan")
    with writer, traced() as walk:
        table.scan(columns=["id"], filter="n > 5").to_table()
    return walk


def walk_vector_search(directory: Path) -> Walk:
    table, writer = _all_levels(directory, "search")
    with writer, traced() as walk:
        table.vector_search("vector", np.zeros(DIMENSION, np.float32), k=5)
    return walk


def walk_replay(directory: Path) -> Walk:
    table = new_table(directory, "replay")
    shard = table.shard_for(0)
    # WAL-only mode closes without a flush, so that the entries stay.
    with table.shard_writer(shard, enable_memtable=False) as writer:
        for first in (100, 110, 120):
            writer.put(rows(first, 10))
    with traced() as walk:
        writer = table.shard_writer(shard)
    writer.close()
    return walk


def walk_micro_batch(directory: Path) -> Walk:
    """One batch through the low-latency path, the driver's and the task's part in one process."""
    from tests.architecture.micro_batch import write_one

    table = new_table(directory, "spark")
    with traced() as walk:
        write_one(table.uri, rows(100, 10))
    return walk


WALKS: dict[str, Callable[[Path], Walk]] = {
    "put to durable": walk_put,
    "flush": walk_flush,
    "compaction": walk_compaction,
    "filtered scan": walk_filtered_scan,
    "vector search": walk_vector_search,
    "replay": walk_replay,
}


def main() -> None:
    print(f"{'walk':16} {'functions':>9} {'lines':>6} {'files':>5} {'returns':>7}")
    for name, run in WALKS.items():
        with tempfile.TemporaryDirectory() as directory:
            walk = run(Path(directory))
        print(f"{name:16} {len(walk.functions):9} {walk.lines:6} {walk.files:5} {walk.returns:7}")
        if "-v" in sys.argv:
            print("    " + " > ".join(walk.path))


if __name__ == "__main__":
    main()
