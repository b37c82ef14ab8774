"""The gateway, a process that writes a table for many clients, and these clients."""

from lancewal.gateway.access import Access
from lancewal.gateway.aio import AsyncTable, AsyncView, AsyncWriter
from lancewal.gateway.calls import Limits
from lancewal.gateway.client import RemoteScan, RemoteTable, RemoteView, connect
from lancewal.gateway.health import HealthEndpoint
from lancewal.gateway.remote_writer import RemoteWriter
from lancewal.gateway.server import Gateway
from lancewal.gateway.shared import SharedTable, share

__all__ = [
    "Access",
    "AsyncTable",
    "AsyncView",
    "AsyncWriter",
    "Gateway",
    "HealthEndpoint",
    "Limits",
    "RemoteScan",
    "RemoteTable",
    "RemoteView",
    "RemoteWriter",
    "SharedTable",
    "connect",
    "share",
]
