"""What a reader walks through who follows one operation from its call to its end.

``python tests/architecture/walks.py`` runs each operation once under a tracer and prints, for each: how
many functions of the package it goes through, how many lines they have, in how many files they stand, and
how often the walk comes back to a file that it had left, counted for two kinds of readers.

The walk is that of a person with the source before them:

- It begins at the function that was called. A function is read once, from its first line to its last, and
  each function that it calls is read where it is called, before the reader goes on: depth first, in the
  order of the source. Only calls that this operation made count, not those of branches it did not take.
- The leaf rooms (:data:`LEAVES`) are not entered: a call into one of them is understood by its name and
  docstring. What a leaf calls back belongs to the function that called the leaf. ``--all`` enters them.
- A lambda, a comprehension and a generated method belong to the function that runs them.
- The work of a thread or a task is read where the thread or task was made. A thread that was there
  before comes last, and the heartbeat of owners is left out.
- A *return* is a step into a file that the walk has left before. Coming back to a function in order to
  read on is none; meeting another function of a file that was closed is one.
- *Reopened* counts the same for a reader who stays: having opened a file, they first read there whatever is
  called within the file, and only then, in order, what stands elsewhere. The first count grows with every
  call that crosses files; this one only where files cannot be read one after the other.
- The last two columns are for a reader who trusts doors: *own* are the files of the operation's own room
  (:data:`OWN_ROOMS`), and *own returns* the returns if each call into another room is understood at its
  door, by its name and docstring.

Nothing of this depends on which thread was faster: who called whom, and where, is recorded as a set, and
the order is made from it afterwards. The script needs only a checkout's ``src`` on ``PYTHONPATH``, also
an old one, so that two can be compared:

    PYTHONPATH=src python tests/architecture/walks.py --json > after.json
    PYTHONPATH=../before/src python tests/architecture/walks.py --json > before.json
    python tests/architecture/walks.py --compare before.json after.json

Names of walks choose among them; ``-v`` prints the files in both orders, ``-vv`` the functions.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import pkgutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import lance
import numpy as np
import pyarrow as pa

import lancewal

ROOT = Path(lancewal.__file__).parent
DIMENSION = 8

#: Rooms and modules whose functions are read by their names. Those of the second line are what
#: they were called when they lay loose.
LEAVES = (
    *("storage/", "format/", "predicate/", "errors.py", "config.py", "base/lance.py"),
    *("objects/", "layout.py", "parallel.py", "forks.py", "clock.py", "reader/key_set.py", "predicate.py"),
    *("conditions.py", "expressions.py", "dialect.py", "writer/config.py", "lance_errors.py"),
)

#: The room that each operation belongs to.
OWN_ROOMS = {
    "put to durable": "writer/",
    "flush": "writer/",
    "compaction": "maintenance/",
    "filtered scan": "reader/",
    "vector search": "reader/",
    "replay": "writer/",
    "micro-batch": "spark/",
}

#: Threads that work by the clock, whatever is going on: no part of any operation.
HEARTBEAT = "lancewal-heartbeat"


@dataclass(frozen=True)
class Step:
    """A function, as it is found in the source."""

    file: str
    line: int
    name: str
    last_line: int

    @classmethod
    def of(cls, code: CodeType) -> Step:
        numbers = [line for *_, line in code.co_lines() if line is not None]
        file = str(Path(code.co_filename).relative_to(ROOT))
        return cls(file, code.co_firstlineno, code.co_qualname, max(numbers))


@dataclass(frozen=True)
class Walk:
    """The functions of one operation, in the order in which they are read: depth first, and file by file."""

    steps: tuple[Step, ...]
    staying: tuple[Step, ...]
    #: What the files of the operation's own room begin with.
    room: str = ""

    @property
    def own(self) -> tuple[Step, ...]:
        """The functions of the operation's own room, in the order of the walk."""
        return tuple(step for step in self.steps if step.file.startswith(self.room))

    @property
    def figures(self) -> dict[str, int]:
        files = {step.file for step in self.steps}
        own = {step.file for step in self.own}
        lines = {(step.file, line) for step in self.steps for line in range(step.line, step.last_line + 1)}
        return {
            "functions": len(self.steps),
            "lines": len(lines),
            "files": len(files),
            "returns": len(path_of(self.steps)) - len(files),
            "reopened": len(path_of(self.staying)) - len(files),
            "own": len(own),
            "own returns": len(path_of(self.own)) - len(own),
        }


