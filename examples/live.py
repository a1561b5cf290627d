"""Server-sent events from a topic, with FastAPI: a browser follows a log, and goes on where it was after a break.

    pip install "loglib-segments" fastapi uvicorn
    python examples/live.py data/events 8000

    curl -d 'a line' localhost:8000/events
    curl -N localhost:8000/events                                     what comes from now on
    curl -N 'localhost:8000/events?since=-15m'                        the last quarter of an hour as well

POST answers when the record is on the disk; requests at the same time share a sync. GET streams records as events. An
event's id says where to read on, so a browser's EventSource that lost its connection misses nothing: it sends the id
of its last event. A thousand followers take no thread.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from loglib import aio

KEEP_ALIVE_S = 15.0  # proxies close connections on which nothing comes


def application(path: str) -> FastAPI:
    """An application on the topic at this path."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with aio.open(path, create=True, partitions=4) as topic:
            app.state.topic = topic
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/events", status_code=201)
    async def publish(request: Request) -> dict[str, int]:
        at = await request.app.state.topic.append(await request.body(), sync=True)
        return {"partition": at.partition, "offset": at.offset}

    @app.get("/events")
    async def events(request: Request, since: str = "end") -> StreamingResponse:
        last = request.headers.get("last-event-id")
        try:
            reader = request.app.state.topic.follow(json.loads(last) if last else since, timeout=KEEP_ALIVE_S)
        except (ValueError, LookupError) as error:
            raise HTTPException(400, f"no such place: {error}") from error
        return StreamingResponse(stream(reader), media_type="text/event-stream")

    return app


async def stream(reader: aio.AsyncReader) -> AsyncIterator[str]:
    """The records as server-sent events."""
    async with reader:
        while not reader.closed:
            async for record in reader:
                yield event(json.dumps(reader.tell()), (record.value or b"").decode("utf-8", "replace"))
            yield ": nothing new\n\n"


def event(number: str, data: str) -> str:
    """One event. A line break would end a field, so each line of the data gets a field of its own."""
    return f"id: {number}\n" + "".join(f"data: {line}\n" for line in data.splitlines() or [""]) + "\n"


def main(arguments: list[str]) -> Any:
    path, port = arguments[0], int(arguments[1])
    # Followers never end by themselves, so the server does not wait for them when it is stopped.
    uvicorn.run(application(path), host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main(sys.argv[1:])
