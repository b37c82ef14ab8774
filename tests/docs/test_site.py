"""The site builds without a warning, and its pages of the API are those of the public names."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import lancewal
import lancewal.spark
from tests.docs.blocks import PAGES, ROOT, blocks, runs
from tests.patience import PATIENCE, wait_until

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
API = ROOT / "docs" / "api"
PUBLIC = {f"lancewal.{name}" for name in lancewal.__all__ if name != "__version__"} | {
    f"lancewal.spark.{name}" for name in lancewal.spark.__all__
}

#: What jobs give or raise; nobody calls it.
RESULTS_OF_JOBS = {"BatchReport", "ShardOutcome", "JobFailedError", "Diagnosis"}
#: Classes and methods that other rooms call. They are public for those who build on one shard; the
#: class has an example, and each method says what it does.
OF_ROOMS = {
    "ShardRouter",
    "ShardWriter",
    "ShardWriterConfig",
    "WalAppender",
    "WalEntry.rows",
    "WalTailer",
    "RemoteWriter.write_group",
    "Scan.pinned_keys",
    "Table.announce",
    "TableWriter.intake",
    "TableWriter.shards_of",
}


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", made)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def test_the_site_builds_strictly(site: Path) -> None:
    for name in PUBLIC - {"lancewal.errors"}:
        page = site / "api" / f"{name.removeprefix('lancewal.').replace('.', '/')}.html"
        assert f'id="{name}"' in page.read_text(), name
    pages = "".join(page.read_text() for page in (site / "api").rglob("*.html"))
    assert not re.search(r":(?:class|meth|func):|code-block::|<blockquote", pages)


def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.search(r"<(script|link|img|iframe)\b[^>]*=\"?https?://", page.read_text()), page


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium; what the page loads is tested without")
def test_search_works_where_the_site_is_opened_from_a_directory(site: Path, tmp_path: Path) -> None:
    """Browsers give such pages no web workers, and search found nothing."""
    assert BROWSER is not None
    options = ["headless", "no-sandbox", "disable-gpu", "virtual-time-budget=60000", "dump-dom"]
    command = [BROWSER, *(f"--{option}" for option in options), f"--user-data-dir={tmp_path}/profile"]
    asked = f"{(site / 'index.html').as_uri()}?q=create"

    def found() -> bool:
        # The browser's clock runs ahead of a busy machine, which may not have built the index by then.
        done = subprocess.run([*command, asked], capture_output=True, text=True, timeout=PATIENCE, check=True)
        return bool(re.search(r"\d+ matching documents", done.stdout))

    wait_until(found)


def test_a_page_that_names_nothing_fails_the_build(tmp_path: Path) -> None:
    """What keeps the site honest must notice a name that is gone."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("::: lancewal.NoSuchName\n")
    plugin = f"mkdocstrings: {{handlers: {{python: {{paths: [{ROOT / 'src'}]}}}}}}"
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\nplugins:\n  - {plugin}\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "NoSuchName" in done.stdout + done.stderr


def test_a_warning_did_not_fail_the_build(tmp_path: Path) -> None:
    """Quiet mkdocs does not count warnings: six pages were in no menu, and nobody was told."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere.md" in done.stdout + done.stderr
    assert not re.search(r"mkdocs build .*(--quiet|-q\b)", (ROOT / "Makefile").read_text())


def test_every_public_name_has_a_page() -> None:
    shown = {
        name for page in API.rglob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
    }
    assert shown == PUBLIC
    assert "lancewal.__version__" in (API / "index.md").read_text()


def test_every_public_name_is_listed_with_what_it_is_for() -> None:
    listed = set(re.findall(r"\]\(([\w/]+)\.md\)", (API / "index.md").read_text()))
    assert {name.removeprefix("lancewal.").replace(".", "/") for name in PUBLIC} == listed


def test_every_public_name_has_a_docstring() -> None:
    for name in PUBLIC:
        room = lancewal.spark if name.startswith("lancewal.spark.") else lancewal
        assert getattr(room, name.rpartition(".")[2]).__doc__, name


def test_every_public_name_shows_an_example_that_runs() -> None:
    """A doctest of its own, which the suite runs; what needs a Spark session runs on a page about Spark."""
    pages = "".join(
        block.body for page in PAGES for block in blocks(page) if runs(block) and page.name == "spark.md"
    )
    # What needs a source of events is shown on that page, and run by the tests of the room.
    others = [*(ROOT / "examples").rglob("*.py"), ROOT / "tests/spark/test_debezium.py"]
    examples = pages + "".join(each.read_text() for each in others)
    without = []
    for name in PUBLIC - {"lancewal.errors"}:
        room, _, last = name.rpartition(".")
        if room == "lancewal.spark":
            own = getattr(lancewal.spark, last).__doc__ or ""
            shown = last in RESULTS_OF_JOBS or f"{last}(" in examples or ">>> " in own
        else:
            shown = ">>> " in (getattr(lancewal, last).__doc__ or "")
        without += [] if shown else [name]
    assert without == []


def test_every_method_that_users_call_is_called_in_an_example() -> None:
    """In a doctest, in a page whose code runs, or in examples/."""
    called = "".join(each.read_text() for each in (ROOT / "examples").rglob("*.py"))
    called += "".join(block.body for page in PAGES for block in blocks(page) if runs(block))
    for source in (ROOT / "src").rglob("*.py"):
        called += "\n".join(re.findall(r"^\s*(?:>>>|\.\.\.) (.*)$", source.read_text(), re.M))
    without = [
        f"{name}.{method}"
        for name in lancewal.__all__
        if inspect.isclass(kind := getattr(lancewal, name)) and name not in OF_ROOMS
        for method, function in inspect.getmembers(kind, inspect.isroutine)
        if not method.startswith("_")
        and str(getattr(function, "__module__", "")).startswith("lancewal")
        and f"{name}.{method}" not in OF_ROOMS
        and not re.search(rf"\.{method}\(", called)
    ]
    assert without == []


def test_docstrings_become_markdown() -> None:
    path = ROOT / "docs" / "docstrings.py"
    spec = importlib.util.spec_from_file_location("docstrings", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.markdown("Raises :class:`~lancewal.errors.FencedError`.") == "Raises `FencedError`."
    assert module.markdown("One.\n\n>>> 1 + 1\n2\n\nTwo.") == "One.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nTwo."
    assert module.markdown("``fsync``\n    Sync each entry.") == "`fsync`\n:   Sync each entry."
    assert module.markdown("Say::\n\n    lancewal flush\n") == "Say:\n\n    lancewal flush"
    assert (
        module.markdown("One.\n\n.. code-block:: python\n\n    flush()\n")
        == "One.\n\n```python\nflush()\n```"
    )


def test_every_public_method_says_what_it_does() -> None:
    kinds = (property, classmethod, staticmethod, FunctionType)
    silent = [
        f"{name}.{member}"
        for name in lancewal.__all__
        for member, found in getattr(getattr(lancewal, name), "__dict__", {}).items()
        if isinstance(found, kinds) and not member.startswith("_") and not inspect.getdoc(found)
    ]
    assert silent == []