def path_of(steps: Sequence[Step]) -> list[str]:
    """The files in the order of the walk; a file appears again where the walk comes back to it."""
    return [file for file, _ in groupby(steps, key=lambda step: step.file)]


@dataclass
class Trace:
    """Who called whom, and from where; the same for every run, whatever order threads took."""

    enter_leaves: bool
    #: The thread that runs the operation.
    thread: int = field(default_factory=threading.get_ident)
    #: What nothing of the package called in that thread, in the order of the calls.
    roots: dict[CodeType, None] = field(default_factory=dict)
    #: For each function those that it called, each with the place in the caller's bytecode.
    calls: dict[CodeType, dict[CodeType, int]] = field(default_factory=dict)
    #: The function and place that made a thread or a task, by the object's id.
    makers: dict[int, tuple[CodeType, int] | None] = field(default_factory=dict)

    def called(self, frame: FrameType) -> None:
        if threading.current_thread().name.startswith(HEARTBEAT):
            return
        code = frame.f_code
        if code.co_qualname in ("Thread.__init__", "Task.__init__"):
            self.makers[id(frame.f_locals["self"])] = self._caller(frame)
        if not self._is_entered(code):
            return
        caller = self._caller(frame)
        if caller is not None:
            called = self.calls.setdefault(caller[0], {})
            called[code] = min(caller[1], called.get(code, caller[1]))
        elif threading.get_ident() == self.thread:
            self.roots.setdefault(code)
        else:
            self.calls.setdefault(code, {})

    def _is_entered(self, code: CodeType) -> bool:
        file = code.co_filename.removeprefix(f"{ROOT}/")
        if file == code.co_filename or code.co_name.startswith("<"):
            return False
        return self.enter_leaves or not file.startswith(LEAVES)

    def _caller(self, frame: FrameType) -> tuple[CodeType, int] | None:
        """The nearest function on the stack that is read, or that made the thread or task of the stack."""
        above = frame.f_back
        while above is not None:
            code = above.f_code
            if code.co_qualname in ("Thread.run", "Task.run"):
                maker = self.makers.get(id(above.f_locals.get("self")))
                if maker is not None:
                    return maker
            if self._is_entered(code):
                return code, above.f_lasti
            above = above.f_back
        return None

    def walk(self, room: str) -> Walk:
        return Walk(self._read(stay=False), self._read(stay=True), room)

    def _read(self, *, stay: bool) -> tuple[Step, ...]:
        read: dict[CodeType, None] = {}

        def visit(code: CodeType, later: list[CodeType]) -> None:
            if code in read:
                return
            read[code] = None
            called = self.calls.get(code, {})
            for each in sorted(called, key=called.__getitem__):
                if stay and each.co_filename != code.co_filename:
                    later.append(each)
                else:
                    visit(each, later)

        def enter(code: CodeType) -> None:
            elsewhere: list[CodeType] = []
            visit(code, elsewhere)
            for each in elsewhere:
                enter(each)

        for root in self.roots:
            enter(root)
        # Threads that were there before: first the functions that wait for work, then whatever is left.
        below = {code for called in self.calls.values() for code in called}
        for code in sorted(self.calls, key=lambda code: (code in below, *_place(code))):
            enter(code)
        return tuple(map(Step.of, read))


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_filename, code.co_firstlineno


