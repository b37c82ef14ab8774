"""Every operation under every real fault of a disk: typed errors or right answers, and no row is lost.

The disks are file systems of our own, and the faults those of the operating system, so that also what
Lance does on its own account meets them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lancewal.writer.flush
from lancewal.errors import LanceWalError
from tests.real_faults.disks import (
    BreakableDisk,
    Fault,
    MemoryDisk,
    broken_disk,
    can_mount,
    full_disk,
    lost_permission,
    no_more_files,
    read_only_disk,
)
from tests.real_faults.operations import OPERATIONS, Scene, build, copy, settle

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not can_mount("mkfs.ext4", "e2fsck"), reason="needs root and the tools of ext4"),
]

Template = tuple[Path, dict[int, str]]

FAULTS: dict[str, Callable[[Any], Fault]] = {
    "full": full_disk,
    "full but for 4 KB": lambda disk: full_disk(disk, 4 << 10),
    "full but for 32 KB": lambda disk: full_disk(disk, 32 << 10),
    "read-only": read_only_disk,
    "no writing": lambda disk: lost_permission(disk, 0o555),
    "no permission": lambda disk: lost_permission(disk, 0),
    "no files": lambda disk: no_more_files(),
    "two files": lambda disk: no_more_files(2),
    "EIO": broken_disk,
}
#: With so much room or so many files some operations get through.
SOME_GET_THROUGH = ("full but for 32 KB", "two files")
WRITING = {"put", "delete", "flush", "flush_of_others", "close", "open", "compact", "gc", "backup", "ingest"}
#: Lance tries for seconds to list the versions of a table that it opens.
SLOW_WITHOUT_FILES = {"flush_of_others", "open", "open_table", "first_scan", "gc", "backup", "feed"}


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    where = tmp_path_factory.mktemp("template") / "table"
    return where, build(where)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lancewal.writer.flush, "FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(lancewal.writer.flush, "MAX_RETRY_SECONDS", 0.01)


@pytest.fixture
def disk(request: pytest.FixtureRequest) -> Iterator[MemoryDisk | BreakableDisk]:
    kind = BreakableDisk if request.node.callspec.params["fault"] == "EIO" else MemoryDisk
    # Not below pytest's own directory, which other users cannot enter.
    with tempfile.TemporaryDirectory(prefix="lancewal-disk-") as place:
        os.chmod(place, 0o755)
        try:
            disk = kind(Path(place))
        except AssertionError as error:
            pytest.skip(f"no file system of our own here: {error}")
        yield disk
        disk.remove()


@pytest.mark.parametrize("fault", FAULTS)
def test_every_operation_under_a_fault_tells_what_is_wrong_and_loses_nothing(
    fault: str, disk: Any, template: Template
) -> None:
    scene = begin(disk.path, template)
    readable = fault.startswith(("full", "read-only", "no writing"))
    tried = {*OPERATIONS} if readable else {*OPERATIONS} - SLOW_WITHOUT_FILES
    met = {name for name in OPERATIONS if name in tried and attempt(scene, name, FAULTS[fault](disk))}
    settle(scene)
    # A disk that cannot be written to can be read; all else is noticed by every operation.
    expected = WRITING if readable else tried
    if fault not in SOME_GET_THROUGH:
        assert met >= expected, f"no fault for {expected - met}"


@pytest.mark.soak
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_begins_in_the_middle_of_an_operation(
    operation: str, fault: str, disk: Any, template: Template
) -> None:
    """After each of its storage calls, at most so many of them that a long operation ends some day."""
    after, began = 0, True
    while began:
        place = disk.path / str(after)
        place.mkdir()
        scene = begin(place, template)
        trouble = FAULTS[fault](disk)
        attempt(scene, operation, trouble, after=after)
        began = trouble.struck
        settle(scene)
        shutil.rmtree(place)
        after += 1 + after // 6


def begin(place: Path, template: Template) -> Scene:
    copy(template[0], place)
    return Scene(place, dict(template[1]))


def attempt(scene: Scene, operation: str, fault: Fault, *, after: int = 0) -> bool:
    """Do it; the fault begins before it, or before the nth of its storage calls. Whether it raised."""
    call = OPERATIONS[operation](scene)
    scene.error = None
    try:
        if after:
            scene.faults.before("*", fault.begin, nth=after)
        else:
            fault.begin()
        call()
    except LanceWalError as error:
        scene.error = error
    finally:
        scene.faults.clear()
        fault.end()
    scene.let_go()
    scene.check(scene.table)
    return scene.error is not None
