"""The worker in which Spark's planner asks lancewal about tables; ``java/`` has the side that asks.

Spark starts worker modules only if their names begin with ``pyspark``: the answers are in
:mod:`lancewal.spark.front`.
"""

from __future__ import annotations

import json
import struct
from typing import IO

try:
    from pyspark.sql.worker.utils import worker_run
    from pyspark.worker_util import get_sock_file_to_executor
except ImportError:
    # Spark 4.1 has the same lines in each of its workers.
    from pyspark_lancewal.worker_4_1 import get_sock_file_to_executor, worker_run  # type: ignore[assignment]

_LENGTH = struct.Struct("!i")


def _answer(infile: IO[bytes], outfile: IO[bytes]) -> None:
    from lancewal.spark.front import answer

    (length,) = _LENGTH.unpack(infile.read(_LENGTH.size))
    told = json.dumps(answer(json.loads(infile.read(length)))).encode()
    outfile.write(_LENGTH.pack(len(told)) + told)


def main(infile: IO[bytes], outfile: IO[bytes]) -> None:
    worker_run(_answer, infile, outfile)


if __name__ == "__main__":
    # How Spark starts it where its daemon cannot fork.
    with get_sock_file_to_executor() as connection:
        main(connection, connection)
