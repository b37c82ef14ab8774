from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancewal.config import ShardWriterConfig, _warn_once
from lancewal.errors import InvalidInputError

MB = 1024 * 1024


def test_defaults_are_those_of_lance() -> None:
    config = ShardWriterConfig()
    assert config.durable_write
    assert config.sync_indexed_write
    assert config.enable_memtable
    assert config.fsync
    assert config.max_wal_buffer_size == 10 * MB
    assert config.max_wal_flush_interval == timedelta(milliseconds=100)
    assert (config.max_memtable_size, config.max_memtable_rows, config.max_memtable_batches) == (
        256 * MB,
        100_000,
        8_000,
    )
    assert config.max_unflushed_memtable_bytes == 1024 * MB
    assert config.manifest_scan_batch_size == 2
    assert config.backpressure_log_interval == timedelta(seconds=30)
    assert (config.async_index_buffer_rows, config.async_index_interval) == (10_000, timedelta(seconds=1))
    assert config.stats_log_interval == timedelta(seconds=60)


def test_freeze_limit_above_the_backpressure_limit_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidInputError, match=r"\(2000\).*\(1000\)"):
        ShardWriterConfig(max_memtable_size=2000, max_unflushed_memtable_bytes=1000)
    # WAL-only mode has no MemTable to freeze: there the same numbers are fine.
    ShardWriterConfig(max_memtable_size=2000, max_unflushed_memtable_bytes=1000, enable_memtable=False)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_memtable_rows": 0},
        {"max_memtable_batches": -1},
        {"max_wal_buffer_size": 1.5},
        {"max_memtable_size": True},
        {"durable_write": "yes"},
        {"max_wal_flush_interval": 100},
        {"max_wal_flush_interval": timedelta(milliseconds=-1)},
        {"backpressure_log_interval": timedelta(0)},
        {"backpressure_log_interval": None},
        {"async_index_interval": timedelta.max},
        {"manifest_scan_batch_size": 1025},
        {"slowdown_sstables": None},
        {"stop_sstables": 0},
        {"stop_sstables": True},
        {"stop_timeout": None},
        {"stop_timeout": 30},
    ],
)
def test_nonsense_is_refused_and_named(setting: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(setting))):
        ShardWriterConfig(**setting)  # type: ignore[arg-type]


def test_persisted_form_names_durations_in_milliseconds_and_no_identity() -> None:
    persisted = ShardWriterConfig(durable_write=False, max_memtable_size=8 * MB).to_defaults()
    assert persisted["durable_write"] == "false"
    assert persisted["max_memtable_size"] == "8388608"
    assert persisted["max_wal_flush_interval_ms"] == "100"
    assert persisted["async_index_interval_ms"] == "1000"
    assert {"sync_indexed_write", "enable_memtable"} <= persisted.keys()
    assert not {"shard_id", "shard_spec_id"} & persisted.keys()


_millis = st.integers(1, 10**7).map(lambda n: timedelta(milliseconds=n))
_configs = st.builds(
    ShardWriterConfig,
    durable_write=st.booleans(),
    sync_indexed_write=st.booleans(),
    fsync=st.booleans(),
    enable_memtable=st.booleans(),
    max_wal_flush_interval=st.none() | _millis,
    stats_log_interval=st.none() | _millis,
    backpressure_log_interval=_millis,
    stop_sstables=st.none() | st.integers(1, 1000),
    stop_timeout=_millis,
    max_memtable_size=st.integers(1, 1000),
    max_unflushed_memtable_bytes=st.integers(1000, 10**15),
)


@given(_configs)
def test_any_configuration_survives_persisting(config: ShardWriterConfig) -> None:
    assert ShardWriterConfig.from_defaults(config.to_defaults()) == config


def test_argument_beats_stored_default_beats_built_in() -> None:
    stored = {"max_memtable_rows": "7", "durable_write": "false", "custom_knob": "kept elsewhere"}
    config = ShardWriterConfig.from_defaults(stored, max_memtable_rows=9)
    assert (config.max_memtable_rows, config.durable_write, config.max_memtable_batches) == (9, False, 8_000)


