"""Converts storage options in pylance's spelling to the arguments of obstore's constructors.

One dictionary serves both libraries. As in pylance, keys are case-insensitive and have several
spellings (``aws_region``, ``region``). Unknown keys are ignored, because pylance has more settings.
Missing keys come from the environment: ``AWS_…``, ``AZURE_…``, ``GOOGLE_…``, and HTTP settings such as
``TIMEOUT`` and ``ALLOW_HTTP`` without a prefix.
"""

from __future__ import annotations

import configparser
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lancewal.errors import InvalidInputError
from lancewal.storage.location import Kind, Location
from lancewal.storage.secrets import remember_password, remember_secrets

logger = logging.getLogger(__name__)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True)
class _Spelling:
    """How a provider spells its keys: drop ``prefixes``, apply ``synonyms``, then look in ``keys``."""

    prefixes: tuple[str, ...]
    keys: frozenset[str]
    synonyms: Mapping[str, str]

    def canonical(self, key: str) -> str | None:
        name = key.lower()
        for prefix in self.prefixes:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        name = self.synonyms.get(name, name)
        return name if name in self.keys or name in _CLIENT_KEYS else None


_CLIENT_KEYS = _names(
    "allow_http allow_invalid_certificates connect_timeout default_content_type http1_only http2_only "
    "http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle pool_idle_timeout "
    "pool_max_idle_per_host proxy_url proxy_ca_certificate proxy_excludes randomize_addresses "
    "read_timeout timeout user_agent"
)
_SPELLINGS: dict[Kind, _Spelling] = {
    "s3": _Spelling(
        ("aws_",),
        _names(
            "access_key_id secret_access_key session_token region default_region endpoint "
            "endpoint_url_s3 endpoint_url_sts virtual_hosted_style_request s3_express imdsv1_fallback "
            "metadata_endpoint unsigned_payload checksum_algorithm container_credentials_relative_uri "
            "container_credentials_full_uri container_authorization_token_file web_identity_token_file "
            "role_arn role_session_name skip_signature copy_if_not_exists conditional_put disable_tagging "
            "disable_bulk_delete request_payer server_side_encryption sse_kms_key_id "
            "sse_bucket_key_enabled sse_customer_key_base64"
        ),
        {"endpoint_url": "endpoint", "token": "session_token"},
    ),
    "azure": _Spelling(
        ("azure_storage_", "azure_"),
        _names(
            "account_name account_key client_id client_secret tenant_id authority_host sas_key token "
            "use_emulator endpoint use_fabric_endpoint msi_endpoint object_id msi_resource_id "
            "federated_token_file use_azure_cli skip_signature disable_tagging credential_type "
            "fabric_token_service_url fabric_workload_host fabric_session_token "
            "fabric_cluster_identifier encryption_key"
        ),
        {
            "access_key": "account_key",
            "master_key": "account_key",
            "authority_id": "tenant_id",
            "sas_token": "sas_key",
            "bearer_token": "token",
            "identity_endpoint": "msi_endpoint",
        },
    ),
    "gs": _Spelling(
        ("google_",),
        _names(
            "service_account service_account_key application_credentials base_url bearer_token skip_signature"
        ),
        {"service_account_path": "service_account", "storage_token": "bearer_token"},
    ),
}
# obstore accepts this key only with its prefix.
_RENAMED_FOR_OBSTORE = {"endpoint_url_s3": "aws_endpoint_url_s3"}
_SECRETS = _names(
    "access_key_id secret_access_key session_token sse_customer_key_base64 account_key client_secret sas_key "
    "token encryption_key fabric_session_token service_account_key bearer_token"
)
#: The prefix of options that set HTTP headers; the header's name follows.
_HEADERS = "headers."
_DEFAULT_RETRIES = 3
_DEFAULT_RETRY_SECONDS = 180
_REGION_LOOKUP_SECONDS = 5.0


# Without a repr, which would show the credentials.
@dataclass(frozen=True, repr=False)
class ClientSettings:
    """Arguments for an obstore constructor."""

    config: dict[str, str]
    client_options: dict[str, Any]
    retry_config: dict[str, Any]


def check_options(options: Mapping[str, str] | None) -> dict[str, str]:
    """A copy of the caller's options; refuses options that pylance would not accept either."""
    checked = dict(options or {})
    for key, value in checked.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidInputError(
                f"storage option {key!r} must map text to text, e.g. {{'allow_http': 'true'}}"
            )
    _remember(checked)
    return checked


def _remember(options: Mapping[str, str]) -> None:
    """Keep the secrets among these options out of all error texts."""
    for key, value in options.items():
        names = {spelling.canonical(key) for spelling in _SPELLINGS.values()}
        if not _SECRETS.isdisjoint(names) or key.lower().startswith(_HEADERS):
            remember_secrets([value])
        else:
            remember_password(value)


