"""The demo as a program: it tells what holds, and fails when something does not."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import lance
import pytest
from rich.console import Console

import lancewal
from demo import __main__ as program
from demo import live, report
from demo.narration import Narration
from demo.stage import Scale
from demo.story import tell
from lancewal.errors import InvalidInputError, StorageError
from tests.patience import PATIENCE

SMALL = Scale(library=150, remarks=30, rows_per_file=40, seconds_per_file=0.0, kills=1, puts_per_kill=5)


class _Page(HTMLParser):
    """What a page refers to, and which tags it leaves open."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line", "rect", "polyline", "polygon"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def test_the_story_holds_and_leaves_a_table_and_a_report(tmp_path: Path) -> None:
    where = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "demo", str(where), "--no-spark", "--quick"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every check held" in done.stdout
    assert "✗" not in done.stdout
    plain = lance.dataset(str(where / "documents.lance")).count_rows()
    assert plain == lancewal.open(str(where / "documents.lance")).count_rows() > 100
    page = _Page()
    page.feed((where / "report.html").read_text())
    assert page.references == []
    assert page.tags.count("svg") == 3
    assert "http" not in re.sub(r"https?://www\.w3\.org/\S+", "", (where / "report.html").read_text())


def test_a_check_that_fails_makes_the_program_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drop = live._drop

    def lose_the_last_file(stage, first, end, pause):  # type: ignore[no-untyped-def]
        drop(stage, first, end - 1, pause)

    monkeypatch.setattr(live, "_drop", lose_the_last_file)
    monkeypatch.setattr(program, "_QUICK", SMALL)
    assert program.main([str(tmp_path / "out"), "--no-spark", "--quick"]) == 1
    told = capsys.readouterr().out
    assert "✗ all files of the stream are in the table" in told
    assert "something did not hold" in told
    assert "Something did not hold" in (tmp_path / "out" / "report.html").read_text()


def test_a_step_that_fails_is_told_and_ends_the_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(live, "_drop", fail)
    (tmp_path / "out").mkdir()
    narration = Narration(Console(quiet=True))
    stage = tell(tmp_path / "out", narration, SMALL, with_spark=False)
    assert not narration.holds
    assert narration.steps[-1].lines[-1].text == "the step came to its end: the disk is full"
    assert len(narration.steps) == 2
    assert "the disk is full" in report.write_report(stage, 1.0).read_text()


def test_a_directory_with_somebodys_work_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert program.main([str(tmp_path), "--no-spark"]) == 1
    assert "thesis.txt, which the demo did not make" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_what_an_earlier_run_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out" / "documents.lance").mkdir(parents=True)
    (tmp_path / "out" / "report.html").write_text("old")
    program.make_room(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_without_java_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lancewal.spark import spark_session as java

    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(java, "packaged_runtime", lambda: None)
    assert program.main([str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert "Java 17" in told
    assert "lancewal[jre]" in told
    assert "--no-spark" in told
    assert not (tmp_path / "out").exists()


def test_without_pyspark_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    with pytest.raises(InvalidInputError, match=r"lancewal\[spark,jre\].*--no-spark"):
        program.check_spark()
