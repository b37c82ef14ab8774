"""Local disks: what is synced and in which order, what a kill leaves, and how the disk's errors look."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from lancewal.errors import OutcomeUnknownError, StorageError
from lancewal.storage import ObjectStore, PutOutcome
from tests.real_faults.signals import InterruptAt

CREATED, EXISTS = PutOutcome.CREATED, PutOutcome.EXISTS


class Trace:
    """Records the system calls that durability depends on, with paths relative to a directory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
        self.steps: list[tuple[str, str]] = []
        self._base = str(base)
        real = {name: getattr(os, name) for name in ("fsync", "write", "link", "rename")}

        def fsync(file: int) -> None:
            self._note("sync", self._name(file))
            real["fsync"](file)

        def write(file: int, data: Any) -> int:
            self._note("write", self._name(file))
            return int(real["write"](file, data))

        def link(source: str, target: str, **kwargs: Any) -> None:
            self._note("link", target)
            real["link"](source, target, **kwargs)

        def rename(source: str, target: str) -> None:
            self._note("rename", target)
            real["rename"](source, target)

        for replacement in (fsync, write, link, rename):
            monkeypatch.setattr(os, replacement.__name__, replacement)

    def _note(self, what: str, path: str) -> None:
        self.steps.append((what, os.path.relpath(path, self._base)))

    def _name(self, file: int) -> str:
        path = os.readlink(f"/proc/self/fd/{file}")
        nameless = path.endswith("(deleted)") or os.path.basename(path).startswith(".")
        return os.path.join(self._base, "file") if nameless else path

    def take(self) -> list[tuple[str, str]]:
        steps, self.steps = self.steps, []
        return steps


