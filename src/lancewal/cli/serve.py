"""``lancewal serve``: a gateway that writes and reads tables for many processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Annotated

import typer

from lancewal.cli import console, options
from lancewal.cli.exits import guarded, wait_until_stopped
from lancewal.errors import InvalidInputError

#: Settings of glibc's allocator, by the environment variables that a user may set instead: the parameter of
#: ``mallopt`` and its value. There are few arenas, and large freed blocks go back to the system.
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": (-8, 2),
    "MALLOC_MMAP_THRESHOLD_": (-3, 128 << 10),
    "MALLOC_TRIM_THRESHOLD_": (-1, 128 << 10),
}
_TOKENS_HELP = "File with tokens, one a line, that let clients {}. The file is read at the start."


@guarded
def serve(
    tables: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]TABLE…", help="Tables to serve, by default under the last part of their path."
        ),
    ],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; unix:PATH for a socket.")
    ] = "127.0.0.1:9465",
    advertise: Annotated[
        str | None,
        typer.Option(
            "--advertise",
            metavar="HOST:PORT",
            help="Where clients reach this gateway, if not at --listen: other gateways send them there.",
        ),
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option("--tokens", metavar="FILE", help=_TOKENS_HELP.format("read and write"))
    ] = None,
    read_tokens: Annotated[
        Path | None, typer.Option("--read-tokens", metavar="FILE", help=_TOKENS_HELP.format("read"))
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--tls-certificate", metavar="FILE", help="PEM of the certificate chain.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="PEM of its key.")] = None,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="HOST:PORT", help="Serve a page, /live, /ready and /metrics there."),
    ] = None,
    upkeep: Annotated[
        bool, typer.Option("--upkeep/--no-upkeep", help="Keep the tables in shape meanwhile.")
    ] = True,
    option: options.StorageOptions = None,
    json: options.Json = False,
) -> None:
    """Write and read tables for many processes, over Arrow Flight.

    All clients share one group commit. Connect with lancewal.connect("grpc://HOST:PORT"), or with any Arrow
    Flight client. To listen beyond this machine, tokens and TLS are required. On SIGTERM or Ctrl-C the
    gateway finishes running puts, flushes, and hands over its shards. A second gateway on the same tables
    is a stand-by that then takes over.
    """
    share_freed_memory()
    from lancewal.gateway import Access, Gateway, HealthEndpoint

    access = Access(
        read_write=_lines(tokens),
        read_only=_lines(read_tokens),
        certificate=_content(certificate),
        key=_content(key),
    )
    opened = {name: options.open_table(uri, option) for name, uri in _named(tables).items()}
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(
            Gateway(opened, listen=listen, advertise=advertise, access=access, upkeep=upkeep)
        )
        # Read-only tokens, because HTTP sends them in the clear.
        health = stack.enter_context(HealthEndpoint(gateway, http, token=access.read_only)) if http else None
        # Close the gateway before the endpoint, which says "not ready" while the gateway drains.
        stack.callback(gateway.close)
        served = ", ".join(opened)
        text = f"serving {served} at {gateway.address}" + (f", health at {health.address}" if health else "")
        document = {"address": gateway.address, "tables": list(opened), "http": health and health.address}
        console.tell(text, document, json=json, indent=None)
        wait_until_stopped()


def share_freed_memory() -> None:
    """Let all threads reuse the memory that one thread frees, for processes that write hundreds of shards.

    Arrow's default pool and glibc's arenas keep freed memory for the thread, and each shard has threads of
    its own. So the process would take several times its memory budget. Call this before pyarrow is imported,
    which reads the environment once. Variables that the user has set are not changed.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no mallopt
        c_library = ctypes.CDLL(None)
        for variable, (parameter, value) in _ALLOCATOR.items():
            if variable not in os.environ:
                c_library.mallopt(parameter, value)


def _named(texts: list[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for text in texts:
        name, equals, uri = text.partition("=")
        if not equals or "/" in name:
            name, uri = os.path.basename(text.rstrip("/")).removesuffix(".lance"), text
        if not name or name in named:
            raise typer.BadParameter(f"give {text!r} a name of its own: NAME={uri}")
        named[name] = uri
    return named


def _lines(path: Path | None) -> tuple[str, ...]:
    try:
        text = (_content(path) or b"").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path} holds no text; write one token a line") from None
    found = tuple(line.strip() for line in text.splitlines() if line.strip())
    if path is not None and not found:
        raise InvalidInputError(f"{path} holds no token; write one a line")
    return found


def _content(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror}") from None
