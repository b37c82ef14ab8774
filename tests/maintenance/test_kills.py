"""Maintenance is killed wherever it can be, beside a live writer and a reader that checks every row."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from lancewal.maintenance.commits import APPEND_POINTS, COLLECT_POINTS, MERGE_POINTS, TIDY_POINTS
from tests.maintenance.arena import Arena, Child, children

_TOGETHER = 3
#: Bytes per commit: several commits a generation, and several generations a commit.
SMALL, LARGE = 1000, 1 << 28
_TABLES = pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])


def kill_at(arena: Arena, points: list[str], directory: Path) -> None:
    """One child for each point, some at a time; each must have reached its point and died there."""
    for start in range(0, len(points), _TOGETHER):
        some = points[start : start + _TOGETHER]
        files = [directory / f"{start + place}.reached" for place in range(len(some))]
        started = [
            Child.start(
                arena,
                ["compact", "collect"],
                die_at=point,
                reached=file,
                max_commit_bytes=_commit_bytes(point),
            )
            for point, file in zip(some, files, strict=True)
        ]
        with children(started):
            for point, file, child in zip(some, files, started, strict=True):
                assert child.end() == -signal.SIGKILL
                assert file.read_text() == point
        arena.healthy()


def _commit_bytes(point: str) -> int:
    return SMALL if "a part of" in point else LARGE


def kill_at_random(arena: Arena, times: int, seed: int) -> None:
    """A child at a time, killed at some moment; the next one is warm by then."""
    moments = random.Random(seed)

    def next_child() -> Child:
        return Child.start(
            arena, ["compact", "collect"], max_commit_bytes=moments.choice([SMALL, LARGE]), waits=True
        )

    coming = next_child()
    for _ in range(times):
        child, coming = coming, next_child()
        with children([child]):
            child.until_ready()
            child.go()
            time.sleep(moments.uniform(0.0, 0.4))
            assert child.process.poll() is None, "the child failed by itself"
            child.kill()
        arena.healthy()
    coming.kill()


def run_together(arena: Arena, seconds: float) -> None:
    """Two compactors and a collector."""
    started = [
        Child.start(arena, ["compact"]),
        Child.start(arena, ["compact"], max_commit_bytes=SMALL),
        Child.start(arena, ["collect"]),
    ]
    with children(started):
        for child in started:
            child.until_ready()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            arena.healthy()
            assert all(child.process.poll() is None for child in started), "a child failed by itself"
            time.sleep(0.1)


class TestNamedPoints:
    def test_with_a_key(self, tmp_path: Path) -> None:
        with Arena(tmp_path / "table", keyed=True) as arena:
            kill_at(arena, [*MERGE_POINTS, *TIDY_POINTS, *COLLECT_POINTS], tmp_path)
        arena.settle()
        assert arena.checks > 0

    def test_without_a_key(self, tmp_path: Path) -> None:
        with Arena(tmp_path / "table", keyed=False) as arena:
            kill_at(arena, [*APPEND_POINTS, *TIDY_POINTS, *COLLECT_POINTS[1:4:2]], tmp_path)
        arena.settle()
        assert arena.checks > 0


@_TABLES
def test_random_moments(tmp_path: Path, keyed: bool) -> None:
    with Arena(tmp_path / "table", keyed=keyed) as arena:
        kill_at_random(arena, 3, seed=1)
    arena.settle()


@_TABLES
def test_two_compactors_and_a_collector(tmp_path: Path, keyed: bool) -> None:
    with Arena(tmp_path / "table", keyed=keyed) as arena:
        run_together(arena, 2.0)
    arena.settle()


@pytest.mark.soak
@pytest.mark.timeout(1800)
class TestLong:
    @_TABLES
    def test_every_point_several_times(self, tmp_path: Path, keyed: bool) -> None:
        points = [*(MERGE_POINTS if keyed else APPEND_POINTS), *COLLECT_POINTS]
        with Arena(tmp_path / "table", keyed=keyed, seed=7) as arena:
            for repeat in range(3):
                directory = tmp_path / str(repeat)
                directory.mkdir()
                kill_at(arena, points, directory)
        arena.settle()

    @_TABLES
    def test_two_hundred_random_moments(self, tmp_path: Path, keyed: bool) -> None:
        for round_ in range(4):
            with Arena(tmp_path / f"table{round_}", keyed=keyed, seed=round_) as arena:
                kill_at_random(arena, 50, seed=round_)
            arena.settle()

    @_TABLES
    def test_a_minute_of_two_compactors_and_a_collector(self, tmp_path: Path, keyed: bool) -> None:
        with Arena(tmp_path / "table", keyed=keyed, shards=3, seed=3) as arena:
            run_together(arena, 60.0)
        arena.settle()
