"""Who may use a gateway: tokens, TLS, and where it listens. What is refused leaves nothing but a log line."""

from __future__ import annotations

import datetime
import logging
import socket
from pathlib import Path

import pyarrow as pa
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import lancewal
from lancewal.errors import AccessDeniedError, InvalidInputError, OutcomeUnknownError, UnavailableError
from lancewal.gateway import Access, Gateway
from tests.patience import PATIENCE
from tests.tables import rows

WRITES = "write-token-of-the-tests"
READS = "read-token-of-the-tests-"


def certificate(*, days: int = 1) -> tuple[bytes, bytes]:
    """A certificate of this host for itself, and its key; with negative ``days`` it has expired."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return signed.public_bytes(serialization.Encoding.PEM), private


def test_tokens_let_read_or_write(events: lancewal.Table) -> None:
    access = Access(read_write=(WRITES,), read_only=(READS,))
    with Gateway({"events": events}, access=access) as gateway:
        with (
            lancewal.connect(gateway.address, token=WRITES, timeout=PATIENCE) as table,
            table.writer() as writer,
        ):
            writer.put(rows(0, 3))
        with lancewal.connect(gateway.address, token=READS, timeout=PATIENCE) as table:
            assert table.count_rows() == 3
            with pytest.raises(AccessDeniedError, match="may read"):
                table.flush()
            with table.writer() as writer, pytest.raises(AccessDeniedError, match="may read"):
                writer.put(rows(3, 3))
        assert events.count_rows() == 3


@pytest.mark.parametrize("token", [None, "", "wrong", WRITES[:-1], WRITES + "x"])
def test_a_wrong_token_is_refused_and_not_logged(
    events: lancewal.Table, token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with Gateway({"events": events}, access=Access(read_write=(WRITES,))) as gateway:
        with (
            caplog.at_level(logging.DEBUG),
            lancewal.connect(gateway.address, token=token, timeout=2) as table,
            pytest.raises((AccessDeniedError, UnavailableError, InvalidInputError)),
        ):
            table.count_rows()
        assert WRITES not in caplog.text
    assert events.count_rows() == 0


def test_a_token_that_no_header_can_carry_is_refused(gateway: Gateway) -> None:
    with pytest.raises(InvalidInputError, match="printable"):
        lancewal.connect(gateway.address, token="line\nbreak")


def test_tls_is_spoken_and_checked(events: lancewal.Table) -> None:
    pem, key = certificate()
    access = Access(read_write=(WRITES,), certificate=pem, key=key)
    with Gateway({"events": events}, access=access, listen="localhost:0") as gateway:
        assert gateway.address.startswith("grpc+tls://")
        with (
            lancewal.connect(gateway.address, token=WRITES, tls_root_certs=pem, timeout=PATIENCE) as table,
            table.writer() as writer,
        ):
            writer.put(rows(0, 3))
            assert table.count_rows() == 3
        plain = gateway.address.replace("grpc+tls", "grpc")
        wrong = lancewal.connect(plain, token=WRITES, timeout=1)
        with wrong, pytest.raises((UnavailableError, OutcomeUnknownError)):
            wrong.count_rows()


def test_a_certificate_that_is_not_trusted_was_tried_until_the_time_was_over(events: lancewal.Table) -> None:
    """One of a stranger, one for another host, and one that has expired."""
    (pem, key), (stranger, _), (expired, expired_key) = certificate(), certificate(), certificate(days=-1)
    with Gateway(
        {"events": events},
        access=Access(read_write=(WRITES,), certificate=pem, key=key),
        listen="localhost:0",
    ) as gateway:
        elsewhere = gateway.address.replace("localhost", "127.0.0.1")
        for address, known in ((gateway.address, stranger), (elsewhere, pem)):
            with (
                lancewal.connect(address, token=WRITES, tls_root_certs=known, timeout=PATIENCE) as table,
                pytest.raises(AccessDeniedError, match="certificate cannot be verified"),
            ):
                table.count_rows()
        access = Access(read_write=(WRITES,), certificate=expired, key=expired_key)
        with Gateway({"events": events}, access=access, listen="localhost:0") as old:
            with (
                lancewal.connect(
                    old.address, token=WRITES, tls_root_certs=expired, timeout=PATIENCE
                ) as table,
                pytest.raises(AccessDeniedError, match="certificate cannot be verified"),
            ):
                table.count_rows()
            # A stand-by that is trusted serves all the same.
            both = [old.address, gateway.address]
            with lancewal.connect(both, token=WRITES, tls_root_certs=pem, timeout=PATIENCE) as table:
                assert table.count_rows() == 0
    with pytest.raises(InvalidInputError, match="no certificate"):
        lancewal.connect(gateway.address, tls_root_certs=b"a path of a file")


@pytest.mark.parametrize(
    ("listen", "tokens", "tls"),
    [("0.0.0.0:0", True, False), ("0.0.0.0:0", False, True), ("[::]:0", False, False), ("10.1.2.3:0", 0, 0)],
)
def test_other_machines_are_let_in_with_token_and_tls_only(
    events: lancewal.Table, listen: str, tokens: bool, tls: bool
) -> None:
    pem, key = certificate() if tls else (None, None)
    access = Access(read_write=(WRITES,) if tokens else (), certificate=pem, key=key)
    with pytest.raises(InvalidInputError, match="token and a TLS"):
        Gateway({"events": events}, access=access, listen=listen)


@pytest.mark.parametrize("listen", ["", "localhost", "127.0.0.1:x", "127.0.0.1:99999", "unix:", "unix:s"])
def test_what_is_no_address_is_refused(events: lancewal.Table, listen: str) -> None:
    with pytest.raises(InvalidInputError):
        Gateway({"events": events}, listen=listen)


def test_a_port_that_is_taken_is_refused(gateway: Gateway, events: lancewal.Table) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot listen.*in use"):
        Gateway({"events": events}, listen=gateway.address.removeprefix("grpc://"))


def test_a_second_gateway_took_the_socket_away_from_the_first(events: lancewal.Table, tmp_path: Path) -> None:
    listen = f"unix:{tmp_path / 's'}"
    with Gateway({"events": events}, listen=listen) as gateway:
        with pytest.raises(InvalidInputError, match="another process listens there"):
            Gateway({"events": events}, listen=listen)
        with lancewal.connect(gateway.address, timeout=PATIENCE) as table:
            assert table.count_rows() == 0


def test_the_socket_of_a_killed_gateway_is_taken(events: lancewal.Table, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    with (
        Gateway({"events": events}, listen=f"unix:{tmp_path / 's'}") as gateway,
        lancewal.connect(gateway.address, timeout=PATIENCE) as table,
    ):
        assert table.count_rows() == 0


def test_reasons_why_a_gateway_cannot_listen_were_not_told(events: lancewal.Table, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="No such file or directory"):
        Gateway({"events": events}, listen=f"unix:{tmp_path / 'missing' / 's'}")
    (pem, _), (_, key) = certificate(), certificate()
    for other in (key, b"garbage"):
        with pytest.raises(InvalidInputError, match="do not belong together"):
            Gateway({"events": events}, access=Access(certificate=pem, key=other))


def test_a_gateway_whose_advertised_address_is_refused_does_not_listen(
    events: lancewal.Table, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match="advertise"):
        Gateway({"events": events}, listen=f"unix:{tmp_path / 's'}", advertise="nowhere")
    assert not (tmp_path / "s").exists()


def test_weak_tokens_and_half_a_certificate_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least 16"):
        Access(read_write=("short",))
    with pytest.raises(InvalidInputError, match="certificate and its key"):
        Access(certificate=b"pem")
    assert "pem" not in repr(Access(certificate=b"pem", key=b"pem"))


def test_a_unix_socket_serves_processes_of_this_machine(events: lancewal.Table, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with (
        Gateway({"events": events}, listen=f"unix:{path}") as gateway,
        lancewal.connect(gateway.address, timeout=PATIENCE) as table,
        table.writer() as writer,
    ):
        writer.put(pa.table({"id": [1], "name": ["a"]}))
        assert table.count_rows() == 1
        assert path.is_socket()


def test_tokens_were_shown_with_the_access_that_has_them() -> None:
    shown = repr(Access(read_write=(WRITES,), read_only=(READS,)))
    assert WRITES not in shown
    assert READS not in shown
