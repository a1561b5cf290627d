"""App: the requests of the page, and the files that it consists of.

Invariant: each request reads, and none changes a topic. An error of the library is an answer with its text, and not a
failure of the server. The files of the page are read once; no other file can be asked for.

    /                        the page; `/app.js` and the others beside it
    /api/enter               the token, for the ticket of the browser that was opened
    /api/topics              the names of the topics
    /api/row, /api/topic     a row of the list; the facts of a topic
    /api/partitions, /api/segments, /api/samples, /api/groups
    /api/shares, /api/share  the shares of a topic; the facts of one
    /api/records, /api/record, /api/value, /api/tail

Threads: requests are answered in threads of Starlette's pool.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..errors import CorruptLogError, LogError
from ..system.not_copyable import NotCopyable
from ..topic import Topic
from .consumers import groups_of
from .filters import Filter, parse_filter
from .guard import Guard, Keys
from .overview import Overview, page_title
from .records import (
    MOST_RECORDS,
    RecordPage,
    is_too_many,
    one_record,
    page_after,
    page_before,
    tail,
    tail_start,
    undeclared,
    whole_record,
)
from .samples import Sampler
from .segments import Segments
from .shares import Part, Shares
from .topics import Topics

_TYPES = {
    "html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
}  # fmt: skip
_ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#3949ab"/>'
    b'<path d="M4 4h8M4 7h8M4 10h5M4 13h2" stroke="#fff" stroke-width="1.6"/></svg>'
)
_MOST_ROWS = 500  # of a list in one answer
_MOST_PLACES = 20_000  # partitions in a position


class Asked:
    """The arguments of a request. A wrong one is a `ValueError`."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        self._arguments = arguments

    def text(self, name: str, default: str = "") -> str:
        return self._arguments.get(name, default)

    @property
    def topic(self) -> str:
        return self.text("topic")

    def number(self, name: str, default: int, most: int = 1 << 62) -> int:
        """A whole number, at most `most`."""
        given = self.text(name)
        if not given:
            return min(default, most)
        if len(given) > 20 or not given.removeprefix("-").isascii() or not given.removeprefix("-").isdigit():
            raise ValueError(f"{name} must be a whole number, not {given[:40]!r}")
        return min(int(given), most)

    def maybe(self, name: str) -> int | None:
        """A whole number; None if it is missing."""
        return self.number(name, 0) if self.text(name) else None

    def places(self, name: str) -> dict[int, int]:
        """Offsets by partition, written as `0:128,1:4096`."""
        parts = [each.partition(":") for each in self.text(name).split(",", _MOST_PLACES) if each]
        if any(not (key.isascii() and key.isdigit() and at.isascii() and at.isdigit()) for key, _, at in parts):
            raise ValueError(f"{name} must be places such as 0:128,1:4096")
        return {int(key): int(at) for key, _, at in parts}

    def part(self, start: str, count: str, default: int) -> Part:
        """The part of a list that two arguments name."""
        return Part(max(0, self.number(start, 0)), max(0, self.number(count, default, _MOST_ROWS)))

    def filter(self) -> Filter | None:
        return parse_filter(self.text("text"), self.text("key"), self.text("path"))