class Tracer:
    """Follows all threads that begin while it is installed; notes calls while it is recording."""

    def __init__(self, *, enter_leaves: bool = False, room: str = "") -> None:
        self._enter_leaves = enter_leaves
        self._room = room
        self._trace: Trace | None = None
        self.walk: Walk | None = None

    @contextmanager
    def installed(self) -> Iterator[Tracer]:
        threading.setprofile(self._follow)
        sys.setprofile(self._follow)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What runs in here is the operation. Finalizers of garbage are not part of it."""
        gc.collect()
        gc.disable()
        self._trace = trace = Trace(self._enter_leaves)
        try:
            yield
        finally:
            self._trace = None
            gc.enable()
        self.walk = trace.walk(self._room)

    def _follow(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (trace := self._trace) is not None:
            trace.called(frame)


# The operations, with public names only, so that they run on any checkout.


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


def small_table(directory: Path) -> lancewal.Table:
    """A hundred rows in the base table, one shard."""
    key = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
    vector = pa.field("vector", pa.list_(pa.float32(), DIMENSION))
    schema = pa.schema([key, pa.field("n", pa.int64()), vector])
    lance.write_dataset(rows(0, 100).cast(schema), str(directory / "table"), schema=schema)
    return lancewal.initialize(str(directory / "table"), bucket=("id", 1))


def walk_put(directory: Path, tracer: Tracer) -> None:
    """The second put of a writer: durable when it returns."""
    with small_table(directory).writer() as writer:
        writer.put(rows(100, 10))
        with tracer.recording():
            writer.put(rows(110, 10))


def walk_flush(directory: Path, tracer: Tracer) -> None:
    """Rows of a live writer into an SSTable."""
    table = small_table(directory)
    with table.writer() as writer:
        writer.put(rows(100, 10))
        with tracer.recording():
            table.flush()


def walk_compaction(directory: Path, tracer: Tracer) -> None:
    """An SSTable with new, changed and deleted rows into the base table."""
    table = small_table(directory)
    with table.writer() as writer:
        writer.put(rows(90, 20))
        writer.delete([5, 6])
    table.flush()
    with tracer.recording():
        table.compact()


@contextmanager
def _all_levels(directory: Path) -> Iterator[lancewal.Table]:
    """A table with rows in the base table, in an SSTable and in a MemTable."""
    table = small_table(directory)
    with table.writer() as writer:
        writer.put(rows(90, 20))
    table.flush()
    with table.writer() as writer:
        writer.put(rows(95, 20))
        yield table


def walk_filtered_scan(directory: Path, tracer: Tracer) -> None:
    with _all_levels(directory) as table, tracer.recording():
        table.scan(columns=["id"], filter="n > 5").to_table()


def walk_vector_search(directory: Path, tracer: Tracer) -> None:
    with _all_levels(directory) as table, tracer.recording():
        table.vector_search("vector", np.zeros(DIMENSION, np.float32), k=5)


def walk_replay(directory: Path, tracer: Tracer) -> None:
    """A writer opens a shard whose log has three entries."""
    table = small_table(directory)
    shard = table.shard_for(0)
    # WAL-only mode closes without a flush, so that the entries stay.
    with table.shard_writer(shard, enable_memtable=False) as writer:
        for first in (100, 110, 120):
            writer.put(rows(first, 10))
    with tracer.recording():
        writer = table.shard_writer(shard)
    writer.close()


def walk_micro_batch(directory: Path, tracer: Tracer) -> None:
    """The second micro-batch of ``lancewal.spark.stream``; see :class:`_Frame`."""
    from lancewal.spark import stream

    table = small_table(directory)
    with _no_spark_functions():
        first, second = _Frame(rows(100, 10)), _Frame(rows(110, 10))
        stream(first, table.uri, str(directory / "checkpoint"), txn_app_id="walk")  # type: ignore[arg-type]
        assert first.batch_function is not None
        first.batch_function(first, 0)
        with tracer.recording():
            first.batch_function(second, 1)
    assert table.scan().count_rows() == 120


class _Frame:
    """A data frame without Spark: one partition, and functions that are called as Spark calls them.

    Spark runs a task in a Python process of its own. Here it is a call.
    """

    def __init__(self, data: pa.Table) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema

        self._data = data
        self._found: list[pa.RecordBatch] = []
        self.schema = from_arrow_schema(data.schema)
        self.columns = data.column_names
        self.batch_function: Callable[[_Frame, int], None] | None = None

    write = writeStream = property(lambda self: self)  # noqa: N815

    def foreachBatch(self, function: Callable[[_Frame, int], None]) -> _Frame:  # noqa: N802
        self.batch_function = function
        return self

    def mapInArrow(self, function: Callable[..., Iterator[pa.RecordBatch]], schema: str) -> _Frame:  # noqa: N802
        from pyspark import TaskContext

        task = mock.Mock(partitionId=mock.Mock(return_value=0))
        with mock.patch.object(TaskContext, "get", return_value=task):
            self._found = list(function(iter(self._data.to_batches())))
        return self

    def collect(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(**row) for batch in self._found for row in batch.to_pylist()]

    def __getattr__(self, name: str) -> Callable[..., _Frame]:
        """Whatever else is asked of it (repartition, drop, format, mode, start) changes nothing here."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: self


