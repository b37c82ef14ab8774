"""What every kind of storage does alike, and what ObjectStore adds on top of it."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import obstore
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.errors import InvalidInputError, OutcomeUnknownError, StorageError
from lancewal.storage import ObjectStore, PutOutcome
from lancewal.storage.backend import Backend, TransientError
from lancewal.storage.local import LocalBackend
from tests.faults import FaultyBackend, FaultyStore

CREATED, EXISTS = PutOutcome.CREATED, PutOutcome.EXISTS


def paths(store: ObjectStore, prefix: str = "") -> list[str]:
    return [info.path for info in store.list(prefix)]


class TestObjects:
    @pytest.mark.parametrize(
        "data",
        [
            b"bytes",
            b"",
            bytearray(b"array"),
            memoryview(b"__view__")[2:6],
            pa.py_buffer(b"arrow"),
            os.urandom(300_000),
        ],
        ids=["bytes", "empty", "bytearray", "memoryview", "arrow", "large"],
    )
    def test_bytes_come_back_as_they_were_put(self, any_store: ObjectStore, data: Any) -> None:
        assert any_store.put_if_absent("a/b/created", data) is CREATED
        any_store.put("a/b/put", data)
        assert any_store.get("a/b/created") == any_store.get("a/b/put") == bytes(data)
        assert isinstance(any_store.get("a/b/put"), bytes)

    @pytest.mark.parametrize("other", [b"other", b"third one"], ids=["same size", "other size"])
    def test_a_taken_path_keeps_its_first_bytes(self, any_store: ObjectStore, other: bytes) -> None:
        assert any_store.put_if_absent("a/b", b"first") is CREATED
        assert any_store.put_if_absent("a/b", other) is EXISTS
        assert any_store.get("a/b") == b"first"

    def test_put_replaces(self, any_store: ObjectStore) -> None:
        any_store.put("hint", b"a longer first version")
        any_store.put("hint", b"second", durable=False)
        assert any_store.get("hint") == b"second"

    def test_a_missing_object(self, any_store: ObjectStore) -> None:
        any_store.put("a/b", b"x")
        for missing in ("nothing", "a", "a/b/c", "a/bb"):
            assert any_store.head(missing) is None
            with pytest.raises(FileNotFoundError, match=missing):
                any_store.get(missing)
            with pytest.raises(FileNotFoundError):
                any_store.get_range(missing, 0, 1)
            if missing != "a":
                any_store.delete(missing)
        assert any_store.get("a/b") == b"x"

    def test_ranges_end_where_the_object_ends(self, any_store: ObjectStore) -> None:
        any_store.put("x", b"0123456789")
        assert any_store.get_range("x", 2, 3) == b"234"
        assert any_store.get_range("x", 8, 100) == b"89"
        assert any_store.get_range("x", 10, 1) == b""
        assert any_store.get_range("x", 1000, 5) == b""
        assert any_store.get_range("x", 0, 0) == b""
        with pytest.raises(InvalidInputError):
            any_store.get_range("x", -1, 5)

    def test_head_tells_size_and_time(self, any_store: ObjectStore) -> None:
        any_store.put("a/b", b"12345")
        info = any_store.head("a/b")
        assert info is not None
        assert (info.path, info.size) == ("a/b", 5)
        assert info.modified.utcoffset() == timedelta(0)
        listed = any_store.list("a")[0]
        assert (listed.path, listed.size) == ("a/b", 5)
        assert abs(listed.modified - info.modified) < timedelta(seconds=1.1)

    def test_delete(self, any_store: ObjectStore) -> None:
        any_store.put("a/b", b"x")
        any_store.delete("a/b")
        any_store.delete("a/b")
        assert any_store.head("a/b") is None
        assert any_store.put_if_absent("a/b", b"y") is CREATED

    def test_many_are_deleted_and_missing_ones_are_fine(self, any_store: ObjectStore) -> None:
        for path in ("a/1", "a/2", "b/3", "b/33"):
            any_store.put(path, b"x")
        any_store.delete_many(["b/3", "a/2", "a/missing", "no/such"])
        assert paths(any_store) == ["a/1", "b/33"]
        any_store.delete_many(["b/3", "a/2"])
        any_store.delete_many([])
        with pytest.raises(InvalidInputError):
            any_store.delete_many(["a/1", "../a"])
        assert paths(any_store) == ["a/1", "b/33"]

    def test_the_thousands_of_a_long_list_follow_each_other(self, s3_store: ObjectStore) -> None:
        store, backend, _ = faulty(s3_store._backend)
        names = [f"w/{number:04}" for number in range(2100)]
        for name in names:
            store.put(name, b"")
        backend.faults.fail("delete_many", nth=3, error=StorageError("refused"))
        with pytest.raises(StorageError):
            store.delete_many(names)
        assert paths(store) == names[2000:]
        assert [len(call.path.split()) for call in backend.faults.calls if call.kind == "delete_many"] == [
            1000,
            1000,
            100,
        ]

    def test_a_request_that_was_carried_out_partly_is_made_again(self, memory_store: ObjectStore) -> None:
        store, backend, _ = faulty(memory_store._backend)
        names = [f"w/{number}" for number in range(5)]
        for name in names:
            store.put(name, b"")
        backend.faults.before("delete_many", lambda: memory_store.delete_many(names[1:4:2]))
        backend.faults.fail("delete_many", error=TransientError("some were not deleted"))
        store.delete_many(names)
        assert paths(store) == []

    def test_a_store_that_minds_missing_objects_deletes_the_others(
        self, memory_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Azure and Google Cloud say that one is missing, and leave those that come after it."""
        whole = obstore.delete

        def minds(store: object, keys: str | list[str]) -> None:
            if not isinstance(keys, str):
                raise FileNotFoundError(keys[0])
            whole(store, keys)  # type: ignore[arg-type]

        memory_store.put("a/1", b"x")
        monkeypatch.setattr(obstore, "delete", minds)
        memory_store.delete_many(["a/0", "a/1"])
        assert paths(memory_store) == []

    def test_delete_prefix_takes_a_directory_and_nothing_beside_it(self, any_store: ObjectStore) -> None:
        for path in ("a/b/1", "a/b/c/d/2", "a/bc", "a/b2/3", "b/4"):
            any_store.put(path, b"x")
        assert any_store.delete_prefix("a/b") == 2
        assert paths(any_store) == ["a/b2/3", "a/bc", "b/4"]
        assert any_store.list_directories("a") == ["b2"]
        assert any_store.delete_prefix("a/b/") == 0
        for root in ("", "/"):
            with pytest.raises(InvalidInputError):
                any_store.delete_prefix(root)
        assert len(paths(any_store)) == 3


