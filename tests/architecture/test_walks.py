"""How far a reader walks who follows one operation: it may get shorter, and longer only on purpose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import lancewal
from tests.architecture import walks
from tests.architecture.walks import WALKS, Step, Walk, follow, path_of

#: The most that each walk may take without the leaf rooms. Lower a figure when a walk has become shorter.
LIMITS = {
    "put to durable": {"files": 9, "returns": 4, "reopened": 3, "own": 6, "own returns": 4},
    "flush": {"files": 23, "returns": 24, "reopened": 17, "own": 7, "own returns": 5},
    "compaction": {"files": 20, "returns": 35, "reopened": 23, "own": 9, "own returns": 10},
    "filtered scan": {"files": 23, "returns": 30, "reopened": 17, "own": 9, "own returns": 11},
    "vector search": {"files": 25, "returns": 33, "reopened": 21, "own": 10, "own returns": 17},
    "replay": {"files": 25, "returns": 42, "reopened": 27, "own": 9, "own returns": 9},
    "micro-batch": {"files": 20, "returns": 46, "reopened": 26, "own": 5, "own returns": 12},
}


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, int]]:
    """As the script prints it: in a process of its own, where no other test has left anything."""
    script = Path(walks.__file__)
    paths = os.pathsep.join([str(Path(lancewal.__file__).parents[1]), str(script.parents[2])])
    done = subprocess.run(
        [sys.executable, script, "--json"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, dict[str, int]] = json.loads(done.stdout)["without leaf rooms"]
    return figures


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_does_not_grow_unnoticed(name: str, measured: dict[str, dict[str, int]]) -> None:
    found = measured[name]
    longer = {figure: found[figure] for figure, most in LIMITS[name].items() if found[figure] > most}
    assert longer == {}, f'see python tests/architecture/walks.py -v "{name}"'


def test_a_walk_does_not_depend_on_which_thread_was_faster() -> None:
    follow("flush")  # what is kept for the whole process is there from now on
    # A worker that wakes up by the clock may fall into a walk; it does not fall into each of them.
    assert any(len({follow("flush").steps for _ in range(3)}) == 1 for _ in range(5))


def test_leaf_rooms_are_entered_on_request_only() -> None:
    def files(*, enter_leaves: bool) -> set[str]:
        """In every walk: a worker that wakes up by the clock does not fall into each of them."""
        walks = [follow("put to durable", enter_leaves=enter_leaves) for _ in range(3)]
        return set.intersection(*({step.file for step in walk.steps} for walk in walks))

    short, long = files(enter_leaves=False), files(enter_leaves=True)
    assert short < long
    assert not any(file.startswith(("storage/", "format/")) for file in short)
    assert any(file.startswith("storage/") for file in long)


def test_coming_back_to_a_file_is_counted() -> None:
    def steps(files: str) -> tuple[Step, ...]:
        return tuple(Step(file, 10 * place, "f", 10 * place + 4) for place, file in enumerate(files))

    walk = Walk(steps("aababcb"), steps("aaabbbc"))
    assert path_of(walk.steps) == list("ababcb")
    counted = {"functions": 7, "lines": 35, "files": 3, "returns": 3, "reopened": 0}
    assert walk.figures == {**counted, "own": 3, "own returns": 3}
    assert replace(walk, room="b").figures == {**counted, "own": 1, "own returns": 0}