def test_unknown_override_and_wrong_override_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="max_memtable_row;"):
        ShardWriterConfig.from_defaults({}, max_memtable_row=1)
    with pytest.raises(InvalidInputError, match="max_memtable_rows"):
        ShardWriterConfig.from_defaults({}, max_memtable_rows=0)


@pytest.mark.parametrize(
    ("stored", "used"),
    [
        ({"max_memtable_size": str(4 << 30)}, {"max_memtable_size": 1024 * MB}),
        ({"max_unflushed_memtable_bytes": "1000", "max_memtable_size": "2000"}, {"max_memtable_size": 1000}),
        ({"manifest_scan_batch_size": "0"}, {"manifest_scan_batch_size": 1}),
        ({"manifest_scan_batch_size": str(1 << 62)}, {"manifest_scan_batch_size": 1024}),
        ({"durable_write": "True", "fsync": "0"}, {"durable_write": True, "fsync": False}),
        ({"max_memtable_size": "256MB"}, {"max_memtable_size": 256 * MB}),
        ({"max_wal_buffer_size": " 1.5 GiB"}, {"max_wal_buffer_size": 1536 * MB}),
        ({"max_memtable_rows": "-3"}, {"max_memtable_rows": 1}),
        ({"max_memtable_rows": "many"}, {"max_memtable_rows": 100_000}),
        ({"max_memtable_rows": "\u00b2"}, {"max_memtable_rows": 100_000}),
        ({"max_memtable_rows": "9" * 5000}, {"max_memtable_rows": 100_000}),
        ({"durable_write": "maybe"}, {"durable_write": True}),
        ({"max_wal_flush_interval_ms": "soon"}, {"max_wal_flush_interval": timedelta(milliseconds=100)}),
        ({"max_wal_flush_interval_ms": "2s"}, {"max_wal_flush_interval": timedelta(seconds=2)}),
        ({"async_index_interval_ms": "9" * 25}, {"async_index_interval": timedelta(days=36_500)}),
        ({"backpressure_log_interval_ms": "0"}, {"backpressure_log_interval": timedelta(milliseconds=1)}),
    ],
)
def test_stored_default_that_others_accepted_is_bent_and_told_once_in_the_log(
    stored: dict[str, str], used: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    _warn_once.cache_clear()
    config = ShardWriterConfig.from_defaults(stored)
    assert {name: getattr(config, name) for name in used} == used
    told = [record.getMessage() for record in caplog.records]
    assert told
    assert all("writer default" in text for text in told)
    ShardWriterConfig.from_defaults(stored)
    assert [record.getMessage() for record in caplog.records] == told
    with pytest.raises(InvalidInputError):
        ShardWriterConfig.check_defaults(stored)


@given(
    st.dictionaries(
        st.sampled_from(sorted({*ShardWriterConfig().to_defaults(), "max_wal_flush_interval"})),
        st.text(max_size=12)
        | st.tuples(
            st.integers(-(10**40), 10**40), st.sampled_from(["", "MB", " GiB", "ms", "s", ".5", "x"])
        ).map(lambda parts: f"{parts[0]}{parts[1]}")
        | st.sampled_from(["True", "FALSE", "none", "", "inf", "nan", "1e9"]),
    )
)
def test_no_stored_default_makes_a_table_unwritable(stored: dict[str, str]) -> None:
    config = ShardWriterConfig.from_defaults(stored)
    assert ShardWriterConfig.from_defaults(config.to_defaults()) == config


def test_stored_default_gives_way_to_what_the_caller_says() -> None:
    stored = {"max_memtable_size": str(256 * MB), "manifest_scan_batch_size": "0"}
    config = ShardWriterConfig.from_defaults(
        stored, max_unflushed_memtable_bytes=16 * MB, manifest_scan_batch_size=3
    )
    assert (config.max_memtable_size, config.manifest_scan_batch_size) == (16 * MB, 3)


def test_lance_stores_zero_for_never_logging_statistics() -> None:
    assert ShardWriterConfig.from_defaults({"stats_log_interval_ms": "0"}).stats_log_interval is None
