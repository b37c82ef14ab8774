"""Every bug of the list can still be planted, and in ``make soak`` each of them is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import report
from tests.planted.bug import Bug
from tests.planted.bugs import BUGS
from tests.planted.planting import REPOSITORY, Verdict, judged, page, planted, store, stored


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


def test_what_is_stored_of_other_bugs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LAYERS", tmp_path)
    monkeypatch.setattr(report, "PAGE", tmp_path / "testing.md")
    first, second, third = BUGS[:3]
    store(
        {
            first.name: Verdict(first, "simulator", 3, "a row is lost"),
            second.name: Verdict(second, "", None, ""),
        }
    )
    store({second.name: Verdict(second, "tests/shard", None, "a < b")})
    known = stored()
    assert [*known] == [first.name, second.name]
    assert (known[first.name].worlds, known[second.name].layer) == (3, "tests/shard")
    assert known[second.name].symptom == "a < b"
    assert "a &lt; b" in report.PAGE.read_text()
    (told,) = [text for text in page([*known.values()])["text"] if text.startswith("No verdict")]
    assert third.name in told
    assert second.name not in told


def test_every_bug_of_the_list_has_a_verdict_and_was_noticed() -> None:
    """By the run that is stored; ``python -m tests.planted.planting --missing --store`` plants the others."""
    known = stored()
    assert [bug.name for bug in BUGS if bug.name not in known] == []
    assert [name for name, verdict in known.items() if not verdict.layer] == []
    assert [name for name, verdict in known.items() if "does not end" in verdict.symptom] == []


@pytest.mark.soak
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_is_noticed(bug: Bug) -> None:
    verdict = judged(bug)
    print(verdict.layer, verdict.worlds, verdict.symptom)
    store({bug.name: verdict})
    assert verdict.layer, f"nobody notices: {bug.breaks}"
