"""Real clusters: tasks, executors and drivers are killed, and streams go on from their checkpoints."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import pytest

import lancewal
from tests.patience import wait_until
from tests.spark import faulty
from tests.spark.changes import ChangeFiles
from tests.spark.processes import (
    LOCAL,
    LOCAL_CLUSTER,
    STANDALONE,
    Cluster,
    Driver,
    kill,
    running_cluster,
)
from tests.spark.tables import content, new_table, schema_of
from tests.spark.test_stream_faults import FAULTS, changes_in

#: Files that come after the last kill, so that whoever was started last has work to do.
_LAST_FILES = 2

EXECUTOR, DRIVER, MACHINE, TASKS = "executor", "driver", "machine", "tasks"


@dataclass
class Stream:
    """One stream of changes into a table of its own."""

    path: str
    keyed: bool
    directory: Path
    #: One a micro-batch; after a restart Spark may take two at once.
    num_files: int

    def __post_init__(self) -> None:
        self.files = ChangeFiles(self.directory / "changes", self.keyed, seed=self.num_files)
        self.files.add(self.num_files - _LAST_FILES)
        self.table = new_table(self.directory / "table", schema_of(self.keyed))

    @property
    def name(self) -> str:
        return f"{self.path}, {'keyed' if self.keyed else 'append only'}"

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    def committed(self) -> int:
        """Micro-batches that Spark has noted as done; it keeps notes of the latest only."""
        with contextlib.suppress(FileNotFoundError):
            names = os.listdir(self.checkpoint / "commits")
            return 1 + max((int(name) for name in names if name.isdigit()), default=-1)
        return 0

    def config(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "keyed": self.keyed,
            "uri": self.table.uri,
            "changes": str(self.files.directory),
            "checkpoint": str(self.checkpoint),
        }

    def check(self) -> None:
        assert content(self.table) == self.files.expected(), self.name
        assert changes_in(self.table.uri) == self.files.changes, self.name
        table = lancewal.open(self.table.uri)
        table.flush()
        table.compact()
        in_base = lance.dataset(self.table.uri).to_table().to_pylist()
        assert sorted(tuple(row.values()) for row in in_base) == self.files.expected(), self.name


def run_with_faults(cluster: Cluster, found: list[Stream], faults: list[str], seed: int = 3) -> Counter[str]:
    """Run all streams to their end, with one of ``faults`` after each of some random micro-batches.

    Returns what was killed: processes that were alive, and are gone.
    """
    chance = random.Random(seed)
    chance.shuffle(faults)
    last = sum(stream.num_files - _LAST_FILES for stream in found)
    moments = sorted(chance.sample(range(1, max(last * 9 // 10, len(faults) + 1)), len(faults)))
    killed: Counter[str] = Counter()
    finish = cluster.directory / "finish"
    config = {"streams": [stream.config() for stream in found], "finish": str(finish)}
    drivers = [Driver("tests.spark.driver", cluster, config)]
    try:
        for moment, fault in zip(moments, faults, strict=True):
            _wait_for(drivers[-1], lambda: sum(s.committed() for s in found) >= moment, fault)  # noqa: B023
            time.sleep(chance.random() / 2)
            if fault == TASKS:
                faulty.issue(chance.choice(FAULTS), chance.choice(FAULTS), f"commit {chance.randrange(40)}")
            elif fault == EXECUTOR:
                _wait_for(drivers[-1], lambda: cluster.executors(drivers[-1]), "executors")
                killed[fault] += _kill_one(cluster, drivers[-1], chance)
            else:
                killed[fault] += drivers[-1].kill(with_executors=fault == MACHINE)
                drivers.append(Driver("tests.spark.driver", cluster, config))
        for stream in found:
            stream.files.add(_LAST_FILES)
        finish.touch()
        drivers[-1].expect_success()
    finally:
        for driver in drivers:
            driver.end()
    return killed


def _wait_for(driver: Driver, condition: Any, what: str) -> None:
    def or_over() -> bool:
        driver.expect_running()
        return bool(condition())

    wait_until(or_over, what)


def _kill_one(cluster: Cluster, driver: Driver, chance: random.Random) -> bool:
    return kill(chance.choice(cluster.executors(driver)))


def test_executors_and_a_driver_are_killed_and_every_batch_lands_exactly_once(tmp_path: Path) -> None:
    found = [Stream(*kind, tmp_path / kind[0], 4) for kind in (("sink", True), ("wal", False))]
    with running_cluster(LOCAL_CLUSTER, tmp_path) as cluster:
        killed = run_with_faults(cluster, found, [EXECUTOR, DRIVER])
    assert killed == {EXECUTOR: 1, DRIVER: 1}
    for stream in found:
        stream.check()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", ["sink", "wal"])
@pytest.mark.parametrize("kind", [LOCAL, LOCAL_CLUSTER, STANDALONE])
def test_two_hundred_batches_land_exactly_once_while_everything_is_killed(
    tmp_path: Path, kind: str, path: str
) -> None:
    found = [Stream(path, keyed, tmp_path / str(keyed), 215) for keyed in (True, False)]
    kills = {MACHINE: 2, DRIVER: 2, **({} if kind == LOCAL else {EXECUTOR: 6})}
    bundles = 24
    try:
        with running_cluster(kind, tmp_path) as cluster:
            killed = run_with_faults(cluster, found, [*Counter(kills).elements(), *[TASKS] * bundles])
        suffered = faulty.suffered()
        left = faulty.left()
    finally:
        faulty.withdraw()
    assert killed == kills
    assert left == 0
    assert len(suffered) == 3 * bundles
    assert set(FAULTS) < set(suffered)
    for stream in found:
        assert stream.committed() >= 200, stream.name
        stream.check()
