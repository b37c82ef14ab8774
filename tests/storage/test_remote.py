"""S3, Azure and Google: one dictionary of options for pylance and for us, and errors without secrets."""

from __future__ import annotations

import io
import threading
import traceback
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path
from typing import Any, ClassVar

import lance
import obstore
import obstore.store
import pyarrow as pa
import pytest
from obstore.exceptions import BaseError, GenericError, PermissionDeniedError, UnknownConfigurationKeyError

from lancewal.errors import InvalidInputError, OutcomeUnknownError, StorageError
from lancewal.storage import ObjectStore
from lancewal.storage.location import parse_location
from lancewal.storage.options import _SPELLINGS, ClientSettings, client_settings
from tests.servers import S3Server

NO_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "/nonexistent", "AWS_CONFIG_FILE": "/nonexistent"}


def resolve(
    uri: str, options: Mapping[str, str] | None = None, env: Mapping[str, str] | None = None
) -> ClientSettings:
    return client_settings(parse_location(uri), options or {}, {**NO_FILES, **(env or {})})


class TestOneDictionaryForBoth:
    # pylance's own knobs, other providers' keys and nonsense: it ignores them, and so do we.
    IGNORED: ClassVar = {
        "download_retry_count": "5",
        "account_name": "other",
        "use_opendal": "false",
        "no_such_key": "1",
    }

    @pytest.mark.parametrize(
        "spelling",
        [
            {},
            {"aws_region": "region", "aws_endpoint": "endpoint", "allow_http": "aws_allow_http"},
            {"aws_access_key_id": "ACCESS_KEY_ID", "aws_secret_access_key": "Secret_Access_Key"},
            {"aws_endpoint": "aws_endpoint_url"},
        ],
        ids=["usual", "short", "case", "url"],
    )
    def test_pylance_writes_and_we_read(self, s3: S3Server, spelling: dict[str, str]) -> None:
        options = {spelling.get(key, key): value for key, value in s3.storage_options.items()}
        options |= self.IGNORED | {"aws_virtual_hosted_style_request": "false", "client_max_retries": "2"}
        uri = s3.uri(f"{uuid.uuid4().hex}/pre%20fix/ä b")
        store = ObjectStore.from_uri(uri, options)
        lance.write_dataset(pa.table({"id": [1, 2]}), uri, storage_options=options)
        assert store.list_directories() == ["_transactions", "_versions", "data"]
        version = store.list("_versions")[-1]
        assert len(store.get(version.path)) == version.size > 0
        assert lance.dataset(store.uri, storage_options=dict(store.storage_options)).count_rows() == 2

    def test_credentials_from_the_environment(self, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        for key, value in s3.storage_options.items():
            monkeypatch.setenv(key.upper(), value)
        uri = s3.uri(uuid.uuid4().hex)
        lance.write_dataset(pa.table({"id": [1]}), uri)
        assert "_versions" in ObjectStore.from_uri(uri).list_directories()

    def test_credentials_from_a_profile(
        self, s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "credentials").write_text(
            "[other]\naws_access_key_id = no\n[mine]\naws_access_key_id = a\naws_secret_access_key = b\n"
        )
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        (tmp_path / "config").write_text("[profile mine]\nregion = us-east-1\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_PROFILE", "mine")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        options = {"aws_endpoint": s3.endpoint, "allow_http": "true"}
        uri = s3.uri(uuid.uuid4().hex)
        lance.write_dataset(pa.table({"id": [1]}), uri, storage_options=options)
        assert "_versions" in ObjectStore.from_uri(uri, options).list_directories()


class TestOptions:
    VALUES: ClassVar = {
        "checksum_algorithm": "sha256",
        "copy_if_not_exists": "multipart",
        "conditional_put": "etag",
        "server_side_encryption": "AES256",
        "endpoint": "https://localhost",
        "encryption_key": "A" * 43 + "=",
        "credential_type": "auto",
        "sas_key": "sv=1&sig=2",
        "s3_express": "false",
    }
    BASE: ClassVar[dict[str, dict[str, str]]] = {
        "s3": {"access_key_id": "k", "secret_access_key": "s", "region": "r"},
        "azure": {"account_name": "a"},
        "gs": {},
    }

    @pytest.mark.parametrize("kind", ["s3", "azure", "gs"])
    def test_obstore_knows_every_name_that_we_pass(self, kind: Any) -> None:
        store: Any = {
            "s3": obstore.store.S3Store,
            "azure": obstore.store.AzureStore,
            "gs": obstore.store.GCSStore,
        }
        for key in _SPELLINGS[kind].keys:
            name = "aws_endpoint_url_s3" if key == "endpoint_url_s3" else key
            try:
                store[kind]("name", config={**self.BASE[kind], name: self.VALUES.get(key, "true")})
            except UnknownConfigurationKeyError:
                pytest.fail(f"obstore does not know {key}")
            except BaseError as error:
                # The dummy value may be a missing file; then the name was understood.
                if "service account" not in str(error).lower():
                    raise

    @pytest.mark.parametrize("key", sorted(_SPELLINGS["s3"].keys))
    def test_spellings_and_cases_mean_the_same(self, key: str) -> None:
        for spelled in (key, f"aws_{key}", f"AWS_{key.upper()}"):
            assert _SPELLINGS["s3"].canonical(spelled) == key

    def test_synonyms(self) -> None:
        azure = resolve("az://c/p", {"azure_storage_account_name": "a", "azure_storage_access_key": "AAAA"})
        assert azure.config == {"account_name": "a", "account_key": "AAAA"}
        assert resolve("az://c/p", {"account_name": "a", "azure_tenant_id": "t"}).config["tenant_id"] == "t"
        assert resolve("gs://b", {"google_storage_token": "t"}).config == {"bearer_token": "t"}
        assert resolve("gs://b", {"google_service_account_path": "/f"}).config == {"service_account": "/f"}

    def test_the_client_has_its_own_options(self) -> None:
        settings = resolve(
            "gs://b",
            {"timeout": "9s", "allow_http": "true", "Headers.x-team": "abc", "client_max_retries": "7"},
        )
        assert settings.config == {}
        assert settings.client_options == {
            "timeout": "9s",
            "allow_http": "true",
            "default_headers": {"x-team": "abc"},
        }
        assert settings.retry_config["max_retries"] == 7

    def test_an_option_wins_over_the_environment(self) -> None:
        env = {
            "AWS_REGION": "from-env",
            "AWS_ENDPOINT_URL": "http://env",
            "TIMEOUT": "1s",
            "REGION": "not ours",
        }
        settings = resolve("s3://b", {"region": "mine", "endpoint": "", "timeout": "2s"}, env)
        assert settings.config == {"region": "mine"}
        assert settings.client_options == {"timeout": "2s"}
        assert resolve("s3://b", {}, env).config == {"region": "from-env", "endpoint": "http://env"}

    def test_two_spellings_with_different_values_are_refused(self) -> None:
        with pytest.raises(InvalidInputError, match=r"aws_region.*region"):
            resolve("s3://b", {"aws_region": "a", "region": "b"})
        assert resolve("s3://b", {"aws_region": "a", "region": "a"}).config == {"region": "a"}

    @pytest.mark.parametrize(
        "options",
        [
            {"client_max_retries": "many"},
            {"aws_virtual_hosted_style_request": "perhaps"},
            {"timeout": "soon"},
            {"aws_access_key_id": "only half"},
            {"region": 5},
            {5: "region"},
            {"allow_http": True},
        ],
    )
    def test_bad_values_are_refused(self, options: Any) -> None:
        with pytest.raises(InvalidInputError):
            ObjectStore.from_uri("s3://b/t", {"aws_endpoint": "http://127.0.0.1:1", **options})

    def test_azure_takes_the_account_from_the_uri(self) -> None:
        for uri in ("abfss://box@acct.dfs.core.windows.net/t", "az://box@acct/t"):
            assert parse_location(uri).container == "box"
            assert resolve(uri, {"account_key": "AAAA"}).config["account_name"] == "acct"
        store = ObjectStore.from_uri("abfss://box@acct.dfs.core.windows.net/t", {"account_key": "AAAA"})
        assert not store.is_local
        assert store.local_path("a") is None

    def test_express_buckets_are_recognised(self) -> None:
        settings = resolve("s3://b--usw2-az1--x-s3/t", {"region": "us-west-2"})
        assert settings.config["s3_express"] == "true"

    @pytest.mark.parametrize(
        "uri",
        ["", "s3://", "s3:///key", "memory://", "az:///x", "abfss://box/path", "gs://", "http://x/y", "s3+ddb://b/t",
         "s3://key:secret@bucket/t", "s3://b/t?x=1", "s3://b/t#x", "file://host/x", "s3://b/a/../c", "a\0b"],
    )  # fmt: skip
    def test_bad_uris_are_refused(self, uri: str) -> None:
        with pytest.raises(InvalidInputError):
            ObjectStore.from_uri(uri)


class TestRegion:
    def answer(self, monkeypatch: pytest.MonkeyPatch, reply: Callable[[], Any]) -> list[str]:
        asked: list[str] = []

        def urlopen(request: urllib.request.Request, timeout: float) -> Any:
            asked.append(request.full_url)
            return reply()

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        return asked

    def test_is_asked_for_when_nothing_tells_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        headers = Message()
        headers["x-amz-bucket-region"] = "eu-north-1"

        def refuse() -> Any:
            raise urllib.error.HTTPError("u", 403, "Forbidden", headers, io.BytesIO())

        asked = self.answer(monkeypatch, refuse)
        assert resolve("s3://some-bucket/t").config["region"] == "eu-north-1"
        assert asked == ["https://some-bucket.s3.amazonaws.com"]

    def test_an_unreachable_s3_leaves_it_open(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def down() -> Any:
            raise urllib.error.URLError("no route")

        self.answer(monkeypatch, down)
        assert "region" not in resolve("s3://b/t").config

    @pytest.mark.parametrize("options", [{"region": "r"}, {"endpoint": "http://x"}, {"default_region": "r"}])
    def test_is_not_asked_for_otherwise(
        self, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
    ) -> None:
        asked = self.answer(monkeypatch, lambda: pytest.fail("asked"))
        resolve("s3://b/t", options)
        assert asked == []


def text_of(error: BaseException) -> str:
    """All that a user could see of an error: its text, its causes, its traceback."""
    seen = "".join(traceback.format_exception(error))
    while error.__context__ is not None:
        error = error.__context__
        seen += str(error)
    return seen


class TestErrors:
    def test_a_server_that_does_not_answer(self) -> None:
        options = {
            "aws_access_key_id": "AKIAVERYSECRET",
            "aws_secret_access_key": "wJalrSECRET/K7",
            "aws_session_token": "FwoTOKENtoken",
            "aws_region": "us-east-1",
            "aws_endpoint": "http://127.0.0.1:1",
            "allow_http": "true",
            "client_max_retries": "0",
        }
        slept: list[float] = []
        store = ObjectStore.from_uri("s3://bucket/t", options)
        store._sleep = slept.append
        writes: list[Callable[[], object]] = [
            lambda: store.put_if_absent("a", b"x"),
            lambda: store.put("a", b"x"),
            lambda: store.delete("a"),
            lambda: store.delete_prefix("a"),
        ]
        calls: list[Callable[[], object]] = [
            *writes,
            lambda: store.get("a"),
            lambda: store.head("a"),
            lambda: store.list(),
            lambda: store.list_directories(),
        ]
        for call in calls:
            slept.clear()
            expected = OutcomeUnknownError if call in writes else StorageError
            with pytest.raises(expected, match=r"127\.0\.0\.1:1") as caught:
                call()
            assert len(slept) == 3
            assert isinstance(caught.value.__cause__, BaseError)
            assert "SECRET" not in text_of(caught.value)
            assert "TOKEN" not in text_of(caught.value)
        assert "SECRET" not in repr(store)

    def test_a_signature_in_an_azure_url(self) -> None:
        signature = "SECRET" + "SIGNATURE%2Fx%3D"
        options = {
            "account_name": "acct",
            "sas_token": f"sv=2024-01-01&sp=rw&sig={signature}",
            "azure_storage_endpoint": "http://127.0.0.1:1/acct",
            "allow_http": "true",
            "client_max_retries": "0",
        }
        store = ObjectStore.from_uri("az://box/t", options)
        store._sleep = lambda seconds: None
        with pytest.raises(StorageError) as caught:
            store.get("a")
        assert "SECRET" not in text_of(caught.value)

    def test_secrets_that_the_library_quotes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        key, token = "SECRET" + "KEY/+1", "SECRET" + "TOKEN"
        store = ObjectStore.from_uri(
            "s3://b/t", {"access_key_id": "a", "secret_access_key": key, "token": token, "region": "r"}
        )
        quoted = (
            f"<Key>{key}</Key> GET https://h/p?X-Amz-Security-Token=SECRETx&sig=SECRETy&z=1 "
            f"via http://user:SECRETz@proxy/\n\nDebug source:\n {token}"
        )
        outcomes = [PermissionDeniedError(quoted), GenericError(f"{token} {quoted}"), ValueError(quoted)]

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise outcomes[-1]

        monkeypatch.setattr(obstore, "get", fail)
        store._sleep = lambda seconds: None
        while outcomes:
            with pytest.raises(StorageError, match="cannot read 'a' in s3://b/t") as caught:
                store.get("a")
            assert "SECRET" not in text_of(caught.value)
            assert "z=1" in str(caught.value)
            outcomes.pop()

    def test_a_panic_of_the_library_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Not an Exception by birth: it would fly past every handler and end a thread.
        panic = type("PanicException", (BaseException,), {})

        def fail(*args: Any, **kwargs: Any) -> Any:
            raise panic("unwrap on None")

        store = ObjectStore.from_uri(f"memory://{uuid.uuid4().hex}")
        monkeypatch.setattr(obstore, "put", fail)
        monkeypatch.setattr(obstore, "get", fail)
        for write in (store.put_if_absent, store.put):
            with pytest.raises(OutcomeUnknownError, match="unwrap on None"):
                write("a", b"x")
        with pytest.raises(StorageError, match="unwrap on None"):
            store.get("a")

    def test_an_interrupt_stays_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

        store = ObjectStore.from_uri(f"memory://{uuid.uuid4().hex}")
        monkeypatch.setattr(obstore, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put_if_absent("a", b"x")

    def test_a_secret_in_refused_options(self) -> None:
        secret = "SECRET" + "without=pairs="
        refused: list[dict[str, str]] = [{"sas_token": secret[:12]}, {"encryption_key": secret}]
        for options in refused:
            with pytest.raises(InvalidInputError) as caught:
                ObjectStore.from_uri("az://box/t", {"account_name": "a", **options})
            assert "SECRET" not in text_of(caught.value)

    def test_a_missing_bucket(self, s3: S3Server) -> None:
        store = ObjectStore.from_uri(
            "s3://no-such-bucket/t", {**s3.storage_options, "client_max_retries": "0"}
        )
        store._sleep = lambda seconds: None
        for write in (store.put_if_absent, store.put):
            with pytest.raises(StorageError, match="bucket or container does not exist"):
                write("a", b"x")
        with pytest.raises(StorageError, match="NoSuchBucket"):
            store.list()

    def test_a_store_that_lists_more_than_it_was_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = obstore.list
        monkeypatch.setattr(obstore, "list", lambda store, prefix, **kwargs: real(store, None, **kwargs))
        store = ObjectStore.from_uri(f"memory://{uuid.uuid4().hex}/table")
        for path in ("a/b/1", "a/bc/2", "c"):
            store.put(path, b"")
        assert [info.path for info in store.list("a/b")] == ["a/b/1"]
        assert store.delete_prefix("a/b") == 1
        assert [info.path for info in store.list()] == ["a/bc/2", "c"]

    def test_the_same_directory_deleted_twice_at_once(self, s3_store: ObjectStore) -> None:
        for number in range(50):
            s3_store.put(f"d/{number}", b"")
        threads = [threading.Thread(target=s3_store.delete_prefix, args=("d",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert s3_store.list() == []
