"""The processes of a Spark session, as the tests that kill them find them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from tests.spark.processes import children_of


def test_no_child_was_found_while_a_thread_of_its_parent_ended() -> None:
    """So that a test which kills a worker of Spark killed none now and then."""
    over = threading.Event()

    def start_threads() -> None:
        while not over.is_set():
            threading.Thread(target=over.is_set).start()

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    starter = threading.Thread(target=start_threads)
    starter.start()
    try:
        assert all(child.pid in children_of(os.getpid()) for _ in range(300))
    finally:
        over.set()
        starter.join()
        child.communicate(b"\n")