class TestListing:
    def test_sorted_and_by_directory(self, any_store: ObjectStore) -> None:
        for path in ("a/b/z", "a/b/c/y", "a/b/a", "a/bc", "a/b.x", "ab/1", "top"):
            any_store.put(path, b"x")
        assert paths(any_store, "a/b") == paths(any_store, "a/b/") == ["a/b/a", "a/b/c/y", "a/b/z"]
        assert paths(any_store) == ["a/b.x", "a/b/a", "a/b/c/y", "a/b/z", "a/bc", "ab/1", "top"]
        assert any_store.list_directories() == ["a", "ab"]
        assert any_store.list_directories("a") == ["b"]
        assert any_store.list_directories("a/b/") == ["c"]

    def test_an_object_is_no_directory(self, any_store: ObjectStore) -> None:
        any_store.put("a/b", b"x")
        assert any_store.list("a/b") == []
        assert any_store.list_directories("a/b") == []

    def test_a_missing_directory_is_empty(self, any_store: ObjectStore) -> None:
        assert any_store.list() == []
        assert any_store.list("no/such") == []
        assert any_store.list_directories("no") == []
        assert any_store.list_staging() == []
        assert any_store.delete_prefix("no") == 0

    def test_more_than_one_page(self, s3_store: ObjectStore, memory_store: ObjectStore) -> None:
        names = [f"w/{number:04}" for number in range(1100)]
        for store in (s3_store, memory_store):
            for name in names:
                store.put(name, b"")
            assert paths(store, "w") == names
        assert s3_store.delete_prefix("w") == 1100
        assert s3_store.list() == []

    def test_a_prefix_of_the_table_does_not_leak(self) -> None:
        name = uuid.uuid4().hex
        outer = ObjectStore.from_uri(f"memory://{name}")
        inner = ObjectStore.from_uri(f"memory://{name}/deep/table")
        sibling = ObjectStore.from_uri(f"memory://{name}/deep/table2")
        inner.put("a/x", b"1")
        sibling.put("b", b"2")
        assert paths(inner) == ["a/x"]
        assert inner.list_directories() == ["a"]
        assert paths(outer) == ["deep/table/a/x", "deep/table2/b"]

    segment = st.sampled_from(["a", "b", "ab", "a.b", "c d", "é", "_x", "0"])
    trees = st.sets(st.lists(segment, min_size=1, max_size=4).map("/".join), max_size=12)

    @settings(max_examples=40)
    @given(tree=trees, prefix=st.lists(segment, max_size=2).map("/".join))
    def test_every_kind_lists_the_same(
        self, tmp_path_factory: pytest.TempPathFactory, tree: set[str], prefix: str
    ) -> None:
        # A file and a directory of one name can only live side by side in an object store.
        tree = {path for path in tree if not any(other.startswith(f"{path}/") for other in tree)}
        below = f"{prefix}/" if prefix else ""
        expected = sorted(path for path in tree if path.startswith(below))
        children = {path[len(below) :] for path in expected}
        directories = sorted({child.split("/")[0] for child in children if "/" in child})
        for store in (
            ObjectStore.from_uri(f"memory://{uuid.uuid4().hex}/t"),
            ObjectStore.from_uri(tmp_path_factory.mktemp("tree"), fsync=False),
        ):
            for path in tree:
                assert store.put_if_absent(path, b"x") is CREATED
            assert paths(store, prefix) == expected
            assert store.list_directories(prefix) == directories


