"""Directories for temporary files: gone after their block; those of killed processes with the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lancewal.storage import scratch_directory

CHILD = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from lancewal.storage import scratch_directory
with scratch_directory() as place:
    open(place + "/rows", "w").close()
    print(place, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def grow_old(place: Path) -> None:
    long_ago = time.time() - 3600
    os.utime(place, (long_ago, long_ago))


def test_what_a_killed_process_left_stayed_for_ever(temporary: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(temporary)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    left = Path(child.stdout.readline().strip())
    assert left.parent == temporary
    grow_old(left)

    with scratch_directory() as mine:
        assert left.exists(), "its process still lives"
    assert not Path(mine).exists()

    child.send_signal(signal.SIGKILL)
    child.wait()
    assert left.exists()
    with scratch_directory():
        assert not left.exists()


def test_what_is_too_young_or_of_others_stays(temporary: Path) -> None:
    young = temporary / "lancewal-scratch-young"
    foreign = temporary / "lancewal-other"
    elsewhere = temporary / "elsewhere"
    link = temporary / "lancewal-scratch-link"
    for each in (young, foreign, elsewhere):
        each.mkdir()
    link.symlink_to(elsewhere)
    (elsewhere / "precious").touch()
    grow_old(foreign)
    grow_old(elsewhere)
    with scratch_directory():
        assert young.exists()
        assert foreign.exists()
        assert (elsewhere / "precious").exists()


def test_two_directories_of_one_process_do_not_remove_each_other(temporary: Path) -> None:
    with scratch_directory() as first:
        grow_old(Path(first))
        with scratch_directory() as second:
            assert Path(first).exists()
            assert first != second
