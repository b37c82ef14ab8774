"""The matrix of versions: what pyproject.toml promises was tried, and the page shows what came out."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from bench.versions import PAGE, PYTHONS, Tried, kept, table_of

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
(PYLANCE,) = [each for each in map(Requirement, PROJECT["dependencies"]) if each.name == "pylance"]
TRIED = [Tried(**each) for each in kept()]


def passed(tried: Tried) -> bool:
    return tried.passed > 0 and not tried.failed and not tried.stopped


def test_every_version_of_pylance_that_is_asked_for_was_tried() -> None:
    """A range that is wider than what was tried, or that holds a version that failed, is a guess."""
    bounds = {Version(each.version) for each in PYLANCE.specifier}
    good = {Version(each.pylance) for each in TRIED if each.pylance and passed(each)}
    assert {each.operator for each in PYLANCE.specifier} == {">=", "<="}
    assert bounds <= good
    for each in TRIED:
        if each.pylance and PYLANCE.specifier.contains(each.pylance):
            assert passed(each), each


def test_every_python_that_is_named_was_tried_with_the_newest_pylance() -> None:
    named = {
        text.rpartition(" ")[2] for text in PROJECT["classifiers"] if text.startswith("Programming Language")
    } & set(PYTHONS)
    newest = str(max(Version(each.version) for each in PYLANCE.specifier))
    tried = {
        ".".join(each.python.split(".")[:2]) for each in TRIED if each.pylance == newest and passed(each)
    }
    assert named == tried == set(PYTHONS)


def test_the_page_shows_the_stored_result() -> None:
    assert table_of(kept()) in PAGE.read_text()


def test_a_run_that_ended_early_is_no_pass() -> None:
    assert Tried("3.11.7", "14.0.2", 10).said() == "10 pass"
    assert Tried("3.11.7", "14.0.2", 10, 2).said() == "2 of 12 fail"
    assert Tried("3.11.7", "14.0.2", 0, 0, stopped=True).said() == "did not come to its end"
    assert Tried("3.14", None).said().startswith("not tried")
