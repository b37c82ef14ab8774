"""A source of changes as files, one a micro-batch, and the model of what they make of a table."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING

from tests.spark.tables import Rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "id long, name string, op string"
_FIRST_AGE = 1_700_000_000


class ChangeFiles:
    """Files of upserts and deletes (or of appends alone), each key at most once a file."""

    def __init__(self, directory: Path, keyed: bool, seed: int = 1) -> None:
        self.directory = directory
        self.keyed = keyed
        self.model: dict[int, str] = {}
        self.appended: Rows = []
        self.changes = 0
        self._random = random.Random(seed)
        self._count = 0

    @classmethod
    def existing(cls, directory: Path, keyed: bool) -> ChangeFiles:
        """Files that somebody else has added, to be streamed."""
        return cls(directory, keyed)

    def add(self, files: int, rows: int = 12) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for _ in range(files):
            lines = [self._change(key) for key in self._keys(rows)]
            # Spark takes a file as soon as it sees it: it must be whole by then.
            path = self.directory / f"{self._count:05d}.json"
            staging = path.with_name(f".{path.name}")
            staging.write_text("\n".join(json.dumps(line) for line in lines))
            # It takes them by age, to the millisecond.
            os.utime(staging, (_FIRST_AGE + self._count, _FIRST_AGE + self._count))
            staging.rename(path)
            self._count += 1
            self.changes += len(lines)

    def expected(self) -> Rows:
        return sorted(self.model.items()) if self.keyed else sorted(self.appended)

    def stream(self, spark: SparkSession) -> DataFrame:
        """One file a micro-batch, spread over partitions that have nothing to do with shards."""
        df = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).json(str(self.directory))
        return (df if self.keyed else df.drop("op")).repartition(3)

    def _keys(self, count: int) -> list[int]:
        if self.keyed:
            # Spark may take two files into one batch after a restart, where rows have no order: files
            # that follow each other share no key.
            return self._random.sample(range(self._count % 2, 80, 2), count)
        return list(range(self._count * count, (self._count + 1) * count))

    def _change(self, key: int) -> dict[str, object]:
        name = f"{self._count}-{key}"
        if not self.keyed:
            self.appended.append((key, name))
            return {"id": key, "name": name}
        if self._random.random() < 0.25:
            self.model.pop(key, None)
            return {"id": key, "op": "delete"}
        self.model[key] = name
        return {"id": key, "name": name, "op": "upsert"}
