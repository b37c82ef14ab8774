"""The house: rooms with doors, one direction, no circles."""

from __future__ import annotations

from pathlib import Path

import pytest

import lancewal
from tests.architecture.graph import FLOORS, Graph, draw, figures, without

#: What ``import lancewal`` offers; a name leaves this list only with a deprecation.
PUBLIC_NAMES = {
    "AsyncTable",
    "AsyncWriter",
    "Checkpoint",
    "Gateway",
    "LookupResult",
    "PutId",
    "RemoteTable",
    "RemoteWriter",
    "Scan",
    "SharedTable",
    "ShardInfo",
    "ShardRouter",
    "ShardWriter",
    "ShardWriterConfig",
    "Table",
    "TableView",
    "TableWriteResult",
    "TableWriter",
    "UpkeepPlan",
    "UpkeepReport",
    "UpkeepSettings",
    "WalAppender",
    "WalEntry",
    "WalTailer",
    "WriteResult",
    "__version__",
    "connect",
    "create",
    "errors",
    "initialize",
    "open",
    "restore",
    "share",
    "uninitialize",
}

#: Longer than this a module holds more than one concept.
MOST_LINES = 600


@pytest.fixture(scope="module")
def house() -> Graph:
    return draw(Path(lancewal.__file__).parents[1])


def test_rooms_are_entered_by_their_doors(house: Graph) -> None:
    assert [f"{edge.importer} takes {edge.target}" for edge in house.past_doors()] == []


def test_nothing_imports_from_a_higher_floor(house: Graph) -> None:
    assert [f"{edge.importer} takes {edge.target}" for edge in house.upward()] == []


def test_no_modules_import_each_other_in_a_circle(house: Graph) -> None:
    assert house.cycles() == []


def test_only_what_users_import_lies_at_the_top(house: Graph) -> None:
    top = {*house.loose(), *(room.removeprefix("lancewal.") for room in house.rooms())}
    assert top == set(FLOORS)


def test_every_door_exports_what_it_names(house: Graph) -> None:
    for room in house.rooms():
        door = __import__(room, fromlist=["__all__"])
        assert [name for name in house.exports[room] if not hasattr(door, name)] == [], room


def test_a_module_is_one_concept(house: Graph) -> None:
    assert {module: lines for module, lines in house.lines.items() if lines > MOST_LINES} == {}


def test_public_names_are_those_that_are_listed() -> None:
    assert set(lancewal.__all__) == PUBLIC_NAMES
    assert all(hasattr(lancewal, name) for name in PUBLIC_NAMES)


@pytest.fixture
def shack(tmp_path: Path) -> Path:
    """A small package with every fault that the tests above look for."""
    files = {
        "__init__.py": "",
        "errors.py": "from lancewal.table import Table\n",
        "table.py": "from lancewal.storage.local import Local\nfrom lancewal.storage import hidden\n",
        "storage/__init__.py": "from lancewal.storage.local import Local\n__all__ = ['Local']\n",
        "storage/local.py": "from lancewal.storage.remote import Remote\n",
        "storage/remote.py": (
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from lancewal.storage.local import Local\n"
        ),
    }
    for name, text in files.items():
        path = tmp_path / "lancewal" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return tmp_path


def test_every_fault_is_found(shack: Path) -> None:
    graph = draw(shack)
    past = {edge.target for edge in graph.past_doors()}
    assert past == {"lancewal.storage.local.Local", "lancewal.storage.hidden"}
    assert [edge.target for edge in graph.upward()] == ["lancewal.table.Table"]
    assert graph.cycles() == [["lancewal.storage.local", "lancewal.storage.remote"]]
    assert graph.loose() == ["errors", "table"]
    counted = figures(graph)
    assert (counted["modules"], counted["rooms"], counted["loose at the top"]) == (4, 1, 2)
    assert (counted["imports past a door"], counted["cycles"]) == (2, 1)
    assert without(graph, "storage").rooms() == []
    assert graph.neighbours() == {"errors": ["table"], "table": ["storage"]}
