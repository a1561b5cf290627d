"""A web service of several worker processes that append to one topic, with FastAPI: each takes its turn at a partition.

    pip install "loglib-segments" fastapi uvicorn
    TOPIC=data/events uvicorn --app-dir examples collect:app --workers 4
    TOPIC=data/events gunicorn --chdir examples collect:app -k asgi -w 4        # with gunicorn 25 or newer

    curl -d '{"page": "/"}' 'localhost:8000/events?key=user-7'
    curl -d '{"page": "/"}' -H 'X-Client: shop-3' -H 'X-Number: 17' 'localhost:8000/events?key=user-7'

POST answers when the record is on the disk; requests of one worker at the same time share a sync. Records of one key
are in one partition, whichever worker gets them. Workers may be added, reloaded and killed at any time: what was
answered is in the topic.

A client that got no answer does not know whether its event was stored. It sends the event again, with the same name
and number in `X-Client` and `X-Number`. The event is stored once, even if another worker gets the second request. The
numbers of a client rise, and it sends the next event of a key when it has the answer to the one before.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Header, HTTPException, Request, Response

from loglib import LockedError, aio

PARTITIONS = 8  # about two for each worker; more let more workers append at the same instant
WAIT_S = 20.0  # for a turn. Only a worker that hangs takes that long, and the server ends such a worker


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Each worker opens the topic when it starts: after the fork, if the server forks."""
    options: dict[str, Any] = {"create": True, "partitions": PARTITIONS, "shared": True, "wait": WAIT_S}
    async with aio.open(os.environ.get("TOPIC", "data/events"), **options) as topic:
        app.state.topic = topic
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/events", status_code=201)
async def append(
    request: Request,
    response: Response,
    key: str | None = None,
    x_client: Annotated[str | None, Header()] = None,
    x_number: Annotated[int | None, Header(ge=0)] = None,
) -> dict[str, int]:
    if (x_client is None) != (x_number is None):
        raise HTTPException(400, "X-Client and X-Number belong together")
    try:
        at = await request.app.state.topic.append(
            await request.body(),
            None if key is None else key.encode(),
            producer=None if x_client is None else (x_client, x_number),
            sync=True,
        )
    except LockedError as error:
        raise HTTPException(503, str(error), {"Retry-After": "1"}) from error
    response.headers["X-Worker"] = str(os.getpid())
    return {"partition": at.partition, "offset": at.offset}
