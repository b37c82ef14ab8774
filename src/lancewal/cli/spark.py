"""Commands that run on Spark: the session, ``ingest --engine spark``, and jobs that report each shard."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lancewal.cli import console
from lancewal.cli.exits import CommandError
from lancewal.errors import InvalidInputError
from lancewal.ingest import Part

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from lancewal.ingest import PreparedPart, SourceFile
    from lancewal.maintenance import BackupReport
    from lancewal.publish import Transaction
    from lancewal.service import TakeOver
    from lancewal.spark import ShardOutcome
    from lancewal.table import Table


def start_session() -> SparkSession:
    """Start the session of this process. Spark's own log is off, because the command reports errors."""
    # Spark's launcher forks to start Java, which is harmless.
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    try:
        from lancewal.spark import session

        started = session()
    except ImportError as error:
        raise CommandError(
            "--engine spark needs PySpark: pip install 'lancewal[spark,jre]', or use --engine local"
        ) from error
    started.sparkContext.setLogLevel("OFF")
    _silence_query_contexts()
    return started


def _silence_query_contexts() -> None:
    """Silence PySpark's log of failed queries, which it prints in addition to raising the error."""
    from pyspark.logger import PySparkLogger

    PySparkLogger.getLogger("DataFrameQueryContextLogger").setLevel(logging.CRITICAL)


_SPARK_FORMATS = {"parquet": "parquet", "csv": "csv", "tsv": "csv", "jsonl": "json"}


class SparkParts:
    """Writes files one after the other, each as one transaction of many tasks."""

    #: Rows never go to the WAL, but become SSTables at once.
    wal_bytes = 0

    def __init__(
        self,
        table: Table,
        storage_options: dict[str, str],
        *,
        drop_unknown: bool = False,
        take_over: TakeOver = "when_gone",
    ) -> None:
        self._table = table
        self._take_over = take_over
        self._storage = storage_options
        self._drop_unknown = drop_unknown
        self._session: SparkSession | None = None

    def prepare(self, file: SourceFile, start: int) -> PreparedPart:
        if start:
            raise InvalidInputError(
                f"the first {start} rows of {file} were taken without Spark; finish it with --engine local"
            )
        rows = self._read(file, self._table.schema)
        if file.format != "parquet":
            # Invalid text in a column must be found before the transaction begins.
            _call(lambda: rows.write.format("noop").mode("overwrite").save(), f"Spark cannot read {file}")
        return _SparkPart(self, file, Part.of(file, 0, None, last=True), rows)

    def prepare_again(self, file: SourceFile, part: Part) -> PreparedPart:
        if part.stop is not None:
            raise InvalidInputError(f"{part} was begun without Spark; finish it with --engine local")
        return self.prepare(file, 0)

    def write(self, file: SourceFile, rows: DataFrame, transaction: Transaction) -> int:
        writer = rows.write.format("lancewal").mode("append").option("roundFloats", "true")
        writer = writer.option("walBytes", self.wal_bytes).option("takeOver", self._take_over)
        for name, value in self._storage.items():
            writer = writer.option(f"storage.{name}", value)
        writer = writer.option("txnAppId", transaction.app_id).option("txnVersion", transaction.version)
        try:
            _call(lambda: writer.save(self._table.uri), f"Spark could not write {file}")
        except InvalidInputError as error:
            raise CommandError(
                f"{error}; nothing of it is in the table. Run the same command again, or with --give-up "
                "after the file was changed"
            ) from error
        return rows.count()

    def _read(self, file: SourceFile, columns: pa.Schema) -> DataFrame:
        spark = self._start()
        import pyarrow as pa
        from pyspark.sql import functions

        from lancewal.spark import spark_schema

        if file.format not in _SPARK_FORMATS:
            raise InvalidInputError(f"Spark cannot read {file} ({file.format}); use --engine local for it")
        # Read as double: Spark silently casts a number that is too large for a float to infinity.
        schema = spark_schema(pa.schema([field.with_type(_with_doubles(field.type)) for field in columns]))
        wanted = {field.name: field.dataType for field in schema}
        reader: Any = spark.read.format(_SPARK_FORMATS[file.format])
        if _SPARK_FORMATS[file.format] == "csv":
            reader = reader.option("header", "true").option("sep", "\t" if file.format == "tsv" else ",")
        elif file.format == "jsonl":
            reader = reader.schema(schema)
        rows: DataFrame = reader.load(str(file))
        known = [name for name in rows.columns if name in wanted]
        chosen = known if self._drop_unknown else rows.columns
        # Text is cast to the table's types. The write refuses columns that the table lacks.
        return rows.select(
            [functions.col(f"`{n}`").cast(wanted[n]).alias(n) if n in wanted else f"`{n}`" for n in chosen]
        )

    def _start(self) -> SparkSession:
        if self._session is None:
            self._session = start_session()
        return self._session


