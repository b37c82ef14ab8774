"""kill -9 at random moments: what was acknowledged is there once, the rest whole or not at all."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lance
import pytest

import lancewal
from lancewal.base.table import BaseTable
from lancewal.storage import layout
from tests.patience import PATIENCE
from tests.shards import Row, manifest_of, memory_rows
from tests.tables import APPEND_ONLY, KEYED, abandon, new_table, open_writer

CHILD = Path(__file__).with_name("crash_child.py")
BATCHES_PER_LIFE = 1_000_000


class Child:
    """A process that has its imports behind it and waits for its order."""

    def __init__(self) -> None:
        source = str(Path(lancewal.__file__).parent.parent)
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD)],
            env={**os.environ, "PYTHONPATH": source},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, order: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the child could not open the shard"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=PATIENCE)


class Shard:
    """One shard that is written by one child after another, and what must be in it."""

    def __init__(self, base: BaseTable, journal: Path, seed: int) -> None:
        self.base = base
        self.shard_id = uuid.uuid4()
        self._journal = journal
        journal.touch()
        self._choose = random.Random(seed)
        self._sstables: dict[str, list[Row]] = {}
        self.lives = 0

    def start(self, child: Child, *, memtable: bool, fsync: bool = False) -> None:
        child.start(
            {
                "uri": self.base.uri,
                "shard": str(self.shard_id),
                "journal": str(self._journal),
                "memtable": memtable,
                "fsync": fsync,
                "first": self.lives * BATCHES_PER_LIFE,
            }
        )
        self.lives += 1

    def live_and_die(self, child: Child) -> None:
        self.start(child, memtable=self._choose.random() < 0.85)
        if self._choose.random() < 0.15:
            time.sleep(self._choose.uniform(0, 0.05))  # dies while it opens
        else:
            child.wait_until_ready()
            time.sleep(self._choose.uniform(0, 0.15))
        child.kill()

    def check(self) -> int:
        """Open the shard, compare with the journal, and die too; how many batches were acknowledged."""
        writer = open_writer(self.base, self.shard_id)
        writer.wait_for_flush_drain()
        stored = self._sstable_rows() + memory_rows(writer)
        abandon(writer)
        journal = (
            [line.split() for line in self._journal.read_text().splitlines()]
            if self._journal.exists()
            else []
        )
        put = {int(number): int(size) for what, number, size in journal if what == "put"}
        deleted = {int(number) for what, number, _ in journal if what == "deleted"}
        maybe_deleted = {int(number) for what, number, _ in journal if what == "delete"}
        if self.base.schema.primary_key:
            live = {row["id"]: row for row in stored}
            stored = [row for row in live.values() if not row["_tombstone"]]
        counts = Counter(row["id"] for row in stored)
        doubled = [key for key, count in counts.items() if count > 1]
        assert not doubled, f"rows that are there twice: {doubled[:10]}"
        found = Counter(row["name"] for row in stored)
        present = {}
        for name, count in found.items():
            number, size = map(int, name.split("/"))
            assert count == size, f"{count} of {size} rows of batch {number} are there"
            present[number] = size
        lost = put.keys() - present.keys() - maybe_deleted
        assert not lost, f"acknowledged batches that are gone: {sorted(lost)[:10]}"
        back = deleted & present.keys()
        assert not back, f"deleted batches that are back: {sorted(back)[:10]}"
        return len(put)

    def _sstable_rows(self) -> list[Row]:
        rows: list[Row] = []
        for entry in manifest_of(self.base, self.shard_id).sstables:
            if entry.path not in self._sstables:
                uri = layout.child_uri(self.base.uri, layout.sstable_dir(self.shard_id, entry.path))
                self._sstables[entry.path] = lance.dataset(uri).to_table().to_pylist()
            rows += self._sstables[entry.path]
        return rows


def kill_again_and_again(shard: Shard, times: int, stop: threading.Event) -> int:
    """How many batches were acknowledged in all."""
    child = Child()
    acknowledged = 0
    try:
        for life in range(times):
            if stop.is_set():
                break
            # The next one does its imports while this one lives.
            current, child = child, Child() if life + 1 < times else child
            try:
                shard.live_and_die(current)
            finally:
                current.kill()
            acknowledged = shard.check()
    except BaseException:
        stop.set()
        raise
    finally:
        child.kill()
    return acknowledged


def kill_in_two_shards(tmp_path: Path, times: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    stop = threading.Event()
    shards = [
        Shard(new_table(tmp_path / name, schema), tmp_path / f"{name}.journal", seed + i)
        for i, (name, schema) in enumerate([("keyed", KEYED), ("append_only", APPEND_ONLY)])
    ]
    with ThreadPoolExecutor(len(shards)) as pool:
        runs = [pool.submit(kill_again_and_again, shard, times, stop) for shard in shards]
        acknowledged = [run.result() for run in runs]
    assert min(acknowledged) > times, f"too little was written to prove anything: {acknowledged}"
    generations = [manifest_of(shard.base, shard.shard_id).current_generation for shard in shards]
    assert min(generations) > times // 4, f"hardly anything was flushed: {generations}"


def test_nothing_is_lost_doubled_or_halved_by_kills(tmp_path: Path) -> None:
    kill_in_two_shards(tmp_path, 12)


@pytest.mark.soak
def test_nothing_is_lost_doubled_or_halved_by_200_kills(tmp_path: Path) -> None:
    kill_in_two_shards(tmp_path, 100)