@pytest.fixture(params=["nameless", "staging"])
def file_system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to create: with nameless files, and for file systems that have none."""
    if request.param == "staging":
        monkeypatch.delattr(os, "O_TMPFILE")
    return str(request.param)


class TestDurability:
    def test_the_file_is_synced_before_its_name_and_the_directory_after_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str
    ) -> None:
        (tmp_path / "wal").mkdir()
        store = ObjectStore.from_uri(tmp_path)
        store.put_if_absent("wal/0", b"x")
        trace = Trace(monkeypatch, tmp_path)
        assert store.put_if_absent("wal/1", b"x") is CREATED
        assert trace.take() == [("write", "file"), ("sync", "file"), ("link", "wal/1"), ("sync", "wal")]

    def test_new_directories_are_synced_up_to_the_root(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = ObjectStore.from_uri(tmp_path / "new" / "table")
        trace = Trace(monkeypatch, tmp_path)
        store.put_if_absent("a/b/1", b"x")
        steps = trace.take()
        above = [("sync", "."), ("sync", "new")]
        assert steps[:2] == above
        assert steps[2:] == [
            ("write", "file"),
            ("sync", "file"),
            ("link", "new/table/a/b/1"),
            ("sync", "new/table/a/b"),
            ("sync", "new/table/a"),
            ("sync", "new/table"),
        ]
        store.put_if_absent("a/b/2", b"x")
        assert trace.take()[-1] == ("sync", "new/table/a/b")

    def test_directories_that_somebody_else_made_are_synced_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Their maker (another thread, another process, Lance) may not have synced them yet.
        (tmp_path / "a" / "b").mkdir(parents=True)
        store = ObjectStore.from_uri(tmp_path)
        trace = Trace(monkeypatch, tmp_path)
        store.put_if_absent("a/b/1", b"x")
        assert trace.take()[-3:] == [("sync", "a/b"), ("sync", "a"), ("sync", ".")]

    def test_a_directory_made_again_is_synced_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = ObjectStore.from_uri(tmp_path)
        store.put_if_absent("a/b/1", b"x")
        assert store.delete_prefix("a") == 1
        trace = Trace(monkeypatch, tmp_path)
        assert store.put_if_absent("a/b/1", b"x") is CREATED
        assert trace.take()[-3:] == [("sync", "a/b"), ("sync", "a"), ("sync", ".")]

    def test_a_directory_that_somebody_else_made_again_is_synced_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = ObjectStore.from_uri(tmp_path)
        store.put_if_absent("a/b/1", b"x")
        # Renamed, not deleted, so that the new one cannot get the old one's inode.
        os.rename(tmp_path / "a", tmp_path / "old")
        (tmp_path / "a" / "b").mkdir(parents=True)
        trace = Trace(monkeypatch, tmp_path)
        assert store.put_if_absent("a/b/1", b"x") is CREATED
        assert trace.take()[-3:] == [("sync", "a/b"), ("sync", "a"), ("sync", ".")]

    def test_put_syncs_before_and_after_the_rename(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = ObjectStore.from_uri(tmp_path)
        trace = Trace(monkeypatch, tmp_path)
        store.put("hint", b"x")
        assert trace.take() == [("write", "file"), ("sync", "file"), ("rename", "hint"), ("sync", ".")]
        store.put("hint", b"x", durable=False)
        assert trace.take() == [("write", "file"), ("rename", "hint")]

    def test_nothing_is_synced_without_fsync(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = ObjectStore.from_uri(tmp_path / "new", fsync=False)
        trace = Trace(monkeypatch, tmp_path)
        store.put_if_absent("a/b", b"x")
        store.put_if_absent("a/b", b"x")
        store.put("a/c", b"x")
        assert [what for what, _ in trace.take()] == ["write", "link", "write", "link", "write", "rename"]

    def test_our_own_bytes_are_synced_before_they_count_as_created(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # The first attempt linked the name and failed to sync the directory.
        store = ObjectStore.from_uri(tmp_path)
        real = os.fsync
        failing = [False, True]

        def fsync(file: int) -> None:
            if failing and failing.pop(0):
                raise OSError(errno.EIO, "input/output error")
            real(file)

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(OutcomeUnknownError, match="EIO"):
            store.put_if_absent("entry", b"mine")
        trace = Trace(monkeypatch, tmp_path)
        assert store.put_if_absent("entry", b"mine") is CREATED
        assert trace.take()[-2:] == [("sync", "entry"), ("sync", ".")]

    def test_an_object_whose_name_was_not_synced_may_or_may_not_be_there_later(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str
    ) -> None:
        store = ObjectStore.from_uri(tmp_path)
        real = os.fsync

        def fsync(file: int) -> None:
            if stat.S_ISDIR(os.fstat(file).st_mode):
                raise OSError(errno.EIO, "input/output error")
            real(file)

        writes: list[Callable[[], object]] = [
            lambda: store.put_if_absent("created", b"x"),
            lambda: store.put("replaced", b"x"),
            lambda: store.put_from("streamed", lambda: iter([b"x"])),
        ]
        monkeypatch.setattr(os, "fsync", fsync)
        for write in writes:
            with pytest.raises(OutcomeUnknownError, match=r"EIO.*power cut"):
                write()
        assert [info.path for info in store.list()] == ["created", "replaced", "streamed"]

    def test_a_file_whose_sync_failed_never_gets_its_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str
    ) -> None:
        store = ObjectStore.from_uri(tmp_path)

        def fsync(file: int) -> None:
            raise OSError(errno.EIO, "input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            for write in (store.put_if_absent, store.put):
                with pytest.raises(StorageError, match="EIO"):
                    write("entry", b"x")
        assert os.listdir(tmp_path) == []


class TestNothingHalfWritten:
    def test_no_staging_file_after_success_or_a_lost_race(self, tmp_path: Path, file_system: str) -> None:
        store = ObjectStore.from_uri(tmp_path, fsync=False)
        assert store.put_if_absent("a/x", b"1") is CREATED
        assert store.put_if_absent("a/x", b"2") is EXISTS
        store.put("a/y", b"3")
        assert sorted(os.listdir(tmp_path / "a")) == ["x", "y"]

    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
    def test_a_file_system_that_refuses_nameless_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        real = os.open

        def refusing(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(code, os.strerror(code))
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refusing)
        store = ObjectStore.from_uri(tmp_path)
        assert store.put_if_absent("a/x", b"1") is CREATED
        assert store.put_if_absent("a/x", b"2") is EXISTS
        assert os.listdir(tmp_path / "a") == ["x"]

    def test_a_file_system_that_cannot_link_nameless_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.link

        def refusing(source: str, target: str, **kwargs: Any) -> None:
            if source.startswith("/proc/"):
                raise OSError(errno.EXDEV, "cross-device link")
            real(source, target, **kwargs)

        monkeypatch.setattr(os, "link", refusing)
        store = ObjectStore.from_uri(tmp_path)
        assert store.put_if_absent("a/x", b"1") is CREATED
        assert os.listdir(tmp_path / "a") == ["x"]

    def test_writes_that_the_system_cuts_short_are_completed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str
    ) -> None:
        real = os.write
        monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:1000]))
        store = ObjectStore.from_uri(tmp_path, fsync=False)
        data = os.urandom(12_345)
        store.put_if_absent("a", data)
        store.put("b", data)
        assert store.get("a") == store.get("b") == data

    def test_reads_that_the_system_cuts_short_are_completed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = ObjectStore.from_uri(tmp_path, fsync=False)
        data = os.urandom(12_345)
        store.put("a", data)
        real = os.pread
        monkeypatch.setattr(os, "pread", lambda file, size, start: real(file, min(size, 1000), start))
        assert store.get("a") == data
        assert store.get_range("a", 10, 5000) == data[10:5010]

    def test_names_of_lance_and_object_store_are_not_listed(self, local_store: ObjectStore) -> None:
        local_store.put("wal/entry.arrow", b"x")
        staging = [
            ".entry.arrow.0f1e.tmp",
            ".tmpQ1w2E3",
            "entry.binpb.tmp.77aa",
            "entry.arrow#1",
            "e.tmp.77aa#12",
        ]
        directory = local_store.local_path("wal")
        assert directory is not None
        for name in staging:
            Path(directory, name).write_bytes(b"half")
        assert [info.path for info in local_store.list()] == ["wal/entry.arrow"]
        assert [info.path for info in local_store.list_staging()] == sorted(f"wal/{name}" for name in staging)
        local_store.delete(f"wal/{staging[0]}")
        assert len(local_store.list_staging("wal")) == len(staging) - 1
        assert local_store.delete_prefix("wal") == len(staging)
        assert not os.path.exists(directory)

    KILLED = """
