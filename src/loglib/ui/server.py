"""Server: serves the page on this host alone, until a signal ends it.

Invariant: it listens on 127.0.0.1 and on no other address, whatever it is told. The address is reported when the server
takes signals, so one that comes later ends it in order.

Threads: uvicorn's loop is in the caller's thread.
"""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Callable
from contextlib import closing

import uvicorn

from .app import Answers, make_app
from .guard import Keys
from .topics import Topics

HOST = "127.0.0.1"
_ENDING_S = 1  # for requests that are being answered when a signal comes
_BACKLOG = 128
_MOST_HEADER_BYTES = 256 << 10  # of a request: a tail's address has the place in each partition


def serve(path: str, *, port: int, browser: bool, report: Callable[[str], object]) -> None:
    """Serve the topic at a path, or the topics in that directory, until a signal comes. Port 0 is a free one.

    `report` is called with the address when the server listens. Raises `OSError` if the port is taken.
    """
    keys, answers = Keys(), Answers(Topics(path))
    config = uvicorn.Config(
        make_app(answers, keys), loop="asyncio", http="h11", ws="none", lifespan="off", log_config=None,
        access_log=False, server_header=False, date_header=False, timeout_graceful_shutdown=_ENDING_S,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
    )  # fmt: skip
    with closing(answers), socket.create_server((HOST, port), backlog=_BACKLOG) as listener:
        address = f"http://{HOST}:{listener.getsockname()[1]}/"

        def listens() -> None:
            report(f"{address}?token={keys.token}")
            if browser:
                webbrowser.open(f"{address}?ticket={keys.ticket}")

        _Server(config, listens).run(sockets=[listener])


class _Server(uvicorn.Server):
    """A server that says when it answers."""

    def __init__(self, config: uvicorn.Config, listens: Callable[[], object]) -> None:
        super().__init__(config)
        self._listens = listens

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        self._listens()
