"""Several processes of one machine on one table: one leads, and when it dies another does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import lancewal
from lancewal.errors import ClosedError, InvalidInputError, LanceWalError
from lancewal.gateway import shared as shared_module
from tests.tables import APPEND_ONLY, ids, rows, wal_table

_ROOT = Path(__file__).parents[2]


class Producers:
    """Child processes that share a table; those that are killed are started again."""

    def __init__(self, table: lancewal.Table, directory: Path) -> None:
        self._table = table
        self._directory = directory
        self._started = 0
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        first, self._started = self._started * 1_000_000, self._started + 1
        what = [self._table.uri, str(self._directory), str(self._directory / f"notes-{first}"), str(first)]
        child = subprocess.Popen([sys.executable, "-m", "tests.gateway.producer", *what], cwd=_ROOT)
        self.running[child.pid] = child

    def kill_leader(self) -> bool:
        """Kill the process that has the shards; ``False`` if none of ours has them now."""
        for owner in self._table.owners():
            if owner.pid in self.running and owner.shards and not owner.gone:
                child = self.running.pop(owner.pid)
                child.send_signal(signal.SIGKILL)
                child.wait()
                return True
        return False

    def finish(self) -> list[int]:
        """Have all stop, and wait for them; the exit codes."""
        (self._directory / "stop").touch()
        codes = [child.wait() for child in self.running.values()]
        self.running.clear()
        return codes

    def notes(self) -> tuple[set[int], set[int], list[tuple[float, float]]]:
        """The ids that were acknowledged, those that were tried, and the begin and length of each put."""
        done, tried, puts = set(), set(), []
        for path in self._directory.glob("notes-*"):
            for line in path.read_text().splitlines():
                what, number, *times = line.split()
                (done if what == "done" else tried).add(int(number))
                if len(times) == 2:
                    puts.append((float(times[0]), float(times[1])))
        return done, tried, puts


def acknowledged_puts_survive(
    where: Path, processes: int, kills: int, puts: int, seconds: float = 0.0
) -> tuple[list[float], list[float]]:
    """Run producers, kill their leader after every ``puts`` puts, and compare.

    Gives how long puts took, and take-overs: from a kill to the first answer to a put that began after it.

    Without a key a doubled row would show. What is waited for is progress, whatever time it takes.
    """
    started = time.monotonic()
    table = wal_table(where / "table", APPEND_ONLY, bucket=("id", 4))
    producers = Producers(table, where)
    for _ in range(processes):
        producers.start()
    killed, until = 0, puts
    kills_at: list[float] = []
    while killed < kills or len(producers.notes()[0]) < until or time.monotonic() - started < seconds:
        time.sleep(0.05)
        assert all(child.poll() is None for child in producers.running.values())
        if killed < kills and len(producers.notes()[0]) >= until and producers.kill_leader():
            kills_at.append(time.monotonic())
            killed += 1
            until = len(producers.notes()[0]) + puts
            producers.start()
    # A producer ends with code 0 only if no put raised anything, a FencedError included.
    assert producers.finish() == [0] * processes
    done, tried, timed = producers.notes()
    counted = Counter(ids(table.scan().to_table()))
    assert [number for number in done if counted[number] != 1] == []
    assert [number for number, count in counted.items() if count != 1 or number not in tried] == []
    take_overs = [min(began + seconds for began, seconds in timed if began > at) - at for at in kills_at]
    return sorted(seconds for _, seconds in timed), take_overs


def test_no_acknowledged_row_is_lost_or_doubled_when_the_leader_is_killed(tmp_path: Path) -> None:
    acknowledged_puts_survive(tmp_path, processes=2, kills=1, puts=50)


@pytest.mark.soak
def test_eight_processes_and_ten_kills(tmp_path: Path) -> None:
    began = time.monotonic()
    took, take_overs = acknowledged_puts_survive(tmp_path, processes=8, kills=10, puts=1_000, seconds=60)
    seconds, median = time.monotonic() - began, took[len(took) // 2] * 1e3
    print(f"\n{len(took)} puts in {seconds:.0f} s, median {median:.1f} ms, longest {took[-1]:.2f} s")
    print(f"take-overs took {', '.join(f'{each:.2f}' for each in sorted(take_overs))} s")


def test_two_in_one_process_meet(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "table")
    one = lancewal.share(table.uri, directory=tmp_path, fsync=False)
    two = lancewal.share(table.uri, directory=tmp_path, fsync=False)
    with one.writer() as first, two.writer() as second:
        first.put(rows(0, 3))
        second.put(rows(3, 3))
        assert (one.leads, two.leads) == (True, False)
        assert two.table.count_rows() == 6
        two.flush()
        one.close()
        second.put(rows(6, 3))
        assert (one.leads, two.leads) == (False, True)
        with pytest.raises(ClosedError):
            first.put(rows(9, 1))
    two.close()
    assert table.count_rows() == 9
    assert table.owners() == []
    assert not list(tmp_path.glob("*.sock"))


def test_a_long_path_is_refused(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "table")
    with pytest.raises(InvalidInputError, match="too long for a socket"):
        lancewal.share(table.uri, directory=tmp_path / ("x" * 120))


def test_a_directory_that_others_can_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = wal_table(tmp_path / "table")
    monkeypatch.setattr(shared_module.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"lancewal-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"lancewal-{os.getuid()}").chmod(0o777)
    with pytest.raises(LanceWalError, match="not this user's alone"):
        lancewal.share(table.uri)