def client_settings(
    location: Location, options: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> ClientSettings:
    """Settings for the store at ``location``; an option wins over the environment."""
    env = os.environ if environ is None else environ
    spelling = _SPELLINGS[location.kind]
    merged = {**_from_environment(spelling, env), **_from_options(spelling, options)}
    if location.account is not None:
        merged["account_name"] = location.account
    if location.kind == "s3":
        _complete_s3(location.container, merged, env)
    # An empty option only hides a value of the environment.
    merged = {key: value for key, value in merged.items() if value}
    _remember(merged)
    headers = {
        key[len(_HEADERS) :]: value for key, value in options.items() if key.lower().startswith(_HEADERS)
    }
    client_options: dict[str, Any] = {key: merged[key] for key in merged.keys() & _CLIENT_KEYS}
    if headers:
        client_options["default_headers"] = headers
    config = {
        _RENAMED_FOR_OBSTORE.get(key, key): value for key, value in merged.items() if key not in _CLIENT_KEYS
    }
    return ClientSettings(config, client_options, _retry_config(options))


def _from_options(spelling: _Spelling, options: Mapping[str, str]) -> dict[str, str]:
    known: dict[str, str] = {}
    spelled: dict[str, str] = {}
    for key, value in options.items():
        name = spelling.canonical(key)
        if name is None:
            continue
        if known.get(name, value) != value:
            raise InvalidInputError(
                f"storage options {spelled[name]!r} and {key!r} mean the same and differ; pass one of them"
            )
        known[name], spelled[name] = value, key
    return known


def _from_environment(spelling: _Spelling, env: Mapping[str, str]) -> dict[str, str]:
    known = {}
    for key, value in env.items():
        name = spelling.canonical(key)
        if name is not None and (name in _CLIENT_KEYS or key.lower().startswith(spelling.prefixes)):
            known[name] = value
    return known


def _retry_config(options: Mapping[str, str]) -> dict[str, Any]:
    lowered = {key.lower(): value for key, value in options.items()}
    numbers = {"client_max_retries": _DEFAULT_RETRIES, "client_retry_timeout": _DEFAULT_RETRY_SECONDS}
    for key in numbers:
        if key in lowered:
            if not lowered[key].isdecimal():
                raise InvalidInputError(f"storage option {key} must be a whole number, not {lowered[key]!r}")
            numbers[key] = int(lowered[key])
    return {
        "max_retries": numbers["client_max_retries"],
        "retry_timeout": timedelta(seconds=numbers["client_retry_timeout"]),
    }


def _complete_s3(bucket: str, merged: dict[str, str], env: Mapping[str, str]) -> None:
    """Fill in the settings that pylance detects by itself: profile, region, S3 Express."""
    if bucket.endswith("--x-s3"):
        merged.setdefault("s3_express", "true")
    profile = _aws_profile(env)
    has_keys = "access_key_id" in merged or merged.get("skip_signature", "").lower() in ("true", "1")
    if not has_keys and {"access_key_id", "secret_access_key"} <= profile.keys():
        for key in ("access_key_id", "secret_access_key", "session_token"):
            if key in profile:
                merged[key] = profile[key]
    if not merged.get("region") and not merged.get("default_region"):
        custom = merged.get("endpoint") or merged.get("endpoint_url_s3")
        region = (None if custom else bucket_region(bucket)) or profile.get("region")
        if region:
            merged["region"] = region


def _aws_profile(env: Mapping[str, str]) -> dict[str, str]:
    """Static keys and region of the selected AWS profile; obstore does not read these files."""
    home = os.path.expanduser("~/.aws")
    credentials = env.get("AWS_SHARED_CREDENTIALS_FILE", f"{home}/credentials")
    config = env.get("AWS_CONFIG_FILE", f"{home}/config")
    name = env.get("AWS_PROFILE", "default")
    parser = configparser.RawConfigParser()
    try:
        parser.read([config, credentials], encoding="utf-8")
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        # The parser's text quotes the offending line, which may be a key.
        logger.warning("AWS profile files are not readable (%s); ignoring them", type(error).__name__)
        return {}
    found: dict[str, str] = {}
    for section in (f"profile {name}", name):
        if parser.has_section(section):
            for key, value in parser.items(section):
                found[key.removeprefix("aws_")] = value
    return found


def bucket_region(bucket: str) -> str | None:
    """Ask S3 for a bucket's region; ``None`` when it does not answer."""
    request = urllib.request.Request(f"https://{bucket}.s3.amazonaws.com", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_REGION_LOOKUP_SECONDS) as reply:
            region = reply.headers.get("x-amz-bucket-region")
    except urllib.error.HTTPError as error:
        # S3 names the region even when it refuses the anonymous request.
        region = error.headers.get("x-amz-bucket-region")
    except OSError as error:
        logger.warning("could not find out the region of bucket %s: %s; set aws_region", bucket, error)
        return None
    return str(region) if region else None
