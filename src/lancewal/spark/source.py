"""The data source behind ``format("lancewal")``.

Spark imports this module in every worker of every session that has lancewal installed, so its
dependencies are imported where they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

    from lancewal.spark.options import Options


class DefaultSource(DataSource):
    """The data source: source and sink, batch and stream."""

    @classmethod
    def name(cls) -> str:
        return "lancewal"

    def schema(self) -> StructType:
        from lancewal.errors import InvalidInputError
        from lancewal.publish import feed_schema
        from lancewal.spark.columns import spark_schema
        from lancewal.spark.options import OpenTable, state_to_read

        options = self._parsed()
        if options.text("job") is not None:
            from lancewal.spark.job_tasks import REPORT_SCHEMA

            return REPORT_SCHEMA
        # Checked here, because Spark replaces the errors of a stream's reader with its own.
        options.number("maxEntriesPerTrigger")
        options.number("maxBytesPerTrigger")
        if options.flag("readChangeFeed"):
            from lancewal.spark.feed_source import key_filter, wanted_changes, wanted_shards

            wanted_shards(options)
            wanted_changes(options)
        if options.text("versionAsOf") is None:
            schema = OpenTable.open(options).base.schema
        else:
            schema = state_to_read(options).base(options.storage).base.schema
        condition = options.text("filter")
        if options.flag("readChangeFeed") and condition is not None:
            key_filter(condition, schema)
        shown = feed_schema(schema) if options.flag("readChangeFeed") else schema.plain
        names = options.names("columns")
        if names is not None:
            unknown = [name for name in names if name not in shown.names]
            if unknown or not names:
                raise InvalidInputError(
                    f"option columns names {', '.join(unknown) or 'nothing'}; "
                    f"the table has {', '.join(shown.names)}"
                )
            if len(set(names)) < len(names):
                raise InvalidInputError(f"option columns names a column twice: {', '.join(names)}")
            import pyarrow as pa

            shown = pa.schema([shown.field(name) for name in names])
        return spark_schema(shown)

    def reader(self, schema: StructType) -> DataSourceReader:
        from lancewal.spark.options import FEED_OPTIONS

        options = self._parsed()
        job = options.text("job")
        if job is not None:
            from lancewal.spark.job_tasks import JobReader

            return JobReader(options, job)
        if options.flag("readChangeFeed"):
            from lancewal.spark.feed_source import FeedReader

            return FeedReader(options, schema)
        options.refuse(FEED_OPTIONS, "is for the change feed; set readChangeFeed to true as well")
        from lancewal.spark.merged import MergedReader

        return MergedReader(options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from lancewal.spark.feed_source import FeedStream

        return FeedStream(self._parsed(), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options = self._parsed()
        from lancewal.spark.sink import BatchSink, check_write

        check_write(options, schema, overwrite)
        return BatchSink(options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from lancewal.spark.sink import StreamSink, check_write

        options = self._parsed()
        check_write(options, schema, overwrite)
        return StreamSink(options)

    def _parsed(self) -> Options:
        from lancewal.spark.options import Options
        from lancewal.spark.worker import settle

        settle()
        return Options.parse(dict(self.options))
