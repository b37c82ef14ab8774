"""Of all that race for one path exactly one wins, and its bytes are what is stored."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter
from pathlib import Path

import pytest

from lancewal.storage import ObjectStore, PutOutcome
from tests.patience import PATIENCE
from tests.servers import S3Server

THREADS = 16
PROCESSES = 4
KEYS = 12


def payload(racer: int) -> bytes:
    # All of one size, so that a loser has to compare contents.
    return bytes([racer]) * 20_000


def race(store: ObjectStore, racer: int, barrier: threading.Barrier, wins: list[tuple[int, int]]) -> None:
    barrier.wait()
    for key in range(KEYS):
        if store.put_if_absent(f"race/{key}/entry", payload(racer)) is PutOutcome.CREATED:
            wins.append((key, racer))


def race_in_process(
    uri: str,
    options: dict[str, str],
    racer: int,
    barrier: threading.Barrier,
    answers: multiprocessing.Queue[object],
) -> None:
    wins: list[tuple[int, int]] = []
    store = ObjectStore.from_uri(uri, options)
    store.list()
    race(store, racer, barrier, wins)
    answers.put(wins)


def check(store: ObjectStore, wins: list[tuple[int, int]]) -> None:
    assert Counter(key for key, _ in wins) == Counter(range(KEYS))
    for key, winner in wins:
        assert store.get(f"race/{key}/entry") == payload(winner)
    assert [info.path for info in store.list("race")] == sorted(f"race/{key}/entry" for key in range(KEYS))
    assert store.list_staging() == []


def race_threads(store: ObjectStore) -> None:
    barrier = threading.Barrier(THREADS)
    wins: list[tuple[int, int]] = []
    threads = [threading.Thread(target=race, args=(store, racer, barrier, wins)) for racer in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(store, wins)


def race_processes(store: ObjectStore) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(PROCESSES)
    answers = spawn.Queue()
    processes = [
        spawn.Process(
            target=race_in_process, args=(store.uri, dict(store.storage_options), racer, barrier, answers)
        )
        for racer in range(PROCESSES)
    ]
    for process in processes:
        process.start()
    wins = [win for _ in processes for win in answers.get(timeout=PATIENCE)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    check(store, wins)


def test_sixteen_threads(any_store: ObjectStore) -> None:
    race_threads(any_store)


def test_sixteen_threads_with_fsync(tmp_path: Path) -> None:
    race_threads(ObjectStore.from_uri(tmp_path / "table"))


def test_sixteen_threads_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.O_TMPFILE")
    race_threads(ObjectStore.from_uri(tmp_path / "table", fsync=False))


def test_four_processes_on_a_local_disk(tmp_path: Path) -> None:
    race_processes(ObjectStore.from_uri(tmp_path / "table"))


def test_four_processes_on_s3(s3: S3Server) -> None:
    race_processes(ObjectStore.from_uri(s3.uri("races/table"), s3.storage_options))
