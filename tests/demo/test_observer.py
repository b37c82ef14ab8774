"""The demo's own reader notices what must not be: half a file, a lost put, an older state."""

from __future__ import annotations

from pathlib import Path

import lance
import pytest

import lancewal
from demo.corpus import SCHEMA, Document, remarks, rows
from demo.incoming import Incoming
from demo.measurements import Measurements
from demo.observer import Observer
from demo.service import Service, Written

DOCUMENTS = [
    Document(kind, f"package.{kind}{number}", f"The {kind} number {number} raises exceptions of its own.")
    for kind in ("module", "class", "function", "method")
    for number in range(6)
]


class _Silent(Service):
    """A service that claims what a test tells it to."""

    claims = Written({}, {}, None)

    def written(self) -> Written:
        return self.claims


@pytest.fixture
def incoming() -> Incoming:
    return Incoming(DOCUMENTS, rows_per_file=8)


@pytest.fixture
def table(tmp_path: Path, incoming: Incoming) -> lancewal.Table:
    lance.write_dataset(rows(incoming.first), str(tmp_path / "t"), schema=SCHEMA)
    return lancewal.initialize(str(tmp_path / "t"), identity="kind")


@pytest.fixture
def service(table: lancewal.Table) -> _Silent:
    return _Silent(table, remarks(5), Measurements())


@pytest.fixture
def observer(table: lancewal.Table, incoming: Incoming, service: _Silent) -> Observer:
    return Observer(table, incoming, service, Measurements())


def test_whole_files_are_fine(table: lancewal.Table, incoming: Incoming, observer: Observer) -> None:
    with table.writer() as writer:
        for number, file in enumerate(incoming.files, 1):
            writer.put(rows(file.editions))
            observer.look()
            assert observer.wrong == []
            assert observer.files_seen >= number


def test_half_a_file_is_noticed(table: lancewal.Table, incoming: Incoming, observer: Observer) -> None:
    kind = incoming.files[0].editions[0].kind
    of_kind = [each for each in incoming.files[0].editions if each.kind == kind]
    assert len(of_kind) > 1
    with table.writer() as writer:
        writer.put(rows(of_kind[:1]))
        observer.look()
    assert any(f"of kind {kind} that fit no whole number of files" in text for text in observer.wrong)


def test_an_older_state_than_before_is_noticed(
    table: lancewal.Table, incoming: Incoming, observer: Observer
) -> None:
    with table.writer() as writer:
        writer.put(rows(incoming.files[0].editions))
        observer.look()
        assert observer.wrong == []
        writer.delete(rows(incoming.files[0].editions).select(["kind", "name"]))
        writer.put(rows(incoming.first))
        observer.look()
    assert observer.wrong


def test_a_lost_put_is_noticed(observer: Observer, service: _Silent) -> None:
    lost = remarks(1)[0].edition(1)
    service.claims = Written({lost.name: 1}, {lost.name: 1}, lost)
    observer.look()
    assert any(f"{lost.name}: edition None, acknowledged was 1" in text for text in observer.wrong)
    assert any("was not found" in text for text in observer.wrong)


def test_levels_add_up(table: lancewal.Table, observer: Observer, incoming: Incoming) -> None:
    with table.writer() as writer:
        writer.put(rows([remarks(1)[0].edition(1)]))
        observer.look()
        looked = observer._measured.levels[-1]
        assert (looked.memtable, looked.wal, looked.sstables) == (1, 0, 0)
        assert looked.base == len(incoming.first)
    table.compact()
    observer.look()
    assert observer._measured.levels[-1].base == len(incoming.first) + 1
