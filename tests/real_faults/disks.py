"""File systems of our own, and what goes wrong with real ones: full, read-only, forbidden, broken."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.patience import PATIENCE

#: A user without any rights, as whom the work is done that loses its permissions.
_NOBODY = 65534
# Of fs/ext4/ext4.h: stop at once, and do not flush the journal before.
_SHUTDOWN = 0x8004587D
_WITHOUT_FLUSH = 2
_SIZE_MB = 24


def run(*command: str, allowed: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in allowed, f"{command}: {done.stderr}"


def can_mount(*tools: str) -> bool:
    """Whether this process may mount file systems: it is root, and the tools are there."""
    return os.name == "posix" and os.geteuid() == 0 and all(map(shutil.which, ("mount", "umount", *tools)))


class MemoryDisk:
    """A small file system in memory, mounted at ``path``."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "disk"
        self.path.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={_SIZE_MB}m,mode=0777", "lancewal", str(self.path))

    def mount_again(self, option: str) -> None:
        """``ro`` or ``rw``. Files that are open for writing hold the first one up."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                run("mount", "-o", f"remount,{option}", str(self.path))
                return
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def remove(self) -> None:
        # Lazily: Lance keeps handles of files that it has read.
        run("umount", "-l", str(self.path))


class BreakableDisk:
    """An ext4 file system on a loop device, which can be made to answer everything with EIO."""

    def __init__(self, directory: Path) -> None:
        self._image = directory / "disk.img"
        self.path = directory / "disk"
        self.path.mkdir()
        with self._image.open("wb") as image:
            image.truncate(_SIZE_MB << 20)
        run("mkfs.ext4", "-q", "-O", "^has_journal", str(self._image))
        self._mount()

    def _mount(self) -> None:
        run("mount", "-o", "loop", str(self._image), str(self.path))
        os.chmod(self.path, 0o777)

    def break_down(self) -> None:
        os.sync()  # this is no power cut: what was written is there later
        file = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(file, _SHUTDOWN, struct.pack("I", _WITHOUT_FLUSH))
        finally:
            os.close(file)

    def repair(self) -> None:
        self._unmount()
        run("e2fsck", "-fy", str(self._image), allowed=(0, 1, 2))
        self._mount()

    def remove(self) -> None:
        self._unmount()

    def _unmount(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            gc.collect()
            try:
                run("umount", str(self.path))
                return
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


class Fault:
    """Something that is wrong between :meth:`begin` and :meth:`end`; both may be called twice."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end
        self.active = self.struck = False

    def begin(self) -> None:
        if not self.active:
            self.active = self.struck = True
            self._begin()

    def end(self) -> None:
        if self.active:
            self._end()
            self.active = False


def full_disk(disk: MemoryDisk, left: int = 0) -> Fault:
    """A disk on which ``left`` bytes are free."""
    ballast = disk.path / "ballast"

    def begin() -> None:
        with ballast.open("wb", buffering=0) as file:
            size = 0
            with suppress(OSError):
                while True:
                    size += file.write(bytes(1 << 16))
            file.truncate(max(0, size - left))

    return Fault(begin, lambda: ballast.unlink(missing_ok=True))


def read_only_disk(disk: MemoryDisk) -> Fault:
    return Fault(lambda: disk.mount_again("ro"), lambda: disk.mount_again("rw"))


def broken_disk(disk: BreakableDisk) -> Fault:
    return Fault(disk.break_down, disk.repair)


def no_more_files(spare: int = 0) -> Fault:
    """This process may open ``spare`` files more than it has open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def begin() -> None:
        # The limit is on the number of a handle, and the lowest free one is taken.
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(highest)]
        limit = max(taken) + 1
        for file in taken[len(taken) - spare :] if spare else []:
            os.close(file)
        held.extend(taken[: len(taken) - spare])
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))

    def end() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        while held:
            os.close(held.pop())

    held: list[int] = []
    return Fault(begin, end)


def lost_permission(disk: MemoryDisk, mode: int) -> Fault:
    """The directories of the disk get another ``mode``, and this process loses root's right to ignore it.

    All that is on the disk belongs to the user as whom the work goes on.
    """

    def begin() -> None:
        for place, _, names in os.walk(disk.path, topdown=False):
            for name in names:
                os.chown(f"{place}/{name}", _NOBODY, _NOBODY)
            modes[place] = os.stat(place).st_mode & 0o7777
            os.chown(place, _NOBODY, _NOBODY)
            os.chmod(place, mode)
        os.seteuid(_NOBODY)

    def end() -> None:
        os.seteuid(0)
        for place, before in modes.items():
            os.chmod(place, before)

    modes: dict[str, int] = {}
    return Fault(begin, end)
