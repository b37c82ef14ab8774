"""What pages say about the source is there: modules, folders, tests and names."""

from __future__ import annotations

import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

import lancewal
from tests.docs.blocks import PAGES, ROOT

WRITTEN = [ROOT / "CONTRIBUTING.md", *PAGES]
PACKAGE = ROOT / "src" / "lancewal"
ROOMS = "|".join(sorted(each.name for each in PACKAGE.iterdir() if (each / "__init__.py").exists()))

#: A link to a file of the checkout, but not to another page.
_LINK = re.compile(r"\]\((?!https?:)([^)#]*(?:src|tests|bench|demo)/[^)#]+)\)")
#: A path of the checkout, as text: `tests/shard/test_tip.py::test_name` counts without the test.
_PATH = re.compile(r"`((?:src|tests|bench|demo|docs)/[\w./-]*)")
#: A module of a room, as text.
_MODULE = re.compile(rf"`((?:{ROOMS})/\w+\.py)`")
_NAME = re.compile(r"`(lancewal(?:\.\w+)+)[`(]")

WALKS = ["put", "flush", "replay", "read", "compaction", "micro-batch"]


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WRITTEN, ids=by_name)
def test_what_a_page_says_of_the_source_exists(page: Path) -> None:
    text = page.read_text()
    named = [page.parent / path for path in _LINK.findall(text)]
    named += [ROOT / path for path in _PATH.findall(text)]
    named += [PACKAGE / path for path in _MODULE.findall(text)]
    assert [str(path) for path in named if not path.exists()] == []


@pytest.mark.parametrize("page", WRITTEN, ids=by_name)
def test_names_of_the_package_that_a_page_uses_exist(page: Path) -> None:
    assert [name for name in _NAME.findall(page.read_text()) if not exists(name)] == []


def exists(name: str) -> bool:
    found: object = lancewal
    for place, part in enumerate(parts := name.split(".")[1:], 1):
        if not hasattr(found, part):
            try:
                import_module(".".join(["lancewal", *parts[:place]]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("walk", WALKS)
def test_each_walk_links_the_modules_that_it_goes_through(walk: str) -> None:
    page = ROOT / "docs" / "internals" / f"{walk}.md"
    assert len(set(_LINK.findall(page.read_text()))) >= 5
    assert f"internals/{walk}.md" in (ROOT / "docs" / "internals.md").read_text()


def test_each_word_is_defined_once() -> None:
    rows = re.findall(r"^\| (.+?) \|", (ROOT / "docs" / "internals.md").read_text(), re.MULTILINE)
    words = Counter(word for row in rows if row != "word" for word in row.split(", "))
    assert [word for word, times in words.items() if times > 1] == []
    assert {"leader", "follower", "generation", "tail", "tip", "marker", "fence", "staged", "listed"} <= set(
        words
    )


def test_what_is_gone_is_noticed() -> None:
    assert _LINK.findall("[`a`](../../src/lancewal/gone.py)") == ["../../src/lancewal/gone.py"]
    assert _PATH.findall("`tests/gone.py::test_a`") == ["tests/gone.py"]
    assert _MODULE.findall("`writer/gone.py`") == ["writer/gone.py"]
    assert exists("lancewal.Table.scan")
    assert not exists("lancewal.writer.Gone")
