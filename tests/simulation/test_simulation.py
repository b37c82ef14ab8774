"""Worlds of many seeds keep the guarantees; what goes wrong in them is counted, and must have gone wrong.

A seed that fails is in the error's notes. ``python -m tests.simulation.test_simulation SEED`` runs it again,
step by step the same, and prints its steps.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulation.actors import new_template, simulate
from tests.simulation.oracle import OWN, BrokenError, History
from tests.simulation.world import Process, StuckError, World

#: A writer of a dead process cannot end its threads when it is collected, as it should not.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

#: What has to happen somewhere in the worlds of a run, or the run shows nothing.
INTERESTING = (
    "a put meets a fence",
    "rows were compacted",
    "collected wal_entries",
    "collected manifest_versions",
)
STRIKES = (
    "a process dies",
    "a process stands still",
    "create fails before",
    "create fails after",
    "list fails before",
    "read fails before",
    "replace fails after",
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_template(tmp_path_factory.mktemp("simulation") / "template")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Processes that die leave warnings by the hundred."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def _run(seeds: range, template: Path, directory: Path) -> tuple[Counter[str], Counter[str]]:
    met, struck = Counter[str](), Counter[str]()
    for seed in seeds:
        world = simulate(seed, template, directory)
        met += world.met
        struck += world.faults.struck
        met["acknowledged"] += len(world.history.acknowledged())
        met["reads"] += world.history.reads
    return met, struck


def test_worlds_keep_the_guarantees(template: Path, tmp_path: Path) -> None:
    met, struck = _run(range(40), template, tmp_path / "table")
    assert met["acknowledged"] > 100
    assert met["reads"] > 200
    assert [each for each in INTERESTING if not met[each]] == []
    assert [each for each in STRIKES if not struck[each]] == []


@pytest.mark.soak
def test_many_worlds_keep_the_guarantees(template: Path, tmp_path: Path) -> None:
    met, struck = _run(range(1000, 6000), template, tmp_path / "table")
    print(dict(met), dict(struck))
    assert met["acknowledged"] > 10_000


def test_a_seed_decides_every_step(template: Path, tmp_path: Path) -> None:
    one, other, third = (simulate(seed, template, tmp_path / "table") for seed in (7, 7, 8))
    assert one.world.trace == other.world.trace
    assert one.world.trace != third.world.trace


def test_a_world_in_which_nobody_can_go_on_is_stuck() -> None:
    world = World(1)
    world.spawn(Process("sleeper"), lambda: world.wait("for ever", lambda: False) and None)
    with pytest.raises(StuckError, match="sleeper"):
        world.run()


@pytest.mark.parametrize(
    ("rows", "must_show", "broken"),
    [
        ([(0, 1), (1, 1), (OWN + 1, 1)], {1}, None),
        ([(0, 2), (1, 2), (OWN + 1, 1), (OWN + 2, 2)], {1, 2}, None),
        ([(0, 1), (1, 1), (OWN + 1, 1)], {1, 2}, "lost"),
        ([(0, 1), (1, 1), (OWN + 1, 1), (OWN + 1, 1)], {1}, "twice"),
        ([(0, 2), (1, 1), (OWN + 1, 1), (OWN + 2, 2)], {1}, "half a put"),
        ([(OWN + 1, 1)], {1}, "without their registers"),
        ([(0, 1), (1, 1)], set(), "its row is missing"),
        ([(0, 1), (1, 1), (OWN + 1, 1), (OWN + 2, 2)], {1, 2}, "came after"),
        ([(0, 3), (1, 3), (OWN + 3, 3)], set(), "refused"),
        ([(0, 9), (1, 9), (OWN + 9, 9)], set(), "nobody put"),
    ],
)
def test_the_oracle_sees_what_is_wrong(
    rows: list[tuple[int, int]], must_show: set[int], broken: str | None
) -> None:
    history = History()
    for step in (0, 10, 20):
        history.begin(step).acknowledged = step + 5
    history.puts[3].acknowledged, history.puts[3].refused = None, True
    if broken is None:
        assert history.check(rows, frozenset(must_show)) >= must_show
    else:
        with pytest.raises(BrokenError, match=broken):
            history.check(rows, frozenset(must_show))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        found = simulate(int(sys.argv[1]), new_template(Path(place) / "template"), Path(place) / "table")
        print(*found.world.trace, sep="\n")
