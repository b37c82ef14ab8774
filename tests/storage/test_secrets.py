"""Credentials stay out of texts: of errors, of all that led to them, of logs and reprs."""

from __future__ import annotations

import logging
import re
import traceback
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lancewal
from lancewal.base.lance import lance_errors
from lancewal.base.table import BaseTable
from lancewal.errors import LanceWalError, StorageError
from lancewal.ingest import find_files
from lancewal.publish.feed import ChangeFeed
from lancewal.spark.options import Options
from lancewal.storage import ObjectStore, scrub_error, scrubbed
from lancewal.storage.secrets import remember_password, remember_secrets
from tests.servers import S3Server
from tests.tables import KEYED, new_table, rows

PASSWORD = "hunter2" + "sesame"
KEY = "wJalrXUtnFEMI" + "K7MDENGbPxRfiCY"


def shown(error: BaseException) -> str:
    """All that a program could print of an error."""
    texts = ["".join(traceback.format_exception(error))]
    chain: list[BaseException | None] = [error]
    while chain:
        each = chain.pop()
        if each is not None:
            texts += [str(each), repr(each)]
            chain += [each.__cause__, each.__context__]
    return "\n".join(texts)


def with_password(endpoint: str) -> str:
    return endpoint.replace("://", f"://user:{PASSWORD}@")


@pytest.fixture
def unreachable(s3: S3Server, caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """Options whose endpoint carries a password and answers nobody."""
    caplog.set_level(logging.DEBUG)
    return {
        **s3.storage_options,
        "aws_secret_access_key": KEY,
        "aws_endpoint": with_password("http://127.0.0.1:9"),
        "client_max_retries": "0",
        "client_retry_timeout": "1",
    }


OPERATIONS: dict[str, Callable[[lancewal.Table], Any]] = {
    "scan": lambda table: table.scan().to_table(),
    "filter": lambda table: table.scan(filter="name = 'a_1'").to_table(),
    "count": lambda table: table.count_rows(),
    "lookup": lambda table: table.lookup([1]),
    "status": lambda table: table.status(),
    "verify": lambda table: table.verify(),
    "flush": lambda table: table.flush(),
    "compact": lambda table: table.compact(),
    "gc": lambda table: table.gc(dry_run=True),
    "writer": lambda table: table.writer(),
    "schema": lambda table: table.schema,
}


@pytest.fixture(scope="module")
def table_on_s3(s3: S3Server) -> str:
    uri = s3.uri(f"{uuid.uuid4().hex}/table")
    new_table(uri, KEYED, pa.Table.from_batches([rows(1, 2)]), s3.storage_options)
    with lancewal.open(uri, s3.storage_options).writer() as writer:
        writer.put(rows(2, 2))
    return uri


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_password_in_the_endpoint_stood_in_errors_of_every_operation(
    name: str,
    table_on_s3: str,
    s3: S3Server,
    unreachable: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = lancewal.open(table_on_s3, s3.storage_options)
    away = ObjectStore.from_uri(table_on_s3, unreachable)
    away._sleep = lambda seconds: None
    # pylance fails where our own store still answers, and the other way round.
    half = ObjectStore(table_on_s3, table._store._backend, unreachable)
    for store in (away, half):
        with pytest.raises(LanceWalError) as caught:
            OPERATIONS[name](lancewal.Table(store))
        assert PASSWORD not in shown(caught.value)
        assert KEY not in shown(caught.value)
    assert PASSWORD not in caplog.text
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "call",
    [
        lambda uri, options: lancewal.open(uri, options),
        lambda uri, options: lancewal.initialize(uri, storage_options=options),
        lambda uri, options: ChangeFeed.open(uri, options),
    ],
)
def test_a_password_in_the_endpoint_stood_in_errors_of_opening(
    call: Callable[[str, dict[str, str]], object], unreachable: dict[str, str]
) -> None:
    with pytest.raises(LanceWalError) as caught:
        call("s3://bucket/table", unreachable)
    assert PASSWORD not in shown(caught.value)
    assert "***@127.0.0.1:9" in shown(caught.value)


@pytest.mark.parametrize(
    "uri", [f"s3://user:{PASSWORD}@b/t", f"https://u:{PASSWORD}@h/t", f"file://u:{PASSWORD}@h/t"]
)
def test_a_password_in_the_tables_uri_is_refused_without_showing_it(uri: str) -> None:
    for call in (lancewal.open, lancewal.initialize, ObjectStore.from_uri):
        with pytest.raises(LanceWalError) as caught:
            call(uri)
        assert PASSWORD not in shown(caught.value)


def test_a_password_in_the_uri_of_files_to_ingest_is_not_shown() -> None:
    uri = f"s3://key:{PASSWORD}@bucket/files?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1"
    with pytest.raises(LanceWalError) as caught:
        list(find_files([uri]))
    assert PASSWORD not in shown(caught.value)


def test_reprs_show_no_storage_options(s3: S3Server, table_on_s3: str) -> None:
    table = lancewal.open(table_on_s3, s3.storage_options)
    base = BaseTable.open(table_on_s3, s3.storage_options)
    options = Options.parse({"path": table_on_s3, "storage.aws_secret_access_key": KEY})
    for each in (table, table._store, base, options):
        assert "test-secret-key" not in repr(each)
        assert KEY not in repr(each)


def test_pylances_texts_are_scrubbed_with_what_led_to_them() -> None:
    def fail() -> None:
        try:
            raise OSError(5, f"no route to http://u:{PASSWORD}@host", f"s3://u:{PASSWORD}@b/t")
        except OSError as error:
            error.add_note(f"asked as u:{PASSWORD}@ at http://u:{PASSWORD}@host?sig={KEY}")
            raise ValueError(f"GET http://u:{PASSWORD}@host/?X-Amz-Signature={KEY}&n=1 failed") from error

    remember_password(f"http://u:{PASSWORD}@host")
    read = "cannot read: GET http://***@host/?X-Amz-Signature=***&n=1 failed"
    with pytest.raises(LanceWalError, match=re.escape(read)) as caught, lance_errors("read"):
        fail()
    assert PASSWORD not in shown(caught.value)
    assert KEY not in shown(caught.value)


def test_interrupts_pass_and_panics_do_not() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(StorageError, match="unwrap on None"), lance_errors("read"):
        raise panic("unwrap on None")
    for passing in (KeyboardInterrupt, SystemExit, GeneratorExit):
        with pytest.raises(passing), lance_errors("read"):
            raise passing


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=8, max_size=40), st.text(max_size=20))
def test_any_password_is_found_as_it_is_and_as_a_url_has_it(password: str, around: str) -> None:
    secret = f"pw{password}wp"
    remember_secrets([secret])
    for spelled in (secret, quote(secret), quote(secret, safe="")):
        assert spelled not in scrubbed(f"{around}{spelled}{around}")
    url = f"http://user:{quote(secret, safe='')}@host/path"
    assert quote(secret, safe="") not in scrubbed(url)
    assert str(scrub_error(ValueError(secret))) == "***"


def test_texts_without_credentials_stay_as_they_are() -> None:
    text = "cannot read abfss://box@account.dfs.core.windows.net/t at s3://bucket/a@b: version 3, rows=7"
    assert scrubbed(text) == text
