"""One flipped bit in each file of lancewal's own: reads give the right rows or a typed error."""

from __future__ import annotations

import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import LanceWalError
from tests.maintenance.support import Site
from tests.tables import rows

_READS = ("scan", "count", "lookup of all", "lookup of none", "deep check")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows in the base table, in SSTables and in the log, and a look of a collection."""
    where = tmp_path_factory.mktemp("original") / "table"
    site = Site(where, data=pa.Table.from_batches([rows(0, 20)]))
    site.flush(rows(0, 12, prefix="one"), [3])
    site.compact()
    site.flush(rows(5, 12, prefix="two"), [6])
    site.flush(rows(8, 12, prefix="three"))
    writer = site.writer()
    writer.put(rows(30, 4, prefix="four"))
    writer.put(rows(10, 4, prefix="five"))
    site.look()
    return where


def reads(where: Path) -> dict[str, Any]:
    """What each way to read gives: rows, or that it was refused."""
    table = lancewal.open(str(where))
    every = {
        "scan": lambda: sorted(table.scan().to_table().to_pylist(), key=str),
        "count": table.count_rows,
        "lookup of all": lambda: sorted(table.lookup(list(range(40))).table.to_pylist(), key=str),
        "lookup of none": lambda: table.lookup([-1, 77, 10**12]).table.num_rows,
        "deep check": lambda: bool(table.verify().checked),
    }
    found: dict[str, Any] = {}
    for name in _READS:
        try:
            found[name] = every[name]()
        except LanceWalError:
            found[name] = "refused"
    return found


def flips(original: Path, copies: Path, each: int) -> int:
    """How many reads were refused; asserts that the others were right."""
    right = reads(original)
    assert "refused" not in right.values()
    refused = 0
    own = [path for path in sorted((original / "_mem_wal").rglob("*")) if path.is_file() and _is_ours(path)]
    own = [path for path in own if path.stat().st_size]
    for path in own:
        name = path.relative_to(original)
        source = random.Random(zlib.crc32(path.name.encode()))
        for number in range(each):
            copy = copies / f"{number}-{zlib.crc32(str(name).encode())}"
            shutil.copytree(original, copy)
            data = bytearray((copy / name).read_bytes())
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
            (copy / name).write_bytes(data)
            try:
                found = reads(copy)
            except LanceWalError:
                refused += len(_READS)
            else:
                wrong = {key: value for key, value in found.items() if value not in (right[key], "refused")}
                assert not wrong, f"{name}, flip {number}"
                refused += list(found.values()).count("refused")
            shutil.rmtree(copy)
    return refused


def _is_ours(path: Path) -> bool:
    """Not Lance's own files, which have no checksum: rows and the manifests of SSTables."""
    return not {"data", "_versions", "_transactions", "_indices", "_deletions"} & set(path.parts)


def test_a_flipped_bit_gives_the_right_rows_or_a_typed_error(original: Path, tmp_path: Path) -> None:
    assert flips(original, tmp_path, 1) > 0


@pytest.mark.soak
def test_many_flipped_bits_give_the_right_rows_or_a_typed_error(original: Path, tmp_path: Path) -> None:
    assert flips(original, tmp_path, 30) > 0


def test_verification_notices_most_flipped_bits_in_the_rows_of_an_sstable(
    original: Path, tmp_path: Path
) -> None:
    """Lance's files have no checksum. A bit that changes a value is noticed by the sum of the rows."""
    changed = noticed = 0
    right = reads(original)["scan"]
    for number in range(12):
        copy = tmp_path / str(number)
        shutil.copytree(original, copy)
        (file,) = (copy / "_mem_wal").glob("*/*_gen_3/data/*.lance")
        data = bytearray(file.read_bytes())
        data[number * 16] ^= 2
        file.write_bytes(data)
        table = lancewal.open(str(copy))
        try:
            is_right = sorted(table.scan().to_table().to_pylist(), key=str) == right
        except LanceWalError:
            continue
        changed += not is_right
        noticed += not is_right and bool(table.verify().findings)
    assert changed == noticed
    assert changed