import os, sys, time
root, operation, nameless = sys.argv[1:]
if nameless == "False":
    del os.O_TMPFILE
def hang(*args, **kwargs):
    print("staged", flush=True)
    time.sleep(60)
os.link = os.rename = hang
from lancewal.storage import ObjectStore
getattr(ObjectStore.from_uri(root), operation)("wal/entry.arrow", b"x" * 50_000)
"""

    @pytest.mark.parametrize(
        ("operation", "nameless", "left"),
        [("put_if_absent", True, 0), ("put_if_absent", False, 1), ("put", True, 1)],
    )
    def test_a_killed_writer_leaves_nothing_that_is_listed(
        self, tmp_path: Path, operation: str, nameless: bool, left: int
    ) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", self.KILLED, str(tmp_path), operation, str(nameless)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"staged\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = ObjectStore.from_uri(tmp_path)
        assert store.list() == []
        assert len(os.listdir(tmp_path / "wal")) == left
        assert len(store.list_staging()) == left
        assert store.put_if_absent("wal/entry.arrow", b"whole") is CREATED
        assert [info.path for info in store.list()] == ["wal/entry.arrow"]


def failing(code: int) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


class TestErrors:
    @pytest.mark.parametrize(
        ("code", "text"),
        [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "quota"), (errno.EIO, "EIO")],
    )
    def test_a_full_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str, code: int, text: str
    ) -> None:
        store = ObjectStore.from_uri(tmp_path)
        store.put("wal/old", b"kept")
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", failing(code))
            for write in (store.put_if_absent, store.put):
                with pytest.raises(StorageError, match=text) as caught:
                    write("wal/new", b"x")
                assert isinstance(caught.value.__cause__, OSError)
                assert "wal/new" in str(caught.value)
        assert os.listdir(tmp_path / "wal") == ["old"]

    @pytest.mark.parametrize(
        ("code", "text"),
        [(errno.EACCES, "permission denied"), (errno.EROFS, "read-only"), (errno.EMFILE, "ulimit")],
    )
    def test_a_directory_that_cannot_be_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str
    ) -> None:
        store = ObjectStore.from_uri(tmp_path)
        store.put("a", b"x")
        for name in ("open", "scandir", "lstat", "unlink"):
            monkeypatch.setattr(os, name, failing(code))
        calls: list[Callable[[], object]] = [
            lambda: store.put_if_absent("b", b"x"),
            lambda: store.put("b", b"x"),
            lambda: store.get("a"),
            lambda: store.head("a"),
            lambda: store.list(),
            lambda: store.list_directories(),
            lambda: store.list_staging(),
            lambda: store.delete("a"),
            lambda: store.delete_prefix("x"),
        ]
        for call in calls:
            with pytest.raises(StorageError, match=text):
                call()

    def test_a_file_in_the_place_of_a_directory(self, local_store: ObjectStore) -> None:
        local_store.put("a", b"x")
        for path in ("a/b", "a/b/c"):
            for write in (local_store.put_if_absent, local_store.put):
                with pytest.raises(StorageError, match="directory"):
                    write(path, b"x")

    def test_a_directory_in_the_place_of_a_file(self, local_store: ObjectStore) -> None:
        local_store.put("a/b", b"x")
        with pytest.raises(StorageError, match="directory"):
            local_store.put("a", b"x")
        with pytest.raises(StorageError, match="directory"):
            local_store.delete("a")
        assert [info.path for info in local_store.list()] == ["a/b"]
        assert local_store.list_staging() == []

    def test_a_name_that_is_too_long(self, local_store: ObjectStore) -> None:
        with pytest.raises(StorageError, match="too long"):
            local_store.put_if_absent("x" * 300, b"x")

    def test_a_directory_that_vanishes_under_the_writer_is_made_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str
    ) -> None:
        store = ObjectStore.from_uri(tmp_path)
        real = os.link
        removals = [1, 2]

        def link(source: str, target: str, **kwargs: Any) -> None:
            if removals:
                removals.pop()
                for name in os.listdir(tmp_path / "wal"):
                    os.unlink(tmp_path / "wal" / name)
                os.rmdir(tmp_path / "wal")
            real(source, target, **kwargs)

        monkeypatch.setattr(os, "link", link)
        assert store.put_if_absent("wal/1", b"x") is CREATED
        assert store.get("wal/1") == b"x"

    def test_a_directory_that_keeps_vanishing_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "mkdir", lambda path: None)
        store = ObjectStore("x", ObjectStore.from_uri(tmp_path)._backend, sleep=lambda seconds: None)
        for write in (store.put_if_absent, store.put):
            with pytest.raises(StorageError, match="vanishing"):
                write("wal/1", b"x")

    def test_deleting_a_directory_does_not_follow_links(self, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "kept").write_bytes(b"x")
        store = ObjectStore.from_uri(tmp_path / "table", fsync=False)
        store.put("shard/a", b"x")
        os.symlink(outside, tmp_path / "table" / "shard" / "link")
        assert store.delete_prefix("shard") == 2
        assert (outside / "kept").exists()
        assert store.list_directories() == []


@pytest.mark.parametrize("call", ["delete", "list", "delete_prefix", "get", "put_if_absent", "put"])
def test_ctrl_c_had_a_descriptor_closed_twice(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time it may be another thread's file."""
    opened: set[int] = set()
    closed_twice: list[int] = []
    real_open, real_close = os.open, os.close

    def open_(*arguments: Any, **how: Any) -> int:
        file = real_open(*arguments, **how)
        opened.add(file)
        return file

    def close(file: int) -> None:
        if file not in opened:
            closed_twice.append(file)
            return
        opened.discard(file)
        real_close(file)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "close", close)
    for nth in itertools.count(1):
        store = ObjectStore.from_uri(tmp_path / str(nth), fsync=False)
        store.put("a/b/c/d", b"x")
        arguments = {"put_if_absent": ("a/b/c/e", b"x"), "put": ("a/b/c/d", b"y")}
        given = arguments.get(call, ("a/b/c" if call.startswith(("list", "delete_p")) else "a/b/c/d",))
        interrupt = InterruptAt(nth)
        with suppress(KeyboardInterrupt), interrupt:
            getattr(store, call)(*given)
        assert closed_twice == [], interrupt.where
        if not interrupt.raised:
            break
    assert nth > 10
    for file in list(opened):
        close(file)