@dataclass(frozen=True)
class _SparkPart:
    parts: SparkParts
    file: SourceFile
    part: Part
    rows: DataFrame

    def write(self, transaction: Transaction) -> int:
        return self.parts.write(self.file, self.rows, transaction)


def _with_doubles(type_: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    from lancewal.format import map_children

    if pa.types.is_floating(type_):
        return pa.float64()
    return map_children(type_, lambda child: child.with_type(_with_doubles(child.type)))


def _call(action: Callable[[], object], failed: str) -> None:
    """Run an action on Spark, and turn its errors into one sentence."""
    from pyspark.errors import PySparkException

    try:
        action()
    except PySparkException as error:
        raise InvalidInputError(f"{failed}: {spark_reason(str(error))}") from error


def spark_reason(text: str) -> str:
    """The reason in the text of a Spark error.

    >>> spark_reason("Job aborted\\n  File x\\nlancewal.errors.InvalidInputError: column v is too long\\n")
    'column v is too long'
    >>> spark_reason("[CAST_INVALID_INPUT] The value 'ten' cannot be cast. Use try_cast\\n== SQL ==")
    "The value 'ten' cannot be cast. Use try_cast"
    """
    ours = re.findall(r"lancewal\.errors\.\w+: (.+)", text)
    if ours:
        return str(ours[-1]).strip()
    first = next((line.strip() for line in text.splitlines() if line.strip()), "unknown error")
    return re.sub(r"^\[[A-Z_.]+\] ", "", first)


def run_jobs(
    uri: str, jobs: Sequence[str], storage_options: Mapping[str, str], *, json: bool, **arguments: Any
) -> None:
    """Run jobs (``flush``, ``compact``, ``gc``) whose tasks do some shards each; prints a line per shard."""
    spark = start_session()
    from lancewal import spark as spark_jobs

    for job in jobs:
        failure = None
        with console.progress(json=json, counted=False) as shown:
            shown.add_task(f"{job} on Spark", total=None, note="")
            try:
                outcomes: Sequence[ShardOutcome] = getattr(spark_jobs, job)(
                    spark, uri, storage_options=storage_options, **arguments
                )
            except spark_jobs.JobFailedError as error:
                outcomes, failure = error.outcomes, error
        _show(job, outcomes, json=json)
        if failure is not None:
            raise failure


def run_backup(
    uri: str,
    backups: str,
    storage_options: Mapping[str, str],
    backup_options: Mapping[str, str],
    *,
    json: bool,
) -> BackupReport:
    """Back up a table; each task copies one shard or some files of the base table."""
    spark = start_session()
    from lancewal.spark import backup

    with console.progress(json=json, counted=False) as shown:
        shown.add_task("backup on Spark", total=None, note="")
        return backup(spark, uri, backups, storage_options=storage_options, backup_options=backup_options)


def _show(job: str, outcomes: Sequence[ShardOutcome], *, json: bool) -> None:
    if json:
        for outcome in outcomes:
            console.print_json({"job": job, **asdict(outcome), "shard_id": _name(outcome)}, indent=None)
        return
    out = console.out()
    for outcome in outcomes:
        mark = "[green]✓[/]" if outcome.error is None else "[red]✗[/]"
        out.print(f"{mark} {job} of {_name(outcome)} in {console.duration(outcome.seconds)}: ", end="")
        told = ", ".join(f"{name} {value}" for name, value in outcome.details.items() if _is_figure(value))
        out.print(told if outcome.error is None else outcome.error, markup=False, soft_wrap=True)
    if not outcomes:
        out.print(f"[green]✓[/] {job}: nothing to do")


def _name(outcome: ShardOutcome) -> str:
    return "no shard" if outcome.shard_id is None else str(outcome.shard_id)


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
