"""``lancewal ingest --engine spark``: whole files through a Spark session.

Which files were taken is remembered in the same way as without Spark, so both may take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lancewal.cli.exits import CommandError
from lancewal.errors import InvalidInputError
from lancewal.ingest.journal import Part

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from lancewal.ingest import PreparedPart, SourceFile
    from lancewal.table import Table
    from lancewal.transactions import Transaction

_SPARK_FORMATS = {"parquet": "parquet", "csv": "csv", "tsv": "csv", "jsonl": "json"}


class SparkParts:
    """Brings files in one after the other, each as one transaction of many tasks."""

    #: Rows become SSTables right away.
    wal_bytes = 0

    def __init__(self, table: Table, storage_options: dict[str, str], *, drop_unknown: bool = False) -> None:
        self._table = table
        self._storage = storage_options
        self._drop_unknown = drop_unknown
        self._session: SparkSession | None = None

    def prepare(self, file: SourceFile, start: int) -> PreparedPart:
        if start:
            raise InvalidInputError(
                f"the first {start} rows of {file} were taken without Spark; finish it with --engine local"
            )
        return _SparkPart(self, Part.of(file, 0, None, last=True), self._read(file, self._table.schema))

    def prepare_again(self, file: SourceFile, part: Part) -> PreparedPart:
        if part.stop is not None:
            raise InvalidInputError(f"{part} was begun without Spark; finish it with --engine local")
        return self.prepare(file, 0)

    def write(self, rows: DataFrame, transaction: Transaction) -> int:
        writer = rows.write.format("lancewal").mode("append")
        for name, value in self._storage.items():
            writer = writer.option(f"storage.{name}", value)
        writer = writer.option("txnAppId", transaction.app_id).option("txnVersion", transaction.version)
        writer.save(self._table.uri)
        return rows.count()

    def stop(self) -> None:
        if self._session is not None:
            self._session.stop()

    def _read(self, file: SourceFile, columns: pa.Schema) -> DataFrame:
        spark = self._start()
        from pyspark.sql import functions

        from lancewal.spark.columns import spark_schema

        if file.format not in _SPARK_FORMATS:
            raise InvalidInputError(f"Spark cannot read {file} ({file.format}); use --engine local for it")
        wanted = {field.name: field.dataType for field in spark_schema(columns)}
        reader: Any = spark.read.format(_SPARK_FORMATS[file.format])
        if _SPARK_FORMATS[file.format] == "csv":
            reader = reader.option("header", "true").option("sep", "\t" if file.format == "tsv" else ",")
        elif file.format == "jsonl":
            reader = reader.schema(spark_schema(columns))
        rows: DataFrame = reader.load(str(file))
        known = [name for name in rows.columns if name in wanted]
        chosen = known if self._drop_unknown else rows.columns
        # What is text in the file gets the table's types; what the table lacks is refused there.
        return rows.select(
            [functions.col(f"`{n}`").cast(wanted[n]).alias(n) if n in wanted else f"`{n}`" for n in chosen]
        )

    def _start(self) -> SparkSession:
        if self._session is None:
            try:
                from lancewal.spark import session

                self._session = session()
            except ImportError as error:
                raise CommandError(
                    "--engine spark needs PySpark: pip install 'lancewal[spark,jre]', or use --engine local"
                ) from error
            self._session.sparkContext.setLogLevel("ERROR")
        return self._session


@dataclass(frozen=True)
class _SparkPart:
    parts: SparkParts
    part: Part
    rows: DataFrame

    def write(self, transaction: Transaction) -> int:
        return self.parts.write(self.rows, transaction)
