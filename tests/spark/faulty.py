"""lancewal's data source with faults: tasks that fail or are killed, commits that die half-way.

Tickets lie as files in the directory that ``LANCEWAL_TEST_FAULTS`` names; whoever takes one suffers
the fault. Workers import this module by name, so it works on any master.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from lancewal.publish import ShardWrite
from lancewal.spark.low_latency import Appending
from lancewal.spark.sink import BatchSink, StreamSink, TaskMessage
from lancewal.spark.source import DefaultSource
from lancewal.storage import ObjectStore
from tests.patience import wait_until

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

FORMAT = "faulty_lancewal"
DIRECTORY = "LANCEWAL_TEST_FAULTS"
HALF = "stop.half"
_TAKEN = "taken"
_PASS = "commit pass"


class InjectedError(RuntimeError):
    """A fault of the test's making."""


def issue(*tickets: str) -> None:
    """Put tickets out, to be taken in this order: "before raise", "after kill", "commit 5" (dies at
    the fifth write), "commit pass" (gets through)."""
    for ticket in tickets:
        (Path(os.environ[DIRECTORY]) / f"{ticket}.{time.monotonic_ns():020}").touch()


def left() -> int:
    """Tickets that nobody has taken."""
    return sum(path.is_file() for path in Path(os.environ[DIRECTORY]).iterdir())


def suffered() -> list[str]:
    """The tickets that were taken, and so the faults that have happened."""
    taken = Path(os.environ[DIRECTORY]) / _TAKEN
    names = [path.name.split(".")[0] for path in taken.iterdir()] if taken.exists() else []
    return sorted(name for name in names if name != _PASS)


def withdraw() -> None:
    """Remove all tickets, those that were taken too."""
    for path in Path(os.environ[DIRECTORY]).rglob("*.*"):
        path.unlink(missing_ok=True)


def take(kind: str) -> str | None:
    """The oldest ticket of some kind, if there is one; nobody else gets the same."""
    if DIRECTORY not in os.environ:
        return None
    taken = Path(os.environ[DIRECTORY]) / _TAKEN
    for path in sorted(Path(os.environ[DIRECTORY]).glob(f"{kind} *"), key=lambda path: path.suffix):
        try:
            taken.mkdir(exist_ok=True)
            path.rename(taken / path.name)
        except FileNotFoundError:
            continue
        return path.name.split(".")[0]
    return None


def suffer(moment: str) -> None:
    """Which task gets a ticket is left to chance."""
    ticket = take(moment) if random.random() < 0.5 else None
    if ticket == f"{moment} kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ticket is not None:
        raise InjectedError(ticket)


@contextmanager
def dying_commit() -> Iterator[None]:
    """Takes a "commit" ticket, if there is one: from some write to the storage on all writes fail."""
    ticket = take("commit")
    if ticket in (None, _PASS):
        yield
        return
    last = int(ticket.split()[1])
    originals = {name: getattr(ObjectStore, name) for name in ("put", "put_if_absent")}
    made = 0

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            if made > last:
                raise InjectedError(ticket)
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(ObjectStore, name, dying(original))
    try:
        yield
        raise InjectedError(f"{ticket}: after all writes")
    finally:
        for name, original in originals.items():
            setattr(ObjectStore, name, original)


class FaultyBatchSink(BatchSink):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        suffer("before")
        message = super().write(iterator)
        suffer("after")
        return message

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        with dying_commit():
            super().commit(messages)


class FaultyStreamSink(StreamSink):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskMessage:
        suffer("before")
        message = super().write(iterator)
        suffer("after")
        return message

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        with dying_commit():
            super().commit(messages, batchId)


class FaultyAppending(Appending):
    def append(self, batches: Iterator[pa.RecordBatch], partition: int) -> list[ShardWrite]:
        suffer("before")
        written = super().append(batches, partition)
        suffer("after")
        return written

    def commit(self, store: ObjectStore, written: Sequence[ShardWrite]) -> None:
        with dying_commit():
            super().commit(store, written)


class HalfAppending(Appending):
    """While a file says so, tasks of odd numbers fail, once those of even numbers have written theirs."""

    def append(self, batches: Iterator[pa.RecordBatch], partition: int) -> list[ShardWrite]:
        place = Path(os.environ[DIRECTORY])
        if partition % 2 and (place / HALF).exists():
            wait_until(lambda: (place / "written.half").exists(), "the other tasks")
            raise InjectedError("half")
        written = super().append(batches, partition)
        (place / "written.half").touch()
        return written


class SourceWithSinks(DefaultSource):
    """lancewal's data source under another name, with other sinks for batches."""

    format: str
    batch_sink: type[BatchSink]

    @classmethod
    def name(cls) -> str:
        return cls.format

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        return self.batch_sink(self._parsed())


class FaultySource(SourceWithSinks):
    format = FORMAT
    batch_sink = FaultyBatchSink

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        return FaultyStreamSink(self._parsed())