def test_a_root_that_another_thread_made_meanwhile_was_taken_for_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore.from_uri(tmp_path / "table")
    real, meanwhile = os.stat, ["other"]

    def stat(path: Any, **how: Any) -> os.stat_result:
        try:
            return real(path, **how)
        finally:
            if path == store.uri and meanwhile:
                store.put(meanwhile.pop(), b"x")

    monkeypatch.setattr(os, "stat", stat)
    store.put("wal/1", b"x")
    assert [each.path for each in store.list()] == ["other", "wal/1"]


class TestPaths:
    def test_a_relative_path_stays_where_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        store = ObjectStore.from_uri("some/table")
        monkeypatch.chdir("/")
        store.put("a", b"x")
        assert (tmp_path / "some/table/a").read_bytes() == b"x"
        assert store.uri == str(tmp_path / "some/table")
        assert store.is_local
        assert store.local_path("a/b") == str(tmp_path / "some/table/a/b")

    @pytest.mark.parametrize(
        "spelling", ["{path}", "{path}/", "file://{path}", "file:{path}", "file://localhost{path}"]
    )
    def test_spellings_of_one_directory(self, tmp_path: Path, spelling: str) -> None:
        assert ObjectStore.from_uri(spelling.format(path=tmp_path)).uri == str(tmp_path)

    def test_the_home_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        assert ObjectStore.from_uri("~/table").uri == str(tmp_path / "table")

    @pytest.mark.parametrize("name", ["plain", "with space", "per%20cent", "hash#1", "ünïcode"])
    @pytest.mark.parametrize("scheme", ["", "file://"])
    def test_pylance_finds_the_same_directory(self, tmp_path: Path, name: str, scheme: str) -> None:
        uri = f"{scheme}{tmp_path}/{name.replace('#', '%23') if scheme else name}"
        lance.write_dataset(pa.table({"id": [1]}), uri)
        store = ObjectStore.from_uri(uri)
        assert "_versions" in store.list_directories()
        assert lance.dataset(store.uri).count_rows() == 1


def test_a_create_was_denied_for_an_error_that_came_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was synced and had its name; then the file system failed to close it."""
    store = ObjectStore.from_uri(tmp_path / "t")
    store.put_if_absent("a/before", b"makes the directory")
    close, linked = os.close, []
    link = os.link

    def failing_close(file: int) -> None:
        close(file)
        if linked:
            linked.clear()
            raise OSError(errno.EIO, "late error")

    def noted_link(*args: Any, **kwargs: Any) -> None:
        link(*args, **kwargs)
        linked.append(1)

    monkeypatch.setattr(os, "link", noted_link)
    monkeypatch.setattr(os, "close", failing_close)
    assert store.put_if_absent("a/b", b"mine") is CREATED
    assert not linked
    monkeypatch.undo()
    assert store.get("a/b") == b"mine"
