"""Access control of a gateway: tokens, TLS, and where it may listen."""

from __future__ import annotations

import hmac
import ipaddress
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyarrow import flight

from lancewal.errors import InvalidInputError

logger = logging.getLogger(__name__)

_LEAST_TOKEN_LENGTH = 16
#: The name of the middleware that holds a caller's rights.
CALLER = "caller"


@dataclass(frozen=True)
class Access:
    """Tokens that let callers read, or read and write, and the certificate of the gateway.

    Without any token every caller may do everything, so the gateway then listens only on the loopback
    interface or a Unix socket.
    """

    read_write: tuple[str, ...] = field(default=(), repr=False)
    read_only: tuple[str, ...] = field(default=(), repr=False)
    #: The certificate chain and its key, in PEM format.
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for tokens in (self.read_write, self.read_only):
            if isinstance(tokens, str):  # otherwise each of its letters would be a token
                raise InvalidInputError("tokens are a list, also where there is only one")
        for token in (*self.read_write, *self.read_only):
            if (
                not isinstance(token, str)
                or len(token) < _LEAST_TOKEN_LENGTH
                or not token.isascii()
                or not token.isprintable()
            ):
                raise InvalidInputError(
                    f"a token has at least {_LEAST_TOKEN_LENGTH} printable ASCII characters; draw one with "
                    '`python -c "import secrets; print(secrets.token_urlsafe(32))"`'
                )
        if (self.certificate is None) != (self.key is None):
            raise InvalidInputError("TLS needs a certificate and its key; only one of them is given")

    @property
    def has_tokens(self) -> bool:
        return bool(self.read_write or self.read_only)

    def may(self, token: str | None) -> Caller | None:
        """The rights of a caller with ``token``; ``None`` if it is unknown. Compares in constant time."""
        if not self.has_tokens:
            return Caller(writes=True)
        given = (token or "").encode()
        # Lists, not generators, so that all tokens are compared even after a match.
        writes = [hmac.compare_digest(given, each.encode()) for each in self.read_write]
        reads = [hmac.compare_digest(given, each.encode()) for each in self.read_only]
        return Caller(any(writes)) if any(writes + reads) else None

    def check_listen(self, location: str) -> None:
        """Refuse an address that other machines can reach, unless there are tokens and TLS."""
        if location.startswith(("grpc+unix://", "unix:")) or is_loopback(location):
            return
        if not (self.has_tokens and self.certificate):
            raise InvalidInputError(
                f"{location} can be reached from other machines, so the gateway needs a token and a TLS "
                "certificate to listen there; give both, or listen on 127.0.0.1"
            )


#: The headers of the W3C Trace Context.
_TRACE_HEADERS = ("traceparent", "tracestate")


class Caller(flight.ServerMiddleware):  # type: ignore[misc]
    """The caller of a call, with the rights of its token."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        #: The call's trace headers.
        self.trace: dict[str, str] = {}


class Doorkeeper(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses calls with an unknown token; its log records name the method, never the token."""

    def __init__(self, access: Access) -> None:
        super().__init__()
        self._access = access

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, list[str]]) -> Caller:
        caller = self._access.may(_bearer(headers))
        if caller is None:
            logger.warning("refused a call without a known token", extra={"method": str(info.method)})
            raise flight.FlightUnauthenticatedError("this gateway takes calls with a known token only")
        caller.trace = {
            name.lower(): str(values[0])
            for name, values in headers.items()
            if name.lower() in _TRACE_HEADERS and values
        }
        return caller


def _bearer(headers: Mapping[str, list[Any]]) -> str | None:
    for name, values in headers.items():
        if name.lower() == "authorization" and values:
            scheme, _, token = str(values[0]).partition(" ")
            if scheme.lower() == "bearer":
                return token.strip()
    return None


def is_loopback(location: str) -> bool:
    """Whether only this machine can reach ``host:port``, with or without a scheme.

    >>> is_loopback("grpc://127.0.0.1:80"), is_loopback("[::1]:80"), is_loopback("0.0.0.0:80")
    (True, True, False)
    """
    host = location.rpartition("://")[2].rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
