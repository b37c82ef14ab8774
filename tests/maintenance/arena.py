"""A live writer, a reader that checks every read against the model, and processes to kill beside them."""

from __future__ import annotations

import bisect
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import UUID, uuid4

import lance
import numpy as np
import pyarrow as pa

from lancewal.base.table import BaseTable
from lancewal.errors import StorageError
from lancewal.maintenance import UpkeepSettings, compact, verify
from lancewal.reader.table_reader import TableReader
from lancewal.storage import ObjectStore
from lancewal.writer import ShardWriter, open_shard_writer
from tests.tables import KEY, fast

ROOT = Path(__file__).parents[2]

VALUE = pa.field("v", pa.int64())
KEYED = pa.schema([pa.field("id", pa.int64(), False, KEY), VALUE])
APPEND_ONLY = pa.schema([pa.field("id", pa.int64(), False), VALUE])

KEYS = 400
#: Without a key: every operation has ids of its own.
IDS_OF_ONE = 100
#: About how many operations there are while the reader reads once: on a busy machine both get slower.
WRITES_OF_A_READ = 20
#: Ages short enough for a test. Nothing in it stands still for as long as they are.
AGES = {"sstables": 2.0, "orphans": 2.0, "wal_entries": 1.0, "manifest_versions": 4.0, "staging_files": 2.0}
#: Everything is due all the time, but for logs: the writer that is tested tells nobody that it lives.
ALL_DUE = UpkeepSettings(
    max_sstables=1,
    max_uncompacted_age=timedelta(0),
    max_index_lag=1,
    max_small_files=1,
    garbage_age=timedelta(0),
)