class TestRefusals:
    @pytest.mark.parametrize(
        "path",
        [
            "",
            "/a",
            "a/",
            "a//b",
            "..",
            "../a",
            "a/../b",
            "a/..",
            ".",
            "./a",
            "a/./b",
            "a\\b",
            "a\0b",
            "a\nb",
            None,
            5,
        ],
    )
    def test_bad_paths(self, any_store: ObjectStore, path: Any) -> None:
        calls: list[Callable[[], object]] = [
            lambda: any_store.put_if_absent(path, b"x"),
            lambda: any_store.put(path, b"x"),
            lambda: any_store.get(path),
            lambda: any_store.get_range(path, 0, 1),
            lambda: any_store.head(path),
            lambda: any_store.delete(path),
            lambda: any_store.local_path(path),
        ]
        if path not in ("", "a/"):
            calls += [
                lambda: any_store.list(path),
                lambda: any_store.list_directories(path),
                lambda: any_store.list_staging(path),
                lambda: any_store.delete_prefix(path),
            ]
        for call in calls:
            with pytest.raises(InvalidInputError):
                call()
        assert any_store.list() == []

    @pytest.mark.parametrize("path", ["..a/b..c/...", "a/.hidden", "a b/ä"])
    def test_odd_but_good_paths(self, any_store: ObjectStore, path: str) -> None:
        any_store.put(path, b"x")
        assert paths(any_store) == [path]

    @pytest.mark.parametrize("name", [".x.arrow.1f.tmp", ".tmpAbC123", "x.binpb.tmp.0f1e", "x#1"])
    def test_names_of_half_written_files(self, any_store: ObjectStore, name: str) -> None:
        for write in (any_store.put_if_absent, any_store.put):
            with pytest.raises(InvalidInputError, match="half-written"):
                write(f"wal/{name}", b"x")

    @pytest.mark.parametrize("data", ["text", None, 5, memoryview(b"abcdef")[::2]])
    def test_what_is_not_bytes(self, any_store: ObjectStore, data: Any) -> None:
        for write in (any_store.put_if_absent, any_store.put):
            with pytest.raises(InvalidInputError):
                write("a", data)
        assert any_store.list() == []


