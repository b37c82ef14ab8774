from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lancewal.errors import InvalidInputError
from lancewal.spark import spark_session as java


def fake_runtime(where: Path) -> Path:
    (where / "bin").mkdir(parents=True)
    (where / "lib").mkdir()
    program = where / "bin" / "java"
    program.write_text('#!/bin/sh\nfor each do printf "<%s>" "$each"; done\n')
    program.chmod(0o755)
    return where


def test_java_home_is_taken_as_it_is(tmp_path: Path) -> None:
    home = fake_runtime(tmp_path / "jdk")
    assert java.find_java_home({"JAVA_HOME": str(home), "PATH": ""}) == str(home)


def test_a_wrong_java_home_is_refused_rather_than_left_to_spark(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="JAVA_HOME"):
        java.find_java_home({"JAVA_HOME": str(tmp_path), "PATH": ""})


def test_java_on_the_path_needs_no_home(tmp_path: Path) -> None:
    home = fake_runtime(tmp_path / "jdk")
    assert java.find_java_home({"PATH": str(home / "bin")}) is None


def test_without_any_java_the_packaged_one_is_wrapped() -> None:
    home = java.find_java_home({"PATH": ""})
    assert home is not None
    runs = subprocess.run(
        [f"{home}/bin/java", "--add-modules=jdk.incubator.vector", "-version"],
        capture_output=True,
        check=True,
    )
    assert b"version" in runs.stderr
    assert java.find_java_home({"PATH": ""}) == home


def test_without_any_java_at_all_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "packaged_runtime", lambda: None)
    with pytest.raises(InvalidInputError, match=r"lancewal\[jre\]"):
        java.find_java_home({"PATH": ""})


def test_the_launcher_drops_one_flag_and_keeps_every_other_argument(tmp_path: Path) -> None:
    runtime = fake_runtime(tmp_path / "runtime")
    home = java.wrapped_runtime(runtime, tmp_path / "wrapped")
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "", "--add-modules=other", "*"]
    shown = subprocess.run(
        [home / "bin" / "java", *arguments], capture_output=True, check=True, text=True
    ).stdout
    assert shown == "<-Xmx1g><a b><><--add-modules=other><*>"
    assert os.path.realpath(home / "lib") == str(runtime / "lib")


def test_a_second_process_uses_the_directory_that_the_first_one_made(tmp_path: Path) -> None:
    runtime = fake_runtime(tmp_path / "runtime")
    first = java.wrapped_runtime(runtime, tmp_path / "wrapped")
    assert java.wrapped_runtime(runtime, tmp_path / "wrapped") == first
    assert [each.name for each in (tmp_path / "wrapped").iterdir()] == [first.name]
