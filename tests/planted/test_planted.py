"""Every bug of the list can still be planted, and in ``make soak`` each of them is noticed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.planted.bug import Bug
from tests.planted.bugs import BUGS
from tests.planted.planting import REPOSITORY, judged, planted


def test_there_are_many_and_each_has_a_name() -> None:
    assert len(BUGS) >= 40
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_text_of_each_is_there_once(bug: Bug) -> None:
    compile(bug.planted_in(bug.path.read_text()), bug.file, "exec")
    assert all((REPOSITORY / test).exists() for test in bug.tests)


def test_a_bug_is_planted_into_a_copy() -> None:
    bug = BUGS[0]
    before = bug.path.read_text()
    with planted(bug) as copy:
        assert (copy / "src/lancewal" / bug.file).read_text() == bug.planted_in(before)
        assert (copy / "tests/planted/test_planted.py").samefile(Path(__file__))
    assert bug.path.read_text() == before


@pytest.mark.soak
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_is_noticed(bug: Bug) -> None:
    verdict = judged(bug, int(os.environ.get("PLANTED_WORLDS", "600")))
    print(verdict.layer, verdict.worlds, verdict.symptom)
    assert verdict.layer, f"nobody notices: {bug.breaks}"
