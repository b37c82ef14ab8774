"""How a worker of Spark's planner talks to Java in Spark 4.1; later versions have functions for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from pyspark.accumulators import _accumulatorRegistry
from pyspark.serializers import SpecialLengths, read_int, write_int
from pyspark.util import handle_worker_exception, local_connect_and_auth
from pyspark.worker_util import (
    check_python_version,
    send_accumulator_updates,
    setup_broadcasts,
    setup_memory_limits,
    setup_spark_files,
)


def worker_run(main: Callable[[IO[bytes], IO[bytes]], None], infile: IO[bytes], outfile: IO[bytes]) -> None:
    try:
        check_python_version(infile)
        setup_memory_limits(int(os.environ.get("PYSPARK_PLANNER_MEMORY_MB", "-1")))
        setup_spark_files(infile)
        setup_broadcasts(infile)
        _accumulatorRegistry.clear()
        main(infile, outfile)
    except BaseException as error:
        handle_worker_exception(error, outfile)
        sys.exit(-1)
    send_accumulator_updates(outfile)
    if read_int(infile) == SpecialLengths.END_OF_STREAM:  # type: ignore[no-untyped-call]
        write_int(SpecialLengths.END_OF_STREAM, outfile)  # type: ignore[no-untyped-call]
    else:
        # Anything else tells Java not to use this worker again.
        write_int(SpecialLengths.END_OF_DATA_SECTION, outfile)  # type: ignore[no-untyped-call]
        sys.exit(-1)


@contextmanager
def get_sock_file_to_executor() -> Iterator[IO[bytes]]:
    port = int(os.environ.get("PYTHON_WORKER_FACTORY_PORT", -1))
    place = os.environ.get("PYTHON_WORKER_FACTORY_SOCK_PATH", port)
    connection, _ = local_connect_and_auth(place, os.environ.get("PYTHON_WORKER_FACTORY_SECRET"))
    write_int(os.getpid(), connection)  # type: ignore[no-untyped-call]
    connection.flush()
    try:
        yield connection
    finally:
        connection.close()
