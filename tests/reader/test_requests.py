"""What reads cost on storage that is far away, pylance's requests included: counted, not timed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import lancewal
from bench.proxy import Proxy, Recording
from lancewal import Table
from lancewal.errors import InvalidInputError
from lancewal.publish import ChangeFeed
from lancewal.sstable import opened
from lancewal.writer import open_writers
from tests.servers import S3Server
from tests.tables import KEY, abandon

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), False, KEY),
        pa.field("vector", pa.list_(pa.float32(), 4)),
        pa.field("text", pa.string()),
    ]
)
QUERY = np.zeros(4, np.float32)


def rows(first: int, count: int) -> pa.Table:
    numbers = pa.array(np.arange(count * 4, dtype=np.float32))
    vectors = pa.FixedSizeListArray.from_arrays(numbers, 4)
    ids = range(first, first + count)
    return pa.table({"id": ids, "vector": vectors, "text": [f"word{i}" for i in ids]}, SCHEMA)


def index(dataset: lance.LanceDataset) -> None:
    dataset.create_scalar_index("id", "BTREE")
    dataset.create_scalar_index("text", "INVERTED", with_position=False)
    dataset.create_index("vector", "IVF_FLAT", metric="l2", num_partitions=2)


class Far:
    """A table behind the proxy, with SSTables and rows in its log."""

    def __init__(
        self,
        server: S3Server,
        proxy: Proxy,
        sstables: int,
        buckets: int | None = None,
        *,
        indexed: bool = False,
        first: int = 1000,
    ) -> None:
        """``first`` is the least key of the SSTables; the base has keys below 500."""
        self.proxy = proxy
        proxy.set(latency=0.0)
        self.options = {**server.storage_options, "aws_endpoint": proxy.endpoint}
        self.uri = server.uri(f"{uuid.uuid4().hex}/table")
        self.plain = lance.write_dataset(rows(0, 500), self.uri, storage_options=self.options)
        if indexed:
            index(self.plain)
        sharding: Any = {"unsharded": True} if buckets is None else {"bucket": ("id", buckets)}
        table = lancewal.initialize(self.uri, **sharding, storage_options=self.options)
        for number in range(sstables):
            with table.writer() as writer:
                writer.put(rows(first + 10 * number, 20))
            table.flush()
        crashed = table.writer()
        crashed.put(rows(9000, 5))
        for shard_writer in [each for (uri, _), each in open_writers().items() if uri == self.uri]:
            abandon(shard_writer)
        del crashed, shard_writer
        proxy.set(latency=0.03)

    def opened(self, **options: Any) -> Table:
        """As another process would see it."""
        opened._handles.clear()
        return lancewal.open(self.uri, self.options, **options)

    def recorded(self, work: Callable[[], object]) -> Recording:
        with self.proxy.recording() as recording:
            work()
        return recording

    def warm(self, work: Callable[[], object]) -> Recording:
        """The shallowest of several: on a busy machine requests made side by side may not overlap."""
        recordings = []
        for latency in (0.03, 0.06, 0.12):
            self.proxy.set(latency=latency)
            recordings.append(self.recorded(work))
        return min(recordings, key=lambda recording: recording.depth)


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with Proxy(s3.endpoint) as proxy:
        yield proxy


def test_a_warm_lookup_of_a_fresh_key_is_two_round_trips(s3: S3Server, proxy: Proxy) -> None:
    far = Far(s3, proxy, sstables=2)
    table = far.opened()
    assert table.lookup([9000]).found.all()
    warm = far.warm(lambda: table.lookup([9000]))
    assert warm.depth <= 2
    assert len(warm.requests) <= 7


@pytest.mark.parametrize("indexed", [True, False])
def test_a_warm_lookup_of_a_key_in_the_base_is_two_round_trips(
    s3: S3Server, proxy: Proxy, indexed: bool
) -> None:
    far = Far(s3, proxy, sstables=2, indexed=indexed)
    table = far.opened()
    for _ in range(2):
        assert table.lookup([7]).found.all()
    warm = far.warm(lambda: table.lookup([7]))
    assert warm.depth <= 2
    assert len(warm.requests) <= 8


def test_what_the_base_said_of_a_key_counts_only_if_it_is_still_the_newest_version(
    s3: S3Server, proxy: Proxy
) -> None:
    far = Far(s3, proxy, sstables=1, indexed=True)
    proxy.set(latency=0.0)
    table, other = far.opened(), lancewal.open(far.uri, far.options)
    assert table.lookup([7]).table["text"].to_pylist() == ["word7"]
    changed = rows(7, 1).set_column(2, "text", pa.array(["changed"]))
    with other.writer() as writer:
        writer.put(changed)
    other.compact()
    assert table.lookup([7]).table["text"].to_pylist() == ["changed"]
    assert table.lookup([7], columns=["id"]).table.num_columns == 1
    with pytest.raises(InvalidInputError):
        table.lookup([7], columns=["nothing"])


def test_a_warm_search_asks_the_base_once_for_enough_rows_though_newer_ones_hide_the_nearest(
    s3: S3Server, proxy: Proxy
) -> None:
    # The 40 rows of the base that are nearest are hidden.
    far = Far(s3, proxy, sstables=3, indexed=True, first=0)
    table = far.opened()

    def ours() -> object:
        return table.vector_search("vector", QUERY, 5)

    def plain() -> object:
        far.plain.checkout_latest()
        return far.plain.to_table(nearest={"column": "vector", "q": QUERY, "k": 5})

    for _ in range(2):
        ours()
        plain()
    assert far.warm(ours).depth <= far.warm(plain).depth + 3


def test_a_writer_with_three_indexes_opens_and_puts_in_six_round_trips(s3: S3Server, proxy: Proxy) -> None:
    options = {**s3.storage_options, "aws_endpoint": proxy.endpoint}
    depths = []
    for latency in (0.03, 0.06, 0.12):
        # A table that no writer has opened yet, as another process finds it.
        where = s3.uri(f"{uuid.uuid4().hex}/table")
        proxy.set(latency=0.0)
        index(lance.write_dataset(rows(0, 500), where, storage_options=options))
        lancewal.initialize(where, unsharded=True, storage_options=options)
        table = lancewal.open(where, options)
        proxy.set(latency=latency)
        with proxy.recording() as recording:
            writer = table.writer()
            writer.put(rows(0, 1))
        proxy.set(latency=0.0)
        writer.close()
        depths.append(recording.depth)
        of_indexes = [each.path for each in recording.requests if "_indices" in each.path]
        assert {path.rsplit("/")[-1] for path in of_indexes} == {"metadata.lance"}
    assert min(depths) <= 6


def test_warm_scans_and_searches_are_three_round_trips_beyond_plain_lance(s3: S3Server, proxy: Proxy) -> None:
    far = Far(s3, proxy, sstables=8)
    table = far.opened()
    for ours, plain in (
        (lambda: table.scan().to_table(), lambda: far.plain.to_table()),
        (table.count_rows, lambda: far.plain.to_table(columns=["id"])),
        (
            lambda: table.vector_search("vector", QUERY, 5),
            lambda: far.plain.to_table(nearest={"column": "vector", "q": QUERY, "k": 5}),
        ),
    ):
        ours()
        plain()
        assert far.warm(ours).depth <= far.warm(plain).depth + 3


def test_a_cold_read_opens_all_sstables_at_once(s3: S3Server, proxy: Proxy) -> None:
    far = Far(s3, proxy, sstables=24)
    # Long enough for many threads to begin before the first request ends; again if the machine is busy.
    for latency in (0.25, 0.5, 1.0):
        table = far.opened()
        proxy.set(latency=latency)
        depth = far.recorded(lambda: table.scan().to_table()).depth  # noqa: B023
        if depth <= 13:
            break
    assert depth <= 13


def test_the_first_lookup_of_a_key_touches_its_shard_alone(s3: S3Server, proxy: Proxy) -> None:
    far = Far(s3, proxy, sstables=1, buckets=6)
    for table in (far.opened(), far.opened()):
        shard = str(table.shard_for(9000))
        for _ in range(2):
            asked = far.recorded(lambda: table.lookup([9000])).requests  # noqa: B023
            shards = {part for each in asked for part in each.path.split("/") if _is_shard(part)}
            assert shards == {shard}


def _is_shard(part: str) -> bool:
    return len(part) == 36 and part.count("-") == 4


def test_within_its_staleness_a_read_asks_storage_for_nothing(s3: S3Server, proxy: Proxy) -> None:
    far = Far(s3, proxy, sstables=1)
    table = far.opened(max_staleness=timedelta(hours=1))
    assert table.lookup([9000]).found.all()
    assert far.recorded(lambda: table.lookup([9000])).requests == []
    with lancewal.open(far.uri, far.options).writer() as writer:
        writer.put(rows(9900, 1))
        assert table.lookup([9900]).found.all(), "the rows of a writer in this process are seen at once"
        assert far.recorded(lambda: table.lookup([9900])).requests == []
        writer.put(rows(9901, 1))
        assert table.lookup([9901]).found.all()
    assert table.lookup([9901]).found.all(), "also when it has flushed and closed"


def test_an_idle_poll_of_the_feed_is_one_request_a_shard(s3: S3Server, proxy: Proxy) -> None:
    far = Far(s3, proxy, sstables=1, buckets=6)
    feed = ChangeFeed.open(far.uri, far.options)
    place = feed.latest()
    poll = far.warm(lambda: feed.advance(place))
    assert poll.depth == 1
    assert dict(poll.kinds) == {"GET": 6, "LIST": 1}
    with lancewal.open(far.uri, far.options).writer() as writer:
        writer.put(rows(9950, 1))
        assert feed.advance(place) != place


@pytest.mark.parametrize("value", [-1, True, "5", float("nan"), timedelta(seconds=-1)])
def test_a_staleness_that_is_no_duration_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="max_staleness"):
        lancewal.open("memory://none", max_staleness=value)