class TestMemory:
    def test_one_name_is_one_store(self) -> None:
        name = uuid.uuid4().hex
        ObjectStore.from_uri(f"memory://{name}").put("a", b"1")
        assert ObjectStore.from_uri(f"memory://{name}/").get("a") == b"1"

    def test_two_names_never_share(self) -> None:
        first, second = (ObjectStore.from_uri(f"memory://{uuid.uuid4().hex}/same") for _ in range(2))
        first.put("a", b"1")
        assert second.list() == []


def faulty(inner: Backend, **kwargs: Any) -> tuple[ObjectStore, FaultyBackend, list[float]]:
    backend = FaultyBackend(inner)
    slept: list[float] = []
    store = ObjectStore("test://x", cast("Backend", backend), sleep=slept.append, **kwargs)
    return store, backend, slept


@pytest.fixture(params=["local", "memory"])
def inner(request: pytest.FixtureRequest, tmp_path: Path, memory_store: ObjectStore) -> Backend:
    return LocalBackend(str(tmp_path), fsync=True) if request.param == "local" else memory_store._backend


class TestRetries:
    def test_a_lost_reply_counts_as_created(self, inner: Backend) -> None:
        store, backend, slept = faulty(inner)
        backend.faults.fail("create", after=True, error=TransientError("timeout"))
        assert store.put_if_absent("a/b", b"with my write id") is CREATED
        assert backend.faults.count("create") == 2
        assert len(slept) == 1

    def test_an_earlier_call_of_ours_counts_as_created(self, inner: Backend) -> None:
        store, backend, _ = faulty(inner)
        backend.faults.fail("create", after=True, times=None, error=TransientError("timeout"))
        with pytest.raises(OutcomeUnknownError, match="gave up after 4 attempts"):
            store.put_if_absent("a/b", b"with my write id")
        backend.faults.clear()
        assert store.put_if_absent("a/b", b"with my write id") is CREATED

    @pytest.mark.parametrize("foreign", [b"theirs!", b"theirs, longer"])
    def test_a_rival_that_came_between_counts_as_exists(self, inner: Backend, foreign: bytes) -> None:
        store, backend, _ = faulty(inner)
        backend.faults.fail("create", error=TransientError("timeout"))
        backend.faults.before(
            "create", lambda: inner.replace("a/b", memoryview(foreign), durable=True), nth=2
        )
        assert store.put_if_absent("a/b", b"my data") is EXISTS
        assert store.get("a/b") == foreign

    def test_only_objects_of_one_size_are_read_to_compare_them(self, inner: Backend) -> None:
        store, backend, _ = faulty(inner)
        store.put("a", b"four")
        assert store.put_if_absent("a", b"longer than four") is EXISTS
        assert backend.faults.count("read") == 0
        assert store.put_if_absent("a", b"FOUR") is EXISTS
        assert backend.faults.count("read") == 1

    def test_exists_without_an_object_is_tried_again(self, inner: Backend) -> None:
        # S3 answers a create with a conflict while a rival's create is under way, and that may fail.
        store, backend, _ = faulty(inner)
        inner.replace("a/b", memoryview(b"rival"), durable=True)
        backend.faults.before("head", lambda: inner.delete("a/b"))
        assert store.put_if_absent("a/b", b"mine.") is CREATED
        assert store.get("a/b") == b"mine."

    def test_an_object_that_vanishes_while_compared_is_tried_again(self, inner: Backend) -> None:
        store, backend, _ = faulty(inner)
        inner.replace("a/b", memoryview(b"rival"), durable=True)
        backend.faults.before("read", lambda: inner.delete("a/b"))
        assert store.put_if_absent("a/b", b"mine.") is CREATED

    def test_every_operation_survives_three_failures(self, inner: Backend) -> None:
        store, backend, slept = faulty(inner)
        inner.replace("d/x", memoryview(b"x"), durable=True)
        calls: dict[str, Callable[[], object]] = {
            "create": lambda: store.put_if_absent("d/y", b"y"),
            "replace": lambda: store.put("d/x", b"x"),
            "read": lambda: store.get("d/x"),
            "read_range": lambda: store.get_range("d/x", 0, 1),
            "head": lambda: store.head("d/x"),
            "list": lambda: store.list("d"),
            "list_directories": lambda: store.list_directories(),
            "list_staging": lambda: store.list_staging(),
            "delete": lambda: store.delete("d/y"),
            "delete_many": lambda: store.delete_many(["d/y", "d/z"]),
            "delete_prefix": lambda: store.delete_prefix("d"),
        }
        for kind, call in calls.items():
            backend.faults.clear()
            slept.clear()
            backend.faults.fail(kind, times=3, error=TransientError("passing"))
            call()
            assert backend.faults.count(kind) == 4, kind
            assert len(slept) == 3
            assert sorted(slept) == slept
            assert sum(slept) < 1

    def test_a_failure_that_stays_becomes_a_storage_error(self, inner: Backend) -> None:
        store, backend, slept = faulty(inner)
        cause = ConnectionError("the origin")

        def failure() -> BaseException:
            error = TransientError("no answer")
            error.__cause__ = cause
            return error

        backend.faults.fail("read", times=None, error=failure)
        with pytest.raises(StorageError, match="no answer; gave up after 4 attempts") as caught:
            store.get("a")
        assert caught.value.__cause__ is cause
        assert backend.faults.count("read") == 4
        assert len(slept) == 3

    def test_of_a_write_that_was_never_answered_nobody_knows_whether_it_happened(
        self, inner: Backend
    ) -> None:
        store, backend, _ = faulty(inner)
        store.put("d/x", b"before")
        writes: dict[str, Callable[[], object]] = {
            "create": lambda: store.put_if_absent("d/new", b"x"),
            "replace": lambda: store.put("d/x", b"x"),
            "replace_from": lambda: store.put_from("d/x", lambda: iter([b"x"])),
            "delete": lambda: store.delete("d/x"),
            "delete_many": lambda: store.delete_many(["d/x"]),
            "delete_prefix": lambda: store.delete_prefix("d"),
        }
        for kind, write in writes.items():
            backend.faults.fail(kind, times=None, error=TransientError("no answer"))
            with pytest.raises(OutcomeUnknownError, match="no answer; gave up after 4 attempts"):
                write()

    def test_a_refusal_after_a_lost_reply_does_not_deny_the_write(self, inner: Backend) -> None:
        store, backend, _ = faulty(inner)
        backend.faults.fail("create", after=True, error=TransientError("timeout"))
        backend.faults.fail("create", nth=2, error=StorageError("the token has expired"))
        with pytest.raises(OutcomeUnknownError, match="token has expired; an earlier attempt may"):
            store.put_if_absent("a", b"mine")
        assert store.get("a") == b"mine"

    def test_an_object_that_cannot_be_compared_may_be_our_own(self, inner: Backend) -> None:
        # What lies below us retries too: its first request created the object, its second met it.
        store, backend, _ = faulty(inner)
        store.put("a", b"mine")
        backend.faults.fail("head", error=StorageError("no permission"))
        with pytest.raises(OutcomeUnknownError, match="perhaps by this very write: no permission"):
            store.put_if_absent("a", b"mine")

    def test_a_failure_for_good_is_not_tried_again(self, inner: Backend) -> None:
        store, backend, slept = faulty(inner)
        backend.faults.fail("create", error=StorageError("no permission"))
        with pytest.raises(StorageError, match="no permission"):
            store.put_if_absent("a", b"x")
        assert backend.faults.count("create") == 1
        assert slept == []


