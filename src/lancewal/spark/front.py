"""Answers the questions of Spark's planner about tables, in a Python worker of the driver.

The other side is ``front.jar`` (its source is in ``java/``). It has a catalog, and a front for Spark's own
Python data source, which tells the data source which columns and rows a query needs. Python workers read and
write all rows.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import lance
from pyspark import cloudpickle
from pyspark.sql import types as st

from lancewal.base import lance_errors
from lancewal.errors import InvalidInputError, LanceWalError, TableNotFoundError
from lancewal.service import is_owned
from lancewal.spark.columns import arrow_schema, spark_schema
from lancewal.spark.creation import creation_options, open_for_writing
from lancewal.spark.options import CREATE_OPTIONS, OpenTable, Options, is_storage_option
from lancewal.spark.source import DefaultSource
from lancewal.spark.worker import settle
from lancewal.storage import ObjectStore
from lancewal.table import Table

_Arguments = Mapping[str, Any]
_Answer = dict[str, Any]


def answer(asked: Mapping[str, Any]) -> _Answer:
    """The answer to one question; errors of lancewal are returned as answers too."""
    settle()
    try:
        options = {name.lower(): value for name, value in asked["options"].items()}
        return _ANSWERS[asked["question"]](options, asked["arguments"])
    except LanceWalError as error:
        return {"error": type(error).__name__, "message": str(error)}


def _describe(options: dict[str, str], arguments: _Arguments) -> _Answer:
    """The columns, key and properties of a table, and the data source pickled for Spark's workers."""
    source = DefaultSource(options)
    base = OpenTable.open(Options.parse(options)).base
    properties = {
        "location": base.uri,
        # SHOW CREATE TABLE then has no LOCATION, which CREATE refuses: the name of a table says where it is.
        "is_managed_location": "true",
        "provider": DefaultSource.name(),
        **creation_options(base),
    }
    pickled: bytes = cloudpickle.dumps(source)  # type: ignore[no-untyped-call]
    return {
        "schema": source.schema().json(),
        "source": base64.b64encode(pickled).decode(),
        "key": list(base.schema.primary_key),
        "properties": properties,
    }


def _create(options: dict[str, str], arguments: _Arguments) -> _Answer:
    parsed = Options.parse({**options, "createIfMissing": "true"})
    schema = st.StructType.fromJson(json.loads(arguments["schema"]))
    _refuse_other_properties(arguments["properties"])
    if not schema.fields:
        raise InvalidInputError("a table needs columns; name them, or CREATE TABLE … AS SELECT")
    if _exists(parsed):
        return {"error": "TableExistsError", "message": f"there is a table at {parsed.uri}"}
    for field in schema.fields:
        _refuse_unkept(field.dataType, field.name)
    open_for_writing(parsed, schema, [field.name for field in schema.fields if not field.nullable])
    return {}


def _refuse_other_properties(names: Iterable[str]) -> None:
    """Refuse properties that say nothing about a new table; a path would even make it elsewhere."""
    known = {name.lower() for name in CREATE_OPTIONS}
    others = [name for name in names if name.lower() not in known and not is_storage_option(name)]
    if others:
        raise InvalidInputError(
            f"{', '.join(others)} is no property of a table; there are {', '.join(CREATE_OPTIONS)}"
        )


def _refuse_unkept(type_: st.DataType, column: str) -> None:
    """Refuse types, wherever they are in a column, that would come back as another type."""
    if isinstance(type_, st.VariantType):
        raise InvalidInputError(
            f"column {column} is a variant, which no table can hold; use STRING, with JSON"
        )
    if isinstance(type_, st.CharType | st.VarcharType):
        raise InvalidInputError(
            f"column {column} is {type_.simpleString()}; tables limit no text, use STRING"
        )
    if isinstance(type_, st.StringType) and type_ != st.StringType():
        raise InvalidInputError(
            f"column {column} is {type_.simpleString()}; tables keep no collation: use STRING, "
            "and COLLATE in queries"
        )
    if isinstance(type_, st.ArrayType):
        _refuse_unkept(type_.elementType, column)
    elif isinstance(type_, st.MapType):
        _refuse_unkept(type_.keyType, column)
        _refuse_unkept(type_.valueType, column)
    elif isinstance(type_, st.StructType):
        for field in type_.fields:
            _refuse_unkept(field.dataType, f"{column}.{field.name}")
    else:
        leaf = st.StructType([st.StructField(column, type_)])
        shown = spark_schema(arrow_schema(leaf))[column].dataType
        if shown != type_:
            raise InvalidInputError(
                f"column {column} is {type_.simpleString()}, which comes back as {shown.simpleString()}"
            )


def _drop(options: dict[str, str], arguments: _Arguments) -> _Answer:
    parsed = Options.parse(options)
    if not _exists(parsed):
        return {"dropped": False}
    if is_owned(ObjectStore.from_uri(parsed.uri, parsed.storage)):
        raise InvalidInputError(f"somebody writes to the table at {parsed.uri}; close the writers first")
    with lance_errors(f"drop the table at {parsed.uri}"):
        lance.LanceDataset.drop(parsed.uri, parsed.storage)
    return {"dropped": True}


def _exists(options: Options) -> bool:
    try:
        OpenTable.open(options)
    except TableNotFoundError:
        return False
    except LanceWalError:
        # There is a table, even if it cannot be opened.
        return True
    return True


def _list(options: dict[str, str], arguments: _Arguments) -> _Answer:
    parsed = Options.parse(options)
    store = ObjectStore.from_uri(parsed.uri, parsed.storage)
    names = store.list_directories()
    return {"tables": [name for name in names if "_versions" in store.list_directories(name)]}


def _call(options: dict[str, str], arguments: _Arguments) -> _Answer:
    parsed = Options.parse(options)
    table = Table.open(parsed.uri, parsed.storage)
    return {"report": _PROCEDURES[arguments["procedure"]](table, arguments)}


def _flush(table: Table, arguments: _Arguments) -> _Answer:
    table.flush()
    return {}


def _gc(table: Table, arguments: _Arguments) -> _Answer:
    hours = arguments.get("min_age_hours")
    age = None if hours is None else timedelta(hours=float(hours))
    return table.gc(dry_run=arguments.get("dry_run") == "true", min_age=age).to_dict()


_PROCEDURES: dict[str, Callable[[Table, _Arguments], _Answer]] = {
    "flush": _flush,
    "compact": lambda table, arguments: table.compact().to_dict(),
    "gc": _gc,
    "upkeep": lambda table, arguments: table.upkeep().to_dict(),
    "verify": lambda table, arguments: table.verify().to_dict(),
    "backup": lambda table, arguments: table.backup(arguments["to"]).to_dict(),
}
_ANSWERS: dict[str, Callable[[dict[str, str], _Arguments], _Answer]] = {
    "describe": _describe,
    "create": _create,
    "drop": _drop,
    "list": _list,
    "call": _call,
}
