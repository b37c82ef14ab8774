"""Damaged files, thousands of them from one seed: a typed error or the right content, from every decoder.

``python -m tests.hostile.test_decoders 5000`` tries so many inputs for each format, and makes what came of
them the figures of ``docs/testing.md``.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import tracemalloc
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lancewal.errors import LanceWalError
from tests import report
from tests.hostile.formats import Format, formats
from tests.hostile.mutations import mutated

#: The files of the corpus are far below a megabyte; what they make a decoder allocate is bounded by that.
MOST_BYTES = 64 << 20
INPUTS = 200
SOAK_INPUTS = 20_000


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> list[Format]:
    return formats(tmp_path_factory.mktemp("formats"))


def fuzz(each: Format, inputs: int) -> Counter[str]:
    """What became of so many damaged files: refused, read as what they were, or as something else."""
    counts: Counter[str] = Counter()
    originals = [each.decode(data) for data in each.files]
    for seed in range(inputs):
        source = random.Random(zlib.crc32(each.name.encode()) << 32 | seed)
        place = source.randrange(len(each.files))
        data = mutated(source, each.files[place])
        try:
            found = each.decode(data)
        except LanceWalError:
            counts["refused"] += 1
            continue
        except BaseException as error:
            raise AssertionError(f"{each.name}, seed {seed}: {error!r}") from error
        if found == originals[place]:
            counts["right"] += 1
        else:
            counts["other"] += 1
            assert not each.is_sealed, f"{each.name}, seed {seed} read as {found!r}"
    return counts


def check_all(every: list[Format], inputs: int) -> list[dict[str, Any]]:
    table = []
    before_all = pa.default_memory_pool().max_memory() or 0
    for each in every:
        before = pa.default_memory_pool().bytes_allocated()
        tracemalloc.start()
        try:
            counts = fuzz(each, inputs)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < MOST_BYTES, f"{each.name} took {peak} bytes"
        assert pa.default_memory_pool().bytes_allocated() - before < MOST_BYTES
        assert counts["refused"] or not each.is_sealed, f"no damage to {each.name} was noticed"
        table.append(
            {"format": each.name, "checksum": each.is_sealed, "inputs": inputs}
            | {outcome: counts[outcome] for outcome in ("refused", "right", "other")}
        )
    # Other tests of this process may have taken more before.
    assert (pa.default_memory_pool().max_memory() or 0) <= max(before_all, MOST_BYTES) or inputs > INPUTS
    return table


def page(table: list[dict[str, Any]]) -> dict[str, Any]:
    """As the page on testing takes it."""
    counts = {
        outcome: sum(row[outcome] for row in table) for outcome in ("inputs", "refused", "right", "other")
    }
    return {
        "title": "Damaged files",
        "text": [
            "Real files of every format that lancewal decodes are damaged in many ways, from one seed: bits "
            "are flipped, numbers made huge, parts cut, doubled, moved, blanked, made noise. The decoder "
            "ends with a typed error or with the right content, never with another error, a hang or more "
            f"than {MOST_BYTES >> 20} MB. What has a checksum is never read as anything else than it was; "
            "what Lance writes has none, so that some damage reads as other content, as it does in Lance.",
            "Besides, single bits of the files with a checksum are flipped, shard manifests among them; and "
            "bits of all files of a whole table, which is then read: the right rows or a typed error.",
        ],
        "figures": [
            ["inputs", counts["inputs"]],
            ["refused with a typed error", counts["refused"]],
            ["read as what they were", counts["right"]],
            ["read as something else, of files without a checksum", counts["other"]],
            ["other errors", 0],
        ],
        "tables": [
            {
                "caption": "Of each format",
                "columns": ["format", "checksum", "inputs", "refused", "right", "other"],
                "rows": [
                    [row["format"], "yes" if row["checksum"] else "no", *(row[name] for name in counts)]
                    for row in table
                ],
            }
        ],
        "command": f"python -m tests.hostile.test_decoders {table[0]['inputs']}",
    }


def test_damaged_files_are_refused_or_read_as_what_they_were(every: list[Format]) -> None:
    check_all(every, INPUTS)


@pytest.mark.soak
def test_many_damaged_files_are_refused_or_read_as_what_they_were(every: list[Format]) -> None:
    report.store("fuzz", page(check_all(every, SOAK_INPUTS)))


def test_every_single_flipped_bit_of_what_has_a_checksum_is_noticed(every: list[Format]) -> None:
    for each in every:
        if not each.is_sealed:
            continue
        data = min(each.files, key=len)
        original = each.decode(data)
        source = random.Random(len(data))
        bits = range(8 * len(data))
        for bit in bits if len(bits) < 800 else source.sample(bits, 800):
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            try:
                assert each.decode(bytes(flipped)) == original, f"{each.name}, bit {bit}"
            except LanceWalError:
                continue


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # of records that are passed over, for each of them
    with tempfile.TemporaryDirectory() as directory:
        found = check_all(formats(Path(directory)), int(sys.argv[1]))
    report.store("fuzz", page(found))