class Answers(NotCopyable):
    """The answers to the requests for facts, about the topics at a path."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._sampler = Sampler(topics)
        self._shares = Shares(topics)
        self._overview = Overview(topics, self._sampler, self._shares)
        self._segments = Segments(topics)
        self.by_name: dict[str, Callable[[Asked], Any]] = {
            "topics": self._names, "row": self._row, "topic": self._topic, "partitions": self._partitions,
            "segments": self._segments_of, "samples": self._samples, "groups": self._groups, "shares": self._shares_of,
            "share": self._share, "records": self._records, "record": self._record, "tail": self._tail,
        }  # fmt: skip

    def close(self) -> None:
        """End the sampler's thread, and close the topics."""
        self._sampler.close()
        self._topics.close()

    def value(self, asked: Asked) -> bytes:
        """The bytes of a record's value, or of its key with `part=key`."""
        partition, offset = asked.number("partition", 0), asked.number("offset", 0)
        record = self._topics.ask(asked.topic, lambda topic: one_record(topic, partition, offset))
        return (record.key if asked.text("part") == "key" else record.value) or b""

    def _names(self, _asked: Asked) -> Any:
        return {
            "title": page_title(self._topics), "root": self._topics.root, "only": self._topics.only,
            "names": self._topics.names(),
        }  # fmt: skip

    def _row(self, asked: Asked) -> Any:
        return self._overview.row(asked.topic)

    def _topic(self, asked: Asked) -> Any:
        return self._overview.facts(asked.topic)

    def _partitions(self, asked: Asked) -> Any:
        rows, total = self._overview.partitions(
            asked.topic, max(0, asked.number("from", 0)), asked.number("count", 100, _MOST_ROWS)
        )
        return {"partitions": rows, "total": total}

    def _segments_of(self, asked: Asked) -> Any:
        return self._segments.page(
            asked.topic, asked.number("partition", 0), asked.number("from", 0), asked.number("count", 100, _MOST_ROWS)
        )

    def _samples(self, asked: Asked) -> Any:
        self._sampler.taken(asked.topic)  # raises if the topic cannot be read
        return {"samples": self._sampler.samples(asked.topic, asked.number("after", 0))}

    def _groups(self, asked: Asked) -> Any:
        return self._topics.ask(asked.topic, groups_of)

    def _shares_of(self, asked: Asked) -> Any:
        shares, total = self._shares.sums(asked.topic, asked.part("from", "count", 10))
        return {"shares": shares, "total": total}

    def _share(self, asked: Asked) -> Any:
        return self._shares.facts(
            asked.topic, asked.text("share"), partitions=asked.part("from", "count", 100),
            in_hand=asked.part("in_hand_from", "in_hand_count", 50),
            waiting=asked.part("waiting_from", "waiting_count", 50), now_us=time.time_ns() // 1000,
        )  # fmt: skip

    def _records(self, asked: Asked) -> Any:
        limit, partition, wanted = asked.number("limit", 50, MOST_RECORDS), asked.maybe("partition"), asked.filter()
        read = page_before if asked.text("way") == "back" else page_after
        start = asked.places("at") or asked.text("from") or ("end" if asked.text("way") == "back" else "begin")
        key = asked.text("key").encode(errors="surrogateescape")

        def look(topic: Topic) -> RecordPage:
            goes_to = topic.partition_of(key) if key and partition is None and is_too_many(topic) else None
            number = partition if goes_to is None else goes_to
            found = read(topic, start, partition=number, limit=max(1, limit), wanted=wanted)
            if goes_to is not None:
                found.notes.append(f"only partition {goes_to} was searched, to which this key goes")
            return found

        page = self._topics.ask(asked.topic, look)
        self._overview.note_damage(asked.topic, undeclared(page.damage))
        return page

    def _record(self, asked: Asked) -> Any:
        partition, offset = asked.number("partition", 0), asked.number("offset", 0)
        return self._topics.ask(asked.topic, lambda topic: whole_record(topic, partition, offset))

    def _tail(self, asked: Asked) -> Any:
        partition, limit = asked.maybe("partition"), max(1, asked.number("limit", 200, MOST_RECORDS))
        position = asked.places("at")
        page = self._topics.ask(
            asked.topic,
            lambda topic: tail(topic, position or tail_start(topic, partition, 50), partition=partition, limit=limit),
        )
        self._overview.note_damage(asked.topic, undeclared(page.damage))
        return page


def make_app(answers: Answers, keys: Keys) -> ASGIApp:
    """The page and its answers, with the guard in front of them."""
    files = page_files()

    def page(request: Request) -> Response:
        name = request.url.path.removeprefix("/") or "index.html"
        content, kind = files[name]
        return Response(content, media_type=kind)

    async def enter(_: Request) -> Response:
        return JSONResponse({"token": keys.token})

    async def value(request: Request) -> Response:
        data = await _answered(answers.value, request)
        if isinstance(data, Response):
            return data
        return Response(data, media_type="application/octet-stream", headers={"Content-Disposition": "attachment"})

    def route(name: str, facts: Callable[[Asked], Any]) -> Route:
        async def answer(request: Request) -> Response:
            found = await _answered(lambda asked: _plain(facts(asked)), request)
            return found if isinstance(found, Response) else JSONResponse(found)

        return Route(f"/api/{name}", answer)

    routes = [
        Route("/", page), *(Route(f"/{name}", page) for name in files if name != "index.html"),
        Route("/api/enter", enter), Route("/api/value", value),
        *(route(name, facts) for name, facts in answers.by_name.items()),
    ]  # fmt: skip
    paths = {"/", *(f"/{name}" for name in files)}
    return Guard(Starlette(routes=routes), keys, lambda path: path in paths)


def page_files() -> dict[str, tuple[bytes, str]]:
    """The files of the page: content and type, by name."""
    found = importlib.resources.files(__package__) / "static"
    named = {each.name: each for each in found.iterdir() if each.name.rpartition(".")[2] in _TYPES}
    files = {name: (each.read_bytes(), _TYPES[name.rpartition(".")[2]]) for name, each in named.items()}
    return files | {"icon.svg": (_ICON, "image/svg+xml")}


async def _answered(answer: Callable[[Asked], Any], request: Request) -> Any:
    """The answer, or a response with the text of the error."""
    try:
        return await run_in_threadpool(answer, Asked(request.query_params))
    except (LogError, OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        text = error.args[0] if missing and len(error.args) == 1 else str(error)
        kind = "damage" if isinstance(error, CorruptLogError) else "missing" if missing else "wrong"
        return JSONResponse({"error": text, "kind": kind}, 404 if missing else 400)


def _plain(found: Any) -> Any:
    """Dataclasses as dictionaries, also within lists and dictionaries."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return {each.name: _plain(getattr(found, each.name)) for each in dataclasses.fields(found)}
    if isinstance(found, Mapping):
        return {str(name): _plain(each) for name, each in found.items()}
    return list(map(_plain, found)) if isinstance(found, list | tuple) else found