class TestObserver:
    def test_sees_every_call(self, any_store: ObjectStore) -> None:
        seen: list[tuple[str, float, BaseException | None]] = []
        any_store.observer = lambda *call: seen.append(call)
        any_store.put_if_absent("a/b", b"x")
        any_store.list("a")
        with pytest.raises(FileNotFoundError):
            any_store.get("missing")
        assert [kind for kind, _, _ in seen] == ["put_if_absent", "list", "get"]
        assert all(seconds > 0 for _, seconds, _ in seen)
        assert [type(error) for _, _, error in seen] == [type(None), type(None), FileNotFoundError]

    def test_comes_with_the_uri(self, tmp_path: Path) -> None:
        seen: list[str] = []
        store = ObjectStore.from_uri(tmp_path, observer=lambda kind, seconds, error: seen.append(kind))
        store.head("a")
        assert seen == ["head"]

    def test_a_broken_one_does_not_break_a_write(
        self, memory_store: ObjectStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(kind: str, seconds: float, error: BaseException | None) -> None:
            raise RuntimeError("metrics are down")

        memory_store.observer = broken
        with caplog.at_level(logging.ERROR):
            assert memory_store.put_if_absent("a", b"x") is CREATED
        assert "observer failed" in caplog.text


class TestFaultyStore:
    """The tool that other tests trust."""

    def test_fails_the_nth_call_before_or_after_its_effect(self, memory_store: ObjectStore) -> None:
        store = FaultyStore(memory_store)
        store.faults.fail("put_if_absent", nth=2)
        store.faults.fail("put_if_absent", nth=3, after=True)
        assert store.put_if_absent("a", b"1") is CREATED
        for path, error in (("b", StorageError), ("c", OutcomeUnknownError)):
            with pytest.raises(error, match="injected"):
                store.put_if_absent(path, b"2")
        assert [info.path for info in store.list()] == ["a", "c"]
        assert store.faults.count("put_if_absent") == 3

    def test_failures_may_be_bound_to_a_path(self, memory_store: ObjectStore) -> None:
        store = FaultyStore(memory_store)
        store.faults.fail(where="manifest", times=None, error=lambda: OSError("no"))
        store.put("wal/1", b"")
        for _ in range(2):
            with pytest.raises(OSError, match="no"):
                store.put("manifest/1", b"")
        assert store.list_directories() == ["wal"]

    def test_pauses_a_call_until_released(self, memory_store: ObjectStore) -> None:
        store = FaultyStore(memory_store)
        with store.faults.pause("put") as pause:
            thread = threading.Thread(target=store.put, args=("a", b"late"))
            thread.start()
            pause.wait_until_reached()
            assert memory_store.head("a") is None
            memory_store.put("a", b"early")
        thread.join()
        assert memory_store.get("a") == b"late"

    def test_covers_the_whole_interface(self, local_store: ObjectStore) -> None:
        public = {name for name in vars(ObjectStore) if not name.startswith("_")}
        assert public - set(vars(FaultyStore)) == {
            "check_place",
            "from_uri",
            "fsync",
            "is_local",
            "link",
            "local_path",
            "refuse_links",
        }
        store = FaultyStore(local_store)
        assert store.is_local
        assert store.local_path("a") == local_store.local_path("a")
        assert store.uri == local_store.uri
