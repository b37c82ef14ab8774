"""What the demo does, step by step; each step shows what came of it and checks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lance

import lancewal
from demo.corpus import LIBRARY_KINDS, SCHEMA, rows
from demo.crashes import kill_writers
from demo.live import stream_in
from demo.narration import Narration
from demo.settling import compact, flush, search
from demo.stage import Scale, Stage
from lancewal.cli.console import count
from lancewal.cli.exits import plain_sentence
from lancewal.errors import LanceWalError


def tell(directory: Path, narration: Narration, scale: Scale, *, with_spark: bool) -> Stage:
    """Run every step in an empty directory; a step that fails is the last one."""
    stage = Stage.prepare(directory, narration, scale, with_spark=with_spark)
    feed = "Spark" if with_spark else "one thread"
    steps: list[tuple[str, Callable[[Stage], None]]] = [
        ("Create a Lance table and give it a write path", _create),
        (f"Stream documents in through {feed} while a service writes to the same shards", stream_in),
        ("Kill a writer with SIGKILL and recover", kill_writers),
        ("Search a row that was written a moment ago", search),
        ("Flush to SSTables and let Lance itself read them", flush),
        ("Compact into the base table and read it with plain Lance", compact),
    ]
    try:
        for title, step in steps:
            narration.step(title)
            try:
                step(stage)
            except LanceWalError as error:
                narration.check("the step came to its end", False, plain_sentence(error))
                break
    finally:
        stage.strike()
    return stage


def _create(stage: Stage) -> None:
    first = rows(stage.incoming.first)
    base = lance.write_dataset(first, stage.uri, schema=SCHEMA)
    base.create_scalar_index("text", "INVERTED")
    lancewal.initialize(stage.uri, identity="kind")
    stage.narration.say(
        f"{count(first.num_rows)} summaries of docstrings from Python's standard library in the base table, "
        "each with an embedding, and a full-text index"
    )
    stage.narration.say(
        f"the key is (kind, name), and every kind is a shard: {', '.join(LIBRARY_KINDS)}; a stream of "
        "documents and a service that takes remarks about them write to the same ones"
    )
    stage.set()
