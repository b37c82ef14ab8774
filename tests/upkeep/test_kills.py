"""Upkeep in three processes at once, killed at random, beside a writer and a reader that checks every row.

Nothing is lost or doubled, no read is wrong, and nothing that is needed is deleted: guarantees 7 and 8.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.maintenance.arena import Arena, Child, children

_JOBS = ["upkeep", "collect"]


def kill_some(
    arena: Arena,
    times: int,
    seed: int,
    jobs: Sequence[str] = _JOBS,
    beside: Callable[[], object] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Three at work at any time; again and again one of them is killed and another one comes.

    That is done ``times`` times, or fewer once the test has seen ``enough``.
    """
    moments = random.Random(seed)
    at_work = [Child.start(arena, jobs) for _ in range(3)]
    with children(at_work):
        for child in at_work:
            child.until_ready()
        for _ in range(times):
            time.sleep(moments.uniform(0.0, 0.5))
            beside()
            victim = moments.randrange(3)
            assert at_work[victim].process.poll() is None, "the child failed by itself"
            at_work[victim].kill()
            arena.healthy()
            at_work[victim] = Child.start(arena, jobs)
            at_work[victim].until_ready()
            if enough():
                break
        assert all(child.process.poll() is None for child in at_work), "a child failed by itself"


@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
def test_three_processes_killed_at_random(tmp_path: Path, keyed: bool) -> None:
    with Arena(tmp_path / "table", keyed=keyed) as arena:
        kill_some(arena, 2, seed=4)
    arena.settle()
    assert arena.checks > 0


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "append only"])
def test_three_processes_killed_many_times(tmp_path: Path, keyed: bool) -> None:
    with Arena(tmp_path / "table", keyed=keyed, seed=5) as arena:
        kill_some(arena, 60, seed=6)
    arena.settle()
