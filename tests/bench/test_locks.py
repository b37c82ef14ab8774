"""The lock files: users get what the package needs and nothing else, contributors the same versions of it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = ("requirements.lock", "requirements-dev.lock", "requirements-build.lock")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned(lock: str) -> dict[str, str]:
    """Each package of a lock file with its version."""
    found = re.findall(r"^([\w.\-\[\]]+)==(\S+)", (ROOT / lock).read_text(), re.MULTILINE)
    return {canonicalize_name(name.partition("[")[0]): version for name, version in found}


def declared(extra: str | None = None) -> list[Requirement]:
    texts = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


def test_the_lock_of_the_runtime_has_every_dependency_in_a_version_that_is_asked_for() -> None:
    runtime = pinned("requirements.lock")
    for each in declared():
        assert each.specifier.contains(runtime[canonicalize_name(each.name)]), each


def test_the_lock_of_the_runtime_had_the_tools_of_documentation_and_tests() -> None:
    """There was one lock file, with 2 GB of Spark, Java and tools in it."""
    runtime = pinned("requirements.lock")
    needed = {canonicalize_name(each.name) for each in declared()}
    for extra in PROJECT["optional-dependencies"]:
        tools = {canonicalize_name(each.name) for each in declared(extra)} - needed
        assert not tools & runtime.keys(), extra


def test_users_and_contributors_have_the_same_versions() -> None:
    runtime, contributors = pinned("requirements.lock"), pinned("requirements-dev.lock")
    assert runtime.items() <= contributors.items()


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_no_host_and_a_hash_for_every_package(lock: str) -> None:
    text = (ROOT / lock).read_text()
    assert not re.search(r"https?:|--(extra-)?index-url|--find-links|file:", text)
    entries = re.split(r"^(?=[\w.\-\[\]]+==)", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(pinned(lock)) > 0
    assert all("--hash=sha256:" in entry for entry in entries)
