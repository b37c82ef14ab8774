"""Power cuts: what was acknowledged with ``fsync`` is there when the machine is up again.

A file system of our own, on a loop device, is told to stop without writing anything more. What was
not synced by then is gone, as it is when the power fails. Needs root and ext4's tools.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lancewal.errors import LanceWalError
from tests.tables import APPEND_ONLY, KEYED, new_table
from tests.writer.test_crash import Child, Shard

# Of fs/ext4/ext4.h: stop at once, and do not flush the journal before.
_SHUTDOWN = 0x8004587D
_WITHOUT_FLUSH = 2
_TOOLS = ("mkfs.ext4", "e2fsck", "mount", "umount")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, _TOOLS)),
        reason="needs root and the tools of ext4",
    ),
]


class Disk:
    """An ext4 file system in a file, mounted at ``path`` while the power is on."""

    def __init__(self, directory: Path, *, journal: bool) -> None:
        self._image = directory / "disk.img"
        self.path = directory / "disk"
        self.path.mkdir()
        with self._image.open("wb") as image:
            image.truncate(1 << 30)
        features = ["-O", "has_journal" if journal else "^has_journal"]
        _run("mkfs.ext4", "-q", *features, str(self._image))
        self.power_on()

    def power_on(self) -> None:
        # Errors that were corrected are what a check after a power cut is for.
        _run("e2fsck", "-fy", str(self._image), allowed=(0, 1, 2))
        _run("mount", "-o", "loop", str(self._image), str(self.path))

    def cut_power(self) -> None:
        file = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(file, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
        finally:
            os.close(file)

    def power_off(self) -> None:
        _run("umount", str(self.path))


def _run(*command: str, allowed: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in allowed, f"{command}: {done.stderr}"


@pytest.fixture(params=[True, False], ids=["journal", "no journal"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    try:
        disk = Disk(tmp_path, journal=request.param)
    except AssertionError as error:
        pytest.skip(f"no file system of our own here: {error}")
    yield disk
    disk.power_off()


def live_until_the_power_fails(shard: Shard, disk: Disk, seconds: float, *, fsync: bool) -> None:
    child = Child()
    shard.start(child, memtable=True, fsync=fsync)
    child.wait_until_ready()
    time.sleep(seconds)
    disk.cut_power()
    child.kill()
    disk.power_off()
    disk.power_on()


@pytest.mark.parametrize("schema", [KEYED, APPEND_ONLY], ids=["keyed", "append only"])
def test_nothing_acknowledged_is_lost_in_a_power_cut(disk: Disk, tmp_path: Path, schema: object) -> None:
    base = new_table(disk.path / "t", schema)  # type: ignore[arg-type]
    os.sync()  # Lance does not sync the table that it makes
    shard = Shard(base, tmp_path / "journal", seed=1)
    chance = random.Random(2)
    acknowledged = 0
    for _ in range(15):
        live_until_the_power_fails(shard, disk, chance.uniform(0.05, 0.6), fsync=True)
        acknowledged = shard.check()
        os.sync()  # what the check itself wrote, which it does not sync
    assert acknowledged > 100


def test_without_fsync_a_power_cut_does_lose_rows(disk: Disk, tmp_path: Path) -> None:
    """Shows that the test above would fail if nothing were synced."""
    base = new_table(disk.path / "t", KEYED)
    os.sync()
    shard = Shard(base, tmp_path / "journal", seed=1)
    live_until_the_power_fails(shard, disk, 0.5, fsync=False)
    with pytest.raises((AssertionError, LanceWalError, OSError)):
        shard.check()


CREATED = "import sys; from tests.tables import wal_table; wal_table(sys.argv[1])"
READ = """
import sys
import lancewal

table = lancewal.open(sys.argv[1])
print(table.count_rows(), table.count_rows("name LIKE 'newer%'"), table.verify().ok)
"""
MAINTAINED = """
import sys
import lancewal
from tests.maintenance.support import collect_later
from tests.tables import rows

table = lancewal.open(sys.argv[1])
with table.writer(take_over="now", fsync=True) as writer:
    writer.put(rows(0, 500))
    writer.flush()
    writer.put(rows(250, 500, prefix="newer"))
table.compact()
if sys.argv[2] == "collected":
    collect_later(table._store)
"""


@pytest.mark.parametrize("until", ["compacted", "collected"])
def test_nothing_is_lost_when_the_power_fails_after_maintenance(disk: Disk, until: str) -> None:
    """The base table holds the rows by then, and Lance does not sync it."""
    place = disk.path / "t"
    child(CREATED, place)
    os.sync()
    child(MAINTAINED, place, until)
    disk.cut_power()
    disk.power_off()
    disk.power_on()
    assert child(READ, place).split() == ["750", "500", "True"]


def child(script: str, *arguments: object) -> str:
    """What a process prints; this one keeps no file of the disk open."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
