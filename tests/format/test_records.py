"""Small records with a checksum: what is read is what was written, or an error."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancewal.base.columns import ColumnRuns
from lancewal.errors import StorageError
from lancewal.format.records import decode_record, encode_record
from lancewal.ingest.journal import Journal, Part
from lancewal.publish.transactions import Run, Transaction, TransactionLog
from lancewal.storage import ObjectStore, layout

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
records = st.dictionaries(st.text(max_size=6).filter(lambda key: key != "crc32c"), values, max_size=5)


@given(records)
def test_any_record_survives_a_round_trip(content: dict[str, object]) -> None:
    assert decode_record(encode_record(content), must_have_checksum=True) == content


@given(records, st.data())
def test_a_flipped_bit_is_noticed_or_changes_nothing(content: dict[str, object], data: st.DataObject) -> None:
    whole = bytearray(encode_record(content))
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with suppress(ValueError):
        assert decode_record(bytes(whole), must_have_checksum=True) == content
    for end in range(len(whole)):
        with pytest.raises(ValueError, match=r"."):
            decode_record(bytes(whole[:end]), must_have_checksum=True)


@pytest.mark.parametrize("data", [b"", b"[]", b"7", b"null", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_record_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_record(data)


def flips(data: bytes) -> list[bytes]:
    found = []
    for bit in range(len(data) * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        found.append(bytes(damaged))
    return found


def test_a_flipped_digit_made_another_column_of_one() -> None:
    runs = ColumnRuns(3, 41, {0: 3, 1: 3, 4: 27})
    assert (
        ColumnRuns.from_json(
            json.dumps({"first": 3, "version": 41, "since": [[0, 3], [1, 3], [4, 27]]}).encode()
        )
        == runs
    )
    assert {ColumnRuns.from_json(data) == runs for data in flips(runs.to_json())} <= {True, False}
    assert all(ColumnRuns.from_json(data) in (None, runs) for data in flips(runs.to_json()))


def test_a_flipped_digit_in_the_journal_skipped_rows_of_a_file(local_store: ObjectStore) -> None:
    journal = Journal(local_store, "/incoming")
    part = Part("a.csv", 10, 20, 0, 1000, False)
    assert journal.begin(0, part)
    (info,) = local_store.list(layout.OWN_DIR)
    whole = local_store.get(info.path)
    for data in flips(whole):
        local_store.put(info.path, data)
        with suppress(StorageError):
            assert journal.read().unfinished == part
    local_store.put(info.path, b"{}")
    with pytest.raises(StorageError, match="damaged"):
        journal.read()


def test_a_flipped_bit_in_a_transaction_forgot_what_was_written(local_store: ObjectStore) -> None:
    log = TransactionLog(local_store, Transaction("app", 3))
    run = Run(3, floors={}, sstables={})
    log.start(run)
    (info,) = local_store.list(layout.OWN_DIR)
    whole = local_store.get(info.path)
    for data in flips(whole):
        local_store.put(info.path, data)
        with suppress(StorageError):
            assert log.read().runs == (run,)
    for data in (b"{}", b'{"floors": 7}', b'{"floors": {"x": 1}, "sstables": {}}'):
        local_store.put(info.path, data)
        with pytest.raises(StorageError, match="damaged"):
            log.read()
