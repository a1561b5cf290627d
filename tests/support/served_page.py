"""The page of `loglib ui`, served for tests by a process of its own, and requests to it by a real HTTP client."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from conftest import start_python

# `webbrowser.open` writes the address that it gets to standard output, as a browser would get it.
OPENING = """
    import sys, webbrowser
    webbrowser.open = lambda address: print(address, flush=True)
    from loglib.cli.program import run
    sys.exit(run(["ui", *sys.argv[1:]]))
"""


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Page:
    """A served page."""

    process: subprocess.Popen[str]
    address: str

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0

    @property
    def token(self) -> str:
        return parse_qs(urlsplit(self.address).query)["token"][0]

    def request(self, path: str, headers: Mapping[str, str | None] | None = None, *, method: str = "GET") -> Answer:
        """A request with these headers and no others but Host, which is left out if it is None."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = {"Host": f"127.0.0.1:{self.port}"} | dict(headers or {})
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def ask(self, name: str, headers: Any = None, **arguments: object) -> Answer:
        """A request for facts, with the token."""
        known = {"Authorization": f"Bearer {self.token}"} | dict(headers or {})
        return self.request(f"/api/{name}?{urlencode(arguments)}", known)

    def facts(self, name: str, **arguments: object) -> Any:
        answer = self.ask(name, **arguments)
        assert answer.status == 200, answer.body
        return answer.json


@contextmanager
def serving(place: Path, *arguments: object) -> Iterator[Page]:
    """The page for this place, until the end of the context."""
    with start_python(OPENING, place, *(arguments or ("--no-browser",))) as process:
        try:
            yield Page(process, _address(process))
        finally:
            process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.match(r"serving (http://127\.0\.0\.1:\d+/\?token=[\w-]+)\n", line)
    if found is None:
        sys.stderr.write(line)
        raise AssertionError(f"it serves nothing: {line}{process.stderr.read()}")
    return found[1]
