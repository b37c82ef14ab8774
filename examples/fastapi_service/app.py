"""A web service of several worker processes that write one table: FastAPI under uvicorn.

    EVENTS_TABLE=events.lance uvicorn examples.fastapi_service.app:app --workers 4

The workers share the table. One of them has its shards and takes the rows of the others; when it dies another
takes its place, and what was not answered yet is sent there. What was answered is in the table, once.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

import lancewal
from lancewal.errors import BusyError, InvalidInputError, UnavailableError


class Event(BaseModel):
    """One row of the table."""

    id: int
    text: str


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Opens the table in each worker: a process that was forked cannot use what its parent opened."""
    with lancewal.share(os.environ["EVENTS_TABLE"]) as shared:
        async with lancewal.AsyncWriter(shared.writer) as writer:
            app.state.writer, app.state.table = writer, lancewal.AsyncTable(shared.table)
            yield


app = FastAPI(lifespan=lifespan)


@app.post("/events", status_code=201)
async def add(events: list[Event]) -> dict[str, int]:
    """Answers when the rows are durable, and readable in every worker."""
    rows = pa.Table.from_pylist([event.model_dump() for event in events], app.state.table.table.schema)
    return {"rows": await app.state.writer.put(rows), "worker": os.getpid()}


@app.get("/events/{event_id}")
async def get(event_id: int) -> list[dict[str, Any]]:
    """The rows with this id: several where the table has no key."""
    found: list[dict[str, Any]] = (await app.state.table.scan(filter=f"id = {event_id}")).to_pylist()
    if not found:
        raise HTTPException(404, f"there is no event {event_id}")
    return found


@app.exception_handler(BusyError)
@app.exception_handler(UnavailableError)
async def come_again(request: Request, error: Exception) -> JSONResponse:
    """Nothing was written: the client may send the same again."""
    return JSONResponse({"detail": str(error)}, 503, {"Retry-After": "1"})


@app.exception_handler(InvalidInputError)
async def refused(request: Request, error: Exception) -> JSONResponse:
    """The table does not take these rows, now or later."""
    return JSONResponse({"detail": str(error)}, 422)