@contextmanager
def _no_spark_functions() -> Iterator[None]:
    """Expressions of Spark are made in its JVM, and there is none."""
    from pyspark.sql import functions

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("lancewal.spark.")]
    using = [module for module in modules if getattr(module, "F", None) is functions]
    for module in using:
        module.F = mock.MagicMock()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in using:
            module.F = functions  # type: ignore[attr-defined]


WALKS: dict[str, Callable[[Path, Tracer], None]] = {
    "put to durable": walk_put,
    "flush": walk_flush,
    "compaction": walk_compaction,
    "filtered scan": walk_filtered_scan,
    "vector search": walk_vector_search,
    "replay": walk_replay,
    "micro-batch": walk_micro_batch,
}


def follow(name: str, *, enter_leaves: bool = False) -> Walk:
    """Run one operation on a table of its own."""
    _import_everything()
    tracer = Tracer(enter_leaves=enter_leaves, room=OWN_ROOMS[name])
    with tempfile.TemporaryDirectory() as directory, tracer.installed():
        WALKS[name](Path(directory), tracer)
    assert tracer.walk is not None
    return tracer.walk


def _import_everything() -> None:
    """A module that is loaded by the operation would have its own functions run at that moment."""
    for module in pkgutil.walk_packages([str(ROOT)], "lancewal."):
        if not module.name.endswith("__main__") and ".demo" not in module.name:
            with suppress(ImportError):
                importlib.import_module(module.name)


_COLUMNS = ("functions", "lines", "files", "returns", "reopened", "own", "own returns")


def _compare(before: dict[str, Any], after: dict[str, Any]) -> None:
    for kind in before:
        print(f"| {kind} | " + " | ".join(_COLUMNS) + " |")
        print("|---" * (len(_COLUMNS) + 1) + "|")
        for name, old in before[kind].items():
            new = after[kind][name]
            print(f"| {name} | " + " | ".join(f"{old[each]} → {new[each]}" for each in _COLUMNS) + " |")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="walk", help=", ".join(WALKS))
    parser.add_argument("--all", action="store_true", help="enter the leaf rooms too")
    parser.add_argument("--json", action="store_true", help="both ways, as JSON")
    parser.add_argument("--compare", nargs=2, metavar=("BEFORE", "AFTER"), type=Path, help="files of --json")
    parser.add_argument("-v", action="count", default=0, dest="verbose")
    given = parser.parse_args()
    if given.compare:
        _compare(*(json.loads(path.read_text()) for path in given.compare))
        return
    names = given.names or list(WALKS)
    if given.json:
        kinds = {"without leaf rooms": False, "all rooms": True}
        found = {
            kind: {name: follow(name, enter_leaves=entered).figures for name in names}
            for kind, entered in kinds.items()
        }
        print(json.dumps(found, indent=2))
        return
    print(f"{'walk':16}" + "".join(f" {each:>11}" for each in _COLUMNS))
    for name in names:
        walk = follow(name, enter_leaves=given.all)
        print(f"{name:16}" + "".join(f" {walk.figures[each]:11}" for each in _COLUMNS))
        if given.verbose == 1:
            print("    depth first:  " + " > ".join(path_of(walk.steps)))
            print("    file by file: " + " > ".join(path_of(walk.staying)))
            print("    own room:     " + " > ".join(path_of(walk.own)))
        elif given.verbose:
            print("\n".join(f"    {step.file}:{step.line} {step.name}" for step in walk.steps))


if __name__ == "__main__":
    main()
