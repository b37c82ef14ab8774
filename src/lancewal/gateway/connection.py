"""A client's connection to gateways: the current gateway, retries, and the errors of failed calls."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import flight

from lancewal.errors import (
    AccessDeniedError,
    BusyError,
    ClosedError,
    InvalidInputError,
    LanceWalError,
    OutcomeUnknownError,
    PartialWriteError,
    ShardOwnedError,
    UnavailableError,
)
from lancewal.gateway.access import is_loopback
from lancewal.gateway.contract import rebuilt
from lancewal.storage import check_process, is_forked, note_use, trace_headers

logger = logging.getLogger(__name__)

#: For how many seconds a call is retried while the gateway cannot be reached or has no room.
DEFAULT_TIMEOUT = 60.0
_PING_AFTER_MS = 5_000
_LONGEST_WITHOUT_DATA = 150.0
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0
#: How many addresses of other gateways are kept, besides those that the user gave.
_MOST_TOLD = 4

#: What gRPC says of a certificate that is not trusted; the first is of BoringSSL, the second of OpenSSL.
_UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "certificate verify failed", "is not in peer certificate")
_SCHEMES = ("grpc://", "grpc+tcp://", "grpc+tls://", "grpc+unix://")

R = TypeVar("R")

#: Errors after which a call may be retried, perhaps at another gateway.
PASSING = (BusyError, UnavailableError)
#: Errors that do not suggest that the rows of an earlier attempt were not written.
_SAYS_ENOUGH = (OutcomeUnknownError, PartialWriteError, AccessDeniedError)
_UNREACHABLE = (flight.FlightUnavailableError, flight.FlightCancelledError, flight.FlightTimedOutError)


class Connection:
    """A connection to one of several gateways; a table and its writers share it. Thread-safe."""

    def __init__(
        self,
        addresses: Sequence[str],
        token: str | None,
        tls_root_certs: bytes | None,
        timeout: float,
        *,
        before_try: Callable[[], None] = lambda: None,
    ) -> None:
        """``before_try`` is called before each new connection to a gateway, the first one included."""
        for address in addresses:
            if not _is_address(address):
                raise InvalidInputError(f"{address!r} is no address of a gateway; give grpc+tls://host:port")
            if token is not None and address.startswith(("grpc://", "grpc+tcp://")):
                _warn_of_plain_token(address)
        if token is not None and not (isinstance(token, str) and token.isascii() and token.isprintable()):
            raise InvalidInputError("a token is a text of printable ASCII characters")
        if tls_root_certs is not None and not (
            isinstance(tls_root_certs, bytes) and b"BEGIN CERTIFICATE" in tls_root_certs
        ):
            raise InvalidInputError("tls_root_certs is no certificate; give the bytes of a PEM file")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise InvalidInputError(f"timeout is {timeout!r}; give a number of seconds above 0")
        # A forked child would send puts under its parent's put ids, and a gateway writes each id only once.
        note_use()
        self._given = list(addresses)
        self._addresses = list(addresses)
        self._token = token
        self._certs = tls_root_certs
        self.timeout = timeout
        self._before_try = before_try
        self._lock = threading.Lock()
        self._client: flight.FlightClient | None = None
        self._closed = False
        #: Counts the changes of gateway. An open stream from an earlier turn is stale.
        self.turn = 0

    @property
    def address(self) -> str:
        """The address of the current gateway."""
        return self._addresses[self.turn % len(self._addresses)]

    @property
    def num_addresses(self) -> int:
        """How many gateways are known."""
        return len(self._addresses)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def options(self, timeout: float | None = None) -> flight.FlightCallOptions:
        headers = [(name.encode(), value.encode()) for name, value in trace_headers().items()]
        if self._token is not None:
            headers.append((b"authorization", f"Bearer {self._token}".encode()))
        return flight.FlightCallOptions(timeout=timeout, headers=headers)

    def client(self) -> tuple[flight.FlightClient, int]:
        """The client of the current gateway, and the current turn."""
        check_process()
        if self._client is None and not self._closed:
            self._before_try()
        with self._lock:
            if self._closed:
                raise ClosedError("this connection is closed; connect again")
            if self._client is None:
                self._client = flight.FlightClient(
                    self.address, tls_root_certs=self._certs, generic_options=self._alive_checks()
                )
            return self._client, self.turn

    def _alive_checks(self) -> list[tuple[str, int]]:
        """Settings of gRPC with which a gateway that hangs is noticed: it answers no ping, and no connect.

        A gateway that only takes long answers pings. After two pings without any data gRPC sends one each
        minute, and a server cuts a connection that has had five of them; a call whose timeout is longer than
        that is checked every five minutes, as often as servers allow.
        """
        often = self.timeout <= _LONGEST_WITHOUT_DATA
        return [
            ("grpc.keepalive_time_ms", _PING_AFTER_MS if often else 301_000),
            ("grpc.keepalive_timeout_ms", _PING_AFTER_MS),
            ("grpc.http2.ping_timeout_ms", _PING_AFTER_MS),
            ("grpc.min_reconnect_backoff_ms", _PING_AFTER_MS),
        ]

    def may_go_to(self, address: str | None) -> TypeGuard[str]:
        """Whether a shard's owner may be called at this address, which is from a record that may be forged.

        Only at addresses of the same kind as the user's: a token for TLS must not be sent without it.
        """
        return _is_address(address) and address.partition("://")[0] == self._given[0].partition("://")[0]

    def turn_away(self, turn: int, towards: str | None = None) -> None:
        """Switch to the next gateway, or to ``towards``: the one of ``turn`` did not accept a call.

        ``towards`` is an address that :meth:`may_go_to` allows.
        """
        with self._lock:
            if turn != self.turn:
                return  # another thread has already switched
            client, self._client = self._client, None
            self.turn += 1
            if towards is not None:
                if towards not in self._addresses:
                    # The newest ones: most gateways of long ago are gone, and each would be tried.
                    told = [*self._addresses[len(self._given) :], towards]
                    self._addresses = [*self._given, *told[-_MOST_TOLD:]]
                while self.address != towards:
                    self.turn += 1
        if client is not None:
            with contextlib.suppress(pa.ArrowException):
                client.close()

    def call(
        self, make: Callable[[flight.FlightClient, flight.FlightCallOptions], R], *, streams: bool = False
    ) -> R:
        """Make an idempotent call, and retry it until a gateway accepts it.

        A call that ``streams`` has no deadline, only its retries have: many rows take their time, and so does
        whoever takes them.
        """
        trying = Trying(self.timeout)
        while True:
            client, turn = self.client()
            try:
                return make(client, self.options(None if streams else trying.left))
            except (flight.FlightError, pa.ArrowException, OSError) as error:
                failure = as_error(error)
            trying.again(self, turn, failure)

    def close(self) -> None:
        """Close the connection; does nothing in a forked child, because it belongs to the parent."""
        if is_forked():
            return
        with self._lock:
            client, self._client, self._closed = self._client, None, True
        if client is not None:
            client.close()


class Trying:
    """The time that is left for a call, and the pauses between its attempts."""

    def __init__(self, timeout: float) -> None:
        self._until = time.monotonic() + timeout
        self._pause = _FIRST_PAUSE
        self._denials = 0
        #: Whether an attempt may have taken effect although no answer came.
        self.unanswered = False

    @property
    def left(self) -> float:
        return max(self._until - time.monotonic(), 0.001)

    def again(self, connection: Connection, turn: int, failure: LanceWalError) -> None:
        """Wait before the next attempt, at the next gateway if needed; raises if a retry would not help.

        Raises ``failure`` itself, or :class:`OutcomeUnknownError` if an attempt may have taken effect.
        """
        moved_to = failure.address if isinstance(failure, ShardOwnedError) else None
        if not connection.may_go_to(moved_to):
            moved_to = None
        is_final = not isinstance(failure, PASSING) and moved_to is None
        if isinstance(failure, AccessDeniedError):
            # Another gateway may have a certificate that is trusted, or know the token.
            self._denials += 1
            is_final = self._denials >= connection.num_addresses
        if is_final:
            if self.unanswered and not isinstance(failure, _SAYS_ENOUGH):
                raise OutcomeUnknownError(
                    f"an earlier try may have been written; then: {failure}"
                ) from failure
            raise failure
        if time.monotonic() + self._pause >= self._until:
            if self.unanswered:
                raise OutcomeUnknownError(
                    f"no gateway answered in time; the last error: {failure}"
                ) from failure
            raise failure
        if not isinstance(failure, BusyError):
            connection.turn_away(turn, moved_to)
        logger.debug("trying again at %s: %s", connection.address, failure)
        # The pause is random, so that the clients of a lost gateway do not all reach the next one at once.
        time.sleep(self._pause * random.uniform(0.5, 1.0))
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)


def _is_address(value: object) -> TypeGuard[str]:
    """Whether clients can connect to ``value``, if something is there."""
    if not isinstance(value, str) or not value.startswith(_SCHEMES):
        return False
    try:
        flight.Location(value)
    except pa.ArrowException:
        return False
    # A Unix socket has a path, and all others have a host.
    parts = urlsplit(value)
    return bool(parts.path if parts.scheme == "grpc+unix" else parts.hostname)


def chunks_of(reader: Any) -> Iterator[Any]:
    """Yield the batches of a read with their metadata."""
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        if chunk.data is not None:
            yield chunk


def as_error(error: BaseException) -> LanceWalError:
    """Convert the error of a failed call to one of our errors."""
    said = getattr(error, "extra_info", None)
    if said:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return rebuilt(json.loads(said))
    if isinstance(error, flight.FlightUnauthenticatedError | flight.FlightUnauthorizedError):
        return AccessDeniedError(_first_line(error))
    if any(each in str(error) for each in _UNTRUSTED):
        return AccessDeniedError(
            "the gateway's certificate cannot be verified; pass the certificate that has signed it as "
            f"tls_root_certs ({_first_line(error)})"
        )
    if isinstance(error, (*_UNREACHABLE, OSError, StopIteration)) or "nknown error" in str(error):
        return UnavailableError(f"the gateway cannot be reached: {_first_line(error)}")
    return LanceWalError(f"the gateway failed: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].partition(". gRPC client debug context")[0] or type(error).__name__


def _warn_of_plain_token(address: str) -> None:
    if not is_loopback(address):
        logger.warning("the token is sent to %s without TLS; connect with grpc+tls://", address)
