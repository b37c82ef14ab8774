"""Several processes of one machine on one table: one leads, and when it dies another does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import lancewal
from lancewal.errors import ClosedError, InvalidInputError, LanceWalError
from lancewal.gateway import shared as shared_module
from tests.gateway.producer import IDS
from tests.tables import APPEND_ONLY, KEYED, rows, wal_table

_ROOT = Path(__file__).parents[2]
#: How far the numbers of two producers are apart.
PRODUCER = 1_000_000


class Producers:
    """Child processes that share a table; those that are killed are started again."""

    def __init__(self, table: lancewal.Table, directory: Path) -> None:
        self._table = table
        self._directory = directory
        self._started = 0
        self.running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        first, self._started = self._started * PRODUCER, self._started + 1
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

    def notes(self) -> tuple[dict[int, tuple[float, float]], set[int]]:
        """The puts that were acknowledged, with when each began and ended, and those that were tried."""
        done, tried = {}, set()
        for path in self._directory.glob("notes-*"):
            # A line that is just being written, or was when its process was killed, has no end.
            for line in path.read_text().split("\n")[:-1]:
                what, number, *times = line.split()
                if what == "try":
                    tried.add(int(number))
                else:
                    done[int(number)] = (float(times[0]), float(times[1]))
        return done, tried


def acknowledged_puts_survive(
    where: Path, processes: int, kills: int, puts: int, seconds: float = 0.0, *, keyed: bool
) -> tuple[list[float], list[float]]:
    """Run producers of the same ids, kill their leader after every ``puts`` puts, and compare.

    Gives how long puts took, and take-overs: from a kill to the first answer to a put that began after it.

    What is waited for is progress, whatever time it takes.
    """
    started = time.monotonic()
    table = wal_table(where / "table", KEYED if keyed else APPEND_ONLY, bucket=("id", 4))
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
    done, tried = producers.notes()
    found = [(row["id"], int(row["name"])) for row in table.scan().to_table().to_pylist()]
    assert [each for each in found if each[1] not in tried or each[1] % IDS != each[0]] == []
    if keyed:
        newest_of_each_key(found, done)
    else:
        each_once(found, done)
    take_overs = [min(ended for began, ended in done.values() if began > at) - at for at in kills_at]
    return sorted(ended - began for began, ended in done.values()), take_overs


def each_once(found: Sequence[tuple[int, int]], done: Mapping[int, object]) -> None:
    """Without a key every put leaves a row: those that were acknowledged one each, none two."""
    counted = Counter(number for _, number in found)
    assert [number for number in done if counted[number] != 1] == []
    assert [number for number, count in counted.items() if count != 1] == []


def newest_of_each_key(found: Sequence[tuple[int, int]], done: Mapping[int, tuple[float, float]]) -> None:
    """With a key the row that is left may be that of any put that no later one has replaced.

    Later is one that began after it was acknowledged, whoever made it; a producer makes one at a time. A put
    that nobody answered may be anywhere in the order after those of its own producer.
    """
    left = dict(found)
    assert len(left) == len(found), "a key has two rows"
    assert {number % IDS for number in done} <= left.keys(), "a key is lost"
    for key, number in left.items():
        # Of a producer that was killed there is no later one than that without an answer.
        ended = done[number][1] if number in done else float("inf")
        replacing = [each for each, (began, _) in done.items() if each % IDS == key and began > ended]
        assert replacing == [], f"key {key} has the row of put {number}"
        own = [each for each in done if each % IDS == key and each // PRODUCER == number // PRODUCER]
        assert max(own, default=0) <= number


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
def test_no_acknowledged_row_is_lost_or_doubled_when_the_leader_is_killed(
    tmp_path: Path, keyed: bool
) -> None:
    acknowledged_puts_survive(tmp_path, processes=2, kills=1, puts=50, keyed=keyed)


def test_the_oracle_notices_what_it_is_for() -> None:
    times = {1: (1.0, 2.0), 51: (3.0, 4.0), PRODUCER + 1: (1.5, 5.0)}
    newest_of_each_key([(1, 51)], times)
    newest_of_each_key([(1, PRODUCER + 1)], times)
    newest_of_each_key([(1, 101)], times)  # nobody knows what became of it
    for wrong in ([(1, 1)], [], [(1, 51), (1, 1)]):
        with pytest.raises(AssertionError):
            newest_of_each_key(wrong, times)
    each_once([(1, 1), (1, 51), (1, 101)], {1: None, 51: None})
    for found in ([(1, 1)], [(1, 1), (1, 1), (1, 51)], [(1, 1), (1, 51), (1, 101), (1, 101)]):
        with pytest.raises(AssertionError):
            each_once(found, {1: None, 51: None})


@pytest.mark.soak
@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
def test_eight_processes_and_ten_kills(tmp_path: Path, keyed: bool) -> None:
    began = time.monotonic()
    took, take_overs = acknowledged_puts_survive(
        tmp_path, processes=8, kills=10, puts=1_000, seconds=60, keyed=keyed
    )
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


@pytest.mark.parametrize("name", ["a b", "münchen", "a#b", "a?b", "a%20b", "a%b"])
def test_a_directory_whose_name_a_uri_has_to_escape_could_not_be_used(tmp_path: Path, name: str) -> None:
    """Some names failed with an error of Arrow; with others the socket was somewhere else."""
    table = wal_table(tmp_path / "table")
    directory = Path(tempfile.mkdtemp(prefix="l-")) / name  # short: a socket's path has 107 bytes
    directory.mkdir()
    try:
        with (
            lancewal.share(table.uri, directory=directory) as shared,
            shared.writer() as writer,
            lancewal.share(table.uri, directory=directory) as other,
            other.writer() as others,
        ):
            assert writer.put(rows(0, 2)).num_rows == others.put(rows(2, 2)).num_rows == 2
            assert [each.suffix for each in sorted(directory.iterdir())] == [".lock", ".sock"]
            (owner,) = table.owners()
            with lancewal.connect(str(owner.address)) as remote:
                assert remote.count_rows() == 4
    finally:
        shutil.rmtree(directory.parent)


def test_a_directory_that_is_not_there_was_an_error_of_the_system(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "table")
    with pytest.raises(InvalidInputError, match="no directory"):
        lancewal.share(table.uri, directory=Path("/missing"))  # short, as paths of sockets are


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