class Model:
    """What was written, and in which order: every operation has a number."""

    def __init__(self, keyed: bool) -> None:
        self.keyed = keyed
        self.started = 0
        self.acknowledged = 0
        #: For each key the operations that changed it, and the value that each left (``None``: deleted).
        self._changes: dict[int, tuple[list[int], list[int | None]]] = {}
        #: Without a key: the ids that were added, in the order of the operations, and where each one ends.
        self._added: list[int] = []
        self._ends = [0]
        self._lock = threading.Lock()

    def change(self, number: int, keys: Sequence[int], value: int | None) -> None:
        with self._lock:
            if not self.keyed:
                self._added += keys
                self._ends.append(len(self._added))
                self.started = number
                return
            for key in keys:
                numbers, values = self._changes.setdefault(key, ([], []))
                numbers.append(number)
                values.append(value)
            self.started = number

    def check(self, found: pa.Table, since: int, until: int) -> None:
        """``found`` was read after operation ``since`` was acknowledged, and before ``until`` + 1 began."""
        if not self.keyed:
            self._check_added(found, since, until)
            return
        pairs = list(zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True))
        seen = dict(pairs)
        assert len(seen) == len(pairs), f"{len(pairs) - len(seen)} rows are doubled"
        with self._lock:
            changes = list(self._changes.items())
        for key, (numbers, values) in changes:
            before = bisect.bisect_right(numbers, since)
            after = bisect.bisect_right(numbers, until)
            possible = {values[before - 1] if before else None, *values[before:after]}
            assert seen.pop(key, None) in possible, f"key {key} is not one of {possible}"
        assert not seen, f"rows that nobody wrote: {list(seen.items())[:5]}"

    def _check_added(self, found: pa.Table, since: int, until: int) -> None:
        """The same without a key. Such a table only grows: row by row each look would take longer than the
        one before, until they left no time for what is tested."""
        with self._lock:
            possible = np.array(self._added[: self._ends[until]], dtype=np.int64)
            needed = self._ends[since]
        seen = np.sort(found["id"].to_numpy())
        assert (np.diff(seen) > 0).all(), f"{int((np.diff(seen) == 0).sum())} rows are doubled"
        assert np.isin(possible[:needed], seen).all(), "rows that were acknowledged are missing"
        assert np.isin(seen, possible).all(), "rows that nobody wrote"
        # An id tells the operation that wrote it.
        assert (found["v"].to_numpy() == found["id"].to_numpy() // IDS_OF_ONE).all(), (
            "a value is another one's"
        )

    def final(self) -> dict[int, int]:
        if not self.keyed:
            return {number: number // IDS_OF_ONE for number in self._added}
        last = {key: values[-1] for key, (_, values) in self._changes.items()}
        return {key: value for key, value in last.items() if value is not None}


class Arena:
    """Use as a context manager: while it is open the writer writes and the reader checks."""

    def __init__(self, where: Path, *, keyed: bool, shards: int = 3, seed: int = 0) -> None:
        self.where = where
        self.keyed = keyed
        schema = KEYED if keyed else APPEND_ONLY
        lance.write_dataset(schema.empty_table(), str(where)).initialize_mem_wal(unsharded=True)
        self.schema = schema
        self.store = ObjectStore.from_uri(where, fsync=False)
        self.model = Model(keyed)
        self.checks = 0
        self._read_seconds = 0.0
        self._random = random.Random(seed)
        self._shards = [uuid4() for _ in range(shards)]
        self._writers: dict[UUID, ShardWriter] = {}
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._threads = [threading.Thread(target=self._guard, args=(f,)) for f in (self._write, self._read)]

    def __enter__(self) -> Arena:
        for shard_id in self._shards:
            self._writers[shard_id] = open_shard_writer(
                self.base(), shard_id, fast(durable_write=True), store=self.store, indexes=()
            )
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for writer in self._writers.values():
            writer.close()
        if error is None and self._failure is not None:
            raise self._failure

    def base(self) -> BaseTable:
        return BaseTable.open(self.store.uri, store=self.store)

    def healthy(self) -> None:
        """Raise what the reader or the writer found wrong so far."""
        if self._failure is not None:
            raise self._failure

    def settle(self) -> None:
        """After the arena is closed: everything into the base, and plain Lance reads the model."""
        compact(self.store)
        found = lance.dataset(self.store.uri).to_table()
        pairs = zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True)
        assert sorted(pairs) == sorted(self.model.final().items())
        assert found.num_rows == lance.dataset(self.store.uri).count_rows()
        report = verify(self.store)
        assert report.ok, str(report)

    def _guard(self, work: Any) -> None:
        try:
            while not self._stop.is_set():
                work()
        except BaseException as error:
            self._failure = self._failure or error
            self._stop.set()

    def _write(self) -> None:
        model, number = self.model, self.model.started + 1
        deletes = self.keyed and self._random.random() < 0.25
        if self.keyed:
            keys = self._random.sample(range(KEYS), self._random.randint(1, 20))
        else:
            first = number * IDS_OF_ONE
            keys = list(range(first, first + self._random.randint(1, 20)))
        model.change(number, keys, None if deletes else number)
        # A key has one shard.
        for place, shard_id in enumerate(self._shards):
            mine = [key for key in keys if (key // 100 + key) % len(self._shards) == place]
            writer = self._writers[shard_id]
            if mine and deletes:
                writer.delete(mine)
            elif mine:
                writer.put(pa.table({"id": mine, "v": [number] * len(mine)}, self.schema))
            if number % 40 == 0:
                writer.force_seal_active()
        model.acknowledged = number
        # Every entry is a file, and for ten minutes none may go: all that list them take longer with each.
        time.sleep(max(0.004, self._read_seconds / WRITES_OF_A_READ))

    def _read(self) -> None:
        since, began = self.model.acknowledged, time.monotonic()
        try:
            found = TableReader(self.store).scan().to_table()
        except StorageError:
            # With ages as short as these a slow read may lose its SSTables; its caller reads again.
            return
        self.model.check(found, since, self.model.started)
        self.checks += 1
        self._read_seconds = time.monotonic() - began


@dataclass
class Child:
    """A process that compacts and collects until it is killed."""

    process: subprocess.Popen[str]

    @classmethod
    def start(
        cls,
        arena: Arena,
        jobs: Sequence[str],
        *,
        die_at: str | None = None,
        reached: Path | None = None,
        max_commit_bytes: int = 1 << 28,
        waits: bool = False,
    ) -> Child:
        settings = {
            "uri": str(arena.where),
            "jobs": list(jobs),
            "die_at": die_at,
            "reached": str(reached) if reached else None,
            "ages": AGES,
            "max_commit_bytes": max_commit_bytes,
            "waits": waits,
        }
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.maintenance.child", json.dumps(settings)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return cls(process)

    def go(self) -> None:
        """Let a child that waits begin."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def until_ready(self) -> None:
        """Wait until everything is imported."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", "the child did not start"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.end()

    def end(self, timeout: float = 60.0) -> int:
        """Its return code; a child that does not end is a failure."""
        try:
            code = self.process.wait(timeout)
        finally:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    stream.close()
        return code


@contextmanager
def children(started: Sequence[Child]) -> Iterator[Sequence[Child]]:
    """Ends what is still running when the block is left."""
    try:
        yield started
    finally:
        for child in started:
            child.process.kill()
            child.end()


def ages(settings: dict[str, float]) -> dict[str, timedelta]:
    return {name: timedelta(seconds=seconds) for name, seconds in settings.items()}
