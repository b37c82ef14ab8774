"""``lancewal init``: creates tables with columns from a file and a key, and gives tables a write path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lancewal.cli import console, options
from lancewal.cli.console import plain
from lancewal.cli.exits import NOT_FOUND, REFUSED, CommandError, guarded
from lancewal.errors import InvalidInputError, NotInitializedError, TableNotFoundError

if TYPE_CHECKING:
    import lance
    import pyarrow as pa

    from lancewal.ingest import SourceFile
    from lancewal.status import TableStatus
    from lancewal.table import Table


@dataclass(frozen=True)
class Plan:
    """The key, sharding and settings that a user wants.

    The defaults are those of :func:`lancewal.initialize`.
    """

    key: Sequence[str] | None = None
    vectors: Sequence[str] = ()
    bucket: tuple[str, int] | None = None
    identity: str | None = None
    unsharded: bool = False
    by_hand: bool = False
    indexes: Sequence[str] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    def initialize(self, uri: str, options: Mapping[str, str]) -> Table:
        """Give the table at ``uri`` a write path."""
        import lancewal

        return lancewal.initialize(uri, key=self.key, storage_options=options, **self._arguments())

    def open_or_create(self, uri: str, options: Mapping[str, str], file: SourceFile) -> tuple[Table, bool]:
        """The table, and whether this call created it or its write path.

        A missing table is created with the columns of ``file``. An existing table with another key, sharding
        or vectors is refused.
        """
        import lancewal

        try:
            table = lancewal.open(uri, options)
        except NotInitializedError:
            self._refuse_other_vectors(_dataset(uri, options).schema)
            return self.initialize(uri, options), True
        except TableNotFoundError:
            self.create(uri, options, file)
            return self.initialize(uri, options), True
        if self.key is not None and tuple(self.key) != table.primary_key:
            has = f"the primary key {', '.join(table.primary_key)}" if table.primary_key else "no primary key"
            raise InvalidInputError(
                f"the table at {uri} is there and has {has}, not {', '.join(self.key)}; leave --key out"
            )
        self._refuse_other_sharding(table)
        self._refuse_other_vectors(table.schema)
        return table, False

    def create(self, uri: str, options: Mapping[str, str], file: SourceFile) -> None:
        """Create an empty table with the columns of ``file`` that suits this write path."""
        from lancewal.ingest import open_file
        from lancewal.initialization import create_table

        opened = open_file(file)
        first = next(opened.batches, None) if self.vectors else None
        columns = table_columns(opened.schema, self.key or [], self._dimensions(first))
        create_table(uri, columns, options, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        """Sharding and settings as arguments of :func:`lancewal.initialize`."""
        return {
            "bucket": self.bucket,
            "identity": self.identity,
            "unsharded": self.unsharded,
            "by_hand": self.by_hand,
            "maintained_indexes": self.indexes,
            "writer_defaults": self.settings or None,
        }

    def _refuse_other_sharding(self, table: Table) -> None:
        from lancewal.shard import BUCKET, IDENTITY, UNSHARDED

        asked: tuple[str, str | None, int | None] | None = None
        if self.bucket is not None:
            asked = (BUCKET, *self.bucket)
        elif self.identity is not None:
            asked = (IDENTITY, self.identity, None)
        elif self.unsharded:
            asked = (UNSHARDED, None, None)
        if asked is not None:
            router = table.router()
            if (router.transform, router.column, router.num_buckets or None) != asked:
                raise InvalidInputError(
                    f"the table at {table.uri} is there and has another sharding "
                    f"({table.status().sharding}); leave --bucket, --identity and --unsharded out"
                )
        kept = table.details.writer_config_defaults
        others = sorted(name for name, value in self.settings.items() if kept.get(name) != value)
        if others:
            raise InvalidInputError(
                f"the table at {table.uri} is there and keeps another {', '.join(others)}; leave --set out"
            )

    def _refuse_other_vectors(self, schema: pa.Schema) -> None:
        import pyarrow as pa

        for text in self.vectors:
            column, size = _vector_column(text)
            type_ = schema.field(column).type if column in schema.names else None
            if type_ is None or not pa.types.is_fixed_size_list(type_) or size not in (None, type_.list_size):
                raise InvalidInputError(
                    f"the table is there and its column {column} is {type_ or 'missing'}, no vector such as "
                    f"{text}; leave --vector-column out"
                )

    def _dimensions(self, first: pa.RecordBatch | None) -> dict[str, int]:
        """The dimension of each vector column; taken from the ``first`` rows if it is not given."""
        pairs = map(_vector_column, self.vectors)
        return {column: _first_length(column, first) if size is None else size for column, size in pairs}


def _dataset(uri: str, options: Mapping[str, str]) -> lance.LanceDataset:
    import lance

    from lancewal.base import lance_errors

    with lance_errors(f"open the table at {uri}"):
        return lance.dataset(uri, storage_options=dict(options) or None)


def table_columns(schema: pa.Schema, key: Sequence[str], dimensions: Mapping[str, int]) -> pa.Schema:
    """The columns of a table for rows of ``schema``: keys marked and not null, vectors of fixed size.

    >>> import pyarrow as pa
    >>> rows = pa.schema([("id", pa.int64()), ("v", pa.list_(pa.float64()))])
    >>> columns = table_columns(rows, ["id"], {"v": 3})
    >>> columns.field("id").nullable, str(columns.field("v").type)
    (False, 'fixed_size_list<item: float>[3]')
    """
    import pyarrow as pa

    from lancewal.initialization import with_key

    unknown = [name for name in [*key, *dimensions] if name not in schema.names]
    if unknown:
        raise InvalidInputError(
            f"the file has no column {', '.join(unknown)}; its columns are {', '.join(schema.names)}"
        )
    columns = []
    for each in schema:
        type_ = each.type.value_type if pa.types.is_dictionary(each.type) else each.type
        if pa.types.is_null(type_):
            raise InvalidInputError(
                f"column {each.name} holds nothing but nulls in the first rows, so its type is unknown; "
                "create the table with lance.write_dataset"
            )
        if each.name in dimensions:
            type_ = pa.list_(pa.float32(), dimensions[each.name])
        columns.append(pa.field(each.name, type_))
    return with_key(pa.schema(columns), key)


def _vector_column(text: str) -> tuple[str, int | None]:
    column, colon, number = text.rpartition(":")
    return (column, int(number)) if colon and number.isdecimal() else (text, None)


def _first_length(column: str, batch: pa.RecordBatch | None) -> int:
    if batch is not None and column in batch.schema.names:
        for value in batch.column(column):
            if value.is_valid and hasattr(value, "values"):
                return len(value.values)
    raise typer.BadParameter(
        f"the first rows do not tell the dimension of {column}; pass it as {column}:128",
        param_hint="--vector-column",
    )


@guarded
def init(
    table: options.TableArgument,
    bucket: options.Bucket = None,
    identity: options.Identity = None,
    unsharded: options.Unsharded = False,
    by_hand: Annotated[
        bool, typer.Option("--by-hand", help="No sharding: writers name their shard.")
    ] = False,
    like: Annotated[
        str | None,
        typer.Option(
            "--like", metavar="FILE", help="Create the table, empty, with the columns of this file."
        ),
    ] = None,
    key: options.Key = None,
    vector_column: options.Vectors = None,
    index: Annotated[
        list[str] | None,
        typer.Option(
            "--index",
            metavar="NAME",
            help="Index that writers keep up to date on fresh rows; repeat for more, all by default.",
        ),
    ] = None,
    no_indexes: Annotated[bool, typer.Option("--no-indexes", help="Writers maintain no index.")] = False,
    settings: options.Settings = None,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Give a Lance table a write path.

    Done once per table. Without a choice of sharding, rows go to 4 buckets of the first key column, or
    to a single shard if the table has no key.
    """
    options.check_sharding(bucket, identity, unsharded)
    if by_hand and (bucket or identity or unsharded):
        raise typer.BadParameter("--by-hand excludes --bucket, --identity and --unsharded")
    if no_indexes and index:
        raise typer.BadParameter("choose --index or --no-indexes")
    plan = Plan(
        options.names(key),
        vector_column or (),
        bucket=options.bucket(bucket),
        identity=identity,
        unsharded=unsharded,
        by_hand=by_hand,
        indexes=[] if no_indexes else index,
        settings=options.pairs(settings, "--set"),
    )
    storage = options.storage_options(option)
    if like is not None:
        _create_like(table, storage, like, plan)
    elif options.is_missing(table, storage):
        raise CommandError(
            f"there is no Lance table at {table}; write one with Lance, or create it here with --like FILE",
            NOT_FOUND,
        )
    made = plan.initialize(table, storage)
    status = made.status()
    text = (
        f"{plain(made.uri)} has a write path: {shape(status)}, {len(status.shards)} shards\n"
        f"  next: [bold]lancewal ingest {plain(table)} FILE…[/], "
        f"or lancewal.open({plain(repr(table))}).writer()"
    )
    console.tell(text, status.to_dict(), json=json)


def _create_like(table: str, storage: dict[str, str], like: str, plan: Plan) -> None:
    from lancewal.ingest import find_files

    if not options.is_missing(table, storage):
        raise CommandError(f"there is a Lance table at {table} already; leave --like out", REFUSED)
    files = find_files([like])
    if not files:
        raise CommandError(f"{like} has no file to take columns from", REFUSED)
    plan.create(table, storage, files[0])


def shape(status: TableStatus) -> str:
    """The key and sharding of a table, escaped for a text with markup."""
    keyed = f"key {', '.join(status.primary_key)}" if status.primary_key else "no key: append-only"
    return plain(f"{keyed}, {status.sharding}")
