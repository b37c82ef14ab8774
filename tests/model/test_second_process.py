"""Another process sees every acknowledged row, once and whole, without the writer's help."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

import lancewal
from lancewal.format import SOURCE
from lancewal.table import Table
from tests.model.busy_writer import HOT, acknowledged, make_counter, put_size
from tests.tables import KEY

READS = 60
ROOT = Path(__file__).parents[2]


@contextmanager
def busy_writer(table: Table, counter: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that writes to the table; killed at the end, in the middle of whatever it does."""
    command = [sys.executable, "-m", "tests.model.busy_writer", table.uri, str(counter)]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": ""}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            while acknowledged(counter) == 0:
                assert process.poll() is None, "the writer ended"
                time.sleep(0.01)
            yield process
            assert process.poll() is None, "the writer ended"
        finally:
            process.kill()


def checked_puts(found: pa.Table, *, keyed: bool) -> int:
    """How many puts a result shows; fails when one is torn, missing in between, or doubled."""
    ids, puts = found["id"].to_numpy(), found["put"].to_numpy()
    assert len(np.unique(ids)) == len(ids), "a row came twice"
    own = ids != HOT
    count = int(puts.max()) + 1
    expected = np.array([put_size(number) for number in range(count)])
    assert np.bincount(puts[own], minlength=count).tolist() == expected.tolist(), "a put is torn or missing"
    assert found["size"].to_numpy()[own].tolist() == expected[puts[own]].tolist()
    if keyed:
        assert puts[~own].tolist() == [count - 1], "the row that every put rewrites is not the newest put's"
    return count


@pytest.mark.parametrize("keyed", [True, False])
def test_a_second_process_sees_every_acknowledged_put_whole_and_once(tmp_path: Path, keyed: bool) -> None:
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False, metadata=KEY if keyed else None),
            pa.field("put", pa.int64()),
            pa.field("size", pa.int64()),
        ]
    )
    lance.write_dataset(schema.empty_table(), str(tmp_path / "t"))
    table = lancewal.initialize(tmp_path / "t", unsharded=True, writer_defaults={"fsync": "false"})
    counter = make_counter(tmp_path / "acknowledged")
    sources: set[str] = set()
    seen = [0]
    with busy_writer(table, counter):
        # On a slow machine some more reads, until rows were seen on every level.
        while len(seen) < READS or not {"memtable", "sstable", "base"} <= sources:
            before = acknowledged(counter)
            scan = table.scan(with_row_source=True)
            found = scan.to_table()
            count = checked_puts(found, keyed=keyed)
            assert count >= max(before, seen[-1]), "an acknowledged put is missing"
            assert scan.count_rows() == found.num_rows
            if keyed:
                assert table.lookup([(before - 1) * 5, HOT]).found.all()
            sources |= {name.split(":")[0] for name in found[SOURCE].unique().to_pylist()}
            seen.append(count)
    assert len(set(seen)) > 2, "the table did not change while it was read"
    after = acknowledged(counter)
    whole = table.scan().to_table()
    assert checked_puts(whole, keyed=keyed) >= after
    table.flush()
    assert table.scan().to_table().sort_by("id").equals(whole.sort_by("id"))
